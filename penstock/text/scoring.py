"""Scores pairs of texts, ranks scores, and looks up the names of labels, for `LLM` and the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError, UnsupportedFeatureError
from penstock.pipelines.core import EmbeddingsOutput, EmbeddingsResponse
from penstock.pipelines.core.embeddings import EmbeddingsFields
from penstock.text.sentence_transformers import SentenceTransformersLayout

_Array: TypeAlias = npt.NDArray[np.floating]


@dataclass(frozen=True)
class ScoringInput:
    """One model input for scoring."""

    kind: Literal["query", "document", "pair"]
    index: int
    """The index of the query or of the document. A pair has the index of its document."""
    fields: EmbeddingsFields


class PairScoring:
    """Prepares a model's inputs for pairs of query and document, and computes their scores from its outputs.

    - Cross-encoder: one input per pair. Its output is the score.
    - Embedder: one input per distinct query and per document. The score is the similarity of two embeddings,
      by the similarity function of the checkpoint.
    - Multi-vector model: inputs as for an embedder. The score is MaxSim.

    Args:
        queries: the query of each document.
        documents: the documents.
        outputs: the names of the outputs that the model computes, such as ``scores`` or ``multi_vector``.
        layout: prompts and similarity function of the checkpoint.
        activation: whether a cross-encoder applies its activation; None for its default.

    Raises:
        UnsupportedFeatureError: ``activation`` is given and the model is not a cross-encoder.
    """

    def __init__(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        outputs: Sequence[str],
        layout: SentenceTransformersLayout,
        activation: bool | None = None,
    ) -> None:
        self._layout = layout
        self._queries = queries
        self._distinct_queries: dict[str, int] = {}
        for index, query in enumerate(queries):
            self._distinct_queries.setdefault(query, index)
        self._is_cross_encoder = "scores" in outputs
        self._is_multi_vector = tuple(outputs[:1]) == ("multi_vector",)
        self.output: EmbeddingsOutput = "multi_vector" if self._is_multi_vector else "dense"
        if self._is_cross_encoder:
            self.output = "scores"
        """The model output that all inputs request."""
        if activation is not None and not self._is_cross_encoder:
            raise UnsupportedFeatureError("activation", "this model is an embedder and has no scoring head")
        self.inputs = (
            self._pair_inputs(documents, activation)
            if self._is_cross_encoder
            else self._text_inputs(documents)
        )
        """All inputs. The outputs that `scores` takes must be in the same order."""

    def scores(self, responses: Sequence[EmbeddingsResponse]) -> _Array:
        """Return the score of each pair, ``[n]`` float32.

        Args:
            responses: the outputs of `inputs`, in their order.

        Raises:
            InputError: the model is a classifier with several labels, or its similarity function is unknown.
        """
        if not responses:
            return np.zeros(0, np.float32)
        if self._is_cross_encoder:
            scores_by_pair = [response.scores for response in responses if response.scores is not None]
            if len(scores_by_pair[0]) != 1:
                raise InputError(
                    f"the model has {len(scores_by_pair[0])} labels, but a cross-encoder has one: use the "
                    "model to classify"
                )
            return np.concatenate(scores_by_pair)
        query_rows = {query: row for row, query in enumerate(self._distinct_queries)}
        if self._is_multi_vector:
            multi_vectors = [
                response.multi_vector for response in responses if response.multi_vector is not None
            ]
            pairs = zip(self._queries, multi_vectors[len(query_rows) :], strict=True)
            return np.array(
                [max_similarity(multi_vectors[query_rows[query]], document) for query, document in pairs],
                np.float32,
            )
        vectors = np.stack([response.embeddings for response in responses])
        query_vectors = vectors[[query_rows[query] for query in self._queries]]
        return similarity(query_vectors, vectors[len(query_rows) :], self._layout.similarity)

    def _pair_inputs(self, documents: Sequence[str], activation: bool | None) -> list[ScoringInput]:
        return [
            ScoringInput("pair", i, {"input": query, "text_pair": text, "activation": activation})
            for i, (query, text) in enumerate(zip(self._queries, documents, strict=True))
        ]

    def _text_inputs(self, documents: Sequence[str]) -> list[ScoringInput]:
        query_prompt = self._layout.prompt_for("query")
        document_prompt = self._layout.prompt_for("document")
        queries = [
            ScoringInput("query", index, {"input": query, "prompt_name": query_prompt})
            for query, index in self._distinct_queries.items()
        ]
        texts = [
            ScoringInput("document", i, {"input": text, "prompt_name": document_prompt})
            for i, text in enumerate(documents)
        ]
        return [*queries, *texts]


def similarity(first: _Array, second: _Array, function_name: str) -> _Array:
    """Return ``[n]``: the similarity of each row of ``first [n, E]`` to the same row of ``second [n, E]``.

    ``function_name`` is cosine, dot, euclidean or manhattan. The last two are distances, which are negated.

    Raises:
        InputError: the function is unknown.
    """
    if function_name not in _SIMILARITIES:
        raise InputError(f"similarity_fn_name {function_name!r} is unknown: use {', '.join(_SIMILARITIES)}")
    return _SIMILARITIES[function_name](first, second)


def max_similarity(query: _Array, document: _Array) -> float:
    """Return MaxSim: the sum over query vectors of the largest dot product with a document vector.

    Khattab and Zaharia 2020, arXiv:2004.12832.

    Args:
        query: ``[n, E]``.
        document: ``[m, E]``.
    """
    return float((query @ document.T).max(1).sum())


def ranking(scores: _Array, top_n: int | None = None) -> list[int]:
    """Return the indices of the highest scores, highest first. Equal scores keep their order.

    Args:
        scores: ``[n]``.
        top_n: the maximum number of indices; None for all.

    Raises:
        InputError: ``top_n`` is below 1.
    """
    if top_n is not None and top_n < 1:
        raise InputError(f"top_n must be at least 1, was {top_n}")
    return [int(i) for i in np.argsort(-scores, kind="stable")[:top_n]]


def label_names(config: Mapping[str, object]) -> dict[int, str]:
    """Return label index -> label name of a classifier, from ``id2label``; empty without ``id2label``."""
    labels = config.get("id2label")
    return {int(index): str(labels[index]) for index in labels} if isinstance(labels, Mapping) else {}


def best_label(config: Mapping[str, object], scores: _Array) -> str:
    """Return the name of the label with the highest score; ``LABEL_<index>`` if it has no name.

    Args:
        config: the checkpoint's ``config.json``.
        scores: ``[labels]``.
    """
    index = int(scores.argmax())
    return label_names(config).get(index, f"LABEL_{index}")


def _cosine(first: _Array, second: _Array) -> _Array:
    norms: _Array = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products: _Array = (first * second).sum(1)
    return products / np.maximum(norms, 1e-12)


_SIMILARITIES: Mapping[str, Callable[[_Array, _Array], _Array]] = {
    "cosine": _cosine,
    "dot": lambda first, second: cast("_Array", (first * second).sum(1)),
    "euclidean": lambda first, second: cast("_Array", -np.linalg.norm(first - second, axis=1)),
    "manhattan": lambda first, second: cast("_Array", -np.abs(first - second).sum(1)),
}
