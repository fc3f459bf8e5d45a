"""`PipelineModel`, the interface between a pipeline and a model, with its inputs and outputs.

A model is a subclass of `PipelineModel`. Two subclasses define some of its methods:
`penstock.architectures.network_model.NetworkModel` reads and packs a network from a checkpoint, and
`penstock.architectures.decoder.DecoderModel` adds the KV cache and the inputs of a decoder.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from penstock.architectures.cache_types import with_stored_scales
from penstock.dtype import DType
from penstock.host import private_memory
from penstock.kernels import KVCacheInputs, LoRAInputs, SamplingInputs, encoding_named
from penstock.memory import (
    MemoryPlan,
    encoder_cache_size,
    estimate_adapters_size,
    estimate_weights_size,
    plan_memory,
    rank_shares,
)
from penstock.nn import LLAMA_NAMES, ReturnHiddenStates, ReturnLogits, TensorNames
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
"""Maps a checkpoint tensor name to the name that the model uses, or to None to drop the tensor."""

_UNSET: Any = None  # a default, so that a subclass with other inputs can leave fields unset


@dataclass(kw_only=True)
class ModelInputs:
    """A ragged batch: the rows of all sequences, concatenated.

    The rows of a sequence are a whole prompt, a chunk of a prompt or the tokens of a decode step, followed by
    the drafted tokens of the sequence.
    """

    tokens: Tensor = _UNSET
    """``[T]`` int64."""
    row_offsets: Tensor = _UNSET
    """``[B + 1]`` int32: sequence b owns rows ``row_offsets[b]:row_offsets[b + 1]``."""
    positions: Tensor = _UNSET
    """``[T]`` int64; ``[3, T]`` with multimodal RoPE if the positions of a token differ between the axes."""
    logit_rows: Tensor = _UNSET
    """``[R]`` int64: the rows whose logits are computed."""
    logit_offsets: Tensor = _UNSET
    """``[B + 1]`` int64: sequence b owns logits ``logit_offsets[b]:logit_offsets[b + 1]``."""
    kv: KVCacheInputs | None = None
    lora: LoRAInputs | None = None
    input_embeds: tuple[Tensor, Tensor] | None = None
    """The indices ``[P]`` of rows of images or audio, and their embeddings ``[P, W]``.

    W is E, unless the encoder returns additional columns, see `VisionModel.encode_images`."""
    spans: Tensor | None = None
    """``[T, 2]`` int32, see `ImageSpans.bounds`."""
    hidden_states: Tensor | None = None
    """``[T, E]``: hidden states of the target model, for a draft model that reads them."""
    drafts: tuple[int, ...] | None = None
    """The number of drafted tokens of each sequence; their rows are the last rows of the sequence."""
    text_lengths: Tensor | None = None
    """``[T]`` int64, see `StepInputs.text_lengths`."""

    @property
    def buffers(self) -> Iterator[Tensor]:
        """Yield the fields that are tensors."""
        values = (vars(self)[name] for name in vars(self))
        return (value for value in values if isinstance(value, Tensor))


@dataclass(frozen=True)
class ModelOutputs:
    """The result of one forward."""

    next_token_logits: Tensor | None = None
    """``[B, V]``: logits of the last row of each sequence; None if `logits` is None or has other rows."""
    logits: Tensor | None = None
    """``[R, V]``: the requested rows of logits, grouped by sequence."""
    logit_offsets: Tensor | None = None
    """``[B + 1]``: sequence b owns rows ``logit_offsets[b]:logit_offsets[b + 1]`` of ``logits``."""
    hidden_states: Tensor | None = None
    """``[B, E]`` or ``[T, E]``, see `ReturnHiddenStates`."""


@runtime_checkable
class KVCacheMixin(Protocol):
    """The additional methods of a model with a KV cache."""

    def load_kv_manager(self, session: InferenceSession, available_cache_memory: int) -> KVCacheManager:
        """Allocate the KV cache in at most ``available_cache_memory`` bytes."""
        ...

    def estimate_kv_cache_size(self, available_cache_memory: int) -> int:
        """Return the size in bytes of the KV cache, at most ``available_cache_memory``.

        Raises:
            InsufficientMemoryError: the smallest cache that the configuration permits does not fit.
        """
        ...


class PipelineModel(ABC, Generic[BaseContextType]):
    """A loaded model, which prepares the inputs of a step and runs its forward.

    Args:
        pipeline_config: the configuration of the whole pipeline.
        session: devices and kernels.
        devices: the devices of the model; by default the devices of the session.
        kv_cache_config: by default ``pipeline_config.kv_cache``.
        weights: the tensors of the checkpoint; by default opened from the configured checkpoint.
        adapter: maps the names of tensors; by default `weights_adapter` of the class.
        return_logits: the rows of logits that `execute` returns. `TextGenerationPipeline` requests several
            rows of a sequence to echo prompts and to verify drafts.
        return_hidden_states: the rows of hidden states that `execute` returns.
    """

    weights_adapter: ClassVar[WeightsAdapter | None] = None
    """Maps the names of tensors in checkpoints of this family; None if they need no mapping."""

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
        if kv_cache_config is not None:  # set in the configuration, because the memory plan reads it there
            pipeline_config = replace(pipeline_config, kv_cache=kv_cache_config)
        pipeline_config.check_determinism()
        self.pipeline_config = pipeline_config
        self.session = session
        self.devices = list(session.devices if devices is None else devices)
        self.kv_cache_config = pipeline_config.kv_cache
        self.adapter = adapter or type(self).weights_adapter
        self.return_logits = return_logits
        self.return_hidden_states = return_hidden_states
        spec, shard = self.kv_spec(pipeline_config, self.huggingface_config), session.shard
        spec = spec and with_stored_scales(spec, pipeline_config)
        # Plan with the largest number of kv heads of any rank, so that all ranks have equally many blocks.
        self.kv_cache_spec = spec and (spec if shard.is_whole else spec.with_kv_heads(shard.max_kv_heads))
        self.memory_plan = self._plan_memory()
        self.kv_cache_spec = spec and (spec if shard.is_whole else spec.with_kv_heads(shard.num_kv_heads))
        self.max_seq_len = self.memory_plan.max_length
        self._weights = weights

    @cached_property
    def weights(self) -> Weights:
        """The tensors of the checkpoint, under the names that the model uses."""
        weights = self._weights or Weights.open(self.pipeline_config.model.checkpoint)
        return weights if self.adapter is None else weights.renamed(self.adapter)

    @property
    def dtype(self) -> DType:
        """The element type of the activations."""
        return encoding_named(self.pipeline_config.model.encoding).compute_dtype

    @property
    def huggingface_config(self) -> HuggingFaceConfig:
        """The checkpoint's ``config.json``.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return self.pipeline_config.model.huggingface_config

    @property
    def lora_manager(self) -> LoRAManager | None:
        """The manager of LoRA adapters; None if adapters are not enabled."""
        return None

    @property
    def signal_buffers(self) -> list[Tensor]:
        """Buffers for collectives between several devices, one for each rank; empty for one device.

        Also empty if torch.distributed exchanges the tensors, because it has its own buffers.
        """
        ranks = self.session.ranks
        return [] if ranks is None else ranks.buffers

    @classmethod
    @abstractmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the maximum length in tokens of a sequence, prompt and output together.

        Raises:
            ValueError: the configured maximum exceeds the maximum of the model.
        """

    @classmethod
    def kv_spec(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> KVCacheSpec | None:
        """Return the specification of the KV cache of the whole model; None without a cache."""
        return None

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        """Return the tensor names of the family for the memory planner; by default the names of Llama."""
        return LLAMA_NAMES

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """Return the size in bytes of the loaded weights."""
        names = cls.tensor_names(pipeline_config.model.huggingface_config)
        return estimate_weights_size(pipeline_config, names)

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the size in bytes of the activations of the largest step; 0 without an estimate."""
        return 0

    @classmethod
    def estimate_encoder_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the size in bytes of the activations of an image encoder; 0 without one."""
        return 0

    @classmethod
    def min_step_tokens(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> int:
        """Return the length in tokens of the longest input that cannot be split; 0 if inputs can be split."""
        return 0

    def measure_memory(self) -> None:
        """Plan the KV cache again with measured sizes of weights and activations; by default, do nothing."""

    def estimate_memory_footprint(self) -> int:
        """Return the bytes that remain for the KV cache after all other memory of the plan."""
        plan = self.memory_plan
        return plan.available_memory - plan.static_size

    @abstractmethod
    def execute(self, model_inputs: Any) -> ModelOutputs:
        """Run one forward."""

    def pack_pending(self) -> bool:
        """Pack one lazily packed weight, which takes a fraction of a second. An idle worker calls this.

        Returns:
            Whether weights remain to be packed. `execute` packs the remaining weights when necessary.
        """
        return False

    def pack_all_pending(self) -> None:
        """Pack all lazily packed weights."""
        while self.pack_pending():
            pass

    def execute_steps(
        self, model_inputs: Any, sampling: SamplingInputs, uniforms: Tensor, stop_ids: Tensor
    ) -> Tensor | None:
        """Run several decode steps in one call, if possible.

        Each step reads the tokens that the previous one sampled.

        Args:
            model_inputs: the inputs of the first step, one row for each sequence.
            sampling: the sampling parameters of all steps; the field ``uniforms`` is not used.
            uniforms: ``[n, B]`` float64: the random numbers of the n steps, in [0, 1).
            stop_ids: ``[B, k]`` int64: the tokens that end each sequence, padded with -1.

        Returns:
            The sampled tokens ``[m, B]`` int64, with -1 for a row of non-finite logits. m is less than n if
            all sequences have ended before step n. None, without any change, if the model cannot run these
            steps in one call.
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
    ) -> ModelInputs:
        """Return the inputs of the first forward of a batch: the active tokens of each context.

        Args:
            replica_batches: the batch of each data-parallel replica.
            kv_cache_inputs: the block tables of the batch, for a model with a KV cache.
            return_n_logits: rows of logits per sequence with `ReturnLogits.VARIABLE`: one number for all
                sequences, or a list with a number for each. It is a list only if the batch has drafts or
                echoed prompts.
            drafts: drafted tokens of each context, appended to its active tokens. Passed only with
                speculative decoding.
        """

    @abstractmethod
    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> ModelInputs:
        """Return the inputs of the next forward of the same batch, without its contexts.

        Args:
            next_tokens: ``[B]``, the last sampled token of each sequence.
            prev_model_inputs: the inputs of the previous forward.
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
        """Return the log probabilities of the sampled tokens.

        Args:
            session: devices and kernels.
            model_inputs: the inputs of the forward.
            model_outputs: the outputs of the forward.
            next_tokens: ``[B]``, the sampled tokens.
            batch_top_n: for each sequence the number of most probable tokens to return; 0 for no log
                probabilities.
            batch_echo: for each sequence whether to include the log probabilities of its input tokens.

        Returns:
            One entry for each sequence; None for a sequence with a ``batch_top_n`` of 0.
        """
        raise NotImplementedError(f"Log probabilities not implemented for {type(self).__name__}.")

    def _free_memory(self, weights_size: int) -> int:
        """Return the bytes available for weights, activations and KV cache before the model is loaded."""
        # Read before the free memory: a thread turns free memory into idle prefaulted memory. In the other
        # order, memory that the thread turns between the two calls would be counted twice.
        free = self.session.prefaulted.num_idle
        free += self.session.free_memory_of(self.devices)
        private = private_memory.free()
        if private is not None and free >= private and self.pipeline_config.model.packed_key.file.is_file():
            free += weights_size  # the memory limit does not count the mapped file of packed weights
        ranks = self.session.ranks
        if ranks is None:
            return free
        num_sharing = ranks.world_size if self.devices[0].is_host else 1  # CPU ranks share host memory
        return ranks.minimum([free // num_sharing])[0]

    def _rank_weights_size(self) -> int:
        """Return the size in bytes of the weights of the rank that stores the most."""
        config, shard = self.pipeline_config, self.session.shard
        size = self.estimate_weights_size(config)
        if shard.is_whole:
            return size
        spec = self.kv_spec(config, self.huggingface_config)
        kv_heads = max(group.kv_heads for group in spec.groups) if spec else 1
        names = self.tensor_names(self.huggingface_config)
        share = rank_shares(names, shard, kv_heads)
        whole_size = estimate_weights_size(config, names)
        rank_size = estimate_weights_size(config, names, share=share)
        return size - whole_size + rank_size

    def _plan_memory(self) -> MemoryPlan:
        config, huggingface_config = self.pipeline_config, self.huggingface_config
        weights_size = self._rank_weights_size()
        free_memory = self.free_memory = self._free_memory(weights_size)
        encoder_size = self.estimate_encoder_memory(config, huggingface_config)
        plan = plan_memory(
            config,
            self.kv_cache_spec,
            model_max_length=self.calculate_max_seq_len(config, huggingface_config),
            weights_size=weights_size,
            activation_size=self.estimate_activation_memory(config, huggingface_config),
            free_memory=free_memory,
            adapters_size=estimate_adapters_size(config, self.tensor_names(huggingface_config)),
            min_step_tokens=self.min_step_tokens(config, huggingface_config),
            encoder_size=encoder_size,
            encoder_cache_size=encoder_cache_size(config, free_memory) if encoder_size else 0,
        )
        if plan.is_shortened:
            logging.getLogger(__name__).warning(
                "the maximum length is %d tokens, not the model's %d, whose KV cache would not fit in memory",
                plan.max_length,
                plan.model_max_length,
            )
        return plan
