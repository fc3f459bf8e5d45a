"""`TextGenerationPipeline`: a batch of contexts to generated tokens.

One call does the following steps:

1. claim the contexts and reserve cache blocks, unless the scheduler has done it;
2. draft tokens if the pipeline speculates or a grammar forces tokens;
3. launch ``num_steps`` forwards with sampling (`penstock.pipelines.runner`);
4. collect the tokens, pass them to the contexts and commit full blocks to the prefix cache.

Steps 1 to 3 are ``launch``, step 4 is ``collect``. Only ``collect`` adds tokens to contexts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.architectures.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
from penstock.config import PipelineConfig
from penstock.driver import load_devices
from penstock.engine import InferenceSession
from penstock.errors import (
    InputError,
    RequestFailedError,
    UnsupportedFeatureError,
)
from penstock.grammar import GrammarCompiler, acceptable_drafts, forced_tokens
from penstock.host.memory import PrefaultedMemory
from penstock.kv_cache import (
    ReservedBatch,
    claim,
    reserve_drafts,
    reserve_steps,
    tokens_left,
)
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
from penstock.pipelines.runner import LaunchHandle, ModelRunner, SampledTokens
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


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A launched batch whose tokens were not collected yet."""

    batch: Mapping[str, TextContext]
    drafts: list[list[int]]
    is_forced: list[bool]
    """Whether a grammar forces the drafts of a context."""
    launched: LaunchHandle | None
    """None for an empty batch."""
    proposal_seconds: float
    launched_at: float


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
        prefaulted: memory for packed weights.
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
        prefaulted: PrefaultedMemory | None = None,
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
            prefaulted=prefaulted,
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
        self.kv.max_length = self.model.max_seq_len
        self.runner = ModelRunner(self.model, self.session, self.kv)

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
        """Run up to ``num_steps`` steps and return the new tokens of each context.

        Whole prompts, prompt chunks (``active_idx < end_idx``; they yield no token) and single tokens may be
        in one batch. `reserve_steps` decides how many steps run, unless the batch is a `ReservedBatch`. With
        drafts one step runs.

        A context that fails after the forward has no output and is in `failures`; the others have their
        tokens.

        Raises:
            InputError: a context cannot be served; no context has changed.
            InsufficientBlocksError: the KV cache is full. No context has changed, but contexts that were
                given blocks before keep them.
            ForkedProcessError: the model was loaded before this process was forked.
        """
        return self.collect(self.launch(batch, num_steps))

    def launch(self, batch: Mapping[str, TextContext], num_steps: int = 1) -> BatchHandle:
        """Start a batch; see `execute` for parameters and errors.

        Returns:
            A handle for `collect`. Handles of batches without common contexts are independent: a batch may be
            launched while another one is not collected yet.
        """
        self.session.check_process()
        if not batch:
            return BatchHandle(batch, [], [], None, 0.0, 0.0)
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, was {num_steps}")
        contexts = list(batch.values())
        self._check(contexts)
        if not isinstance(batch, ReservedBatch):
            for context in contexts:
                claim(self.kv, context)
            num_steps = reserve_steps(self.kv, contexts, num_steps)
        begin = perf_counter()
        drafts, is_forced = self._drafts(contexts)
        if any(drafts):
            num_steps = 1
            drafts = [
                draft[: reserve_drafts(self.kv, context, len(draft))]
                for context, draft in zip(contexts, drafts, strict=True)
            ]
        proposed = perf_counter()
        if self.eos_token_id is not None:
            for context in contexts:
                if not (context.eos_token_ids or context.ignore_eos):
                    context.eos_token_ids.add(self.eos_token_id)
        launched = self.runner.launch(contexts, num_steps, drafts=drafts)
        return BatchHandle(batch, drafts, is_forced, launched, proposed - begin, proposed)

    def collect(self, handle: BatchHandle) -> dict[str, TextGenerationResponse]:
        """Return the new tokens of a launched batch, after its contexts have taken them."""
        if handle.launched is None:
            return {}
        batch, drafts, contexts = handle.batch, handle.drafts, list(handle.batch.values())
        sampled = self.runner.collect(handle.launched)
        is_timed = (
            self.widths is not None
            and handle.launched.num_steps == 1
            and all(context.active_length == 1 for context in contexts)
        )
        if self.widths is not None and is_timed:
            num_rows, depth = len(contexts) + sum(map(len, drafts)), max(map(len, drafts))
            forward = perf_counter() - handle.launched_at
            self.widths.timed(len(contexts), num_rows, depth, forward, handle.proposal_seconds)
        responses = self._update_contexts(batch, sampled)
        if self.proposer is not None or any(drafts):
            self._observe(contexts, drafts, handle.is_forced, sampled)
        return responses

    def num_steps_for(self, seconds: float) -> int:
        """Return how many steps to request from `execute`, from the configuration or from a time budget.

        Without ``max_num_steps`` in the configuration, estimate how many decode steps take ``seconds``.
        Several steps in one call share the time that Python takes between calls. The estimate is 1 if steps
        do not run as one call, or have not yet, and with a draft proposer.
        """
        if self.config.max_num_steps is not None:
            return self.config.max_num_steps
        plans = self.session.plans
        if plans is None or plans.last is None or self.proposer is not None:
            return 1
        return self.runner.num_steps_for(seconds)

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
        vocabulary, longest = self.runner.vocabulary, self.model.max_seq_len
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

    # -- Drafts -----------------------------------------------------------------------------------------

    def _room(self, context: TextContext) -> int:
        """Return how many more tokens a context may get from one call, accepted drafts included."""
        left = tokens_left(self.kv, context)
        assert left is not None, "the pipeline limits the length of sequences"
        return left

    def _drafts(self, contexts: Sequence[TextContext]) -> tuple[list[list[int]], list[bool]]:
        """Drafts for the contexts that can take them, and whether a grammar forces them.

        No more than fit under a context's maximum length, and under the size that steps are planned for.
        """
        drafts: list[list[int]] = [[] for _ in contexts]
        if self.proposer is None and all(context.matcher is None for context in contexts):
            return drafts, [False] * len(contexts)
        rooms = self._draft_limits(contexts)
        vocabulary = self.runner.vocabulary or 0  # unknown before the first forward
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
                responses[request_id] = context.outstanding_response()
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
        if not _appends_forced(context) or is_over or not self.runner.vocabulary:
            return
        room = self._room(context) - 1  # the token that reaches the maximum length is sampled
        for token in forced_tokens(context, min(room, _MAX_FORCED_TOKENS), self.runner.vocabulary):
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


def _known_tokens(draft: list[int], vocabulary: int) -> list[int]:
    """A draft up to the first id that is no token of the model."""
    unknown = (place for place, token in enumerate(draft) if not 0 <= token < vocabulary)
    return draft[: next(unknown, len(draft))]
