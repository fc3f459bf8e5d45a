"""Converts arguments of `LLM`, each a single value or a list, to lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeAlias, TypeVar, cast

from penstock.config import PipelineConfig
from penstock.errors import InputError
from penstock.pipelines.core import SamplingParams

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int]
ChatMessages: TypeAlias = Sequence[Mapping[str, object]]
"""Messages, such as ``{"role": "user", "content": "Hello"}`` (`TokenGeneratorRequestMessage`)."""
ToolDescriptions: TypeAlias = Sequence[Mapping[str, object]]
"""Descriptions of functions, as OpenAI's ``tools`` (`TokenGeneratorRequestTool`)."""

_SINGLE_PROMPT_TYPES = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Iterable types that count as one prompt: a text, or a value that the tokenizer rejects."""


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, from a list or a single prompt. The tokenizer checks each prompt."""
    return split_prompts(prompts)[0]


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return (a list of prompts, whether a single prompt was given)."""
    if isinstance(prompts, _SINGLE_PROMPT_TYPES) or not isinstance(prompts, Iterable):
        return [prompts], True
    batch = list(prompts)
    if batch and all(_is_token(item) for item in batch):
        return [cast("list[int]", batch)], True
    return cast("list[Prompt]", batch), False


def _is_token(value: object) -> bool:
    return not isinstance(value, str | bytes | Iterable)


def as_conversations(messages: ChatMessages | Sequence[ChatMessages]) -> list[object]:
    """Return a list of conversations, from a list or a single conversation.

    Raises:
        InputError: ``messages`` is not a sequence, or is a text.
    """
    message_list: object = messages
    if not isinstance(message_list, Sequence) or isinstance(message_list, str | bytes):
        raise InputError(f"messages must be a list of messages or of such lists, was {message_list!r}")
    conversations = list(message_list)
    return (
        [conversations]
        if any(isinstance(conversation, Mapping) for conversation in conversations)
        else conversations
    )


def broadcast(name: str, values: T | Sequence[T], num_prompts: int) -> list[T]:
    """Return one value for each prompt, from a list or a single value.

    Raises:
        InputError: the list does not have one value for each prompt.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise InputError(
            f"{len(values)} {name} were given for {num_prompts} prompts: give one for all, or one for each"
        )
    return list(values)


def params_for_each(
    config: PipelineConfig,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    num_prompts: int,
) -> list[SamplingParams]:
    """Return the parameters of each prompt. None means the model's defaults, with a new seed per prompt.

    Raises:
        InputError: the list does not have one element for each prompt, or an element is no `SamplingParams`.
    """
    if sampling_params is None:
        return [config.default_sampling_params() for _ in range(num_prompts)]
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    params = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
    for element in params:
        if not isinstance(element, SamplingParams):
            raise InputError(f"sampling_params must be SamplingParams, was {type(element).__name__}")
    return broadcast("sampling_params", params, num_prompts)
