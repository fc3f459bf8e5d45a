"""Drafts by a second, smaller model with a separate KV cache.

::

    tokens of the context    t0 t1 t2 t3 t4 t5 | d0 d1 d2          d: drafted
    in the draft's cache     t0 t1 t2 t3 t4 t5 | d0 d1             the last draft is never computed
                             `-- computed ---'

    the target accepts d0, d1 and samples x:  t0 .. t5 d0 d1 x
                             `-- computed --------'             one row, x, is not computed yet

The draft model samples with the seed and the positions of the context, that is, with the same random numbers
as the target. If both models have the same distribution, they sample the same token. Drafts obey the
context's grammar.
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
    """The draft model's copy of a context."""

    context: TextContext
    text: TextContext
    """A copy of ``context`` with a slot in the draft cache. Contains drafts only during `propose`."""
    drafts: list[int] = field(default_factory=list)
    """The last drafts. All of them except the last are in the draft's cache."""

    @property
    def num_computed(self) -> int:
        """Number of leading tokens with KV in the draft cache; never counts the last token."""
        return self.text.start_idx

    def catch_up(self) -> bool:
        """Append the new tokens of the context. Return False if its earlier tokens have changed.

        New tokens that equal the drafts are already in the cache.
        """
        new, text = self.context.all_tokens, self.text
        known = text.end_idx
        if len(new) < known or new[known - 1] != text.tokens[known - 1]:
            return False
        text.set_token_indices(active_idx=known)
        for token in new[known:].tolist():
            text.jump_ahead(token)
        if self.drafts:
            appended = new[known : known + len(self.drafts) - 1].tolist()
            matching = 0
            while matching < len(appended) and appended[matching] == self.drafts[matching]:
                matching += 1
            text.set_token_indices(start_idx=min(known + matching, text.end_idx - 1))
            self.drafts = []
        return True


class DraftModelProposer:
    """Drafts tokens with a draft model and the sampling parameters of each context.

    It computes prompts in chunks. Its steps have at most as many tokens as the target's steps. A context gets
    no drafts if the draft cache has no blocks for it, if its prompt is not computed yet, or if it exceeds the
    draft model's maximum length. A missing draft never fails a request.

    Args:
        config: the draft model's configuration, see `share_memory`.
        model: the class of the draft model.
        session: the target's session. Both models run in the same thread, in turn.
        vocabulary: vocabulary size of the target model.
    """

    def __init__(
        self,
        config: PipelineConfig,
        model: type[PipelineModel[TextContext]],
        session: InferenceSession,
        vocabulary: int,
    ) -> None:
        self.model = model(config, session)
        if not isinstance(self.model, KVCacheMixin) or self.model.kv_cache_spec is None:
            raise ConfigError("draft_model_path", f"{model.__name__} has no KV cache, so it cannot draft")
        self.kv: KVCacheManager = self.model.load_kv_manager(session, self.model.memory_plan.kv_cache_size)
        self._runner = ModelRunner(self.model, session, self.kv)
        self._session = session
        self._vocabulary = vocabulary
        self._states: dict[str, _DraftState] = {}  # least recently used first

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        indices: dict[str, int] = {}
        batch: list[_DraftState] = []
        num_left = self.model.memory_plan.max_batch_input_tokens
        for index, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
            if limit > 0 or context.active_idx < context.end_idx:
                state = self._updated_state(context)
                if self._prepare(state, limit, num_left, contexts):
                    num_left -= state.text.active_length
                    indices[context.request_id] = index
                    batch.append(state)
        drafts: list[list[int]] = [[] for _ in contexts]
        for state in self._draft(batch, [limits[indices[f.context.request_id]] for f in batch]):
            drafts[indices[state.context.request_id]] = list(state.drafts)
        return drafts

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        """Set ``draft_offset`` of each context: the number of tokens that the draft model lags behind."""
        for context in contexts:
            state = self._states.get(context.request_id)
            if state is None or state.context is not context or not state.catch_up():
                context.set_draft_offset(context.start_idx)
            else:
                context.set_draft_offset(max(context.start_idx - state.num_computed, 0))

    def release(self, context: TextContext) -> None:
        state = self._states.pop(context.request_id, None)
        if state is not None:
            self.kv.release(state.text)

    def discard_cache(self) -> None:
        for state in self._states.values():
            self.kv.release(state.text)
        self._states.clear()
        self.kv.discard_storage()

    # -- Draft states --------------------------------------------------------------------------------------

    def _updated_state(self, context: TextContext) -> _DraftState:
        """Return the up-to-date draft state of a context."""
        state = self._states.pop(context.request_id, None)
        if state is not None and not (state.context is context and state.catch_up()):
            self.kv.release(state.text)
            state = None
        if state is None:
            text = TextContext(
                prompt="",
                max_length=context.max_length,
                tokens=context.all_tokens,
                request_id=context.request_id,
                cache_salt=context.cache_salt,
                token_hash_overrides=context.token_hash_overrides,
            )
            state = _DraftState(context, text)
        self._states[context.request_id] = state
        return state

    def _prepare(
        self, state: _DraftState, limit: int, num_left: int, contexts: Sequence[TextContext]
    ) -> bool:
        """Set the rows to compute next and reserve their blocks.

        Return False if there are no rows to compute.
        """
        text, end = state.text, state.context.active_idx
        if num_left == 0 or end > self._max_length(state):
            return False
        claim(self.kv, text)
        if text.start_idx >= end:
            return False  # the draft cache contains more of this prompt than the target's cache
        text.set_token_indices(active_idx=min(end, text.start_idx + num_left))
        lookahead = self._num_drafts(state, limit) - 1 if text.active_idx == text.end_idx else 0
        return self._reserve(text, max(lookahead, 0), contexts)

    def _num_drafts(self, state: _DraftState, limit: int) -> int:
        """Return the number of tokens to draft.

        All except the last must fit the draft model's maximum length.
        """
        return max(min(limit, self._max_length(state) - state.text.end_idx + 1), 0)

    def _max_length(self, state: _DraftState) -> int:
        return min(self.model.max_seq_len, state.context.max_length)

    def _reserve(self, text: TextContext, lookahead: int, contexts: Sequence[TextContext]) -> bool:
        """Reserve blocks for the next rows. May release states of contexts outside the batch."""
        running = {context.request_id for context in contexts}
        idle = [state for name, state in self._states.items() if name not in running]
        while True:
            try:
                self.kv.reserve(text, lookahead)
                return True
            except InsufficientBlocksError:
                if not idle:
                    return False
                self.release(idle.pop(0).context)

    # -- Drafting ---------------------------------------------------------------------------------------

    def _draft(self, batch: list[_DraftState], limits: Sequence[int]) -> list[_DraftState]:
        """Compute the rows that `_prepare` has set, then draft. Return the states with drafts."""
        if not batch:
            return []
        logits = self._runner.forward([state.text for state in batch])
        drafting, rows = [], []
        for row, (state, limit) in enumerate(zip(batch, limits, strict=True)):
            text = state.text
            is_whole = text.active_idx == text.end_idx
            text.set_token_indices(start_idx=min(text.active_idx, text.end_idx - 1), active_idx=text.end_idx)
            self.kv.commit(text)
            if is_whole and self._num_drafts(state, limit) > 0:
                drafting.append((state, self._num_drafts(state, limit)))
                rows.append(row)
        drafted = [state for state, _ in drafting]
        logits = logits[rows]
        with ExitStack() as stack:
            can_continue = {
                f.context.request_id: stack.enter_context(matcher_lookahead(f.context)) for f in drafted
            }
            while drafting:
                self._sample([state for state, _ in drafting], logits)
                drafting = [
                    (state, width)
                    for state, width in drafting
                    if can_continue[state.context.request_id](state.drafts[-1]) and len(state.drafts) < width
                ]
                if drafting:
                    for state, _ in drafting:
                        state.text.jump_ahead(state.drafts[-1])
                        state.text.set_token_indices(start_idx=state.text.end_idx - 1)
                    logits = self._runner.forward([state.text for state, _ in drafting])
        for state in drafted:
            state.text.rollback(len(state.drafts) - 1)
        return drafted

    def _sample(self, batch: Sequence[_DraftState], logits: Tensor) -> None:  # [B, V]
        """Sample the next draft of each state with the random numbers that the target will use."""
        contexts = [state.context for state in batch]
        sequences = np.arange(len(batch))
        positions = np.array([state.text.end_idx for state in batch])
        bitmask = None
        if logits.shape[-1] == self._vocabulary:
            so_far = [state.drafts for state in batch]
            logits = adjust_logits(logits, contexts, sequences, positions, so_far)
            bitmask = grammar_bitmask(contexts, sequences, self._vocabulary)
            bitmask = None if bitmask is None else bitmask.to(logits.device)
        sampler = Sampler.for_batch([context.sampling_params for context in contexts], logits.device)
        tokens = sampler(self._session.ops, logits, None, positions, bitmask)
        # Without finite logits an arbitrary token is drafted, because wrong drafts are rejected.
        for state, token in zip(batch, tokens.clamp(min=0).tolist(), strict=True):
            state.drafts.append(token)


# -- Loading ---------------------------------------------------------------------------------------------


def draft_config(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration of the draft model, without its part of the memory."""
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
    """Plan the memory of target and draft model. The draft's cache is planned as further layer groups.

    Args:
        config: the configuration of the target.
        model: the class of the target.
        draft: the class of the draft model.
        free_memory: total free bytes of all devices before loading.

    Returns:
        The configurations of target and draft with their memory.

    Raises:
        ConfigError: their tokenizers differ.
        InsufficientMemoryError: both models together do not fit.
    """
    configs = (config, draft_config(config))
    check_tokenizers(configs[0].model, configs[1].model)
    classes = (model, draft)
    specs = [
        cls.kv_spec(cfg, cfg.model.huggingface_config) for cls, cfg in zip(classes, configs, strict=True)
    ]
    if specs[0] is None or specs[1] is None:
        raise ConfigError(
            "draft_model_path", "a model without a KV cache can neither draft nor be drafted for"
        )
    own = len(specs[0].groups)
    plan = plan_memory(
        config,
        _joint_spec(specs[0], specs[1]),
        model_max_length=model.calculate_max_seq_len(config, config.model.huggingface_config),
        weights_size=sum(cls.estimate_weights_size(cfg) for cls, cfg in zip(classes, configs, strict=True)),
        activation_size=max(  # not the sum: the models run one after the other
            cls.estimate_activation_memory(cfg, cfg.model.huggingface_config)
            for cls, cfg in zip(classes, configs, strict=True)
        ),
        free_memory=free_memory,
        adapters_size=estimate_adapters_size(config, model.tensor_names(config.model.huggingface_config)),
    )
    longest = draft.calculate_max_seq_len(configs[1], configs[1].model.huggingface_config)
    lengths = (plan.max_length, min(plan.max_length, longest))
    shares = (plan.num_blocks[:own], plan.num_blocks[own:])
    target, drafting = (
        replace(
            cfg,
            model=replace(cfg.model, max_length=length),
            kv_cache=replace(cfg.kv_cache, memory=_num_bytes(spec, blocks, requested_block_size(config))),
            max_batch_size=plan.max_batch_size,
            max_batch_input_tokens=plan.max_batch_input_tokens,
        )
        for cfg, spec, length, blocks in zip(configs, specs, lengths, shares, strict=True)
    )
    return target, drafting


def check_tokenizers(target: ModelConfig, draft: ModelConfig) -> None:
    """Check that the token ids of the draft model and of the target have the same meaning.

    Raises:
        ConfigError: the token ids differ; the message describes the difference.
    """
    vocabularies = [model.huggingface_config.vocabulary_size for model in (target, draft)]
    known = [_read_vocabulary(model.checkpoint) for model in (target, draft)]
    if known[0] is not None and known[1] is not None:
        if known[0] == known[1]:
            return  # equal tokenizers: any difference in matrix size is padding
        difference = "their tokenizer.json differ in vocabulary or merges"
    elif vocabularies[0] == vocabularies[1]:
        return
    else:
        difference = f"one has {vocabularies[0]} tokens, the other {vocabularies[1]}"
    raise ConfigError(
        "draft_model_path",
        f"{draft.model_path} cannot draft for {target.model_path}: {difference}. A draft model needs the "
        "tokenizer of its target",
    )


def _read_vocabulary(checkpoint: Path) -> dict[str, object] | None:
    """Return the parts of tokenizer.json that map text to ids; None if it cannot be read."""
    try:
        tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(tokenizer, dict):
        return None
    return {name: tokenizer.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}


def _joint_spec(target: KVCacheSpec, draft: KVCacheSpec) -> KVCacheSpec:
    shifted = [
        replace(group, layers=tuple(layer + target.num_layers for layer in group.layers))
        for group in draft.groups
    ]
    return KVCacheSpec((*target.groups, *shifted))


def _num_bytes(spec: KVCacheSpec | None, num_blocks: Sequence[int], block_size: int) -> int:
    assert spec is not None
    sizes = spec.bytes_per_block(block_size)
    return sum(count * size for count, size in zip(num_blocks, sizes, strict=True))
