"""`EmbeddingsMethods`: the methods of `LLM` for embeddings models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Unpack, cast
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from penstock.assembly import STREAMING_LATENCY_BUDGET
from penstock.errors import InputError
from penstock.host.interrupts import deferred_interrupts
from penstock.host.progress import GenerationProgress
from penstock.llm.prompts import broadcast
from penstock.pipelines.core import (
    EmbeddingsContext,
    EmbeddingsGenerationRequest,
    EmbeddingsOutput,
    EmbeddingsResponse,
    PipelineTask,
    PoolingType,
)
from penstock.pipelines.core.embeddings import EmbeddingsFields, EmbeddingsOptions
from penstock.text.scoring import PairScoring, best_label, ranking

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.llm.batch_runner import BatchRunner
    from penstock.pipelines.embeddings import EmbeddingsPipeline
    from penstock.text.embeddings_tokenizer import EmbeddingsTokenizer

EmbeddingsInput: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer]
"""A text, or its token ids including special tokens."""


@dataclass(frozen=True)
class RerankResult:
    """One result of `LLM.rerank`."""

    index: int
    """The index of the document in the given list."""
    score: float
    document: str


@dataclass(frozen=True)
class Classification:
    """The result of `LLM.classify` for one text."""

    label: str
    """The label with the highest score, by its name in ``id2label``."""
    scores: npt.NDArray[np.floating]
    """``[labels]`` float32."""


class EmbeddingsBuilder:
    """Stores the output of one context.

    Args:
        context: the context.
    """

    def __init__(self, context: EmbeddingsContext) -> None:
        self.context = context
        self.response: EmbeddingsResponse | None = None

    @property
    def is_done(self) -> bool:
        """Whether the output has arrived."""
        return self.response is not None

    def take(self, response: EmbeddingsResponse) -> None:
        """Store the output."""
        self.response = response


class EmbeddingsMethods:
    """Methods of `LLM` that embed, score, rerank and classify texts."""

    if TYPE_CHECKING:
        config: PipelineConfig
        pipeline: EmbeddingsPipeline
        tokenizer: EmbeddingsTokenizer
        _runner: BatchRunner

        def _check_task(self, method: str, task: PipelineTask) -> None: ...

    def embed(
        self,
        inputs: EmbeddingsInput | Sequence[EmbeddingsInput],
        use_tqdm: bool = True,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        pooling: PoolingType | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        task: str | None = None,
    ) -> npt.NDArray[np.floating]:
        """Return the dense embeddings of texts.

        Args:
            inputs: a text, a list of texts, a list of token ids, or a list of such lists.
            use_tqdm: show a progress bar, if standard error is a terminal.
            prompt: a text that is placed before each input, such as ``"query: "``.
            prompt_name: the name of a prompt of the checkpoint; not together with ``prompt``.
            pooling: the pooling to use instead of the checkpoint's pooling.
            dimensions: number of leading dimensions to return, see `check_dimensions`; None for all.
            normalize: whether to scale the vectors to length 1; None for the checkpoint's setting.
            truncate: cut inputs that exceed the maximum length; False rejects these inputs.
            adapter: the LoRA adapter, for all inputs or one for each.
            task: the task of a checkpoint with task adapters. It also selects the prompt with the name of the
                task.

        Returns:
            ``[n, E]`` float32, in the order of the inputs; ``[E]`` for a single input.

        Raises:
            InputError: an input cannot be served, or the numbers of adapters and inputs differ; no input has
                been computed.
            TaskMismatchError: the model computes no embeddings.
        """
        responses = self.encode(
            inputs,
            use_tqdm,
            outputs=("dense",),
            prompt=prompt,
            prompt_name=prompt_name,
            pooling=pooling,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
            adapter=adapter,
            task=task,
        )
        if not responses:
            return np.zeros((0, dimensions or self.pipeline.embedding_size), np.float32)
        vectors = np.stack([response.embeddings for response in responses])
        return vectors[0] if is_single(inputs) else vectors

    def encode(
        self,
        inputs: EmbeddingsInput | Sequence[EmbeddingsInput],
        use_tqdm: bool = True,
        *,
        outputs: Sequence[EmbeddingsOutput] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[EmbeddingsOptions],
    ) -> list[EmbeddingsResponse]:
        """Return the outputs of texts: dense, sparse and multi-vector embeddings, or scores.

        Args:
            inputs: see `embed`.
            use_tqdm: show a progress bar, if standard error is a terminal.
            outputs: the outputs to compute; None for the model's default outputs.
            adapter: the LoRA adapter, for all inputs or one for each.
            **options: further fields of `EmbeddingsGenerationRequest`, the same for all inputs.

        Raises:
            InputError: an input cannot be served, or the numbers of adapters and inputs differ; no input has
                been computed.
            TaskMismatchError: the model computes no embeddings.
        """
        self._check_task("LLM.encode", PipelineTask.EMBEDDINGS_GENERATION)
        batch = as_inputs(inputs)
        adapters: list[str | None] = broadcast("adapter", adapter, len(batch))
        output_types = None if outputs is None else tuple(outputs)
        fields: list[EmbeddingsFields] = [
            {**options, "input": item, "adapter": name, "outputs": output_types}
            for item, name in zip(batch, adapters, strict=True)
        ]
        return self._embeddings(fields, use_tqdm)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        truncate: bool = False,
        activation: bool | None = None,
    ) -> npt.NDArray[np.floating]:
        """Return the score of each pair of a query and a document.

        A cross-encoder computes a score for each pair. An embedder computes the similarity of the two
        embeddings, with the similarity function of the checkpoint. A multi-vector model computes MaxSim.

        Args:
            query: one query for all documents, or one query for each document.
            documents: the documents.
            use_tqdm: show a progress bar, if standard error is a terminal.
            truncate: cut inputs that exceed the maximum length; False rejects these inputs.
            activation: False returns the logits of a cross-encoder.

        Returns:
            ``[n]`` float32.

        Raises:
            InputError: an input cannot be served, the numbers of queries and documents differ, or the model
                is a classifier with several labels.
            TaskMismatchError: the model is no embeddings model.
            UnsupportedFeatureError: ``activation`` is given and the model is an embedder.
        """
        self._check_task("LLM.score", PipelineTask.EMBEDDINGS_GENERATION)
        texts = [documents] if isinstance(documents, str) else list(documents)
        queries = [query] * len(texts) if isinstance(query, str) else list(query)
        if len(queries) != len(texts):
            raise InputError(
                f"{len(queries)} queries and {len(texts)} documents: give one query, or one for each document"
            )
        pair_scoring = PairScoring(
            queries,
            texts,
            outputs=self.pipeline.outputs,
            layout=self.tokenizer.layout,
            activation=activation,
        )
        fields: list[EmbeddingsFields] = [
            {**item.fields, "truncate": truncate, "outputs": (pair_scoring.output,)}
            for item in pair_scoring.inputs
        ]
        return pair_scoring.scores(self._embeddings(fields, use_tqdm))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        use_tqdm: bool = True,
        *,
        top_n: int | None = None,
        truncate: bool = False,
        activation: bool | None = None,
    ) -> list[RerankResult]:
        """Return the documents by descending score for a query; see `score`.

        Args:
            query: the query.
            documents: the documents.
            use_tqdm: show a progress bar, if standard error is a terminal.
            top_n: number of documents to return; None for all.
            truncate: see `score`.
            activation: see `score`.

        Raises:
            InputError: see `score`, or ``top_n`` is below 1.
            TaskMismatchError: see `score`.
            UnsupportedFeatureError: see `score`.
        """
        ranking(np.zeros(0), top_n)  # rejects an invalid top_n before the scores are computed
        scores = self.score(query, documents, use_tqdm, truncate=truncate, activation=activation)
        return [RerankResult(i, float(scores[i]), documents[i]) for i in ranking(scores, top_n)]

    def classify(
        self,
        inputs: EmbeddingsInput | Sequence[EmbeddingsInput],
        use_tqdm: bool = True,
        *,
        truncate: bool = False,
        activation: bool | None = None,
    ) -> list[Classification]:
        """Return the label and the scores of each text.

        Args:
            inputs: see `embed`.
            use_tqdm: show a progress bar, if standard error is a terminal.
            truncate: cut inputs that exceed the maximum length; False rejects these inputs.
            activation: False returns logits.

        Raises:
            InputError: an input cannot be served.
            TaskMismatchError: the model is no embeddings model.
            UnsupportedFeatureError: the model has no classification head.
        """
        responses = self.encode(
            inputs, use_tqdm, outputs=("scores",), truncate=truncate, activation=activation
        )
        config = self.config.model.huggingface_config
        scores = [response.scores for response in responses if response.scores is not None]
        return [Classification(best_label(config, label_scores), label_scores) for label_scores in scores]

    def _embeddings(self, fields: Sequence[EmbeddingsFields], use_tqdm: bool) -> list[EmbeddingsResponse]:
        """Run one request for each entry of ``fields``. Return the outputs in the order of the entries."""
        results: list[EmbeddingsBuilder] = []
        with self._runner.exclusive():
            try:
                for index, context in enumerate(self._embeddings_contexts(fields)):
                    results.append(EmbeddingsBuilder(context))
                    self._check_context(index, len(fields), context)
                self._run_embeddings(results, use_tqdm)
            except BaseException:
                for result in results:
                    self.pipeline.release(result.context)  # frees an adapter slot that `ready` reserved
                raise
        return [result.response for result in results if result.response is not None]

    def _run_embeddings(self, results: Sequence[EmbeddingsBuilder], use_tqdm: bool) -> None:
        progress = GenerationProgress(len(results), shown=use_tqdm)
        with deferred_interrupts() as deliver_interrupt, progress:
            for finished_results in self._runner.run(results, seconds=STREAMING_LATENCY_BUDGET):
                deliver_interrupt()
                progress.advance(
                    num_tokens=sum(result.context.current_length for result in finished_results),
                    num_prompts=len(finished_results),
                )

    def _embeddings_contexts(self, fields: Sequence[EmbeddingsFields]) -> Iterator[EmbeddingsContext]:
        """Yield the context of each request. The texts of all requests are encoded together."""
        name, count, call_id = self.config.model.name, len(fields), uuid4().hex
        requests = []
        for index, request_fields in enumerate(fields):
            try:
                request = EmbeddingsGenerationRequest(
                    id=f"{call_id}-{index}", model_name=name, **request_fields
                )
            except InputError as error:
                _name_input(error, index, count)
                raise
            requests.append(request)
        contexts = self.tokenizer.build_embeddings_contexts(requests)
        for index in range(count):
            try:
                context = next(contexts)
            except InputError as error:
                _name_input(error, index, count)
                raise
            yield context

    def _check_context(self, index: int, count: int, context: EmbeddingsContext) -> None:
        """Raise an `InputError` if the pipeline cannot run a context."""
        try:
            self.pipeline.ready(context)
        except InputError as error:
            _name_input(error, index, count)
            raise


def _name_input(error: InputError, index: int, count: int) -> None:
    """Add the number of the input to an error, if there are several inputs."""
    if count > 1:
        error.add_note(f"in input {index + 1} of {count}")


def is_single(inputs: EmbeddingsInput | Sequence[EmbeddingsInput]) -> bool:
    """Return whether inputs are one text or one list of token ids."""
    return isinstance(inputs, str) or (
        len(inputs) > 0 and all(isinstance(item, int | np.integer) for item in inputs)
    )


def as_inputs(inputs: EmbeddingsInput | Sequence[EmbeddingsInput]) -> list[str | Sequence[int]]:
    """Return a list of inputs, from a list or a single input. The tokenizer checks each input."""
    return cast("list[str | Sequence[int]]", [inputs] if is_single(inputs) else list(inputs))
