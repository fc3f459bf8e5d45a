"""`DraftModelProposer`: drafts with a second, smaller model that has a separate KV cache.

::

    tokens of the context    t0 t1 t2 t3 t4 t5 | d0 d1 d2          d: drafted
    in the draft's cache     t0 t1 t2 t3 t4 t5 | d0 d1             the last draft is never computed
                             `-- computed ---'

    the target accepts d0, d1 and samples x:  t0 .. t5 d0 d1 x
                             `-- computed --------'             one row, x, is not computed yet

The draft model samples with the seed and the positions of the context, and therefore with the same random
numbers as the target. If both models have the same distribution, they sample the same token. Drafting ends
with a draft that the grammar rejects. If both models have the same number of logits, drafts obey the grammar
and the token rules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from penstock.architectures.model import KVCacheMixin, PipelineModel
from penstock.config import LoRAConfig, ModelConfig, PipelineConfig, SpeculativeConfig
from penstock.errors import ConfigError, InsufficientBlocksError
from penstock.grammar import grammar_bitmask, matcher_lookahead
from penstock.kv_cache import KVCacheManager, KVCacheSpec, claim
from penstock.memory import estimate_adapters_size, plan_memory, requested_block_size
from penstock.pipelines.core import TextContext
from penstock.pipelines.runner import ModelRunner
from penstock.pipelines.sampling import Sampler, adjust_logits

if TYPE_CHECKING:
    from penstock.engine import InferenceSession


@dataclass(slots=True)
class _DraftState:
    """The state of a context in the draft model."""

    context: TextContext
    draft_context: TextContext
    """A copy of ``context`` with a slot in the draft cache. It contains drafts only during `propose`."""
    drafts: list[int] = field(default_factory=list)
    """The last drafts. All of them except the last one are in the draft cache."""

    @property
    def num_computed(self) -> int:
        """Number of leading tokens with KV in the draft cache; never counts the last token."""
        return self.draft_context.start_idx

    def catch_up(self) -> bool:
        """Append the new tokens of the context. New tokens that equal the drafts are already in the cache.

        Returns False, without a change, if tokens were removed or the last known token has changed.
        """
        tokens, draft_context = self.context.all_tokens, self.draft_context
        num_known = draft_context.end_idx
        if len(tokens) < num_known or tokens[num_known - 1] != draft_context.tokens[num_known - 1]:
            return False
        draft_context.set_token_indices(active_idx=num_known)
        for token in tokens[num_known:].tolist():
            draft_context.jump_ahead(token)
        if self.drafts:
            new_tokens = tokens[num_known : num_known + len(self.drafts) - 1].tolist()
            num_matching = 0
            while num_matching < len(new_tokens) and new_tokens[num_matching] == self.drafts[num_matching]:
                num_matching += 1
            start = min(num_known + num_matching, draft_context.end_idx - 1)
            draft_context.set_token_indices(start_idx=start)
            self.drafts = []
        return True


class DraftModelProposer:
    """Drafts tokens with a draft model and the sampling parameters of each context.

    The draft model computes prompts in chunks. Its steps have at most as many tokens as the target's steps. A
    context gets no drafts if the draft cache or the step has no space for it, if its prompt is not computed
    yet, or if it exceeds the draft model's maximum length. A missing draft never fails a request.

    Args:
        config: the draft model's configuration, see `share_memory`.
        model: the class of the draft model.
        session: the target's session. Both models run in the same thread, one after the other.
        vocab_size: number of logits of the target.
    """

    def __init__(
        self,
        config: PipelineConfig,
        model: type[PipelineModel[TextContext]],
        session: InferenceSession,
        vocab_size: int,
    ) -> None:
        self.model = model(config, session)
        if not isinstance(self.model, KVCacheMixin) or self.model.kv_cache_spec is None:
            raise ConfigError("draft_model_path", f"{model.__name__} has no KV cache, so it cannot draft")
        self.kv: KVCacheManager = self.model.load_kv_manager(session, self.model.memory_plan.kv_cache_size)
        self._runner = ModelRunner(self.model, session, self.kv)
        self._session = session
        self._vocab_size = vocab_size
        self._states: dict[str, _DraftState] = {}  # least recently used first

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        indices: dict[str, int] = {}
        batch: list[_DraftState] = []
        num_tokens_left = self.model.memory_plan.max_batch_input_tokens
        for index, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
            if limit > 0 or context.active_idx < context.end_idx:
                state = self._updated_state(context)
                if self._select_and_reserve(state, limit, num_tokens_left, contexts):
                    num_tokens_left -= state.draft_context.active_length
                    indices[context.request_id] = index
                    batch.append(state)
        drafts: list[list[int]] = [[] for _ in contexts]
        batch_limits = [limits[indices[state.context.request_id]] for state in batch]
        for state in self._draft(batch, batch_limits):
            drafts[indices[state.context.request_id]] = list(state.drafts)
        return drafts

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_accepted: Sequence[int]
    ) -> None:
        """Set ``draft_offset`` of each context: the number of tokens by which the draft model lags behind."""
        for context in contexts:
            state = self._states.get(context.request_id)
            if state is None or state.context is not context or not state.catch_up():
                context.set_draft_offset(context.start_idx)
            else:
                context.set_draft_offset(max(context.start_idx - state.num_computed, 0))

    def release(self, context: TextContext) -> None:
        state = self._states.pop(context.request_id, None)
        if state is not None:
            self.kv.release(state.draft_context)

    def discard_cache(self) -> None:
        for state in self._states.values():
            self.kv.release(state.draft_context)
        self._states.clear()
        self.kv.discard_storage()

    def prefault_next_pages(self) -> bool:
        return self.kv.prefault_next_pages()

    # -- Draft states --------------------------------------------------------------------------------------

    def _updated_state(self, context: TextContext) -> _DraftState:
        """Return the state of a context, with all tokens of the context."""
        state = self._states.pop(context.request_id, None)
        if state is not None and not (state.context is context and state.catch_up()):
            self.kv.release(state.draft_context)
            state = None
        if state is None:
            draft_context = TextContext(
                prompt="",
                max_length=context.max_length,
                tokens=context.all_tokens,
                request_id=context.request_id,
                cache_salt=context.cache_salt,
                token_hash_overrides=context.token_hash_overrides,
            )
            state = _DraftState(context, draft_context)
        self._states[context.request_id] = state
        return state

    def _select_and_reserve(
        self, state: _DraftState, limit: int, num_tokens_left: int, contexts: Sequence[TextContext]
    ) -> bool:
        """Select the tokens to compute next and reserve their blocks.

        Returns False if nothing is to be computed, the context is too long, or the step or cache is full.
        """
        draft_context, end = state.draft_context, state.context.active_idx
        if num_tokens_left == 0 or end > self._max_length(state):
            return False
        claim(self.kv, draft_context)
        if draft_context.start_idx >= end:
            return False  # the draft cache already contains the part of the prompt that the target computes
        draft_context.set_token_indices(active_idx=min(end, draft_context.start_idx + num_tokens_left))
        lookahead = (
            self._num_drafts(state, limit) - 1 if draft_context.active_idx == draft_context.end_idx else 0
        )
        return self._reserve(draft_context, max(lookahead, 0), contexts)

    def _num_drafts(self, state: _DraftState, limit: int) -> int:
        """Return the number of tokens to draft. All drafts but the last count towards the maximum length."""
        return max(min(limit, self._max_length(state) - state.draft_context.end_idx + 1), 0)

    def _max_length(self, state: _DraftState) -> int:
        return min(self.model.max_seq_len, state.context.max_length)

    def _reserve(self, draft_context: TextContext, lookahead: int, contexts: Sequence[TextContext]) -> bool:
        """Reserve blocks for the next tokens. May release states of contexts outside the batch.

        Returns False if there are not enough blocks.
        """
        batch_ids = {context.request_id for context in contexts}
        idle_states = [state for request_id, state in self._states.items() if request_id not in batch_ids]
        while True:
            try:
                self.kv.reserve(draft_context, lookahead)
                return True
            except InsufficientBlocksError:
                if not idle_states:
                    return False
                self.release(idle_states.pop(0).context)

    # -- Drafting ---------------------------------------------------------------------------------------

    def _draft(self, batch: list[_DraftState], limits: Sequence[int]) -> list[_DraftState]:
        """Compute the selected tokens of each state, then draft. Return the states that have drafts."""
        if not batch:
            return []
        logits = self._runner.forward([state.draft_context for state in batch])
        active_states, rows = [], []
        for row, (state, limit) in enumerate(zip(batch, limits, strict=True)):
            draft_context = state.draft_context
            is_computed = draft_context.active_idx == draft_context.end_idx
            draft_context.set_token_indices(
                start_idx=min(draft_context.active_idx, draft_context.end_idx - 1),
                active_idx=draft_context.end_idx,
            )
            self.kv.commit(draft_context)
            if is_computed and self._num_drafts(state, limit) > 0:
                active_states.append((state, self._num_drafts(state, limit)))
                rows.append(row)
        all_states = [state for state, _ in active_states]
        logits = logits[rows]
        with ExitStack() as stack:
            can_continue = {
                state.context.request_id: stack.enter_context(matcher_lookahead(state.context))
                for state in all_states
            }
            while active_states:
                self._sample([state for state, _ in active_states], logits)
                active_states = [
                    (state, num_drafts)
                    for state, num_drafts in active_states
                    if can_continue[state.context.request_id](state.drafts[-1])
                    and len(state.drafts) < num_drafts
                ]
                if active_states:
                    for state, _ in active_states:
                        state.draft_context.jump_ahead(state.drafts[-1])
                        state.draft_context.set_token_indices(start_idx=state.draft_context.end_idx - 1)
                    logits = self._runner.forward([state.draft_context for state, _ in active_states])
        for state in all_states:
            state.draft_context.rollback(len(state.drafts) - 1)
        return all_states

    def _sample(self, batch: Sequence[_DraftState], logits: Tensor) -> None:  # [B, V]
        """Sample the next draft of each state with the random numbers that the target will use."""
        contexts = [state.context for state in batch]
        context_indices = np.arange(len(batch))
        positions = np.array([state.draft_context.end_idx for state in batch])
        bitmask = None
        if logits.shape[-1] == self._vocab_size:
            drafts = [state.drafts for state in batch]
            logits = adjust_logits(logits, contexts, context_indices, positions, drafts)
            bitmask = grammar_bitmask(contexts, context_indices, self._vocab_size)
            bitmask = None if bitmask is None else bitmask.to(logits.device)
        sampler = Sampler.for_batch([context.sampling_params for context in contexts], logits.device)
        tokens = sampler(self._session.ops, logits, None, positions, bitmask)
        # A row without finite logits drafts token 0. This is harmless: verification rejects wrong drafts.
        for state, token in zip(batch, tokens.clamp(min=0).tolist(), strict=True):
            state.drafts.append(token)


# -- Loading ---------------------------------------------------------------------------------------------


def draft_config(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration of the draft model. `share_memory` sets its part of the memory."""
    path = config.speculative.draft_model_path
    assert path is not None
    encoding = config.speculative.draft_quantization_encoding
    model = ModelConfig(
        model_path=path,
        quantization_encoding=encoding,
        devices=config.model.devices,
        kernels=config.model.kernels,
    )
    return replace(config, model=model, speculative=SpeculativeConfig(), lora=LoRAConfig())


def share_memory(
    config: PipelineConfig,
    model: type[PipelineModel[TextContext]],
    draft: type[PipelineModel[TextContext]],
    *,
    free_memory: int,
) -> tuple[PipelineConfig, PipelineConfig]:
    """Divide the memory between target and draft model.

    The KV cache of the draft model is planned as additional layer groups of the target's cache.

    Args:
        config: the configuration of the target.
        model: the class of the target.
        draft: the class of the draft model.
        free_memory: total free bytes of all devices before loading.

    Returns:
        The configurations of target and draft model, with their part of the memory.

    Raises:
        ConfigError: the tokenizers of the two models differ, or a model has no KV cache.
        InsufficientMemoryError: both models together do not fit.
    """
    configs = (config, draft_config(config))
    check_tokenizers(configs[0].model, configs[1].model)
    classes = (model, draft)
    specs = [
        cls.kv_spec(cfg, cfg.model.huggingface_config) for cls, cfg in zip(classes, configs, strict=True)
    ]
    if specs[0] is None or specs[1] is None:
        raise ConfigError("draft_model_path", "the target and the draft model both need a KV cache")
    num_target_groups = len(specs[0].groups)
    plan = plan_memory(
        config,
        _joint_spec(specs[0], specs[1]),
        model_max_length=model.calculate_max_seq_len(config, config.model.huggingface_config),
        weights_size=sum(cls.estimate_weights_size(cfg) for cls, cfg in zip(classes, configs, strict=True)),
        activation_size=max(  # the maximum, because the models run one after the other
            cls.estimate_activation_memory(cfg, cfg.model.huggingface_config)
            for cls, cfg in zip(classes, configs, strict=True)
        ),
        free_memory=free_memory,
        adapters_size=estimate_adapters_size(config, model.tensor_names(config.model.huggingface_config)),
    )
    draft_max_length = draft.calculate_max_seq_len(configs[1], configs[1].model.huggingface_config)
    lengths = (plan.max_length, min(plan.max_length, draft_max_length))
    num_blocks = (plan.num_blocks[:num_target_groups], plan.num_blocks[num_target_groups:])
    target_config, planned_draft_config = (
        replace(
            cfg,
            model=replace(cfg.model, max_length=length),
            kv_cache=replace(cfg.kv_cache, memory=_num_bytes(spec, blocks, requested_block_size(config))),
            max_batch_size=plan.max_batch_size,
            max_batch_input_tokens=plan.max_batch_input_tokens,
        )
        for cfg, spec, length, blocks in zip(configs, specs, lengths, num_blocks, strict=True)
    )
    return target_config, planned_draft_config


def check_tokenizers(target: ModelConfig, draft: ModelConfig) -> None:
    """Check that both models have equal tokenizers.

    Compares the vocabulary sizes instead if a ``tokenizer.json`` is missing or cannot be read.

    Raises:
        ConfigError: the tokenizers or the sizes differ.
    """
    vocabularies = [model.huggingface_config.vocabulary_size for model in (target, draft)]
    tokenizers = [_read_vocabulary(model.checkpoint) for model in (target, draft)]
    if tokenizers[0] is not None and tokenizers[1] is not None:
        if tokenizers[0] == tokenizers[1]:
            return  # the sizes of the heads may differ, because of padding
        difference = "their tokenizer.json differ in model, added_tokens, normalizer or pre_tokenizer"
    elif vocabularies[0] == vocabularies[1]:
        return
    else:
        difference = f"the target has {vocabularies[0]} tokens, the draft model {vocabularies[1]}"
    raise ConfigError(
        "draft_model_path",
        f"{draft.model_path} cannot draft for {target.model_path}: {difference}. A draft model needs the "
        "tokenizer of its target",
    )


def _read_vocabulary(checkpoint: Path) -> dict[str, object] | None:
    """Return the parts of tokenizer.json that map text to ids; None without a readable JSON object."""
    try:
        tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(tokenizer, dict):
        return None
    return {name: tokenizer.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}


def _joint_spec(target: KVCacheSpec, draft: KVCacheSpec) -> KVCacheSpec:
    draft_groups = [
        replace(group, layers=tuple(layer + target.num_layers for layer in group.layers))
        for group in draft.groups
    ]
    return KVCacheSpec((*target.groups, *draft_groups))


def _num_bytes(spec: KVCacheSpec | None, num_blocks: Sequence[int], block_size: int) -> int:
    assert spec is not None
    sizes = spec.bytes_per_block(block_size)
    return sum(count * size for count, size in zip(num_blocks, sizes, strict=True))
