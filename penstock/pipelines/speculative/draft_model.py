"""Drafts by a second, smaller model that follows each text in a KV cache of its own.

::

    text of the context      t0 t1 t2 t3 t4 t5 | d0 d1 d2          d: drafted
    in the draft's cache     t0 t1 t2 t3 t4 t5 | d0 d1             the last draft is never computed
                             `-- computed ---'

    the target accepts d0, d1 and samples x:  t0 .. t5 d0 d1 x
                             `-- computed --------'             one row, x, is left to catch up with

The draft model samples with the seed and the positions of the context, and so with the very random numbers
that the target will use: where the two agree on the distribution they agree on the token. It drafts within
the context's grammar, so that no draft is lost to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from penstock.architectures.model import KVCacheMixin, PipelineModel
from penstock.config import LoRAConfig, ModelConfig, PipelineConfig, SpeculativeConfig
from penstock.errors import ConfigError, InsufficientBlocksError
from penstock.grammar import going_ahead, grammar_bitmask
from penstock.kv_cache import KVCacheManager, KVCacheSpec, claim
from penstock.memory import estimate_adapters_size, plan_memory, wanted_block_size
from penstock.pipelines.core import TextContext
from penstock.pipelines.runner import ModelRunner
from penstock.pipelines.sampling import Sampler, adjust_logits

if TYPE_CHECKING:
    from penstock.engine import InferenceSession


@dataclass(slots=True)
class _DraftState:
    """A context's text as the draft model knows it."""

    context: TextContext
    text: TextContext
    """The same tokens, with a slot in the draft's cache; never any drafts but while they are made."""
    drafted: list[int] = field(default_factory=list)
    """What was drafted behind the text last time; all but the last are in the cache."""

    @property
    def num_computed(self) -> int:
        """Leading tokens whose keys and values are in the draft's cache, but the last token at most."""
        return self.text.start_idx

    def catch_up(self) -> bool:
        """Takes the tokens that the context has gained; False where it has another text by now.

        Tokens that were drafted just so are in the cache already.
        """
        new, text = self.context.all_tokens, self.text
        known = text.end_idx
        if len(new) < known or new[known - 1] != text.tokens[known - 1]:
            return False
        text.set_token_indices(active_idx=known)
        for token in new[known:].tolist():
            text.jump_ahead(token)
        if self.drafted:
            gained = new[known : known + len(self.drafted) - 1].tolist()
            matching = 0
            while matching < len(gained) and gained[matching] == self.drafted[matching]:
                matching += 1
            text.set_token_indices(start_idx=min(known + matching, text.end_idx - 1))
            self.drafted = []
        return True


class DraftModelProposer:
    """Lets a draft model continue each text, greedily or sampled as the context asks.

    It keeps up with prompts chunk by chunk, in steps no larger than the target's. A context for which its
    cache has no blocks, which it has not caught up with or which is longer than it can read gets no drafts;
    nothing ever fails for want of a draft.

    Args:
        config: the draft model's configuration, see `share_memory`.
        model: its class.
        session: the target's session: both run on one thread, one after the other.
        vocabulary: tokens of the target model.
    """

    def __init__(
        self,
        config: PipelineConfig,
        model: type[PipelineModel[Any]],
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
        self._followers: dict[str, _DraftState] = {}  # the one unused for longest first

    def propose(self, contexts: Sequence[TextContext], rooms: Sequence[int]) -> list[list[int]]:
        places: dict[str, int] = {}
        batch: list[_DraftState] = []
        num_left = self.model.memory_plan.max_batch_input_tokens
        for place, (context, room) in enumerate(zip(contexts, rooms, strict=True)):
            if room > 0 or context.active_idx < context.end_idx:
                follower = self._follow(context)
                if self._prepare(follower, room, num_left, contexts):
                    num_left -= follower.text.active_length
                    places[context.request_id] = place
                    batch.append(follower)
        drafts: list[list[int]] = [[] for _ in contexts]
        for follower in self._draft(batch, [rooms[places[f.context.request_id]] for f in batch]):
            drafts[places[follower.context.request_id]] = list(follower.drafted)
        return drafts

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        """Says on each context how far the draft model lags behind the target; it looks at tokens itself."""
        for context in contexts:
            follower = self._followers.get(context.request_id)
            if follower is None or follower.context is not context or not follower.catch_up():
                context.set_draft_offset(context.start_idx)
            else:
                context.set_draft_offset(max(context.start_idx - follower.num_computed, 0))

    def release(self, context: TextContext) -> None:
        follower = self._followers.pop(context.request_id, None)
        if follower is not None:
            self.kv.release(follower.text)

    # -- Following --------------------------------------------------------------------------------------

    def _follow(self, context: TextContext) -> _DraftState:
        """The follower of a context, with its text as it is now."""
        follower = self._followers.pop(context.request_id, None)
        if follower is not None and not (follower.context is context and follower.catch_up()):
            self.kv.release(follower.text)
            follower = None
        if follower is None:
            text = TextContext(
                prompt="",
                max_length=context.max_length,
                tokens=context.all_tokens,
                request_id=context.request_id,
                cache_salt=context.cache_salt,
                token_hash_overrides=context.token_hash_overrides,
            )
            follower = _DraftState(context, text)
        self._followers[context.request_id] = follower
        return follower

    def _prepare(
        self, follower: _DraftState, room: int, num_left: int, contexts: Sequence[TextContext]
    ) -> bool:
        """Sets the rows to compute next, and gets their blocks; False where there is nothing to compute."""
        text, end = follower.text, follower.context.active_idx
        if num_left == 0 or end > self._longest(follower):
            return False
        claim(self.kv, text)
        if text.start_idx >= end:
            return False  # its cache knows more of this prompt than the target's
        text.set_token_indices(active_idx=min(end, text.start_idx + num_left))
        lookahead = self._width(follower, room) - 1 if text.active_idx == text.end_idx else 0
        return self._reserve(text, max(lookahead, 0), contexts)

    def _width(self, follower: _DraftState, room: int) -> int:
        """How many tokens to draft: all but the last of them must fit in what the model can read."""
        return max(min(room, self._longest(follower) - follower.text.end_idx + 1), 0)

    def _longest(self, follower: _DraftState) -> int:
        return min(self.model.max_seq_len, follower.context.max_length)

    def _reserve(self, text: TextContext, lookahead: int, contexts: Sequence[TextContext]) -> bool:
        """Blocks for the next rows; those who do not run now have to give theirs."""
        running = {context.request_id for context in contexts}
        idle = [follower for name, follower in self._followers.items() if name not in running]
        while True:
            try:
                self.kv.reserve(text, lookahead)
                return True
            except InsufficientBlocksError:
                if not idle:
                    return False
                self.release(idle.pop(0).context)

    # -- Drafting ---------------------------------------------------------------------------------------

    def _draft(self, batch: list[_DraftState], rooms: Sequence[int]) -> list[_DraftState]:
        """Computes the rows that are set, then drafts; returns the followers that have drafts."""
        if not batch:
            return []
        logits = self._runner.forward([follower.text for follower in batch])
        drafting, rows = [], []
        for row, (follower, room) in enumerate(zip(batch, rooms, strict=True)):
            text = follower.text
            is_whole = text.active_idx == text.end_idx
            text.set_token_indices(start_idx=min(text.active_idx, text.end_idx - 1), active_idx=text.end_idx)
            self.kv.commit(text)
            if is_whole and self._width(follower, room) > 0:
                drafting.append((follower, self._width(follower, room)))
                rows.append(row)
        drafted = [follower for follower, _ in drafting]
        logits = logits[rows]
        with ExitStack() as stack:
            goes_on = {f.context.request_id: stack.enter_context(going_ahead(f.context)) for f in drafted}
            while drafting:
                self._take([follower for follower, _ in drafting], logits)
                drafting = [
                    (follower, width)
                    for follower, width in drafting
                    if goes_on[follower.context.request_id](follower.drafted[-1])
                    and len(follower.drafted) < width
                ]
                if drafting:
                    for follower, _ in drafting:
                        follower.text.jump_ahead(follower.drafted[-1])
                        follower.text.set_token_indices(start_idx=follower.text.end_idx - 1)
                    logits = self._runner.forward([follower.text for follower, _ in drafting])
        for follower in drafted:
            follower.text.rollback(len(follower.drafted) - 1)
        return drafted

    def _take(self, batch: Sequence[_DraftState], logits: Tensor) -> None:  # [B, V]
        """Samples the next draft of each, as the target will sample the token in its place."""
        contexts = [follower.context for follower in batch]
        sequences = np.arange(len(batch))
        positions = np.array([follower.text.end_idx for follower in batch])
        bitmask = None
        if logits.shape[-1] == self._vocabulary:
            so_far = [follower.drafted for follower in batch]
            logits = adjust_logits(logits, contexts, sequences, positions, so_far)
            bitmask = grammar_bitmask(contexts, sequences, self._vocabulary)
            bitmask = None if bitmask is None else bitmask.to(logits.device)
        sampler = Sampler.for_batch([context.sampling_params for context in contexts], logits.device)
        tokens = sampler(self._session.ops, logits, None, positions, bitmask)
        # A row that is no distribution drafts any token: a wrong draft is no harm.
        for follower, token in zip(batch, tokens.clamp(min=0).tolist(), strict=True):
            follower.drafted.append(token)


# -- Loading ---------------------------------------------------------------------------------------------


def draft_config(config: PipelineConfig) -> PipelineConfig:
    """The configuration of the draft model that a configuration names, before memory is shared out."""
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
    model: type[PipelineModel[Any]],
    draft: type[PipelineModel[Any]],
    *,
    free_memory: int,
) -> tuple[PipelineConfig, PipelineConfig]:
    """Plans target and draft model as one, in which the draft's cache is one more group of layers.

    Args:
        config: the configuration of the target.
        model: its class.
        draft: the class of the draft model.
        free_memory: of all devices together, in bytes, before anything is loaded.

    Returns:
        The configurations of both, in which each has its share.

    Raises:
        ConfigError: the two do not have the same tokenizer.
        InsufficientMemoryError: they do not fit together.
    """
    configs = (config, draft_config(config))
    check_tokenizers(configs[0].model, configs[1].model)
    classes = (model, draft)
    specs = [
        cls.kv_spec(one, one.model.huggingface_config) for cls, one in zip(classes, configs, strict=True)
    ]
    if specs[0] is None or specs[1] is None:
        raise ConfigError(
            "draft_model_path", "a model without a KV cache can neither draft nor be drafted for"
        )
    own = len(specs[0].groups)
    plan = plan_memory(
        config,
        _joined(specs[0], specs[1]),
        model_max_length=model.calculate_max_seq_len(config, config.model.huggingface_config),
        weights_size=sum(cls.estimate_weights_size(one) for cls, one in zip(classes, configs, strict=True)),
        activation_size=max(  # they run one after the other
            cls.estimate_activation_memory(one, one.model.huggingface_config)
            for cls, one in zip(classes, configs, strict=True)
        ),
        free_memory=free_memory,
        adapters_size=estimate_adapters_size(config, model.tensor_names(config.model.huggingface_config)),
    )
    longest = draft.calculate_max_seq_len(configs[1], configs[1].model.huggingface_config)
    lengths = (plan.max_length, min(plan.max_length, longest))
    shares = (plan.num_blocks[:own], plan.num_blocks[own:])
    target, drafting = (
        replace(
            one,
            model=replace(one.model, max_length=length),
            kv_cache=replace(one.kv_cache, memory=_num_bytes(spec, blocks, wanted_block_size(config))),
            max_batch_size=plan.max_batch_size,
            max_batch_input_tokens=plan.max_batch_input_tokens,
        )
        for one, spec, length, blocks in zip(configs, specs, lengths, shares, strict=True)
    )
    return target, drafting


def check_tokenizers(target: ModelConfig, draft: ModelConfig) -> None:
    """Refuses a draft model whose token ids mean something else.

    Raises:
        ConfigError: says where the two differ.
    """
    vocabularies = [one.huggingface_config.vocabulary_size for one in (target, draft)]
    known = [_vocabulary_of(one.checkpoint) for one in (target, draft)]
    if known[0] is not None and known[1] is not None:
        if known[0] == known[1]:
            return  # matrices of different sizes are padding then
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


def _vocabulary_of(checkpoint: Path) -> dict[str, Any] | None:
    """What decides which id is which text, of a tokenizer file that can be read."""
    try:
        tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(tokenizer, dict):
        return None
    return {name: tokenizer.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}


def _joined(target: KVCacheSpec, draft: KVCacheSpec) -> KVCacheSpec:
    shifted = [
        replace(group, layers=tuple(layer + target.num_layers for layer in group.layers))
        for group in draft.groups
    ]
    return KVCacheSpec((*target.groups, *shifted))


def _num_bytes(spec: KVCacheSpec | None, num_blocks: Sequence[int], block_size: int) -> int:
    assert spec is not None
    sizes = spec.bytes_per_block(block_size)
    return sum(count * size for count, size in zip(num_blocks, sizes, strict=True))
