"""`EmbeddingsPipeline`: dense, sparse and multi-vector embeddings and scores, with one forward per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.architectures.encoder import EncoderModel
from penstock.errors import UnsupportedFeatureError
from penstock.kernels import StepInputs
from penstock.pipelines.core import (
    EmbeddingsContext,
    EmbeddingsOutput,
    EmbeddingsResponse,
    PipelineTask,
    SparseEmbedding,
    TextGenerationStatus,
    check_dimensions,
)
from penstock.pipelines.pooling import load_dense, pool
from penstock.pipelines.task_pipeline import TaskPipeline
from penstock.pipelines.token_heads import TokenHeads, load_token_heads
from penstock.text.sentence_transformers import SentenceTransformersLayout

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.lora import LoRAManager
    from penstock.pipelines.tasks import PipelineRequirements


def create_embeddings(requirements: PipelineRequirements) -> EmbeddingsPipeline:
    """Load the model and return its pipeline.

    Raises:
        CheckpointError: the model cannot be loaded.
        InsufficientMemoryError: the weights do not fit.
    """
    config = requirements.config
    model = requirements.architecture.load_pipeline_model()(config, requirements.open_session())
    size = model.output_size(model.huggingface_config)
    return EmbeddingsPipeline(
        model,
        config.model.embedding_layout,
        config.model.trained_dimensions,
        load_token_heads(config.model.checkpoint, model, size),
    )


class EmbeddingsPipeline(TaskPipeline[EmbeddingsContext, EmbeddingsResponse]):
    """Computes the outputs of whole inputs in ragged batches, without a KV cache.

    Args:
        model: the encoder.
        layout: the pooling, dense layers and normalization of the checkpoint.
        trained_dimensions: lengths to which a dense embedding may be cut; None allows all, empty allows none.
        heads: the heads for sparse and multi-vector embeddings, applied to each token.
    """

    task = PipelineTask.EMBEDDINGS_GENERATION
    context_types = (EmbeddingsContext,)
    chunks_prompts = False

    def __init__(
        self,
        model: EncoderModel,
        layout: SentenceTransformersLayout,
        trained_dimensions: Sequence[int] | None = (),
        heads: TokenHeads | None = None,
    ) -> None:
        super().__init__(model.session, model.memory_plan)
        self.model = model
        self.layout = layout
        self.trained_dimensions = trained_dimensions
        self.heads = heads or TokenHeads()
        ops, device = self.session.ops, model.torch_device
        self._dense = [load_dense(module, ops, device) for module in layout.dense]
        self._poolings = layout.poolings or (model.default_pooling,)
        self._score_activation = scores_activation(model.huggingface_config)

    @cached_property
    def outputs(self) -> tuple[EmbeddingsOutput, ...]:
        """The outputs that the model computes; the first one is the default."""
        network = self.model.network
        if network.classifier is not None:
            return ("scores",)
        names: list[EmbeddingsOutput] = ["dense", "multi_vector"]
        if self.layout.is_present and not self.layout.poolings:
            names.reverse()
        if network.masked_lm_head is not None:
            names.insert(1 if self.layout.poolings else 0, "sparse")
        elif self.heads.weight_head is not None:
            names.insert(1, "sparse")
        return tuple(names)

    @property
    def embedding_size(self) -> int:
        return self._pooled_size(len(self._poolings))

    def encode(self, batch: Mapping[str, EmbeddingsContext]) -> dict[str, EmbeddingsResponse]:
        """Return the outputs of all contexts, by request id."""
        return self.execute(batch)

    @torch.inference_mode()
    def execute(
        self, batch: Mapping[str, EmbeddingsContext], num_steps: int = 1
    ) -> dict[str, EmbeddingsResponse]:
        self.check_context_types(batch.values())
        contexts = list(batch.values())
        inputs = self.model.prepare_initial_token_inputs([contexts])
        step = self.model.step_inputs(inputs)
        responses = self._responses(contexts, self.model.hidden_states(inputs, step), step)
        for context in contexts:
            context.update_status(TextGenerationStatus.END_OF_SEQUENCE)
        return dict(zip(batch, responses, strict=True))

    def ready(self, context: EmbeddingsContext) -> bool:
        super().ready(context)
        self._check_tokens(context)
        missing = [name for name in context.outputs if name not in self.outputs]
        if missing:
            raise UnsupportedFeatureError(
                f"the output {missing[0]}", f"this model computes {', '.join(self.outputs)}"
            )
        if context.dimensions is not None:
            size = self.embedding_size if context.pooling is None else self._pooled_size(1)
            check_dimensions(context.dimensions, size, self.trained_dimensions)
        if context.adapter is None:
            return True
        if self.lora_manager is None:
            raise UnsupportedFeatureError(
                f"the adapter {context.adapter!r}", "the model is loaded without LoRA adapters (--lora)"
            )
        return self.lora_manager.ready(context)

    def _check_tokens(self, context: EmbeddingsContext) -> None:
        """Refuse placeholder tokens of images, audio and other inputs that are not text.

        Raises:
            UnsupportedFeatureError: the message names the first placeholder token.
        """
        placeholders = self.model.placeholders
        if not placeholders:
            return
        tokens = context.next_tokens
        (indices,) = np.isin(tokens, list(placeholders)).nonzero()
        if len(indices):
            token = int(tokens[indices[0]])
            raise UnsupportedFeatureError(
                f"input of type {placeholders[token]}",
                f"token {indices[0]} of the input (id {token}) is a placeholder; the model reads text only",
            )

    def release(self, context: EmbeddingsContext) -> None:
        super().release(context)
        if self.lora_manager is not None:
            self.lora_manager.release(context)

    def prepare_next(self) -> bool:
        return self.model.pack_pending()

    @property
    def lora_manager(self) -> LoRAManager | None:
        return self.model.lora_manager

    def _pooled_size(self, num_poolings: int) -> int:
        """Return the length of a dense embedding that is made from ``num_poolings`` concatenated poolings."""
        if self.layout.dense:
            return self.layout.dense[-1].out_features
        return self.model.output_size(self.model.huggingface_config) * num_poolings

    def _responses(
        self, contexts: Sequence[EmbeddingsContext], hidden: Tensor, step: StepInputs
    ) -> list[EmbeddingsResponse]:
        states = _SequenceStates(hidden, step)
        means = _SequenceMeans(hidden, step)
        outputs = [context.outputs or self.outputs[:1] for context in contexts]
        dense_indices = [i for i, names in enumerate(outputs) if "dense" in names]
        dense = self._dense_embeddings(contexts, states, dense_indices, means)
        score_indices = [i for i, names in enumerate(outputs) if "scores" in names]
        scores = self._classify(contexts, states, score_indices, step)
        return [
            EmbeddingsResponse(
                dense.get(i, np.zeros(0, np.float32)),
                scores=scores.get(i),
                sparse=self._sparse(contexts[i], states[i], step) if "sparse" in outputs[i] else None,
                multi_vector=self._multi_vector(contexts[i], states[i])
                if "multi_vector" in outputs[i]
                else None,
                num_tokens=states.num_tokens(i),
            )
            for i in range(len(contexts))
        ]

    def _dense_embeddings(
        self,
        contexts: Sequence[EmbeddingsContext],
        states: _SequenceStates,
        indices: Sequence[int],
        means: _SequenceMeans,
    ) -> dict[int, npt.NDArray[np.floating]]:
        """Return the dense embeddings of the contexts with the given indices, by index."""
        if not indices:
            return {}
        are_means = [self._is_full_mean(contexts[i]) for i in indices]
        if all(are_means):
            vectors = means.rows if len(indices) == len(contexts) else means.rows[indices]
        else:
            vectors = torch.stack(
                [
                    means.rows[i] if is_mean else self._pool(contexts[i], states[i])
                    for i, is_mean in zip(indices, are_means, strict=True)
                ]
            )  # [n, E]
        for layer in self._dense:
            vectors = layer(vectors, self.session.ops)
        embeddings = self._cut_and_normalize([contexts[i] for i in indices], vectors)
        return dict(zip(indices, embeddings, strict=True))

    def _is_full_mean(self, context: EmbeddingsContext) -> bool:
        """Return whether the embedding of a context is the mean of the hidden states of all its tokens."""
        poolings = self._poolings if context.pooling is None else (context.pooling,)
        return tuple(poolings) == ("mean",) and not context.num_unpooled_tokens

    def _pool(self, context: EmbeddingsContext, hidden: Tensor) -> Tensor:
        poolings = self._poolings if context.pooling is None else (context.pooling,)
        return pool(hidden, poolings, context.num_unpooled_tokens)

    def _cut_and_normalize(
        self,
        contexts: Sequence[EmbeddingsContext],
        vectors: Tensor,  # [n, E]
    ) -> list[npt.NDArray[np.floating]]:
        """Return the vectors, cut and normalized as their contexts or, by default, the checkpoint request."""
        options = [
            (context.dimensions, self.layout.normalize if context.normalize is None else context.normalize)
            for context in contexts
        ]

        def cut_and_normalize(
            rows: Tensor, dimensions: int | None, normalize: bool
        ) -> npt.NDArray[np.floating]:
            rows = rows[:, :dimensions]
            return (F.normalize(rows, dim=-1) if normalize else rows).numpy(force=True)

        if len(set(options)) == 1:
            return list(cut_and_normalize(vectors, *options[0]))
        return [
            cut_and_normalize(vector[None], *vector_options)[0]
            for vector, vector_options in zip(vectors, options, strict=True)
        ]

    def _classify(
        self,
        contexts: Sequence[EmbeddingsContext],
        states: _SequenceStates,
        indices: Sequence[int],
        step: StepInputs,
    ) -> dict[int, npt.NDArray[np.floating]]:
        """Return the scores ``[labels]`` of the contexts with the given indices, by index.

        Contexts with ``activation=False`` get logits instead.
        """
        classifier = self.model.network.classifier
        if not indices or classifier is None:
            return {}
        pooling = (self.model.classifier_pooling,)
        if self.model.pools_logits:
            logits = torch.stack([pool(classifier(states[i], step), pooling) for i in indices])  # [n, labels]
        else:
            pooled = torch.stack([pool(states[i], pooling).to(states[i].dtype) for i in indices])
            logits = classifier(pooled, step).float()
        return {
            i: (row if contexts[i].activation is False else self._score_activation(row)).numpy(force=True)
            for i, row in zip(indices, logits, strict=True)
        }

    def _sparse(self, context: EmbeddingsContext, hidden: Tensor, step: StepInputs) -> SparseEmbedding:
        """Return the sparse embedding of a context, from its hidden states ``[n, E]``.

        The weight of a token id is the maximum of ``log(1 + relu(logit))`` over the input (SPLADE,
        arXiv:2109.10086), or the sum if the checkpoint has sum pooling. With ``log1p_relu``, the logarithm is
        applied twice (arXiv:2504.14839). A model with a token-weight head computes weights for the tokens of
        the input only, see `TokenHeads`.
        """
        if self.heads.weight_head is not None:
            return self.heads.sparse(context.next_tokens, hidden, step)
        masked_lm_head = self.model.network.masked_lm_head
        assert masked_lm_head is not None
        weights = torch.log1p(masked_lm_head(hidden, step).float().relu())  # [n, V]
        if self.layout.sparse_activation == "log1p_relu":
            weights = torch.log1p(weights)
        weights = weights.sum(0) if self.layout.sparse_pooling == "sum" else weights.amax(0)
        ids = weights.nonzero()[:, 0]
        return SparseEmbedding(ids.int().numpy(force=True), weights[ids].numpy(force=True))

    def _multi_vector(self, context: EmbeddingsContext, hidden: Tensor) -> npt.NDArray[np.floating]:
        """Return a normalized vector for each token after the unpooled tokens, ``[n, width]``.

        A model with a head for multi-vector embeddings has no vector for the first token.
        """
        first, layers = context.num_unpooled_tokens, self._dense
        if self.heads.vector_head is not None:
            first, layers = max(first, 1), [self.heads.vector_head]
        vectors = hidden[first:].float()
        for layer in layers:
            vectors = layer(vectors, self.session.ops)
        return F.normalize(vectors[:, : context.dimensions], dim=-1).numpy(force=True)


class _SequenceStates:
    """The hidden states of each sequence of a step.

    Args:
        hidden: the hidden states ``[T, E]`` of all sequences.
        step: the inputs of the step.
    """

    def __init__(self, hidden: Tensor, step: StepInputs) -> None:
        self._hidden = hidden
        self._bounds: list[tuple[int, int]] = list(pairwise(step.row_offsets.tolist()))

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens n of a sequence."""
        start, stop = self._bounds[index]
        return stop - start

    def __getitem__(self, index: int) -> Tensor:
        """Return the hidden states ``[n, E]`` of a sequence."""
        start, stop = self._bounds[index]
        return self._hidden[start:stop]


class _SequenceMeans:
    """The mean hidden state of each sequence of a step. All means are computed at the first use.

    Args:
        hidden: the hidden states ``[T, E]``.
        step: the inputs of the step.
    """

    def __init__(self, hidden: Tensor, step: StepInputs) -> None:
        self._hidden, self._step = hidden, step

    @cached_property
    def rows(self) -> Tensor:
        """The means ``[B, E]`` float32."""
        return self._step.ops.sequence_means(self._hidden, self._step.row_offsets)


def scores_activation(config: HuggingFaceConfig) -> Callable[[Tensor], Tensor]:
    """Return a function that maps the logits ``[labels]`` of a classifier to scores.

    The checkpoint of a cross-encoder can name the identity or a sigmoid. By default, the function is a
    sigmoid for a single label and for multi-label classifiers, otherwise a softmax.
    """
    settings = config.section("sentence_transformers")
    path = settings.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    name = str(path or "").rpartition(".")[2]
    if name == "Identity":
        return lambda logits: logits
    if name == "Sigmoid":
        return torch.sigmoid
    is_multi_label = config.get("problem_type") == "multi_label_classification"

    def activation(logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) if is_multi_label or len(logits) == 1 else logits.softmax(-1)

    return activation
