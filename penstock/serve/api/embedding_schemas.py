"""The schemas of request bodies for embeddings, reranking, scoring and classification."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from penstock.pipelines.core import EmbeddingsOutput, PoolingType
from penstock.serve.api.schemas import Label, RequestBody, Texts, TokenIds

TextsOrIds = str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
"""A text, a list of texts, a list of token ids, or a list of such lists."""


class EncodingBody(RequestBody):
    """The fields that all request bodies of embeddings models share."""

    model: str = ""
    """Defaults to the served model, which `penstock.serve.api.text_generation.checked_body` sets."""
    truncate: bool | Literal["NONE", "END"] | None = None
    """Whether inputs over the maximum length are cut at the end. ``END`` means true, ``NONE`` means false."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Maximum number of leading tokens to keep; -1 for the model's maximum length. Implies `truncate`."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: Label | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _reject_zero(cls, num_tokens: int | None) -> int | None:
        if num_tokens == 0:
            raise ValueError("0 leaves an empty input: send at least 1, or -1 for the model's maximum length")
        return num_tokens

    @property
    def truncates(self) -> bool:
        """Whether inputs over the maximum length are cut. If not, they are refused."""
        return self.truncate in (True, "END") or self.truncate_prompt_tokens is not None

    @property
    def max_tokens(self) -> int | None:
        """Length in tokens to which inputs are cut if `truncates`; None for the model's maximum length."""
        return None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class VectorBody(EncodingBody):
    """The fields that request bodies for embeddings and pooling share."""

    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    """With ``base64``, a vector is the base64 text of its little-endian float32 values."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Number of leading dimensions to keep."""

    # The fields below are not in the OpenAI API.
    prompt_name: str | None = None
    """The name of a prompt in the checkpoint. The prompt is placed before each text."""
    input_type: Literal["query", "document", "passage"] | None = None
    """Selects the checkpoint's prompt for queries or for documents."""
    task: str | None = None
    """Selects the adapter and the prompt of a model with task adapters, for example ``retrieval.query``."""
    pooling: PoolingType | None = None
    """The pooling to use instead of the checkpoint's pooling."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1. If None, ``/pooling`` uses the default of the checkpoint.

    For ``/v1/embeddings``, see `EmbeddingsBody.normalizes`.
    """


class EmbeddingsBody(VectorBody):
    """``POST /v1/embeddings``."""

    @property
    def normalizes(self) -> bool | None:
        """Whether vectors are scaled to length 1. None means the default of the checkpoint.

        If `normalize` is absent and `dimensions` is set, vectors are scaled.
        """
        is_cut = self.dimensions is not None
        return True if self.normalize is None and is_cut else self.normalize


class PoolingBody(VectorBody):
    """``POST /pooling``."""

    outputs: Annotated[list[EmbeddingsOutput], Field(min_length=1, max_length=4)] | None = None
    """The outputs to return. None returns the model's first output."""
    activation: bool | None = None
    """False returns the logits of a classification head, without the activation function."""


class ClassifyBody(EncodingBody):
    """``POST /v1/classify``."""

    input: TextsOrIds
    activation: bool | None = None
    """False returns the logits, without the activation function."""


class ScoreBody(EncodingBody):
    """``POST /v1/score``."""

    text_1: str | Texts
    """One text, or a list as long as ``text_2``.

    One text is paired with each text of ``text_2``. Texts of two lists are paired by index.
    """
    text_2: str | Texts
    activation: bool | None = None
    """False returns the logits of a cross-encoder, without the activation function."""


class RerankDocument(RequestBody):
    """A document in the form of a JSON object."""

    text: str


class RerankBody(EncodingBody):
    """``POST /v1/rerank``, with the fields of Cohere and Jina."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True)]
    top_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Maximum number of leading tokens of each document to keep.

    If this field is set, a pair of query and document is also cut to the maximum length of the model.
    """
    activation: bool | None = None
    """False returns the logits of a cross-encoder, without the activation function."""

    @property
    def truncates(self) -> bool:
        """Whether pairs of query and document over the maximum length are cut."""
        return super().truncates or self.max_tokens_per_doc is not None
