"""`TextGenerationPipeline`: a batch of contexts in, tokens out.

A call goes: claim and reserve cache blocks, draft tokens where somebody can, prepare inputs, then
``num_steps`` times forward and sample (`penstock.pipelines.runner`), then hand the tokens to the contexts and
commit full blocks to the prefix cache. Contexts change only after the last forward has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.architectures.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
from penstock.config import PipelineConfig
from penstock.driver import load_devices
from penstock.engine import InferenceSession
from penstock.errors import (
    InputError,
    InsufficientBlocksError,
    RequestFailedError,
    UnsupportedFeatureError,
)
from penstock.grammar import GrammarCompiler, acceptable_drafts, forced_tokens
from penstock.kv_cache import restart
from penstock.memory import MAX_DRAFT_ROWS
from penstock.pipelines.core import (
    PipelineTask,
    TextAndVisionContext,
    TextContext,
    TextGenerationResponse,
    TextGenerationStatus,
    TextResponse,
    TTSContext,
)
from penstock.pipelines.runner import ModelRunner, SampledTokens
from penstock.pipelines.sampling import check_logit_rules
from penstock.pipelines.speculative import DraftLengthPolicy, DraftProposer, SpeculationStats
from penstock.pipelines.task_pipeline import TaskPipeline

if TYPE_CHECKING:
    from penstock.lora import LoRAManager

__all__ = [
    "KVCacheMixin",
    "ModelInputs",
    "ModelOutputs",
    "PipelineModel",
    "TextGenerationPipeline",
]

_logger = logging.getLogger(__name__)
_MAX_FORCED_TOKENS = 64
"""Most tokens that a grammar may force in one go."""


class TextGenerationPipeline(TaskPipeline[TextContext, TextGenerationResponse]):
    """Generates tokens with any `PipelineModel`.

    Args:
        pipeline_config: the configuration.
        pipeline_model: the class of the model; the pipeline makes the one instance.
        eos_token_id: ends contexts that bring no end-of-sequence ids of their own (unless they ignore it);
            None where the tokenizer names none.
        proposer: drafts tokens for the model to verify.
        widths: how many it may draft; without it as many as it likes.
        grammars: compiles the grammars of contexts, see `ready`; without it they come with a matcher.
    """

    task = PipelineTask.TEXT_GENERATION
    context_types = (TextContext, TextAndVisionContext)
    speculation_stats: SpeculationStats

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[Any]],
        eos_token_id: int | None,
        *,
        proposer: DraftProposer | None = None,
        widths: DraftLengthPolicy | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.config = pipeline_config
        self.eos_token_id = eos_token_id
        self.proposer = proposer
        self.widths = widths
        self.grammars = grammars
        self.speculation_stats = SpeculationStats()
        session = InferenceSession(
            load_devices(pipeline_config.model.devices),
            num_threads=pipeline_config.num_threads,
            kernels=pipeline_config.model.kernels,
        )
        self.model = pipeline_model(pipeline_config, session)
        plan, kv = self.model.memory_plan, None
        self.device = self.model.devices[0].torch_device
        if isinstance(self.model, KVCacheMixin):
            planned = self.model.kv_cache_spec is not None
            kv = self.model.load_kv_manager(
                session, plan.kv_cache_size if planned else self.model.estimate_memory_footprint()
            )
        super().__init__(session, plan, kv)
        self._runner = ModelRunner(self.model, self.session, self.kv)

    def ready(self, context: TextContext) -> bool:
        """Whether a context may run: its grammar is compiled and its adapter can be loaded. Asking starts it.

        Raises:
            PenstockError: it never will.
        """
        self.session.check_process()
        self.check_context_types([context])
        if self.grammars is not None and not self.grammars.ready(context):
            return False
        adapters = self.model.lora_manager  # asked last: where it says yes, it keeps room for the context
        return adapters is None or adapters.ready(context)

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        """Runs up to ``num_steps`` steps and returns the new tokens of each context.

        Whole prompts, prompt chunks (``active_idx < end_idx``; they yield no token) and single tokens may
        stand side by side. Fewer steps run where a context would outgrow its maximum length or needs a
        look at each token: chunks, grammars, penalties, log probabilities, drafts.

        A context on which something goes wrong after the forward is missing in what is returned and stands
        in `failures`; the others have their tokens.

        Raises:
            InputError: a context cannot be served; no context has changed.
            InsufficientBlocksError: the KV cache is full; no context has changed, but those that were
                given their blocks before keep them.
            ForkedProcessError: the model was loaded before this process was forked.
        """
        self.session.check_process()
        if not batch:
            return {}
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, was {num_steps}")
        contexts = list(batch.values())
        self._check(contexts)
        for context in contexts:
            if self.kv.is_stale(context):
                restart(self.kv, context)
            self.kv.claim(context)
            self.kv.reserve(context)
        start = perf_counter()
        drafts, is_forced = self._drafts(contexts)
        proposed = perf_counter()
        num_steps = 1 if any(drafts) else self._num_steps(contexts, num_steps)
        drafts, num_steps = self._reserve_lookahead(contexts, drafts, num_steps)
        if self.eos_token_id is not None:
            for context in contexts:
                if not (context.eos_token_ids or context.ignore_eos):
                    context.eos_token_ids.add(self.eos_token_id)
        is_timed = (
            self.widths is not None
            and num_steps == 1
            and all(context.active_length == 1 for context in contexts)
        )
        sampled = self._runner.run(contexts, drafts, num_steps)
        if self.widths is not None and is_timed:
            num_rows, depth = len(contexts) + sum(map(len, drafts)), max(map(len, drafts))
            self.widths.timed(len(contexts), num_rows, depth, perf_counter() - proposed, proposed - start)
        responses = self._update_contexts(batch, sampled)
        if self.proposer is not None or any(drafts):
            self._observe(contexts, drafts, is_forced, sampled)
        return responses

    def num_steps_for(self, seconds: float) -> int:
        """How many steps of one token each to ask of `execute`, for it to take about so long.

        What Python does between two steps takes as long for short steps as for long ones, and costs most
        where they are short; several in one call share it. 1 where steps do not run as one call, or not yet.
        """
        plans = self.session.plans
        if plans is None or plans.last is None or self.proposer is not None:
            return 1
        return self._runner.num_steps_for(seconds)

    @property
    def lora_manager(self) -> LoRAManager | None:
        """The manager of LoRA adapters; None where no adapters are enabled."""
        return self.model.lora_manager

    @property
    def supports_grammars(self) -> bool:
        """Whether grammars are enabled and a library that compiles them is installed."""
        return self.grammars is not None and self.grammars.is_available

    def close(self) -> None:
        """Stop the threads that compile grammars."""
        if self.grammars is not None:
            self.grammars.close()

    def pack_pending(self) -> bool:
        """Does some of what the load has put off, see `PipelineModel.pack_pending`."""
        return self.model.pack_pending()

    def pack_all_pending(self) -> None:
        """Does all that the load has put off: for whoever measures what comes after."""
        self.model.pack_all_pending()

    def next_token(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> list[dict[str, TextResponse]]:
        """`execute` as a list with one dict a step; a context that has ended is missing from later ones."""
        responses = self.execute(batch, num_steps)
        longest = max((len(response.tokens) for response in responses.values()), default=0)
        return [
            {
                request_id: response.tokens[step]
                for request_id, response in responses.items()
                if step < len(response.tokens)
            }
            for step in range(longest)
        ]

    def release(self, context: TextContext) -> None:
        """Gives back the context's cache slot and blocks, and what others keep of it; twice is once."""
        self.kv.release(context)
        for keeper in (self.proposer, self.widths, self.model.lora_manager):
            if keeper is not None:
                keeper.release(context)

    def _check(self, contexts: Sequence[TextContext]) -> None:
        """Refuses what cannot be served before anything has changed."""
        if len({context.request_id for context in contexts}) < len(contexts):
            raise InputError("a request stands twice in the batch: give each context a request_id of its own")
        self.check_context_types(contexts)
        vocabulary, longest = self._runner.vocabulary, self.model.max_seq_len
        for context in contexts:
            status = _status(context)
            if status is not TextGenerationStatus.ACTIVE:
                raise InputError(f"request {context.request_id} has ended ({status.value})")
            if context.adapter is not None and self.model.lora_manager is None:
                raise UnsupportedFeatureError(
                    f"adapter {context.adapter!r}", "no LoRA adapters are enabled for this model"
                )
            if context.grammar is not None and context.matcher is None:
                raise UnsupportedFeatureError(
                    f"a {context.grammar.kind} grammar",
                    "no matcher was compiled for it: call set_matcher"
                    if self.grammars is None
                    else "its matcher is still being compiled: wait until the pipeline says ready(context)",
                )
            if context.current_length > longest:
                raise InputError(
                    f"request {context.request_id} has {context.current_length} tokens, "
                    f"the model's maximum length is {longest}"
                )
            if vocabulary is not None:  # else sampling finds out
                check_logit_rules(context, vocabulary)
        if self.model.lora_manager is not None:
            self.model.lora_manager.check(contexts)

    # -- How far a call goes ----------------------------------------------------------------------------

    def _num_steps(self, contexts: Sequence[TextContext], num_steps: int) -> int:
        if num_steps == 1 or any(_needs_single_steps(context) for context in contexts):
            return 1
        return max(1, min(num_steps, *map(self._room, contexts)))

    def _room(self, context: TextContext) -> int:
        """Return how many more tokens a context may get from one call, drafts accepted included."""
        room = min(self.model.max_seq_len, context.max_length) - context.current_length
        spec = self.model.kv_cache_spec
        steps_left = spec.steps_left(context.current_length) if spec is not None else None
        return room if steps_left is None else min(room, steps_left)

    def _drafts(self, contexts: Sequence[TextContext]) -> tuple[list[list[int]], list[bool]]:
        """Drafts for the contexts that can take them, and whether a grammar forces them.

        No more than fit under a context's maximum length, and under the size that steps are planned for.
        """
        drafts: list[list[int]] = [[] for _ in contexts]
        if self.proposer is None and all(context.matcher is None for context in contexts):
            return drafts, [False] * len(contexts)
        rooms = self._draft_limits(contexts)
        vocabulary = self._runner.vocabulary or 0  # unknown before the first forward
        for place, (context, room) in enumerate(zip(contexts, rooms, strict=True)):
            has_jumped = _appends_forced(context) and len(
                context.generated_tokens
            )  # then nothing is forced here
            if context.matcher is not None and vocabulary and not has_jumped:
                drafts[place] = forced_tokens(context, min(room, _MAX_FORCED_TOKENS), vocabulary)
        is_forced = [bool(draft) for draft in drafts]
        if self.proposer is None:
            return drafts, is_forced
        rooms = [0 if forced else room for room, forced in zip(rooms, is_forced, strict=True)]
        widths = rooms if self.widths is None else self.widths.widths(contexts, rooms)
        proposals = self.proposer.propose(contexts, widths)
        for place, (context, draft) in enumerate(zip(contexts, proposals, strict=True)):
            if not is_forced[place]:
                known = _known_tokens(draft[: widths[place]], vocabulary)
                drafts[place] = acceptable_drafts(context, known)
        return drafts, is_forced

    def _draft_limits(self, contexts: Sequence[TextContext]) -> list[int]:
        """The most drafts for each context: what the step can take is shared out evenly."""
        num_rows = sum(context.active_length for context in contexts)
        num_left = max(self.memory_plan.max_batch_input_tokens - num_rows, 0)
        share = min(num_left, MAX_DRAFT_ROWS) // len(contexts)
        return [
            0 if context.active_idx < context.end_idx else max(min(self._room(context) - 1, share), 0)
            for context in contexts
        ]

    def _reserve_lookahead(
        self, contexts: Sequence[TextContext], drafts: list[list[int]], num_steps: int
    ) -> tuple[list[list[int]], int]:
        """Blocks for what goes beyond one step; fewer drafts, or a single step, where there are too few."""
        if num_steps == 1 and not any(drafts):
            return drafts, 1
        kept = []
        for context, draft in zip(contexts, drafts, strict=True):
            lookahead = max(num_steps - 1, len(draft))
            while lookahead and not self._has_blocks(context, lookahead):
                num_steps, lookahead = 1, min(len(draft), lookahead // 2)
            kept.append(draft[:lookahead])
        return kept, num_steps

    def _has_blocks(self, context: TextContext, lookahead: int) -> bool:
        try:
            self.kv.reserve(context, lookahead)
        except InsufficientBlocksError:
            return False
        return True

    # -- After the forwards -----------------------------------------------------------------------------

    def _update_contexts(
        self, batch: Mapping[str, TextContext], sampled: Sequence[SampledTokens]
    ) -> dict[str, TextGenerationResponse]:
        """Gives the contexts their tokens; what goes wrong with one ends that one."""
        responses = {}
        for (request_id, context), one in zip(batch.items(), sampled, strict=True):
            try:
                if one.fault is not None:
                    raise FloatingPointError(one.fault)
                matcher = context.matcher
                if matcher is not None:
                    _check_rules(context, one.tokens)
                _advance(context, one)
                if matcher is not None:
                    self._append_forced(context)
                self.kv.commit(context)
                responses[request_id] = _response(context)
            except InputError as error:
                context.update_status(TextGenerationStatus.CANCELLED)
                self.failures[request_id] = error
            except Exception as fault:
                _logger.exception("request %s ended because of a fault", request_id)
                context.update_status(TextGenerationStatus.CANCELLED)
                reason = f": {one.fault}" if one.fault is not None else f" ({type(fault).__name__})"
                self.failures[request_id] = RequestFailedError(
                    f"request {request_id} was ended by a fault of the server{reason}; its log says more"
                )
        return responses

    def _append_forced(self, context: TextContext) -> None:
        """Appends the tokens that the grammar forces, to be computed together with the one before them."""
        is_over = _status(context).is_done or context.active_idx < context.end_idx
        if not _appends_forced(context) or is_over or not self._runner.vocabulary:
            return
        room = self._room(context) - 1  # the token that reaches the maximum length is sampled
        for token in forced_tokens(context, min(room, _MAX_FORCED_TOKENS), self._runner.vocabulary):
            context.jump_ahead(token)
            self.speculation_stats.num_forced += 1
            if _status(context).is_done:
                break

    def _observe(
        self,
        contexts: Sequence[TextContext],
        drafts: Sequence[list[int]],
        is_forced: Sequence[bool],
        sampled: Sequence[SampledTokens],
    ) -> None:
        """Counts what became of the drafts, and tells those who made them."""
        matching = [len(one.tokens) - 1 for one in sampled]
        self.speculation_stats.num_forced += sum(
            count for count, forced in zip(matching, is_forced, strict=True) if forced
        )
        drafts = [[] if forced else draft for draft, forced in zip(drafts, is_forced, strict=True)]
        accepted = [count if draft else 0 for count, draft in zip(matching, drafts, strict=True)]
        self.speculation_stats.count(drafts, accepted)
        for observer in (self.proposer, self.widths):
            if observer is not None:
                observer.observe(contexts, drafts, accepted)


def _check_rules(context: TextContext, tokens: Sequence[int]) -> None:
    """A grammar's masks come last, so what the grammar forces may be a token that the request forbids.

    What ends the output is never forbidden here: it ends where its grammar does.

    Raises:
        InputError: it is one.
    """
    rules = context.logit_rules
    if rules is None:
        return
    before = context.generated_tokens[max(0, len(context.generated_tokens) - rules.longest_prefix) :].tolist()
    for token in tokens:
        is_allowed = rules.allowed is None or token in rules.allowed
        is_banned = token in rules.banned or token in rules.banned_behind(before)
        before.append(token)
        if (not is_allowed or is_banned) and token not in context.eos_token_ids:
            raise InputError(
                f"behind {len(context.generated_tokens)} tokens the grammar allows none of those that "
                "allowed_token_ids, banned_token_ids and banned_sequences leave: change one or the other"
            )


def _advance(context: TextContext, sampled: SampledTokens) -> None:
    """Hands the sampled tokens to the context until it ends; what was sampled beyond is dropped."""
    for place, token in enumerate(sampled.tokens):
        if place and _status(context).is_done:
            break
        context.update(token, sampled.log_probabilities[place] if sampled.log_probabilities else None)


def _response(context: TextContext) -> TextGenerationResponse:
    """What there is of a context to hand out."""
    outstanding = context.outstanding_completion_tokens()
    return TextGenerationResponse(
        [TextResponse(token, logs) for token, logs in outstanding], _status(context)
    )


def _status(context: TextContext) -> TextGenerationStatus:
    """How far the language model has come, which for speech is not how far the audio has."""
    return context.speech_token_status if isinstance(context, TTSContext) else context.status


def _appends_forced(context: TextContext) -> bool:
    """Whether tokens that the grammar forces are appended at once.

    Not where each token must be looked at (log probabilities, sequences that end the output, tokens that are
    forbidden): there they are drafts, and never rejected.
    """
    params = context.sampling_params
    is_banned = params.banned_token_ids or params.banned_sequences
    is_looked_at = context.log_probabilities or context.eos_sequences or is_banned
    return context.matcher is not None and not is_looked_at and params.allowed_token_ids is None


def _needs_single_steps(context: TextContext) -> bool:
    """Whether a context must be looked at after every token."""
    return (
        context.active_idx < context.end_idx
        or context.matcher is not None
        or bool(context.log_probabilities)
        or context.sampling_params.needs_penalties
        or bool(context.sampling_params.banned_sequences)
    )


def _known_tokens(draft: list[int], vocabulary: int) -> list[int]:
    """A draft up to the first id that is no token of the model."""
    unknown = (place for place, token in enumerate(draft) if not 0 <= token < vocabulary)
    return draft[: next(unknown, len(draft))]
