"""`EncoderModel`: the base class of encoder models. It runs whole inputs in one step, without a KV cache.

A subclass defines the longest sequence (`max_positions`) and reads the network from a checkpoint (`build`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs, ModelOutputs
from penstock.architectures.network_model import NetworkModel
from penstock.config import upper_bounded_default
from penstock.errors import UnsupportedFeatureError
from penstock.kernels import KVCacheInputs, Ops, StepInputs
from penstock.nn import Loader
from penstock.pipelines.core import EmbeddingsContext, PoolingType

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig


_HIDDEN_SIZE_KEYS = ("hidden_size", "dim", "d_model", "n_embd")
"""The keys under which families store the hidden size in ``config.json``; the first present key is used."""


class EncoderNetwork(Protocol):
    """The computation from tokens to hidden states, with the heads that the checkpoint has."""

    @property
    def classifier(self) -> Callable[[Tensor, StepInputs], Tensor] | None:
        """The head of a sequence classifier, ``[R, E] -> [R, labels]``; None without one.

        A row is a pooled input, or a token if `EncoderModel.pools_logits` is true.
        """
        ...

    @property
    def masked_lm_head(self) -> Callable[[Tensor, StepInputs], Tensor] | None:
        """The head of a masked language model, ``[T, E] -> [T, V]``; None without one."""
        ...

    @property
    def is_length_dependent(self) -> bool:
        """Whether rotary angles depend on the sequence length; if so, steps need `text_lengths`."""
        ...

    def __call__(self, tokens: Tensor, step: StepInputs, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T]`` and token types ``[T]`` -> hidden states ``[T, E]``."""
        ...


@dataclass(kw_only=True)
class EncoderInputs(ModelInputs):
    """A ragged batch of whole inputs."""

    token_types: Tensor | None = None
    """``[T]`` int64: the segment of each token; None if no input has segments or the model ignores them."""


class EncoderModel(NetworkModel[EmbeddingsContext]):
    """An encoder whose forward computes the hidden states of whole inputs."""

    network: EncoderNetwork
    default_pooling: PoolingType = "mean"
    """The pooling of a checkpoint without a sentence-transformers layout."""

    @property
    def pools_logits(self) -> bool:
        """Whether a sequence classifier applies its head to each token and pools the logits."""
        return False

    @property
    def classifier_pooling(self) -> PoolingType:
        """The pooling of a sequence classifier."""
        return "cls"

    @property
    def reads_token_types(self) -> bool:
        """Whether the network distinguishes the token types of the two texts of a pair."""
        return True

    @property
    def placeholders(self) -> Mapping[int, str]:
        """Map from the id of a placeholder token to the kind of input, such as images, that is refused."""
        return {}

    @property
    def token_weights(self) -> Callable[[Tensor, StepInputs], Tensor] | None:
        """The token-weight head of sparse embeddings, ``[T, E] -> [T, 1]``; None without one."""
        return None

    @classmethod
    def output_size(cls, huggingface_config: HuggingFaceConfig) -> int:
        """Return E, the size of the hidden states that the network computes."""
        config = huggingface_config
        return config.integer(next((key for key in _HIDDEN_SIZE_KEYS if key in config), _HIDDEN_SIZE_KEYS[0]))

    @classmethod
    @abstractmethod
    def max_positions(cls, huggingface_config: HuggingFaceConfig) -> int:
        """Return the longest sequence that the network can compute, in tokens."""

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the maximum length of an input.

        It is the configured length. If none is configured, it is the ``max_seq_length`` of a
        sentence-transformers layout, but at most `max_positions`. Without both, it is `max_positions`.

        Raises:
            ValueError: the configured length exceeds `max_positions`.
        """
        positions = cls.max_positions(huggingface_config)
        trained_length = pipeline_config.model.embedding_layout.max_seq_length
        default = pipeline_config.model.max_length or min(trained_length or positions, positions)
        return upper_bounded_default(positions, default)

    @classmethod
    def min_step_tokens(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> int:
        return cls.calculate_max_seq_len(pipeline_config, huggingface_config)

    @classmethod
    @abstractmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> EncoderNetwork:
        """Read the network from a checkpoint."""

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[EmbeddingsContext]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int | Sequence[int] = 1,
        *,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> EncoderInputs:
        """Return a ragged batch of the whole inputs of all contexts."""
        contexts = [context for replica in replica_batches for context in replica]
        lengths = np.array([context.active_length for context in contexts])
        ends = lengths.cumsum()
        positions = np.arange(ends[-1]) - (ends - lengths).repeat(lengths)
        context_types = [context.token_type_ids for context in contexts]
        token_types = None
        if self.reads_token_types and any(types is not None for types in context_types):
            token_types = np.concatenate(
                [
                    np.zeros(length) if types is None else types
                    for length, types in zip(lengths, context_types, strict=True)
                ]
            )
        return EncoderInputs(
            tokens=self._to_device(np.concatenate([context.next_tokens for context in contexts]), np.int64),
            row_offsets=self._to_device(np.concatenate([[0], ends]), np.int32),
            positions=self._to_device(positions, np.int64),
            token_types=None if token_types is None else self._to_device(token_types, np.int64),
            lora=None if self.lora_manager is None else self.lora_manager.inputs(contexts, lengths),
        )

    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> NoReturn:
        raise UnsupportedFeatureError("a second step", "an encoder generates no tokens")

    @torch.inference_mode()
    def execute(self, model_inputs: EncoderInputs) -> ModelOutputs:
        """Return the hidden states ``[T, E]`` of a batch."""
        return ModelOutputs(hidden_states=self.hidden_states(model_inputs, self.step_inputs(model_inputs)))

    @torch.inference_mode()
    def hidden_states(self, model_inputs: EncoderInputs, step: StepInputs) -> Tensor:
        """Return the hidden states ``[T, E]`` of a batch.

        Args:
            model_inputs: the batch.
            step: the `step_inputs` of the batch. The heads use them too.
        """
        self.begin_step()
        states = self._run_compiled(model_inputs, step)
        return self.network(model_inputs.tokens, step, model_inputs.token_types) if states is None else states

    def _run_compiled(self, model_inputs: EncoderInputs, step: StepInputs) -> Tensor | None:
        """Return the hidden states from a compiled step; None if the step must run eagerly.

        Only steps with a single input of limited length and without adapters are compiled. The shape of a
        step with one input depends only on its length. Batches of several inputs have too many shapes.
        """
        graphs = self.session.graphs
        if graphs is None:
            return None
        if step.blocks is None or step.lora is not None or len(step.row_offsets) > 2:
            graphs.skip("adapters" if step.lora is not None else "several inputs")
            return None
        if len(model_inputs.tokens) > graphs.max_rows:
            graphs.skip(f"more than {graphs.max_rows} rows")
            return None
        tensors = {
            "tokens": model_inputs.tokens,
            "positions": step.positions,
            "row_offsets": step.row_offsets,
        }
        if step.text_lengths is not None:
            tensors["text_lengths"] = step.text_lengths
        token_types = model_inputs.token_types
        tensors["token_types"] = torch.zeros_like(model_inputs.tokens) if token_types is None else token_types

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> tuple[Tensor]:
            forward_step = replace(
                step,
                ops=ops,
                positions=tensors["positions"],
                row_offsets=tensors["row_offsets"],
                text_lengths=tensors.get("text_lengths"),
            )
            return (self.network(tensors["tokens"], forward_step, tensors["token_types"]),)

        results = graphs.run((id(self.network), len(model_inputs.tokens)), tensors, forward)
        return None if results is None else results[0]

    def step_inputs(self, model_inputs: EncoderInputs) -> StepInputs:
        """Return the tensors that all layers and heads of a step share."""
        lengths = None
        if self.network.is_length_dependent:
            counts = model_inputs.row_offsets.diff().long()
            lengths = counts.repeat_interleave(counts)
        return StepInputs(
            self.session.ops,
            model_inputs.positions,
            model_inputs.row_offsets,
            lora=model_inputs.lora,
            text_lengths=lengths,
            blocks=self.session.ops.sequence_blocks(model_inputs.row_offsets),
        )


def has_head(config: HuggingFaceConfig, suffix: str) -> bool:
    """Return whether the first entry of ``architectures`` ends with ``suffix``, such as ``ForMaskedLM``."""
    names = config.get("architectures") or [""]
    return isinstance(names, list) and str(names[0]).endswith(suffix)
