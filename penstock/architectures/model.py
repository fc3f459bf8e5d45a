"""What a model is to a pipeline: `PipelineModel`, its inputs and its outputs.

Whoever brings a model of their own subclasses `PipelineModel` (all of it in their hands) or
`penstock.architectures.decoder.DecoderModel` (a decoder-only transformer, for which only the network is left
to write).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from penstock.dtype import DType
from penstock.host import private_memory
from penstock.kernels import KVCacheInputs, LoRAInputs, SamplingInputs, encoding_named
from penstock.memory import (
    MemoryPlan,
    estimate_adapters_size,
    estimate_weights_size,
    plan_memory,
)
from penstock.nn import ReturnHiddenStates, ReturnLogits
from penstock.pipelines.core import InputContext, LogProbabilities
from penstock.weights import Weights

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, KVCacheConfig, PipelineConfig
    from penstock.driver import Device
    from penstock.engine import InferenceSession
    from penstock.kv_cache import KVCacheManager, KVCacheSpec
    from penstock.lora import LoRAManager

BaseContextType = TypeVar("BaseContextType", bound=InputContext)

WeightsAdapter = Callable[[str], str | None]
"""Checkpoint name -> the name the model asks for; None leaves the tensor out."""

_LEFT_OUT: Any = None  # a model with inputs of its own may have no use for them


@dataclass(kw_only=True)
class ModelInputs:
    """A ragged batch: the rows of all sequences one behind the other, whole prompts, chunks and single
    tokens alike. A model with inputs of its own subclasses it."""

    tokens: Tensor = _LEFT_OUT
    """``[T]`` int64."""
    row_offsets: Tensor = _LEFT_OUT
    """``[B + 1]`` int32: sequence b owns rows ``row_offsets[b]:row_offsets[b + 1]``."""
    positions: Tensor = _LEFT_OUT
    """``[T]`` int64."""
    logit_rows: Tensor = _LEFT_OUT
    """``[R]`` int64: the rows whose logits are wanted."""
    logit_offsets: Tensor = _LEFT_OUT
    """``[B + 1]`` int64: sequence b owns logits ``logit_offsets[b]:logit_offsets[b + 1]``."""
    kv: KVCacheInputs | None = None
    lora: LoRAInputs | None = None
    input_embeds: tuple[Tensor, Tensor] | None = None
    """Rows ``[P]`` and the embeddings ``[P, E]`` that replace theirs: images, audio."""
    hidden_states: Tensor | None = None
    """``[T, E]``: what a draft model reads of its target."""
    drafts: tuple[int, ...] | None = None
    """How many of each sequence's last rows are drafted tokens to verify."""
    text_lengths: Tensor | None = None
    """``[T]`` int64, see `StepInputs.text_lengths`."""

    @property
    def buffers(self) -> Iterator[Tensor]:
        """All tensors of the inputs, for whoever moves or counts them."""
        values = (vars(self)[name] for name in vars(self))
        return (value for value in values if isinstance(value, Tensor))


@dataclass(frozen=True)
class ModelOutputs:
    """What one forward gives back."""

    next_token_logits: Tensor | None = None
    """``[B, V]``: logits of the last row of each sequence."""
    logits: Tensor | None = None
    """``[R, V]``: the rows asked for, those of each sequence together."""
    logit_offsets: Tensor | None = None
    """``[B + 1]``: sequence b owns rows ``logit_offsets[b]:logit_offsets[b + 1]`` of ``logits``."""
    hidden_states: Tensor | None = None
    """``[B, E]`` or ``[T, E]``, as `ReturnHiddenStates` says."""


@runtime_checkable
class KVCacheMixin(Protocol):
    """What a model with a KV cache can do besides."""

    def load_kv_manager(self, session: InferenceSession, available_cache_memory: int) -> KVCacheManager:
        """Allocates the KV cache, in at most ``available_cache_memory`` bytes."""
        ...

    def estimate_kv_cache_size(self, available_cache_memory: int) -> int:
        """How many of these bytes the KV cache would take."""
        ...


class PipelineModel(ABC, Generic[BaseContextType]):
    """A model with setup, input preparation and execution.

    ``PipelineModel(pipeline_config, session)`` is enough: what is not given follows from the configuration.

    Args:
        pipeline_config: the configuration of the whole pipeline.
        session: devices and kernels.
        devices: where the model runs; the session's devices if not given.
        kv_cache_config: the configuration's own if not given.
        weights: the checkpoint's tensors; opened from the configuration's checkpoint if not given.
        adapter: maps the names in the checkpoint to those that the model asks for.
        return_logits: which rows of logits `execute` returns. `TextGenerationPipeline` asks for several a
            sequence where prompts are echoed or drafts verified.
        return_hidden_states: which rows of hidden states it returns.
    """

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        devices: Sequence[Device] | None = None,
        kv_cache_config: KVCacheConfig | None = None,
        weights: Weights | None = None,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.VARIABLE,
        return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
    ) -> None:
        if kv_cache_config is not None:  # the plan, the cache and its element type all follow the one given
            pipeline_config = replace(pipeline_config, kv_cache=kv_cache_config)
        pipeline_config.check_determinism()
        self.pipeline_config = pipeline_config
        self.session = session
        self.devices = list(session.devices if devices is None else devices)
        self.kv_cache_config = pipeline_config.kv_cache
        self.adapter = adapter
        self.return_logits = return_logits
        self.return_hidden_states = return_hidden_states
        self.kv_cache_spec = self.kv_spec(pipeline_config, self.huggingface_config)
        self.memory_plan = self._plan_memory()
        self.max_seq_len = self.memory_plan.max_length
        self._weights = weights

    @cached_property
    def weights(self) -> Weights:
        """The tensors of the checkpoint, under the names that the model asks for."""
        weights = self._weights or Weights.open(self.pipeline_config.model.checkpoint)
        return weights if self.adapter is None else weights.renamed(self.adapter)

    @property
    def dtype(self) -> DType:
        """The type of the model's activations."""
        return encoding_named(self.pipeline_config.model.encoding).compute_dtype

    @property
    def huggingface_config(self) -> HuggingFaceConfig:
        """The checkpoint's ``config.json``.

        Raises:
            CheckpointError: it cannot be read.
        """
        return self.pipeline_config.model.huggingface_config

    @property
    def lora_manager(self) -> LoRAManager | None:
        """The manager of LoRA adapters; None where no adapters are enabled."""
        return None

    @property
    def signal_buffers(self) -> list[Tensor]:
        """Buffers for collectives between several devices; none are needed for one."""
        return []

    @classmethod
    @abstractmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The longest sequence, prompt and output together, that the model is to be run at.

        Raises:
            ValueError: the configuration asks for more than the model can do.
        """

    @classmethod
    def kv_spec(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> KVCacheSpec | None:
        """Layers, heads, sizes and windows of the KV cache; None for a model that keeps none."""
        return None

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """Bytes that the weights take once loaded."""
        return estimate_weights_size(pipeline_config)

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Bytes that the activations of the largest step take; 0 where nobody has worked it out."""
        return 0

    def estimate_memory_footprint(self) -> int:
        """Bytes that are left for the KV cache beside weights and activations."""
        plan = self.memory_plan
        return plan.available_memory - plan.weights_size - plan.adapters_size - plan.activation_size

    @abstractmethod
    def execute(self, model_inputs: Any) -> ModelOutputs:
        """Runs one forward."""

    def pack_pending(self) -> bool:
        """Does some of what the load has put off, a fraction of a second's work: for whoever has nothing to
        run. False once nothing is left; `execute` waits for the rest where it has to."""
        return False

    def pack_all_pending(self) -> None:
        """Does all that the load has put off."""
        while self.pack_pending():
            pass

    def execute_steps(
        self,
        model_inputs: Any,
        sampling: SamplingInputs,
        uniforms: Tensor,
        ends: Tensor,
    ) -> Tensor | None:
        """Several forwards in a row, each of the tokens sampled from the one before, if it has a faster way
        to run them than one by one; else None, and nothing has happened.

        Args:
            model_inputs: of the first, one row a sequence.
            sampling: how all are sampled from; its own uniforms are not read.
            uniforms: ``[n, B]`` float64: those of each forward.
            ends: ``[B, E]`` int64: tokens after which a sequence needs no other, -1 for none.

        Returns:
            ``[m, B]`` int64, -1 for a row that is no distribution. m is less than n where each sequence has
            had an end.
        """
        return None

    @abstractmethod
    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[BaseContextType]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int | Sequence[int] = 1,
        *,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """The inputs of the first forward of a batch: the active tokens of each context.

        Args:
            replica_batches: the batch of each data-parallel replica.
            kv_cache_inputs: the block tables of the batch, for a model with a KV cache.
            return_n_logits: how many rows of logits `ReturnLogits.VARIABLE` gives a sequence, one number for
                all or one for each. Numbers for each are passed only for drafts and echoed prompts.
            drafts: drafted tokens of each context, appended to its active tokens. Passed only if the pipeline
                speculates.
        """

    @abstractmethod
    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: Any) -> Any:
        """The inputs of the next forward of the same batch, without a look at its contexts.

        Args:
            next_tokens: ``[B]``, the token just sampled for each sequence.
            prev_model_inputs: the inputs of the forward that they were sampled from.
        """

    def compute_log_probabilities(
        self,
        session: InferenceSession,
        model_inputs: Any,
        model_outputs: ModelOutputs,
        next_tokens: Tensor,
        batch_top_n: list[int],
        batch_echo: list[bool],
    ) -> list[LogProbabilities | None]:
        """Log probabilities of the tokens just sampled.

        Args:
            session: where to compute them.
            model_inputs: what `execute` was given.
            model_outputs: what it returned.
            next_tokens: ``[B]``, the tokens sampled.
            batch_top_n: how many of the most probable tokens to return beside each; 0 for none at all.
            batch_echo: whether to return those of the input tokens too.

        Returns:
            One entry a sequence, None where ``batch_top_n`` is 0.
        """
        raise NotImplementedError(f"Log probabilities not implemented for {type(self).__name__}.")

    def _free_memory(self, weights_size: int) -> int:
        """What weights, activations and KV cache may share, before anything is loaded."""
        free = self.session.prefaulted.num_idle  # read first: it grows at the expense of the free memory
        free += sum(device.stats["free_memory"] for device in self.devices)
        private = private_memory.free()
        if private is not None and free >= private and self.pipeline_config.model.packed_key.file.is_file():
            free += weights_size  # they are mapped from that file: the limit does not count them
        return free

    def _plan_memory(self) -> MemoryPlan:
        config, huggingface_config = self.pipeline_config, self.huggingface_config
        weights_size = self.estimate_weights_size(config)
        plan = plan_memory(
            config,
            self.kv_cache_spec,
            model_max_length=self.calculate_max_seq_len(config, huggingface_config),
            weights_size=weights_size,
            activation_size=self.estimate_activation_memory(config, huggingface_config),
            free_memory=self._free_memory(weights_size),
            adapters_size=estimate_adapters_size(config),
        )
        if plan.is_shortened:
            logging.getLogger(__name__).warning(
                "the maximum length is %d tokens, not the model's %d: the KV cache would not fit in memory",
                plan.max_length,
                plan.model_max_length,
            )
        return plan
