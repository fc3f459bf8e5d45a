"""`TextTokenizer`: converts text to tokens and back, and requests to contexts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, TypedDict, TypeVar, cast

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
from penstock.pipelines.core import TextContext, TokenGeneratorRequest
from penstock.plain_numbers import checked_flag, checked_integer
from penstock.text.chat_template import ChatTemplate, Message
from penstock.text.context_decoding import next_delta
from penstock.text.request_checks import (
    check_text_length,
    check_token_ids_in_params,
    output_format,
    sampling_params_with_stops,
    total_length,
)
from penstock.text.special_tokens import RenderedPrompt, SpecialTokens
from penstock.text.stop_sequences import StopSequenceCache
from penstock.text.thread_tokenizers import ThreadTokenizers
from penstock.text.token_bytes import find_byte_tokens, single_token_bytes
from penstock.text.token_ids import TokenIds, checked_ids_to_decode, checked_prompt_ids, unique_ids_below
from penstock.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from penstock.text.valid_unicode import valid_unicode

T = TypeVar("T")

_NUM_THREADS = 2  # threads for the async methods; one thread encodes about 200,000 tokens per second


class TokenizerOptions(TypedDict, total=False):
    """Keyword arguments of `TextTokenizer`."""

    max_length: int | None
    chat_template: str | None
    eos_token_ids: Iterable[int]
    special_tokens_in_content: bool


class TextTokenizer:
    """The tokenizer of a checkpoint with its chat template and its limits on requests.

    `encode_text`, `decode_ids`, `render_chat` and `build_context` are synchronous. The methods of the
    `PipelineTokenizer` protocol run them in a thread. All methods are thread-safe.

    Args:
        checkpoint: a folder with ``tokenizer.json`` or with an older tokenizer that transformers can
            convert, a GGUF file, or the result of `read_tokenizer_files`.
        max_length: maximum number of tokens of prompt and output together. None uses the checkpoint's limit.
        chat_template: a Jinja file, or a JSON file with the key ``chat_template``, that replaces the
            checkpoint's templates.
        eos_token_ids: ids that end an output, in addition to the ids in the checkpoint's files.
        special_tokens_in_content: whether special tokens (``<|im_end|>``) in the content of user and tool
            messages are encoded as these tokens. By default they are encoded as text, so that a message
            cannot imitate a second message.

    Raises:
        CheckpointError: the tokenizer is missing, damaged or not convertible, or a JSON file is invalid.
        ConfigError: ``chat_template`` cannot be read or is not a template.
        MissingDependencyError: the tokenizer has an older format and transformers is not installed.
    """

    generates_tokens: ClassVar[bool] = True
    """Whether the maximum length includes tokens that the model generates."""

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
        """All token ids are below this number: ``vocab_size`` of ``config.json`` or of the GGUF metadata,
        otherwise the size of the tokenizer's vocabulary."""
        self.special_tokens = files.special_tokens
        """Name -> text: ``{"eos_token": "</s>", ...}``."""
        self._origin = files.origin
        self._eos_token_ids = unique_ids_below(self.vocab_size, files.eos_token_ids, eos_token_ids)
        self._chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self._chat_template = ChatTemplate.from_file(Path(chat_template), files.special_tokens)
        elif files.templates:
            self._chat_template = ChatTemplate(files.templates, files.special_tokens, files.origin)
        self._thread_tokenizers = ThreadTokenizers(files.tokenizer)
        self._special_tokens = SpecialTokens(files.tokenizer.get_added_tokens_decoder(), self._normalize)
        self.special_token_texts = self._special_tokens.texts
        """The texts of all special tokens. Decoding skips these tokens by default."""
        self._special_tokens_in_content = special_tokens_in_content
        self._token_bytes: dict[int, bytes] = {}
        self._stop_sequences = StopSequenceCache(self._encode, self.token_bytes)
        self._bos_token_id = files.tokenizer.token_to_id(files.special_tokens.get("bos_token", ""))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="penstock-tokenizer")

    @property
    def eos(self) -> int:
        """The tokenizer's EOS token ID; if it has none, the first other ID in `eos_token_ids`.

        Raises:
            CheckpointError: `eos_token_ids` is empty.
        """
        if not self._eos_token_ids:
            raise CheckpointError(self._origin, "has no end-of-sequence token (eos_token, eos_token_id)")
        return self._eos_token_ids[0]

    @property
    def eos_token_ids(self) -> set[int]:
        """A new set of all tokens that end an output, from the files and the argument ``eos_token_ids``."""
        return set(self._eos_token_ids)

    expects_content_wrapping = False  # text parts of messages have the key ``text``, not ``content``
    reads_images = False
    """Whether requests may have images."""

    @property
    def backend(self) -> Tokenizer:
        """The calling thread's copy of the ``tokenizers.Tokenizer``."""
        return self._thread_tokenizers.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat_template is not None

    @property
    def chat_template_source(self) -> str | None:
        """The text of all chat templates, joined by newlines; None if the model has no template."""
        return "\n".join(self._chat_template.sources.values()) if self._chat_template is not None else None

    def close(self) -> None:
        """End the processes of the tokenizer. The base class has no processes."""

    async def new_context(
        self, request: TokenGeneratorRequest, *, stops_as_tokens: bool = True
    ) -> TextContext:
        """Run `build_context` in a thread."""
        return await self._run_in_thread(lambda: self.build_context(request, stops_as_tokens=stops_as_tokens))

    async def encode(self, prompt: str, add_special_tokens: bool = True) -> TokenIds:
        """Run `encode_text` in a thread."""
        return await self._run_in_thread(lambda: self.encode_text(prompt, add_special_tokens))

    async def decode(
        self, context: TextContext, encoded: Sequence[int] | npt.NDArray[np.integer] | int, **kwargs: object
    ) -> str:
        """Return the text of tokens, as the continuation of the previous call with this context.

        - The generated tokens of the context can be passed one by one or several at a time, in order. The
          concatenated results are the text after the prompt, including spaces between words.
        - A call with all generated tokens returns the whole text. The call can be repeated.
        - An incomplete character at the end is returned when it is complete, or at the end of the output.
        - Tokens that the context has not generated are decoded as a separate text (see `context_decoding`).

        The only keyword argument is ``skip_special_tokens``, by default True. `decode_ids` needs no context.

        Raises:
            UnknownParameterError: another keyword argument is passed.
            InputError: an element is not an integer from 0 to 2**32 - 1.
        """
        skip_special_tokens = kwargs.pop("skip_special_tokens", True)
        if kwargs:
            raise UnknownParameterError("decode", next(iter(kwargs)), "the keyword is skip_special_tokens")
        ids = [encoded] if isinstance(encoded, SupportsIndex) and np.ndim(encoded) == 0 else encoded
        delta = next_delta(
            context, checked_ids_to_decode(cast("Iterable[SupportsIndex]", ids)), self._bos_token_id
        )
        return await self._run_in_thread(lambda: delta.text(self, bool(skip_special_tokens)))

    def build_context(self, request: TokenGeneratorRequest, *, stops_as_tokens: bool = True) -> TextContext:
        """Return the context of a request. No KV cache is allocated for it.

        The tokenizer adds its special tokens (such as BOS) to a text prompt. It adds no special tokens to a
        rendered chat, because the template contains them.

        Args:
            request: the request.
            stops_as_tokens: whether to convert stop strings to the token sequences that usually spell them
                (``eos_sequences`` of the context), at which ``next_token`` ends the output. The last token of
                a match is not returned; the tokens before it have already been returned. A model can generate
                a stop string as other tokens (see `stop_sequences`). Callers that match stop strings with a
                `Detokenizer`, which finds all matches, pass False.

        Raises:
            PromptTooLongError: the prompt leaves no room for an output token (see `total_length`).
            UnsupportedFeatureError: the request has images or other content that the model cannot read.
            InputError: the request is invalid. The message contains the reason.
        """
        text, tokens = self._prompt(request, is_limited=True)
        if not len(tokens):
            raise InputError("the prompt is empty: it needs at least one token")
        params = sampling_params_with_stops(request)
        check_token_ids_in_params(params, self.vocab_size)
        schema, grammar = output_format(request)
        values: dict[str, object] = {
            "prompt": tokens.tolist() if text is None else text,
            "max_length": total_length(len(tokens), params, self.max_length),
            "tokens": tokens,
            "eos_token_ids": {
                *(() if params.ignore_eos else self._eos_token_ids),
                *(params.stop_token_ids or ()),
            },
            "eos_sequences": self._stop_sequences.sequences(params.stop or ()) if stops_as_tokens else [],
            "log_probabilities": checked_integer("logprobs", request.logprobs) or None,
            "log_probabilities_echo": checked_flag("echo", request.echo),
            "ignore_eos": params.ignore_eos,
            "json_schema": schema,
            "sampling_params": params,
            "request_id": request.id,
            "model_name": request.model_name,
            "grammar": grammar,
            "adapter": request.adapter,
            "cache_salt": request.cache_salt,
            "priority": checked_integer(
                "priority", request.priority, minimum=-(2**63), rule="an integer of 64 bits"
            ),
        }
        return self._new_context(request, values)

    def encode_text(self, text: str, add_special_tokens: bool = True, *, limited: bool = True) -> TokenIds:
        """Return the tokens of a text. Unpaired surrogates become U+FFFD.

        Raises:
            PromptTooLongError: ``limited`` is set and the text is longer than the maximum length.
        """
        tokens = self._encode_prompt(text, add_special_tokens, is_limited=limited)
        if limited and self.max_length is not None and len(tokens) > self.max_length:
            raise PromptTooLongError(len(tokens), self.max_length)
        return tokens

    def encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text. Special tokens in the text are encoded as ordinary text.

        Args:
            text: the text.
            add_special_tokens: whether to add special tokens of the tokenizer, such as BOS.
        """
        backend = self.backend
        backend.encode_special_tokens = True  # no other thread uses this copy of the tokenizer
        try:
            [encoding] = backend.encode_batch_fast(
                [valid_unicode(text)], add_special_tokens=add_special_tokens
            )
        finally:
            backend.encode_special_tokens = False
        ids: list[int] = encoding.ids
        return ids

    def decode_ids(
        self, ids: Sequence[int] | npt.NDArray[np.integer], skip_special_tokens: bool = True
    ) -> str:
        """Return the text of tokens. Ids without a token, such as padding of the vocabulary, have no text.

        Raises:
            InputError: an element is not an integer from 0 to 2**32 - 1.
        """
        try:
            return self.backend.decode(cast("Sequence[int]", ids), skip_special_tokens)
        except (OverflowError, TypeError):
            checked_ids_to_decode(ids)
            raise

    def encode_request_prompt(self, request: TokenGeneratorRequest) -> tuple[str | None, TokenIds]:
        """Return (text, tokens) of a request's prompt of any length. The text of a prompt of ids is None.

        Raises:
            InputError: the prompt is missing or the model cannot read it.
        """
        return self._prompt(request)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of messages, equal to transformers' ``apply_chat_template``.

        ``options`` are variables for the template. They override ``add_generation_prompt=True``.
        """
        return self._template().render(messages, tools, options)

    def is_visible(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Return whether `decode_ids` includes this token."""
        if skip_special_tokens and token_id in self._special_tokens.by_id:
            return False
        return self.backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text; empty for an unknown id.

        The token may be special. Its bytes may be part of a character.
        """
        raw_bytes = self._token_bytes.get(token_id)
        if raw_bytes is None:
            raw_bytes = single_token_bytes(self.backend, token_id, self.byte_tokens)
            self._token_bytes[token_id] = raw_bytes
        return raw_bytes

    def template_mentions(self, word: str) -> bool:
        """Return whether the source of any chat template contains a word, such as a role or a variable."""
        return self._chat_template is not None and self._chat_template.mentions(word)

    @property
    def template_takes_argument_objects(self) -> bool:
        """Whether the template accepts the arguments of a tool call as an object instead of a string."""
        return self._chat_template is not None and self._chat_template.takes_argument_objects

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Token id -> byte of byte fallback tokens (``<0xE2>``); empty if decoding has no byte fallback."""
        return find_byte_tokens(self.backend)

    def _prompt(
        self, request: TokenGeneratorRequest, *, is_limited: bool = False
    ) -> tuple[str | None, TokenIds]:
        if request.images and not self.reads_images:
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
            text = self._expand_placeholders(RenderedPrompt(request.prompt), request).text
            return text, self._encode_prompt(text, add_special_tokens=True, is_limited=is_limited)
        assert request.prompt is not None
        return None, checked_prompt_ids(request.prompt, self.vocab_size)

    def _chat_prompt(self, request: TokenGeneratorRequest, *, is_limited: bool) -> tuple[str, TokenIds]:
        template, messages = self._template(), request.messages or []

        def render(messages: Sequence[Message]) -> str:
            text = template.render_request(messages, request.tools, request.chat_template_options)
            return valid_unicode(text)

        if self._special_tokens_in_content:
            prompt = RenderedPrompt(render(messages))
        else:
            prompt = self._special_tokens.render(messages, render)
        prompt = self._expand_placeholders(prompt, request)
        if not prompt.boundaries:
            tokens = self._encode_prompt(prompt.text, add_special_tokens=False, is_limited=is_limited)
            return prompt.text, tokens
        if is_limited:
            self._check_length(prompt.text)
        ids = self._special_tokens.encode(self.backend, prompt, self.token_bytes)
        return prompt.text, checked_prompt_ids(ids, self.vocab_size)

    def _expand_placeholders(self, prompt: RenderedPrompt, request: TokenGeneratorRequest) -> RenderedPrompt:
        """Return the prompt with the placeholders of images expanded. Overridden for vision models."""
        return prompt

    def _new_context(self, request: TokenGeneratorRequest, values: Mapping[str, Any]) -> TextContext:
        """Create the context from its fields. Overrides may return a subclass of `TextContext`."""
        return TextContext(**values)

    def _normalize(self, text: str) -> str:
        normalizer = self.backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise InputError(
                "this model has no chat template: pass a prompt, or a template with --chat-template"
            )
        return self._chat_template

    def _encode_prompt(self, text: str, add_special_tokens: bool, *, is_limited: bool = False) -> TokenIds:
        if is_limited:
            self._check_length(text)
        # `encode_batch_fast` is faster than `encode`, and it releases the GIL.
        [encoding] = self.backend.encode_batch_fast(
            [valid_unicode(text)], add_special_tokens=add_special_tokens
        )
        return checked_prompt_ids(encoding.ids, self.vocab_size)

    def _check_length(self, text: str) -> None:
        """Raise `PromptTooLongError` for a text that is clearly too long, without encoding all of it."""
        if self.max_length is not None:
            check_text_length(self.backend, text, self.max_length, has_output=self.generates_tokens)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    async def _run_in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)
