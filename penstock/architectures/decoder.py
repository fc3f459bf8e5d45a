"""`DecoderModel`: the base class of decoder-only transformers.

A subclass defines the KV cache (`kv_spec`) and the length of the longest sequence (`calculate_max_seq_len`),
and reads the network from a checkpoint (`build`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.cache_types import fixed_scales, kv_dtype
from penstock.architectures.model import ModelInputs, ModelOutputs
from penstock.architectures.network_model import NetworkModel
from penstock.architectures.step_messages import StepMessage
from penstock.architectures.step_tensors import (
    eager_reason,
    later_step_tensors,
    step_key,
    step_tensors,
    with_tensors,
)
from penstock.architectures.vision import VisionModel
from penstock.errors import UnsupportedFeatureError
from penstock.kernels import ImageSpans, KVCacheInputs, Ops, SamplingInputs, StepInputs, uploaded_together
from penstock.kv_cache import KVCacheManager, KVCacheSpec
from penstock.log_probabilities import compute_log_probabilities
from penstock.memory import MemoryPlan, estimate_kv_cache_size, plan_memory, requested_block_size
from penstock.nn import Loader, ReturnHiddenStates, ReturnLogits
from penstock.pipelines.core import LogProbabilities, TextAndVisionContext, TextContext

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig
    from penstock.engine import InferenceSession
    from penstock.kernels import GraphCache

__all__ = ["DecoderModel", "Network", "kv_dtype"]


class Network(Protocol):
    """A decoder network and its output head."""

    @property
    def head(self) -> Callable[[Tensor, StepInputs], Tensor]:
        """The output head, ``[R, E] -> [R, V]``."""
        ...

    @property
    def is_length_dependent(self) -> bool:
        """Whether keys depend on the sequence length. If so, steps need `StepInputs.text_lengths`."""
        ...

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm."""
        ...


class DecoderModel(NetworkModel[TextContext]):
    """A decoder-only transformer over the paged KV cache."""

    network: Network
    supports_tensor_parallelism: ClassVar[bool] = False
    """Whether the network supports tensor parallelism: each layer declares the part that a rank stores."""

    @classmethod
    @abstractmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        """Return the specification of the KV cache of the whole model, with the kv heads of all ranks."""

    @classmethod
    @abstractmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Network:
        """Read the network from a checkpoint."""

    def estimate_kv_cache_size(self, available_cache_memory: int) -> int:
        """Return the size in bytes of the KV cache, at most ``available_cache_memory``.

        Raises:
            InsufficientMemoryError: the smallest cache that the configuration permits does not fit.
        """
        return estimate_kv_cache_size(
            self.pipeline_config,
            self.kv_cache_spec,
            model_max_length=self.max_seq_len,
            available_cache_memory=available_cache_memory,
        )

    def load_kv_manager(self, session: InferenceSession, available_cache_memory: int) -> KVCacheManager:
        """Allocate the KV cache in at most ``available_cache_memory`` bytes."""
        config = self.kv_cache_config
        spec = self.kv_cache_spec
        assert spec is not None
        unsharded_spec = self.kv_spec(self.pipeline_config, self.huggingface_config)
        plan = self._plan_cache(available_cache_memory)
        manager = KVCacheManager(
            spec,
            plan.num_blocks,
            requested_block_size(self.pipeline_config),
            device=self.torch_device,
            enable_prefix_caching=config.enable_prefix_caching
            and (spec.shares_prefixes or not self.network.is_length_dependent),
            adapter_digest=self.lora_manager.digest if self.lora_manager else None,
            host_memory=config.offload_memory or 0,
            fixed_scales=fixed_scales(self.pipeline_config, unsharded_spec, session.shard),
            num_states=plan.max_batch_size,
        )
        if session.ranks is not None:
            manager.storage.on_copy = lambda *blocks: self.announce("copy_block", *blocks)
            manager.storage.on_discard = lambda: self.announce("discard_cache")
            manager.storage.on_populate = lambda *blocks: self.announce("populate_cache", *blocks)
        return manager

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[TextContext]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int | Sequence[int] = 1,
        *,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> ModelInputs:
        """Return a ragged batch: the active tokens of each context, followed by its drafted tokens.

        Args:
            replica_batches: the contexts of each data-parallel replica.
            kv_cache_inputs: the block tables of the batch.
            return_n_logits: how many of the last rows of each sequence get logits: one number, or one number
                per sequence. Only `ReturnLogits.VARIABLE` uses it.
            drafts: the drafted tokens of each context; None for no drafts.
        """
        contexts = [context for replica in replica_batches for context in replica]
        self._check_images(contexts)
        drafts = drafts or [()] * len(contexts)
        token_arrays: list[np.ndarray] = []
        for context, draft in zip(contexts, drafts, strict=True):
            token_arrays.append(context.next_tokens)
            if len(draft):
                token_arrays.append(np.array(draft))
        tokens = np.concatenate(token_arrays)
        draft_lengths = [len(draft) for draft in drafts]
        row_counts = np.array([context.active_length for context in contexts]) + draft_lengths
        positions = np.array([context.start_idx for context in contexts])
        with uploaded_together(self.torch_device):
            if len(tokens) == len(contexts):
                row_offsets, logit_rows, logit_offsets = _single_row_offsets(len(contexts), self.torch_device)
            else:
                ends = row_counts.cumsum()
                positions = (positions + row_counts - ends).repeat(row_counts) + np.arange(len(tokens))
                num_logits = self._num_logits(row_counts, return_n_logits)
                logit_ends = num_logits.cumsum()
                logit_indices = np.arange(logit_ends[-1]) + (ends - logit_ends).repeat(num_logits)
                row_offsets = self._to_device(np.append(0, ends), np.int32)
                logit_rows = self._to_device(logit_indices, np.int64)
                logit_offsets = self._to_device(np.append(0, logit_ends), np.int64)
            return ModelInputs(
                tokens=self._to_device(tokens, np.int64),
                row_offsets=row_offsets,
                positions=self._to_device(positions, np.int64),
                logit_rows=logit_rows,
                logit_offsets=logit_offsets,
                kv=kv_cache_inputs,
                lora=self.lora_manager.inputs(contexts, row_counts) if self.lora_manager else None,
                drafts=tuple(draft_lengths),
                text_lengths=self._text_lengths(contexts, row_counts, positions),
                spans=self._image_spans(contexts, row_counts, positions),
            )

    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> ModelInputs:
        """Return inputs with one row for each sequence: the sampled token, at the next position."""
        last_rows = prev_model_inputs.row_offsets[1:].long() - 1  # [B]
        row_offsets, logit_rows, logit_offsets = _single_row_offsets(len(next_tokens), next_tokens.device)
        positions = prev_model_inputs.positions[last_rows] + 1
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
            lora=lora.take(last_rows) if lora else None,
            input_embeds=None,
            drafts=None,
            text_lengths=positions + 1 if self.network.is_length_dependent else None,
            spans=None,
        )

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        ranks = self.session.ranks
        if ranks is None:
            results = self._run(model_inputs)
        else:
            with ranks.step():
                if ranks.rank == 0:
                    self.announce("execute", StepMessage.from_inputs(model_inputs))
                results = self._run(model_inputs)
        logits, *states = results
        return ModelOutputs(
            next_token_logits=logits if len(logits) == len(model_inputs.row_offsets) - 1 else None,
            logits=logits,
            logit_offsets=model_inputs.logit_offsets,
            hidden_states=self._requested_rows(states[0], model_inputs.row_offsets) if states else None,
        )

    def _run(self, model_inputs: ModelInputs) -> tuple[Tensor, ...]:
        """Run the network as a compiled step, or eagerly if `_run_compiled` returns None."""
        self.begin_step()
        results = self._run_compiled(model_inputs)
        if results is None:
            with torch.inference_mode():
                results = self._run_eagerly(model_inputs, self.session.ops)
        return results

    @property
    def _graphs(self) -> GraphCache | None:
        """The session's compiled steps; None if it has none, or if ranks use torch.distributed."""
        ranks = self.session.ranks
        return self.session.graphs if ranks is None or ranks.region else None

    def _run_compiled(self, model_inputs: ModelInputs) -> tuple[Tensor, ...] | None:
        """Return the results of `_run_eagerly` from a compiled step; None if the step must run eagerly."""
        graphs = self._graphs
        if graphs is None:
            return None
        reason = eager_reason(model_inputs, graphs.max_rows)
        if reason is not None:
            graphs.skip(reason)
            return None
        key, states = self._graph_key(model_inputs, graphs), model_inputs.kv and model_inputs.kv.states
        # The step updates the recurrent states. If it cannot be captured, it runs again from the old states.
        restore = states.snapshot() if states and graphs.captures_next(key) else None
        results = graphs.run(
            key,
            step_tensors(model_inputs),
            lambda ops, tensors: self._run_eagerly(with_tensors(model_inputs, tensors), ops),
        )
        if results is None and restore is not None:
            restore()
        return results

    def execute_steps(
        self,
        model_inputs: ModelInputs,
        sampling: SamplingInputs,
        uniforms: Tensor,  # [n, B]
        stop_ids: Tensor,  # [B, k]
    ) -> Tensor | None:  # [m, B]
        graphs, ranks = self._graphs, self.session.ranks
        if graphs is None or eager_reason(model_inputs, graphs.max_rows) is not None:
            return None
        if model_inputs.input_embeds is not None:  # image rows belong to the first step only
            return None
        key = self._graph_key(model_inputs, graphs)
        if ranks is not None and ranks.rank == 0 and not graphs.has(key):
            return None
        with nullcontext() if ranks is None else ranks.step():
            if ranks is not None and ranks.rank == 0:
                message = StepMessage.from_inputs(model_inputs)
                self.announce("execute_steps", message, len(uniforms), stop_ids.cpu().numpy())
            return graphs.run_loop(
                key,
                step_tensors(model_inputs),
                later_step_tensors(model_inputs, len(uniforms)),
                sampling,
                uniforms,
                stop_ids,
                ranks,
            )

    def _graph_key(self, model_inputs: ModelInputs, graphs: GraphCache) -> Hashable:
        return (id(self.network), self.return_hidden_states, step_key(model_inputs, graphs.columns))

    def _run_eagerly(self, model_inputs: ModelInputs, ops: Ops) -> tuple[Tensor, ...]:
        """Return logits. Return the hidden states of all rows too if hidden states are requested."""
        lora, rows, kv = model_inputs.lora, model_inputs.logit_rows, model_inputs.kv
        spans = None
        if model_inputs.spans is not None and kv is not None:
            spans = ImageSpans(model_inputs.spans, model_inputs.row_offsets, kv.lengths)
        step = StepInputs(
            ops, model_inputs.positions, model_inputs.row_offsets, kv, lora, model_inputs.text_lengths, spans
        )
        hidden, normalized = self.network(model_inputs.tokens, step, model_inputs.input_embeds)
        if lora is not None and len(rows) < len(normalized):
            step = replace(step, lora=replace(lora, rows=ops.take_rows(lora.rows[:, None], rows)[:, 0]))
        logits = self.network.head(ops.take_rows(normalized, rows), step)
        requested = self.return_hidden_states
        if requested is ReturnHiddenStates.NONE:
            return (logits,)
        is_normalized = requested in (ReturnHiddenStates.LAST_NORMALIZED, ReturnHiddenStates.ALL_NORMALIZED)
        return logits, normalized if is_normalized else hidden

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

    def _plan_cache(self, available_cache_memory: int) -> MemoryPlan:
        """Return the memory plan, with a smaller KV cache if less memory is available than planned."""
        plan = self.memory_plan
        if available_cache_memory < plan.kv_cache_size:
            smaller_cache = replace(self.kv_cache_config, memory=available_cache_memory)
            plan = plan_memory(
                replace(self.pipeline_config, kv_cache=smaller_cache),
                self.kv_cache_spec,
                model_max_length=self.max_seq_len,
                weights_size=0,
                activation_size=0,
                free_memory=available_cache_memory,
            )
        return plan

    def _num_logits(self, row_counts: np.ndarray, return_n_logits: int | Sequence[int]) -> np.ndarray:  # [B]
        if self.return_logits is ReturnLogits.ALL:
            return row_counts
        if self.return_logits is ReturnLogits.LAST_TOKEN:
            return np.ones_like(row_counts)
        requested = np.broadcast_to(np.asarray(return_n_logits), row_counts.shape)
        num_logits: np.ndarray = np.minimum(requested, row_counts)
        return num_logits

    def _text_lengths(
        self, contexts: Sequence[TextContext], row_counts: np.ndarray, positions: np.ndarray
    ) -> Tensor | None:  # [T]
        """Return the sequence length that sets the rotary angles of each row; None if positions suffice.

        It is the prompt length or the row's position + 1, whichever is larger, as in transformers. It is at
        least `KVCacheSpec.min_regime_length` of the context, so that recomputed keys do not change.
        """
        spec = self.kv_cache_spec
        if not self.network.is_length_dependent or spec is None:
            return None
        prompt_lengths = [len(context.prompt_tokens) for context in contexts]
        regime_lengths = [spec.min_regime_length(context.current_length) for context in contexts]
        lengths = np.maximum(prompt_lengths, regime_lengths)
        return self._to_device(np.maximum(lengths.repeat(row_counts), positions + 1), np.int64)

    def _check_images(self, contexts: Sequence[TextContext]) -> None:
        """Raise an `UnsupportedFeatureError` if the model cannot read images or a context lacks metadata."""
        for context in contexts:
            if not isinstance(context, TextAndVisionContext) or not context.pixel_values:
                continue
            if not isinstance(self, VisionModel):
                raise UnsupportedFeatureError("an image", f"{type(self).__name__} reads text only")
            if not context.images:
                raise UnsupportedFeatureError(
                    "pixel_values without images", "pass the tokens of each image as ImageMetadata"
                )

    def _image_spans(
        self, contexts: Sequence[TextContext], row_counts: np.ndarray, positions: np.ndarray
    ) -> Tensor | None:  # [T, 2]
        """Return `ImageSpans.bounds` of the batch; None if it has no images with bidirectional attention."""
        spans: np.ndarray | None = None
        first_row = 0
        for context, count in zip(contexts, row_counts.tolist(), strict=True):
            if isinstance(context, TextAndVisionContext) and context.has_bidirectional_images:
                for image in context.next_images_in_window:
                    if spans is None:
                        spans = np.stack([positions, positions + 1], axis=1)
                    rows = np.clip(
                        np.array([image.start_idx, image.end_idx]) - context.start_idx,
                        0,
                        context.active_length,
                    )
                    spans[first_row + rows[0] : first_row + rows[1]] = (image.start_idx, image.end_idx)
            first_row += count
        return None if spans is None else self._to_device(spans, np.int32)

    def _requested_rows(self, states: Tensor, row_offsets: Tensor) -> Tensor:
        """Return the rows that `return_hidden_states` requests: all, or the last row of each sequence."""
        all_rows = self.return_hidden_states in (ReturnHiddenStates.ALL, ReturnHiddenStates.ALL_NORMALIZED)
        return states if all_rows else states[row_offsets[1:].long() - 1]


@lru_cache(maxsize=256)
def _single_row_offsets(num_sequences: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return row offsets, logit rows and logit offsets of a batch with one row for each sequence.

    The tensors are cached. Callers must not modify them.
    """
    offsets = torch.arange(num_sequences + 1, device=device)
    return offsets.int(), offsets[:-1].clone(), offsets
