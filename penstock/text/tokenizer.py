"""Text <-> tokens, and requests -> contexts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from penstock.errors import (
    CheckpointError,
    InputError,
    PromptTooLongError,
    UnknownParameterError,
    UnsupportedFeatureError,
)
from penstock.pipelines.core import Grammar, SamplingParams, TextContext, TokenGeneratorRequest
from penstock.plain_numbers import checked_flag, checked_integer
from penstock.text.chat_template import ChatTemplate, Message
from penstock.text.context_decoding import next_piece
from penstock.text.special_tokens import Rendered, SpecialTokens
from penstock.text.stop_sequences import stop_sequences
from penstock.text.tokenizer_files import TokenizerFiles, read_tokenizer_files

T = TypeVar("T")
TokenIds = npt.NDArray[np.int64]

_LIKELY_CHARACTERS = 8
"""Of a token, at most, in nearly all texts: longer ones are looked at before they are encoded as a whole."""

_MAX_KNOWN_STOPS = 1024
_NUM_THREADS = 2  # each keeps a tokenizer of its own, up to 100 MB; one encodes some 200,000 tokens a second


class TextTokenizer:
    """The tokenizer of a checkpoint, its chat template, and the limits that a request must keep to.

    The logic is synchronous (`encode_text`, `decode_ids`, `render_chat`, `build_context`); the methods of the
    `PipelineTokenizer` protocol run it in a thread. All of it may be called from any number of threads.

    Args:
        checkpoint: a folder with ``tokenizer.json``, or an older tokenizer that transformers can convert; or
            what was read from one.
        max_length: the most tokens of prompt and output together; None takes the checkpoint's own limit.
        chat_template: a file that replaces the checkpoint's template, Jinja or JSON with ``chat_template``.
        eos_token_ids: more ids that end an output, besides those that the checkpoint's files name.
        special_tokens_in_content: whether special tokens, such as ``<|im_end|>``, that messages of users and
            tools spell are these tokens. By default they are text, so that no message can forge another.

    Raises:
        CheckpointError: the tokenizer is missing or damaged.
        ConfigError: ``chat_template`` is not a template.
        MissingDependencyError: the tokenizer is of an older format and transformers is not installed.
    """

    def __init__(
        self,
        checkpoint: Path | TokenizerFiles,
        *,
        max_length: int | None = None,
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
        special_tokens_in_content: bool = False,
    ) -> None:
        files = (
            checkpoint if isinstance(checkpoint, TokenizerFiles) else read_tokenizer_files(Path(checkpoint))
        )
        self.max_length = max_length if max_length is not None else files.max_length
        self.vocab_size = files.vocab_size
        """Token ids are below this: the model's number of embeddings, where ``config.json`` says it."""
        self.special_tokens = files.special_tokens
        """Name to text: ``{"eos_token": "</s>", ...}``."""
        self._origin = files.origin
        self._eos_token_ids = _unique_below(self.vocab_size, files.eos_token_ids, eos_token_ids)
        self._chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self._chat_template = ChatTemplate.from_file(Path(chat_template), files.special_tokens)
        elif files.templates:
            self._chat_template = ChatTemplate(files.templates, files.special_tokens, files.origin)
        self._local = _PerThread(_Copies(files.tokenizer).take)
        self._special_tokens = SpecialTokens(files.tokenizer.get_added_tokens_decoder(), self._normalized)
        self.special_token_texts = self._special_tokens.texts
        """The texts of all tokens that decoding leaves out by default."""
        self._special_tokens_in_content = special_tokens_in_content
        self._token_bytes: dict[int, bytes] = {}
        self._known_stops: dict[str, list[list[int]]] = {}
        self._bos = files.tokenizer.token_to_id(files.special_tokens.get("bos_token", ""))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="penstock-tokenizer")

    @property
    def eos(self) -> int:
        """The token that ends an output, the tokenizer's own before those of the model's configuration."""
        if not self._eos_token_ids:
            raise CheckpointError(
                self._origin, "names no token that ends a sequence (eos_token, eos_token_id)"
            )
        return self._eos_token_ids[0]

    @property
    def eos_token_ids(self) -> set[int]:
        """All tokens that end an output: of the tokenizer, config.json and generation_config.json. A copy."""
        return set(self._eos_token_ids)

    @property
    def expects_content_wrapping(self) -> bool:
        """False: text parts of messages are ``{"type": "text", "text": ...}``."""
        return False

    @property
    def backend(self) -> Tokenizer:
        """This thread's own copy of the tokenizer underneath."""
        return self._local.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return self._chat_template is not None

    @property
    def chat_template_source(self) -> str | None:
        """The text of the chat template, of several in a row; None where there is none."""
        return "\n".join(self._chat_template.sources.values()) if self._chat_template is not None else None

    async def new_context(
        self, request: TokenGeneratorRequest, *, stops_as_tokens: bool = True
    ) -> TextContext:
        """`build_context` in a thread."""
        return await self._in_thread(lambda: self.build_context(request, stops_as_tokens=stops_as_tokens))

    async def encode(self, prompt: str, add_special_tokens: bool = True) -> TokenIds:
        """`encode_text` in a thread."""
        return await self._in_thread(lambda: self.encode_text(prompt, add_special_tokens))

    async def decode(
        self, context: TextContext, encoded: Sequence[int] | npt.NDArray[np.integer[Any]] | int, **kwargs: Any
    ) -> str:
        """Text of tokens, as they go on from the last call with this context; computed in a thread.

        Tokens that the context has generated may be given one by one or several at a time, in their order:
        the texts, joined, are the text that follows the prompt, spaces between words included. All of them
        together give it whole, again and again. An unfinished character at the end comes with the tokens
        that finish it, or at the end of the output. Tokens that are not the context's (`context_decoding`)
        are a text of their own in the same way.

        The one keyword is ``skip_special_tokens`` (True). `decode_ids` decodes without a context.
        """
        skip_special_tokens = kwargs.pop("skip_special_tokens", True)
        if kwargs:
            raise UnknownParameterError("decode", next(iter(kwargs)), "the keyword is skip_special_tokens")
        given = [encoded] if isinstance(encoded, SupportsIndex) and np.ndim(encoded) == 0 else encoded
        piece = next_piece(context, _checked_for_text(cast("Iterable[Any]", given)), self._bos)
        return await self._in_thread(lambda: piece.text(self, skip_special_tokens))

    def build_context(self, request: TokenGeneratorRequest, *, stops_as_tokens: bool = True) -> TextContext:
        """The context of a request, without a slot in any cache.

        Text is encoded with the special tokens that the tokenizer puts around it, a rendered chat without:
        its template has them.

        Args:
            request: the request.
            stops_as_tokens: put stop strings into the context's ``eos_sequences``, as the tokens that
                usually spell them, so that ``next_token`` ends the output there. The last of the tokens is
                not returned, the others were returned before. A model can spell the same text in other
                tokens (`stop_sequences`); callers that match the text, with a `Detokenizer`, find all and
                turn this off.

        Raises:
            PromptTooLongError: the prompt leaves no room for a token.
            UnsupportedFeatureError: the request has images or other content that is not text.
            InputError: it cannot be served for another reason, which the message says.
        """
        text, tokens = self._prompt(request, is_limited=True)
        if not len(tokens):
            raise InputError("the prompt is empty: it has no tokens to go on from")
        params = _with_stops_of(request)
        self._check_named_tokens(params)
        schema, grammar = _output_format(request)
        return TextContext(
            prompt=tokens.tolist() if text is None else text,
            max_length=self._max_length_of(len(tokens), params),
            tokens=tokens,
            eos_token_ids=self._ends(params),
            eos_sequences=self._stop_sequences(params.stop or ()) if stops_as_tokens else [],
            log_probabilities=checked_integer("logprobs", request.logprobs) or None,
            log_probabilities_echo=checked_flag("echo", request.echo),
            ignore_eos=params.ignore_eos,
            json_schema=schema,
            sampling_params=params,
            request_id=request.id,
            model_name=request.model_name,
            grammar=grammar,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            priority=checked_integer(
                "priority", request.priority, minimum=-(2**63), rule="an integer of 64 bits"
            ),
        )

    def encode_text(self, text: str, add_special_tokens: bool = True, *, limited: bool = True) -> TokenIds:
        """Tokens of a text; lone surrogates become U+FFFD. PromptTooLongError above the maximum length, if
        ``limited``."""
        tokens = self._tokens_of(text, add_special_tokens, is_limited=limited)
        if limited and self.max_length is not None and len(tokens) > self.max_length:
            raise PromptTooLongError(len(tokens), self.max_length)
        return tokens

    def decode_ids(
        self, ids: Sequence[int] | npt.NDArray[np.integer[Any]], skip_special_tokens: bool = True
    ) -> str:
        """Text of tokens; ids that the tokenizer has no token for (a padded vocabulary) have no text."""
        try:
            return self._local.tokenizer.decode(cast("Sequence[int]", ids), skip_special_tokens)
        except (OverflowError, TypeError):
            _checked_for_text(ids)
            raise

    def prompt_of(self, request: TokenGeneratorRequest) -> tuple[str | None, TokenIds]:
        """The prompt of a request, however long: its text, None where it came as tokens, and its tokens.

        Raises:
            InputError: the request has no prompt that this model can read.
        """
        return self._prompt(request)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt for messages, as transformers' ``apply_chat_template`` makes it.

        ``options`` are variables for the template, over ``add_generation_prompt=True``.
        """
        return self._template().render(messages, tools, options)

    def is_visible(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode_ids` looks at this token at all."""
        if skip_special_tokens and token_id in self._special_tokens.by_id:
            return False
        return self._local.tokenizer.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token writes in the middle of a text, special or not; it may be part of a character.

        Empty for ids that the tokenizer has no token for.
        """
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._bytes_of(token_id)
        return known

    def template_mentions(self, word: str) -> bool:
        """Whether the chat template has a word in its source: a role it knows, a variable it reads."""
        return self._chat_template is not None and self._chat_template.mentions(word)

    @property
    def template_takes_argument_objects(self) -> bool:
        """Whether the template takes a tool call's arguments as an object; some join them to text."""
        return self._chat_template is not None and self._chat_template.takes_argument_objects

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Token id to byte, for tokenizers that spell what they have no token for in bytes (``<0xE2>``)."""
        tokenizer = self._local.tokenizer
        named = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        tokens = {token_id: byte for token_id, byte in named if token_id is not None}
        for token_id, byte in tokens.items():
            # Some vocabularies have such names for their looks only.
            means_byte = tokenizer.decode([token_id]) == bytes([byte]).decode(errors="replace")
            return tokens if means_byte else {}
        return {}

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self.byte_tokens:
            return bytes([self.byte_tokens[token_id]])
        tokenizer = self._local.tokenizer
        piece = tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        before = tokenizer.encode("a", add_special_tokens=False).ids  # so that it is not the first of a text
        start = len(tokenizer.decode(before, skip_special_tokens=False))
        text = tokenizer.decode([*before, token_id], skip_special_tokens=False)[start:]
        if "\N{REPLACEMENT CHARACTER}" in text and all(character in BYTE_LEVEL for character in piece):
            return bytes(BYTE_LEVEL[character] for character in piece)
        return text.encode()

    def _prompt(
        self, request: TokenGeneratorRequest, *, is_limited: bool = False
    ) -> tuple[str | None, TokenIds]:
        if request.images:
            raise UnsupportedFeatureError("images", "this model reads text only")
        if (request.prompt is None) == (request.messages is None):
            raise InputError("a request needs either a prompt or messages")
        if request.messages is not None:
            return self._chat_prompt(request, is_limited=is_limited)
        if request.tools or request.chat_template_options:
            raise InputError(
                "tools and chat_template_options need messages: a prompt does not go through the template"
            )
        if isinstance(request.prompt, str):
            text = request.prompt
            return text, self._tokens_of(text, add_special_tokens=True, is_limited=is_limited)
        assert request.prompt is not None
        return None, self._checked_ids(request.prompt)

    def _chat_prompt(self, request: TokenGeneratorRequest, *, is_limited: bool) -> tuple[str, TokenIds]:
        template, messages = self._template(), request.messages or []

        def render(messages: Sequence[Message]) -> str:
            text = template.render_request(messages, request.tools, request.chat_template_options)
            return _valid_unicode(text)

        if self._special_tokens_in_content:
            rendered = Rendered(render(messages))
        else:
            rendered = self._special_tokens.render(messages, render)
        if not rendered.boundaries:
            tokens = self._tokens_of(rendered.text, add_special_tokens=False, is_limited=is_limited)
            return rendered.text, tokens
        if is_limited:
            self._check_length(rendered.text)
        ids = self._special_tokens.encode(self._local.tokenizer, rendered, self.token_bytes)
        return rendered.text, self._checked_ids(ids)

    def _normalized(self, text: str) -> str:
        normalizer = self._local.tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise InputError(
                "this model has no chat template: pass a prompt, or give a template with --chat-template"
            )
        return self._chat_template

    def _tokens_of(self, text: str, add_special_tokens: bool, *, is_limited: bool = False) -> TokenIds:
        if is_limited:
            self._check_length(text)
        # A batch of one lets other threads run meanwhile, which `encode` does not; it is faster, too.
        [encoding] = self._local.tokenizer.encode_batch_fast(
            [_valid_unicode(text)], add_special_tokens=add_special_tokens
        )
        return self._checked_ids(encoding.ids)

    def _check_length(self, text: str) -> None:
        """Refuses a text that is certainly too long before all of it is encoded.

        Beginnings of the text are encoded, each twice as long as the last. Only the tokens at the end of a
        beginning depend on what follows it; a quarter of the maximum is far more than those.

        Raises:
            PromptTooLongError: a beginning has too many tokens already.
        """
        limit = self.max_length
        if limit is None:
            return
        size = _LIKELY_CHARACTERS * limit
        while size < len(text):
            beginning = [_valid_unicode(text[:size])]
            [encoding] = self._local.tokenizer.encode_batch_fast(beginning, add_special_tokens=False)
            if len(encoding) > limit + max(16, limit // 4):
                raise PromptTooLongError(len(encoding), limit, is_exact=False)
            size *= 2

    def _checked_ids(self, ids: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
        """InputError names the first id that the model has no embedding for."""
        is_bytes = isinstance(ids, str | bytes | bytearray | memoryview)
        if is_bytes or not isinstance(ids, Sequence | np.ndarray):
            raise InputError(f"a prompt is text or a list of token ids, not {type(ids).__name__}")
        values = ids.tolist() if isinstance(ids, np.ndarray) else ids
        # Long prompts of plain integers, which are nearly all, are not looked at one by one.
        if {*map(type, values)} == {int} and 0 <= min(values) <= max(values) < self.vocab_size:
            return np.array(values, dtype=np.int64)
        for index, value in enumerate(values):
            if not _is_id(value, self.vocab_size):
                raise InputError(
                    f"token {index} of the prompt is {value!r}: "
                    f"ids are integers from 0 to {self.vocab_size - 1}"
                )
        return np.array([int(value) for value in values], dtype=np.int64)

    def _max_length_of(self, num_tokens: int, params: SamplingParams) -> int:
        """Prompt and output together."""
        wanted = params.max_new_tokens
        if self.max_length is None:
            if wanted is None:
                raise InputError(
                    "max_new_tokens is needed: neither checkpoint nor configuration has a maximum length"
                )
            return num_tokens + wanted
        room = self.max_length - num_tokens
        if room < (0 if wanted == 0 else 1):
            raise PromptTooLongError(num_tokens, self.max_length)
        granted = room if wanted is None else min(wanted, room)
        if params.min_new_tokens > granted:
            raise InputError(
                f"min_new_tokens is {params.min_new_tokens}, but only {granted} tokens can follow "
                f"the prompt of {num_tokens} (max_new_tokens {wanted}, maximum length {self.max_length})"
            )
        return num_tokens + granted

    def _check_named_tokens(self, params: SamplingParams) -> None:
        """Refuses token ids that the model does not have, and bans that leave none of those it has."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids"):
            largest = max(getattr(params, name) or (), default=0)
            if largest >= self.vocab_size:
                raise InputError(f"{name} has {largest}: ids are integers from 0 to {self.vocab_size - 1}")
        largest = max((max(ids) for ids in params.banned_sequences or ()), default=0)
        if largest >= self.vocab_size:
            raise InputError(
                f"banned_sequences has {largest}: ids are integers from 0 to {self.vocab_size - 1}"
            )
        banned = params.banned_token_ids or []
        if len(banned) >= self.vocab_size == len(set(banned)):
            raise InputError(
                f"banned_token_ids has all {self.vocab_size} tokens of the model: nothing is left to generate"
            )

    def _ends(self, params: SamplingParams) -> set[int]:
        return {*(() if params.ignore_eos else self._eos_token_ids), *(params.stop_token_ids or ())}

    def _stop_sequences(self, stops: Iterable[str]) -> list[list[int]]:
        return [list(run) for stop in stops for run in self._sequences_of(stop)]

    def _sequences_of(self, stop: str) -> list[list[int]]:
        known = self._known_stops.get(stop)
        if known is None:
            if len(self._known_stops) >= _MAX_KNOWN_STOPS:
                self._known_stops.clear()
            known = stop_sequences(_valid_unicode(stop), self._encode, self.token_bytes)
            self._known_stops[stop] = known
        return known

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encodings = self._local.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


class _Copies:
    """Tokenizers that are equal to one given; that one is handed out first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._given = False
        self._lock = threading.Lock()

    def take(self) -> Tokenizer:
        with self._lock:
            if self._given:
                return Tokenizer.from_str(self._serialized)
            self._given = True
            return self._tokenizer

    @cached_property
    def _serialized(self) -> str:
        return self._tokenizer.to_str()


class _PerThread(threading.local):
    """Its constructor runs once in every thread that asks for ``tokenizer``."""

    def __init__(self, take: Callable[[], Tokenizer]) -> None:
        self.tokenizer = take()


def _byte_level_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as they are, the others from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = sorted(set(range(256)).difference(shown))
    written = {chr(byte): byte for byte in shown}
    return written | {chr(256 + index): byte for index, byte in enumerate(hidden)}


BYTE_LEVEL = _byte_level_alphabet()
"""Character to byte."""


def _unique_below(vocab_size: int, *sources: Iterable[int]) -> tuple[int, ...]:
    # Some configurations name ids of a larger sibling model; no step could sample them.
    return tuple(dict.fromkeys(token_id for ids in sources for token_id in ids if 0 <= token_id < vocab_size))


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int | np.integer) and type(value) is not bool and 0 <= int(value) < vocab_size


def _checked_for_text(ids: Iterable[Any]) -> list[int]:
    """Token ids, of which the tokenizer need not know all, as plain integers."""
    given = list(ids)
    for token_id in given:
        if not _is_id(token_id, 2**32):
            raise InputError(f"{token_id!r} is not a token id: ids are integers from 0")
    return [int(token_id) for token_id in given]


def _valid_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _with_stops_of(request: TokenGeneratorRequest) -> SamplingParams:
    """Sampling parameters with the stop strings of both places: the consumer of the text reads them here."""
    given = [request.stop] if isinstance(request.stop, str) else (request.stop or [])
    if not all(isinstance(stop, str) for stop in given):
        raise InputError(f"stop must be a string or a list of strings, was {request.stop!r}")
    stops = dict.fromkeys(stop for stop in [*given, *(request.sampling_params.stop or [])] if stop)
    return replace(request.sampling_params, stop=list(stops) or None)


def _output_format(request: TokenGeneratorRequest) -> tuple[str | None, Grammar | None]:
    """(JSON schema, grammar) of the output; the schema fills the context's grammar by itself."""
    if request.grammar is not None and not isinstance(request.grammar, Grammar):
        raise InputError(f"grammar must be a Grammar, was {request.grammar!r}")
    form = request.response_format
    kind = "text" if form is None else form.get("type")
    if kind == "text":
        return None, request.grammar
    if request.grammar is not None:
        raise InputError("a request has either a response_format or a grammar, not both")
    if kind == "json_object":
        return None, Grammar(kind="json_object")
    if kind != "json_schema" or form is None:
        raise InputError(f"response_format has type {kind!r}: it can be text, json_object or json_schema")
    schema = form.get("json_schema")
    if isinstance(schema, dict) and "schema" in schema:  # which is no keyword of schemas
        schema = schema["schema"]  # OpenAI's envelope
    if not isinstance(schema, dict):
        raise InputError(f"response_format needs a json_schema, an object; it has {schema!r}")
    try:
        return json.dumps(schema), None
    except (TypeError, ValueError) as error:
        raise InputError(f"response_format has a json_schema that is not JSON: {error}") from None
