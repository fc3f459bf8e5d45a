"""The request and the context of the embeddings task: vectors or scores of a text or of a pair of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Required, TypedDict

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.pipelines.core.context import TextContext

EmbeddingsOutput = Literal["dense", "sparse", "multi_vector", "scores"]
"""``dense``: one pooled vector. ``sparse``: the weights of some token ids. ``multi_vector``: one vector
for each token. ``scores``: one number for each label of a classification or reranking head."""
PoolingType = Literal["cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last_token"]
"""How the hidden states of an input become one vector; see ``PoolingMode`` of sentence-transformers."""

EMBEDDINGS_OUTPUTS: tuple[EmbeddingsOutput, ...] = ("dense", "sparse", "multi_vector", "scores")
"""All values of `EmbeddingsOutput`."""
POOLING_TYPES: tuple[PoolingType, ...] = (
    "cls",
    "mean",
    "max",
    "mean_sqrt_len",
    "weighted_mean",
    "last_token",
)
"""All values of `PoolingType`."""


def check_dimensions(dimensions: int, size: int, trained: Sequence[int] | None) -> None:
    """Check that dense vectors of a model can be cut to a length.

    Args:
        dimensions: the requested length.
        size: the length of a whole vector, which is always allowed.
        trained: the shorter lengths for which the model is trained; None allows all from 1 to ``size``.

    Raises:
        InputError: the length is out of range, or the model is not trained for it.
    """
    if dimensions == size or (dimensions >= 1 and trained is None and dimensions < size):
        return
    if trained is None:
        raise InputError(f"dimensions must be from 1 to {size}, was {dimensions}")
    if dimensions < size and dimensions in trained:
        return
    shorter_sizes = [str(trained_size) for trained_size in sorted(trained) if trained_size < size]
    if shorter_sizes:
        sizes = ", ".join([*shorter_sizes, str(size)])
        raise InputError(f"dimensions must be one of {sizes}, was {dimensions}")
    raise InputError(
        f"dimensions is {dimensions}, but the model has {size} dimensions and its checkpoint names no "
        "shorter lengths: omit dimensions, or list the lengths of its training in --matryoshka-dimensions"
    )


@dataclass(frozen=True, kw_only=True)
class EmbeddingsGenerationRequest:
    """A request for the vectors or scores of one text, or of one pair of texts."""

    id: str
    """The context's ``request_id``."""
    model_name: str = ""
    input: str | Sequence[int]
    """The text, or its token ids including special tokens."""
    text_pair: str | None = None
    """The second text of a pair, such as the document that a cross-encoder scores for the query ``input``."""
    outputs: tuple[EmbeddingsOutput, ...] | None = None
    """The requested outputs; None requests the model's default output."""
    prompt: str | None = None
    """Text that is placed before ``input``, such as ``"query: "``."""
    prompt_name: str | None = None
    """The name of a prompt of the checkpoint; excludes ``prompt``."""
    instruction: str | None = None
    """The task description for rerankers whose prompt template contains one."""
    pooling: PoolingType | None = None
    """The pooling of the hidden states; None uses the pooling of the checkpoint."""
    dimensions: int | None = None
    """Keep this many leading dimensions of a dense vector; None keeps all."""
    normalize: bool | None = None
    """Scale vectors to length 1; None follows the checkpoint."""
    activation: bool | None = None
    """Apply the head's sigmoid or softmax to scores; None follows the checkpoint, False returns logits."""
    truncate: bool = False
    """Cut an input that exceeds the maximum length; False rejects the input."""
    max_tokens: int | None = None
    """The length in tokens to which the input is cut; None for the model's maximum. Requires ``truncate``."""
    adapter: str | None = None
    """The name of a LoRA adapter or of a task adapter of the checkpoint. It selects no prompt."""
    task: str | None = None
    """The task of a checkpoint with task adapters, such as ``retrieval.query``. It selects the adapter and,
    unless another prompt is given, the prompt of the same name. Without ``task`` and ``adapter``, a
    ``prompt_name`` that is a task name selects the adapter, too.
    """
    priority: int = 0
    """Requests with a higher number are scheduled first."""

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError("prompt and prompt_name are both given: give one of them")
        if self.task is not None and self.adapter is not None:
            raise InputError("task selects an adapter, and adapter is also given: give one of them")
        if self.max_tokens is not None and not self.truncate:
            raise InputError(f"max_tokens is {self.max_tokens} but truncate is False: pass truncate=True")
        if self.text_pair is not None and not isinstance(self.input, str):
            raise InputError(
                "text_pair needs a text as input, not token ids: encode both texts and omit text_pair"
            )


class EmbeddingsOptions(TypedDict, total=False):
    """The fields of an `EmbeddingsGenerationRequest` that apply to all inputs of a call."""

    text_pair: str | None
    prompt: str | None
    prompt_name: str | None
    task: str | None
    instruction: str | None
    pooling: PoolingType | None
    dimensions: int | None
    normalize: bool | None
    activation: bool | None
    truncate: bool
    max_tokens: int | None
    priority: int


class EmbeddingsFields(EmbeddingsOptions, total=False):
    """The fields of an `EmbeddingsGenerationRequest` except its id and its model."""

    input: Required[str | Sequence[int]]
    outputs: tuple[EmbeddingsOutput, ...] | None
    adapter: str | None


class EmbeddingsContext(TextContext, kw_only=True, tag=True, omit_defaults=True):
    """The context of one embeddings request. One forward computes its whole output.

    ``tokens`` contains the whole model input: special tokens, prompt, text, and the second text of a pair.
    The context generates no tokens, so the input may be as long as ``max_length``.
    """

    outputs: tuple[EmbeddingsOutput, ...] = ()
    """The requested outputs; empty requests the model's default output."""
    token_type_ids: npt.NDArray[np.integer] | None = None
    """``[T]``: the segment of each token, for models that distinguish the two texts of a pair."""
    num_unpooled_tokens: int = 0
    """Number of leading tokens that pooling and multi-vector output skip, such as those of a prompt."""
    pooling: PoolingType | None = None
    """The pooling of the hidden states; None uses the pooling of the checkpoint."""
    dimensions: int | None = None
    """Keep this many leading dimensions of a dense vector; None keeps all."""
    normalize: bool | None = None
    """Scale vectors to length 1; None follows the checkpoint."""
    activation: bool | None = None
    """Apply the head's sigmoid or softmax to scores; None follows the checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.outputs if name not in EMBEDDINGS_OUTPUTS]
        if unknown:
            raise InputError(f"outputs must be among {', '.join(EMBEDDINGS_OUTPUTS)}, were {unknown}")
        if self.pooling is not None and self.pooling not in POOLING_TYPES:
            raise InputError(f"pooling must be one of {', '.join(POOLING_TYPES)}, was {self.pooling!r}")
        if self.dimensions is not None and self.dimensions < 1:
            raise InputError(f"dimensions must be at least 1, was {self.dimensions}")
        num_tokens = self.current_length
        if not 0 <= self.num_unpooled_tokens < num_tokens:
            raise InputError(
                f"num_unpooled_tokens must be from 0 to {num_tokens - 1}, below the number of tokens, was "
                f"{self.num_unpooled_tokens}"
            )
        if self.token_type_ids is not None:
            self.token_type_ids = np.asarray(self.token_type_ids)
            if self.token_type_ids.shape != (num_tokens,):
                raise InputError(
                    f"token_type_ids must have one entry for each of the {num_tokens} tokens, has shape "
                    f"{self.token_type_ids.shape}"
                )


class EmbeddingsContextBuilder(Protocol):
    """Converts embeddings requests to contexts. The tokenizer of an embeddings model inherits from it."""

    def build_embeddings_context(self, request: EmbeddingsGenerationRequest) -> EmbeddingsContext:
        """Return the context of a request.

        Raises:
            InputError: the request cannot be served.
        """
        ...

    def build_embeddings_contexts(
        self, requests: Sequence[EmbeddingsGenerationRequest]
    ) -> Iterator[EmbeddingsContext]:
        """Yield the context of each request, in order.

        The first request that cannot be served raises its error.

        By default one request is converted at a time. A tokenizer that can encode several texts together
        overrides this method.
        """
        return map(self.build_embeddings_context, requests)
