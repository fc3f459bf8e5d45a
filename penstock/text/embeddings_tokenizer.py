"""`EmbeddingsTokenizer`: converts embeddings requests to contexts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from penstock.errors import InputError, PromptTooLongError, UnsupportedFeatureError
from penstock.pipelines.core import (
    EmbeddingsContext,
    EmbeddingsContextBuilder,
    EmbeddingsGenerationRequest,
    SamplingParams,
)
from penstock.text.pair_template import PairTemplate
from penstock.text.sentence_transformers import read_layout
from penstock.text.token_ids import TokenIds, checked_prompt_ids
from penstock.text.tokenizer import TextTokenizer
from penstock.text.valid_unicode import valid_unicode

TokenizerInput: TypeAlias = str | tuple[str, str]
"""A text or a pair of texts."""
EncodedInput: TypeAlias = tuple[TokenIds, TokenIds | None]
"""(tokens of an input, including special tokens; token types of a pair, or None for a single text)."""

_MAX_TEXTS_PER_CALL = 1024
"""Maximum number of texts per call of the tokenizer. It bounds the memory of the results."""
_UNUSED_SAMPLING_PARAMS = SamplingParams()
"""The sampling parameters of all contexts. They have no effect, because no token is sampled."""


class EmbeddingsTokenizer(TextTokenizer, EmbeddingsContextBuilder):
    """The tokenizer of an embeddings model with its prompts and its maximum length.

    Args:
        checkpoint: the checkpoint's folder.
        max_length: maximum number of tokens of an input. None uses the checkpoint's limit.
        chat_template: a file that replaces the checkpoint's template.
        eos_token_ids: see `TextTokenizer`.
        special_tokens_in_content: see `TextTokenizer`.
    """

    generates_tokens = False

    def __init__(
        self,
        checkpoint: Path,
        *,
        max_length: int | None = None,
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
        special_tokens_in_content: bool = False,
    ) -> None:
        super().__init__(
            checkpoint,
            max_length=max_length,
            chat_template=chat_template,
            eos_token_ids=eos_token_ids,
            special_tokens_in_content=special_tokens_in_content,
        )
        self.layout = read_layout(Path(checkpoint))
        trained_length = self.layout.max_seq_length
        if max_length is None and trained_length is not None:
            self.max_length = min(trained_length, self.max_length or trained_length)

    @property
    def pair_template(self) -> PairTemplate | None:
        """The prompt template of a generative reranker; None for other models."""
        return None

    async def new_embeddings_context(self, request: EmbeddingsGenerationRequest) -> EmbeddingsContext:
        """Run `build_embeddings_context` in a thread."""
        return await self._run_in_thread(lambda: self.build_embeddings_context(request))

    def build_embeddings_context(self, request: EmbeddingsGenerationRequest) -> EmbeddingsContext:
        """Return the context of a request.

        Raises:
            PromptTooLongError: the input exceeds the maximum length or ``max_tokens``, without ``truncate``.
            InputError: the input is empty, the prompt name or the task is unknown, or a parameter is invalid.
            UnsupportedFeatureError: the request has an instruction, and either it has no ``text_pair`` or the
                model has no `pair_template`.
        """
        return self._build_embeddings_context(request, None)

    def build_embeddings_contexts(
        self, requests: Sequence[EmbeddingsGenerationRequest]
    ) -> Iterator[EmbeddingsContext]:
        """Yield the context of each request, in order.

        Texts are encoded in batches, on all cores; the prompts of a generative reranker one by one.

        Raises:
            InputError: see `build_embeddings_context`. Raised at the first invalid request.
        """
        for request, encoded_input in zip(requests, self._encode_inputs(requests), strict=True):
            yield self._build_embeddings_context(request, encoded_input)

    def _encode_inputs(self, requests: Sequence[EmbeddingsGenerationRequest]) -> list[EncodedInput | None]:
        """Encode the texts of several requests in batches, on all cores, for `_build_embeddings_context`.

        The result of a request is None if it has no text to encode, has token ids as input, uses
        `pair_template`, or fails a check before encoding. `_build_embeddings_context` handles such requests.
        """
        encoded_inputs: list[EncodedInput | None] = [None] * len(requests)
        inputs_by_limit: dict[int | None, list[tuple[int, TokenizerInput]]] = {}
        for index, request in enumerate(requests):
            if not isinstance(request.input, str) or not (request.input or request.text_pair):
                continue
            if request.text_pair is not None and self.pair_template is not None:
                continue
            try:
                max_tokens = self._max_input_tokens(request) if request.truncate else None
                text = self._prompt_text(request, self._task(request)) + request.input
                text_input = self._tokenizer_input(text, request.text_pair, max_tokens)
            except InputError:
                continue
            inputs_by_limit.setdefault(max_tokens, []).append((index, text_input))
        for max_tokens, text_inputs in inputs_by_limit.items():
            for start in range(0, len(text_inputs), _MAX_TEXTS_PER_CALL):
                batch = text_inputs[start : start + _MAX_TEXTS_PER_CALL]
                results = self._encode_batch([text_input for _, text_input in batch], max_tokens)
                for (index, _), result in zip(batch, results, strict=True):
                    encoded_inputs[index] = result
        return encoded_inputs

    def _build_embeddings_context(
        self, request: EmbeddingsGenerationRequest, encoded_input: EncodedInput | None
    ) -> EmbeddingsContext:
        """Return the context of a request.

        Args:
            request: the request.
            encoded_input: the result of `_encode_inputs` for the request. If None, this method encodes the
                input.
        """
        template = None if request.text_pair is None else self.pair_template
        if request.instruction is not None and template is None:
            raise UnsupportedFeatureError(
                "instruction",
                "there is no template with an instruction for this input: give the instruction as prompt",
            )
        task = self._task(request)
        prompt = self._prompt_text(request, task)
        max_input_tokens = self._max_input_tokens(request)
        token_type_ids = None
        if isinstance(request.input, str):
            if not request.input and request.text_pair is None:
                raise InputError("the input is empty: it needs at least one character")
            max_tokens = max_input_tokens if request.truncate else None
            if encoded_input is not None:
                tokens, token_type_ids = encoded_input
            elif template is not None:
                tokens = self._encode_template(template, request, max_tokens)
            else:
                tokens, token_type_ids = self._encode_input(
                    prompt + request.input, request.text_pair, max_tokens
                )
        else:
            tokens = checked_prompt_ids(list(request.input), self.vocab_size)
            if prompt:
                raise InputError(
                    "a prompt needs a text as input, not token ids: put the prompt's token ids before the "
                    "token ids of the input"
                )
            if request.truncate and max_input_tokens is not None:
                tokens = self._truncate(tokens, max_input_tokens)
        if not len(tokens):
            raise InputError("the input is empty: it needs at least one token")
        if max_input_tokens is not None and len(tokens) > max_input_tokens:
            raise PromptTooLongError(len(tokens), max_input_tokens, has_output=self.generates_tokens)
        return EmbeddingsContext(
            prompt=request.input if isinstance(request.input, str) else tokens.tolist(),
            max_length=self.max_length or len(tokens),
            tokens=tokens,
            request_id=request.id,
            model_name=request.model_name,
            adapter=request.adapter or task,
            priority=request.priority,
            outputs=request.outputs or (),
            token_type_ids=token_type_ids,
            num_unpooled_tokens=self._num_unpooled_tokens(prompt, len(tokens)),
            pooling=request.pooling,
            dimensions=request.dimensions,
            normalize=request.normalize,
            activation=request.activation,
            sampling_params=_UNUSED_SAMPLING_PARAMS,
        )

    def cut_text(self, text: str, max_tokens: int) -> str:
        """Return the text of the first ``max_tokens`` tokens of a text, without added special tokens."""
        text = valid_unicode(text)
        encoding = self.backend.encode(text, add_special_tokens=False)
        if len(encoding) <= max_tokens:
            return text
        _, end = encoding.offsets[max_tokens - 1]
        return text[:end]

    def _task(self, request: EmbeddingsGenerationRequest) -> str | None:
        """Return the task of the request, a name in ``layout.tasks``; None without a task.

        ``prompt_name`` selects the task if the request has neither ``task`` nor ``adapter``.
        """
        tasks = self.layout.tasks
        if request.task is None:
            return request.prompt_name if request.prompt_name in tasks and not request.adapter else None
        if request.task not in tasks:
            known_names = ", ".join(tasks) or "none"
            raise InputError(f"task {request.task!r} is unknown: the checkpoint has {known_names}")
        return request.task

    def _prompt_text(self, request: EmbeddingsGenerationRequest, task: str | None) -> str:
        """Return the prompt of a request, the text before its input; "" without a prompt."""
        if request.prompt is not None:
            return request.prompt
        name = request.prompt_name
        if name is None:
            name = task or self.layout.default_prompt_name
            return self.layout.prompts.get(name, "") if name and isinstance(request.input, str) else ""
        if name not in self.layout.prompts:
            known_names = ", ".join(self.layout.prompts) or "none"
            raise InputError(f"prompt_name {name!r} is unknown: the checkpoint has {known_names}")
        return self.layout.prompts[name]

    def _max_input_tokens(self, request: EmbeddingsGenerationRequest) -> int | None:
        """Return the smaller of the request's ``max_tokens`` and `max_length`; None if both are None."""
        if request.max_tokens is None:
            return self.max_length
        if request.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, was {request.max_tokens}")
        return request.max_tokens if self.max_length is None else min(request.max_tokens, self.max_length)

    def _encode_input(self, text: str, text_pair: str | None, max_tokens: int | None) -> EncodedInput:
        """Return the tokens with special tokens, and the token types of a pair."""
        [encoded_input] = self._encode_batch([self._tokenizer_input(text, text_pair, max_tokens)], max_tokens)
        return encoded_input

    def _tokenizer_input(self, text: str, text_pair: str | None, max_tokens: int | None) -> TokenizerInput:
        """Return ``text``, or the pair of ``text`` and ``text_pair``, in the form that the tokenizer expects.

        Raises:
            InputError: ``max_tokens`` leaves no room besides the special tokens; or it is None, and a text is
                clearly too long.
        """
        texts = [
            item.lower() if self.layout.lower_case else item for item in (text, text_pair) if item is not None
        ]
        if max_tokens is None:
            for item in texts:
                self._check_length(item)
        else:
            num_special = self.backend.num_special_tokens_to_add(text_pair is not None)
            if max_tokens <= num_special:
                raise InputError(
                    f"cannot cut the input to {max_tokens} tokens, because the tokenizer adds {num_special} "
                    f"special tokens: raise max_tokens to {num_special + 1} or more"
                )
        first_text = valid_unicode(texts[0])
        return first_text if text_pair is None else (first_text, valid_unicode(texts[1]))

    def _encode_batch(
        self, text_inputs: Sequence[TokenizerInput], max_tokens: int | None
    ) -> list[EncodedInput]:
        """Return the tokens of each text or pair, and the token types of pairs."""
        backend = self.backend
        if max_tokens is not None:
            backend.enable_truncation(max_tokens)  # cuts the longer text of a pair and keeps special tokens
        try:
            encodings = backend.encode_batch_fast(text_inputs)
        finally:
            backend.no_truncation()
        return [
            (
                checked_prompt_ids(encoding.ids, self.vocab_size),
                None if isinstance(text_input, str) else np.array(encoding.type_ids, np.int64),
            )
            for text_input, encoding in zip(text_inputs, encodings, strict=True)
        ]

    def _truncate(self, tokens: TokenIds, limit: int) -> TokenIds:
        """Return the first ``limit`` tokens. A special token at the end of ``tokens`` is kept."""
        if len(tokens) <= limit or int(tokens[-1]) not in self._special_tokens.by_id:
            return tokens[:limit]
        return np.append(tokens[: limit - 1], tokens[-1])

    def _encode_template(
        self, template: PairTemplate, request: EmbeddingsGenerationRequest, max_tokens: int | None
    ) -> TokenIds:
        """Return the tokens of a reranker's prompt. Only its body is cut to fit into ``max_tokens`` tokens.

        Raises:
            InputError: ``max_tokens`` leaves no room for the body, or the body is clearly too long.
        """
        assert isinstance(request.input, str)
        assert request.text_pair is not None
        body = template.render_body(request.input, request.text_pair, request.instruction)
        if max_tokens is None:
            self._check_length(body)
        parts = [valid_unicode(text) for text in (template.prefix, body, template.suffix)]
        encodings = self.backend.encode_batch_fast(parts, add_special_tokens=False)
        prefix, ids, suffix = (encoding.ids for encoding in encodings)
        if max_tokens is not None:
            max_body_tokens = max_tokens - len(prefix) - len(suffix)
            if max_body_tokens < 1:
                raise InputError(
                    f"cannot cut the input to {max_tokens} tokens: the reranker's prompt without query and "
                    f"document has {len(prefix) + len(suffix)}"
                )
            ids = ids[:max_body_tokens]
        return checked_prompt_ids([*prefix, *ids, *suffix], self.vocab_size)

    def _num_unpooled_tokens(self, prompt: str, num_tokens: int) -> int:
        """Return the number of tokens at the start of the input that pooling skips: those of the prompt.

        It is 0 if there is no prompt, or if pooling includes the prompt.
        """
        if not prompt or self.layout.include_prompt:
            return 0
        tokens, _ = self._encode_input(prompt, None, None)
        return min(len(tokens) - 1, num_tokens - 1)  # without the special token at the end
