"""`DecoderModel`: everything about a decoder-only transformer but its network.

An architecture subclasses it and says what its KV cache looks like (`kv_spec`), how long it may run
(`calculate_max_seq_len`) and how its network is built from a checkpoint (`build`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs, ModelOutputs, PipelineModel
from penstock.architectures.step_tensors import (
    eager_reason,
    shape_of,
    tensors_of_later_steps,
    tensors_of_step,
    with_tensors,
)
from penstock.calibration import CALIBRATED, pack_calibrated
from penstock.dtype import DType
from penstock.errors import UnsupportedFeatureError
from penstock.host.progress import LoadingProgress
from penstock.kernels import (
    KVCacheInputs,
    LazyWeight,
    Ops,
    PackedLinear,
    SamplingInputs,
    StepInputs,
    encoding_named,
)
from penstock.kv_cache import KVCacheManager, KVCacheSpec
from penstock.log_probabilities import compute_log_probabilities
from penstock.lora import LoRAManager
from penstock.memory import (
    estimate_activation_memory,
    estimate_kv_cache_size,
    plan_memory,
    wanted_block_size,
)
from penstock.nn import Loader, ReturnHiddenStates, ReturnLogits
from penstock.pipelines.core import LogProbabilities, TextAndVisionContext, TextContext
from penstock.weights import Weights
from penstock.weights.packed_weights import open_packed

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig
    from penstock.engine import InferenceSession
    from penstock.kernels import GraphCache


LAZILY_PACKED = ("float32", "bfloat16", *CALIBRATED)
"""Encodings whose weights a load leaves as they are: floats until after the first step, those that are fitted
to their inputs until these have been seen. To quantise the others twice would take longer than it saves."""

MIN_LAZY_BYTES = 64 << 20
"""Bytes. Less memory is found in no time, and packed by the load."""


class Network(Protocol):
    """The arithmetic between tokens and logits."""

    @property
    def head(self) -> Callable[[Tensor, StepInputs], Tensor]:
        """The output head, ``[R, E] -> [R, V]``."""
        ...

    @property
    def length_dependent(self) -> bool:
        """Whether keys depend on the length of the text: then steps have `StepInputs.text_lengths`."""
        ...

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm."""
        ...


def kv_dtype(pipeline_config: PipelineConfig) -> DType:
    """The element type of the KV cache: the one configured, else that of the activations."""
    given = pipeline_config.kv_cache.dtype
    return DType(given) if given else encoding_named(pipeline_config.model.encoding).compute_dtype


class DecoderModel(PipelineModel[TextContext]):
    """A decoder-only transformer over the paged KV cache."""

    ignored_weights: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    """Patterns of checkpoint tensors that the network may leave unread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.torch_device = self.devices[0].torch_device
        model = self.pipeline_config.model
        ops = self.session.ops
        store = open_packed(model.packed_key, ops.layout) if ops.packs_weights else None
        if store is not None or not ops.packs_weights:
            self.session.prefaulted.release()  # nothing will be packed into it
        loader = Loader(self.weights, model.encoding, self.torch_device, ops, store, later=LAZILY_PACKED)
        self.network = self.read(self.weights, loader, self.huggingface_config, self.max_seq_len)
        self.calibrate(self.pipeline_config, self.network, loader.layers, ops)
        self._lora_manager = self._load_adapters(loader)
        tensors = (layer.tensors for layer in loader.layers)
        self._lazy_weights = deque(one for one in tensors if isinstance(one, LazyWeight) and one.parts)
        self._has_run = False
        if sum(one.num_bytes for one in self._lazy_weights) < MIN_LAZY_BYTES:
            self.pack_all_pending()

    @property
    def lora_manager(self) -> LoRAManager | None:
        return self._lora_manager

    @classmethod
    @abstractmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        """Layers, heads, sizes and windows of the KV cache."""

    @classmethod
    @abstractmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Network:
        """Reads the network from a checkpoint."""

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        return estimate_activation_memory(pipeline_config, huggingface_config)

    @classmethod
    def read(
        cls, weights: Weights, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int
    ) -> Network:
        """Builds the network from all of a checkpoint, in sight of whoever waits for it.

        Raises:
            WeightsError: lists the tensors that are at fault.
        """
        with torch.no_grad(), LoadingProgress(weights.num_bytes) as progress:
            weights.on_read = progress.advance
            network = cls.build(load, huggingface_config, max_length)
            weights.on_read = None
        weights.finish(cls.ignored_weights)
        return network

    @classmethod
    def calibrate(
        cls, pipeline_config: PipelineConfig, network: Network, layers: Sequence[PackedLinear], ops: Ops
    ) -> None:
        """Packs those of a network's layers that wait to be quantised, by what their inputs are worth."""
        waiting = [layer.tensors for layer in layers if layer.encoding in CALIBRATED]
        lazy_weight = [tensors for tensors in waiting if isinstance(tensors, LazyWeight)]
        if not lazy_weight:
            return
        num_bytes = sum(part.nbytes for one in lazy_weight for part in one.parts)
        with torch.inference_mode(), LoadingProgress(num_bytes, title="quantising") as progress:

            def pack(one: LazyWeight, importance: Tensor | None = None) -> None:
                parts = one.parts
                one.pack(importance)
                progress.advance(sum(part.nbytes for part in parts))

            config = pipeline_config.model.huggingface_config
            pack_calibrated(network, cls.kv_spec(pipeline_config, config), ops, config, pack)
            for one in lazy_weight:
                pack(one)  # what the network was not seen to use

    def estimate_kv_cache_size(self, available_cache_memory: int) -> int:
        """Bytes that the KV cache takes, when it may take this many."""
        return estimate_kv_cache_size(
            self.pipeline_config,
            self.kv_cache_spec,
            model_max_length=self.max_seq_len,
            available_cache_memory=available_cache_memory,
        )

    def load_kv_manager(self, session: InferenceSession, available_cache_memory: int) -> KVCacheManager:
        """Allocates the KV cache, in at most ``available_cache_memory`` bytes."""
        config = self.kv_cache_config
        spec = self.kv_cache_spec
        assert spec is not None
        return KVCacheManager(
            spec,
            self._num_blocks(available_cache_memory),
            wanted_block_size(self.pipeline_config),
            device=self.torch_device,
            enable_prefix_caching=config.enable_prefix_caching
            and (spec.shares_prefixes or not self.network.length_dependent),
            adapter_digest=self.lora_manager.digest if self.lora_manager else None,
        )

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[TextContext]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int | Sequence[int] = 1,
        *,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> ModelInputs:
        """One ragged batch of the active tokens of all contexts, each followed by its drafted tokens.

        ``return_n_logits`` may give each sequence its own number of rows.
        """
        contexts = [context for replica in replica_batches for context in replica]
        if any(isinstance(context, TextAndVisionContext) and context.pixel_values for context in contexts):
            raise UnsupportedFeatureError("an image", f"{type(self).__name__} reads text alone")
        drafts = drafts or [()] * len(contexts)
        rows: list[np.ndarray] = []
        for context, draft in zip(contexts, drafts, strict=True):
            rows.append(context.next_tokens)
            if len(draft):
                rows.append(np.array(draft))
        tokens = np.concatenate(rows)
        drafted = [len(draft) for draft in drafts]
        counts = np.array([context.active_length for context in contexts]) + drafted
        positions = np.array([context.start_idx for context in contexts])
        if len(tokens) == len(contexts):
            row_offsets, logit_rows, logit_offsets = _one_row_each(len(contexts), self.torch_device)
        else:
            ends = counts.cumsum()
            positions = (positions + counts - ends).repeat(counts) + np.arange(len(tokens))
            wanted = self._num_logits(counts, return_n_logits)
            logit_ends = wanted.cumsum()
            rows_of_logits = np.arange(logit_ends[-1]) + (ends - logit_ends).repeat(wanted)
            row_offsets = self._to_device(np.append(0, ends), np.int32)
            logit_rows = self._to_device(rows_of_logits, np.int64)
            logit_offsets = self._to_device(np.append(0, logit_ends), np.int64)
        return ModelInputs(
            tokens=self._to_device(tokens, np.int64),
            row_offsets=row_offsets,
            positions=self._to_device(positions, np.int64),
            logit_rows=logit_rows,
            logit_offsets=logit_offsets,
            kv=kv_cache_inputs,
            lora=self.lora_manager.inputs(contexts, counts) if self.lora_manager else None,
            drafts=tuple(drafted),
            text_lengths=self._text_lengths(contexts, counts, positions),
        )

    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> ModelInputs:
        """One row a sequence: the token just sampled, at the position behind its last."""
        last = prev_model_inputs.row_offsets[1:].long() - 1  # [B]
        row_offsets, logit_rows, logit_offsets = _one_row_each(len(next_tokens), next_tokens.device)
        positions = prev_model_inputs.positions[last] + 1
        lora = prev_model_inputs.lora
        assert prev_model_inputs.kv is not None
        return replace(
            prev_model_inputs,
            tokens=next_tokens,
            row_offsets=row_offsets,
            positions=positions,
            logit_rows=logit_rows,
            logit_offsets=logit_offsets,
            kv=prev_model_inputs.kv.advance(),
            lora=lora.take(last) if lora else None,
            input_embeds=None,
            drafts=None,
            text_lengths=positions + 1 if self.network.length_dependent else None,
        )

    def pack_pending(self) -> bool:
        """Packs the next weight that the load has put off."""
        self.session.check_process()
        if self._lazy_weights:
            self._lazy_weights.popleft().pack()
        return bool(self._lazy_weights)

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        self.session.check_process()
        if self._has_run:
            self.pack_all_pending()
        self._has_run = True
        results = self._replayed(model_inputs)
        if results is None:
            with torch.inference_mode():
                results = self._computed(model_inputs, self.session.ops)
        logits, *states = results
        return ModelOutputs(
            next_token_logits=logits if len(logits) == len(model_inputs.row_offsets) - 1 else None,
            logits=logits,
            logit_offsets=model_inputs.logit_offsets,
            hidden_states=self._wanted_rows(states[0], model_inputs.row_offsets) if states else None,
        )

    def _replayed(self, model_inputs: ModelInputs) -> tuple[Tensor, ...] | None:
        """What `_computed` gives, in one call of the kernels; None where the step is to run eagerly."""
        plans = self.session.plans
        if plans is None:
            return None
        reason = eager_reason(model_inputs, plans.max_rows)
        if reason is not None:
            plans.skip(reason)
            return None
        return plans.run(
            self._plan_key(model_inputs, plans),
            tensors_of_step(model_inputs),
            lambda ops, tensors: self._computed(with_tensors(model_inputs, tensors), ops),
        )

    def execute_steps(
        self,
        model_inputs: ModelInputs,
        sampling: SamplingInputs,
        uniforms: Tensor,  # [n, B]
        ends: Tensor,  # [B, E]
    ) -> Tensor | None:  # [m, B]
        plans = self.session.plans
        if plans is None or eager_reason(model_inputs, plans.max_rows) is not None:
            return None
        return plans.run_loop(
            self._plan_key(model_inputs, plans),
            tensors_of_step(model_inputs),
            tensors_of_later_steps(model_inputs, len(uniforms)),
            sampling,
            uniforms,
            ends,
        )

    def _plan_key(self, model_inputs: ModelInputs, plans: GraphCache) -> Hashable:
        return (id(self.network), self.return_hidden_states, shape_of(model_inputs, plans.columns))

    def _computed(self, model_inputs: ModelInputs, ops: Ops) -> tuple[Tensor, ...]:
        """Logits, and the hidden states of all rows where some are wanted."""
        lora, rows = model_inputs.lora, model_inputs.logit_rows
        step = StepInputs(
            ops,
            model_inputs.positions,
            model_inputs.row_offsets,
            model_inputs.kv,
            lora,
            model_inputs.text_lengths,
        )
        hidden, normed = self.network(model_inputs.tokens, step, model_inputs.input_embeds)
        if lora is not None and len(rows) < len(normed):
            step = replace(step, lora=replace(lora, rows=ops.take_rows(lora.rows[:, None], rows)[:, 0]))
        logits = self.network.head(ops.take_rows(normed, rows), step)
        wanted = self.return_hidden_states
        if wanted is ReturnHiddenStates.NONE:
            return (logits,)
        normalized = wanted in (ReturnHiddenStates.LAST_NORMALIZED, ReturnHiddenStates.ALL_NORMALIZED)
        return logits, normed if normalized else hidden

    def compute_log_probabilities(
        self,
        session: InferenceSession,
        model_inputs: ModelInputs,
        model_outputs: ModelOutputs,
        next_tokens: Tensor,
        batch_top_n: list[int],
        batch_echo: list[bool],
    ) -> list[LogProbabilities | None]:
        assert model_outputs.logits is not None
        return compute_log_probabilities(
            model_inputs.tokens,
            model_inputs.row_offsets,
            model_outputs.logits,
            model_inputs.logit_offsets,
            next_tokens,
            batch_top_n,
            batch_echo,
        )

    def _load_adapters(self, loader: Loader) -> LoRAManager | None:
        config = self.pipeline_config
        if not config.lora.is_enabled:
            return None
        return LoRAManager(
            config.lora,
            loader.linears,
            self.weights,
            [config.model.model_path, config.model.name],
            dtype=loader.dtype,
            device=self.torch_device,
        )

    def _num_blocks(self, available_cache_memory: int) -> tuple[int, ...]:
        """As planned, or as many as fit where there is less memory than was planned for."""
        plan = self.memory_plan
        if available_cache_memory < plan.kv_cache_size:
            smaller = replace(self.kv_cache_config, memory=available_cache_memory)
            plan = plan_memory(
                replace(self.pipeline_config, kv_cache=smaller),
                self.kv_cache_spec,
                model_max_length=self.max_seq_len,
                weights_size=0,
                activation_size=0,
                free_memory=available_cache_memory,
            )
        return plan.num_blocks

    def _num_logits(self, counts: np.ndarray, return_n_logits: int | Sequence[int]) -> np.ndarray:  # [B]
        if self.return_logits is ReturnLogits.ALL:
            return counts
        if self.return_logits is ReturnLogits.LAST_TOKEN:
            return np.ones_like(counts)
        rows: np.ndarray = np.minimum(np.broadcast_to(np.asarray(return_n_logits), counts.shape), counts)
        return rows

    def _text_lengths(
        self, contexts: Sequence[TextContext], counts: np.ndarray, positions: np.ndarray
    ) -> Tensor | None:  # [T]
        """Return the text length that decides the angles of each row.

        It is that of the prompt, or that up to the row where this is longer: what a whole prompt, and then
        each generated token, has in transformers. In a regime of longer sequences it is at least the length
        at which that begins. So the rows of a context that is computed again are those of the first time.
        """
        spec = self.kv_cache_spec
        if not self.network.length_dependent or spec is None:
            return None
        lengths = [
            max(len(context.prompt_tokens), spec.shortest(context.current_length)) for context in contexts
        ]
        return self._to_device(np.maximum(np.array(lengths).repeat(counts), positions + 1), np.int64)

    def _wanted_rows(self, states: Tensor, row_offsets: Tensor) -> Tensor:
        """Of the hidden states of all rows: all, or the last of each sequence."""
        every = self.return_hidden_states in (ReturnHiddenStates.ALL, ReturnHiddenStates.ALL_NORMALIZED)
        return states if every else states[row_offsets[1:].long() - 1]

    def _to_device(self, values: np.ndarray, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=dtype)).to(self.torch_device)


@lru_cache(maxsize=256)
def _one_row_each(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row offsets, rows of logits and their offsets, as `ModelInputs` has them, of one row a sequence.

    The same tensors each time: they are read alone.
    """
    each = torch.arange(size + 1, device=device)
    return each.int(), each[:-1].clone(), each
