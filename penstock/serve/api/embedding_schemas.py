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
    """Whether inputs over the maximum length are cut at the end; otherwise they are refused."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Number of first tokens to keep; -1 keeps as many as the model can read."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: Label | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _reject_zero(cls, count: int | None) -> int | None:
        if count == 0:
            raise ValueError("0 would leave an empty input: send at least 1, or -1 to keep as many as fit")
        return count

    @property
    def cuts(self) -> bool:
        """Whether inputs over the maximum length are cut."""
        return self.truncate in (True, "END") or self.truncate_prompt_tokens is not None

    @property
    def max_tokens(self) -> int | None:
        """The length to cut to; None for the maximum length of the model."""
        return None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class VectorBody(EncodingBody):
    """The fields of bodies that request vectors."""

    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    """``base64``: the bytes of the vector as little-endian float32."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Number of leading dimensions to keep."""

    # Not in the OpenAI API.
    prompt_name: str | None = None
    """The name of a prompt of the checkpoint, which is placed before each text."""
    input_type: Literal["query", "document", "passage"] | None = None
    """Selects the prompt of the checkpoint for queries or for documents."""
    task: str | None = None
    """The task of a model with task adapters, such as ``retrieval.query``; also selects its prompt."""
    pooling: PoolingType | None = None
    """Replaces the pooling of the checkpoint."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1; the default is that of the checkpoint."""


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
    """The outputs to return; the default is the model's first output."""
    activation: bool | None = None
    """False returns the logits of a classification head."""


class ClassifyBody(EncodingBody):
    """``POST /v1/classify``."""

    input: TextsOrIds
    activation: bool | None = None
    """False returns logits."""


class ScoreBody(EncodingBody):
    """``POST /v1/score``."""

    text_1: str | Texts
    """One text, which is paired with each text of ``text_2``, or as many texts as ``text_2``.

    In the second case, each text is paired with the text of the same index.
    """
    text_2: str | Texts
    activation: bool | None = None
    """False returns the logits of a cross-encoder."""


class RerankDocument(RequestBody):
    """A document as an object."""

    text: str


class RerankBody(EncodingBody):
    """``POST /v1/rerank``, with the fields of Cohere and Jina."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True)]
    top_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Number of first tokens of each document to keep. Pairs over the maximum length are cut, too."""
    activation: bool | None = None
    """False returns the logits of a cross-encoder."""

    @property
    def cuts(self) -> bool:
        """Whether pairs over the maximum length are cut."""
        return super().cuts or self.max_tokens_per_doc is not None
