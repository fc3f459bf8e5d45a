"""`TextGenerationPipeline`: generates tokens for a batch of contexts.

One call does the following steps:

1. give each context a slot and its cached prefix (`claim`), and reserve cache blocks, unless the scheduler
   has done both;
2. draft tokens if the pipeline speculates or a grammar forces tokens;
3. launch up to ``num_steps`` forwards with sampling (`penstock.pipelines.runner`);
4. collect the tokens, pass them to the contexts and commit full blocks to the prefix cache.

Steps 1 to 3 are ``launch``, step 4 is ``collect``. Only ``collect`` adds tokens to contexts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
from penstock.config import PipelineConfig
from penstock.driver import load_devices
from penstock.engine import InferenceSession
from penstock.errors import (
    InputError,
    RequestFailedError,
)
from penstock.grammar import GrammarCompiler
from penstock.host.memory import PrefaultedMemory
from penstock.kv_cache import (
    ReservedBatch,
    claim,
    reserve_drafts,
    reserve_steps,
)
from penstock.pipelines.context_rules import (
    append_tokens,
    check_context,
    check_sampled_tokens,
)
from penstock.pipelines.core import (
    PipelineTask,
    TextAndVisionContext,
    TextContext,
    TextGenerationResponse,
    TextGenerationStatus,
    TextResponse,
)
from penstock.pipelines.drafting import append_forced, draft_limits, draft_tokens, report_drafts
from penstock.pipelines.overlap import OverlappedSteps
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


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A launched batch whose tokens are not collected yet."""

    batch: Mapping[str, TextContext]
    drafts: list[list[int]]
    is_forced: list[bool]
    """For each context, whether its grammar forces its drafts."""
    launch: LaunchHandle | None
    """None for an empty batch."""
    proposal_seconds: float
    """Duration of drafting."""
    launched_at: float
    """Time of the launch in seconds."""


class TextGenerationPipeline(TaskPipeline[TextContext, TextGenerationResponse]):
    """Generates tokens with a `PipelineModel`.

    Args:
        pipeline_config: the configuration.
        pipeline_model: the class of the model; the pipeline creates the instance.
        eos_token_id: end-of-sequence id that is added to contexts without end-of-sequence ids, unless they
            have ``ignore_eos``; None adds no id.
        proposer: drafts tokens for the model to verify.
        draft_lengths: limits the number of drafts; None sets no limit.
        grammars: compiles the grammars of contexts, see `ready`. If None, contexts with a grammar must
            already have a matcher.
        prefaulted: memory for packed weights.
        session: devices and kernels; by default a new session with ``prefaulted``.
    """

    task = PipelineTask.TEXT_GENERATION
    context_types: ClassVar[tuple[type[TextContext], ...]] = (TextContext, TextAndVisionContext)
    speculation_stats: SpeculationStats

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[TextContext]],
        eos_token_id: int | None,
        *,
        proposer: DraftProposer | None = None,
        draft_lengths: DraftLengthPolicy | None = None,
        grammars: GrammarCompiler | None = None,
        prefaulted: PrefaultedMemory | None = None,
        session: InferenceSession | None = None,
    ) -> None:
        self.config = pipeline_config
        self.eos_token_id = eos_token_id
        self.proposer = proposer
        self.draft_lengths = draft_lengths
        self.grammars = grammars
        self.speculation_stats = SpeculationStats()
        session = session or InferenceSession(
            load_devices(pipeline_config.model.devices),
            num_threads=pipeline_config.num_threads,
            kernels=pipeline_config.model.kernels,
            prefaulted=prefaulted,
            deterministic=pipeline_config.deterministic,
        )
        self.model = pipeline_model(pipeline_config, session)
        self.model.measure_memory()
        plan, kv = self.model.memory_plan, None
        self.device = self.model.devices[0].torch_device
        if isinstance(self.model, KVCacheMixin):
            is_planned = self.model.kv_cache_spec is not None
            cache_size = plan.kv_cache_size if is_planned else self.model.estimate_memory_footprint()
            kv = self.model.load_kv_manager(session, cache_size)
        super().__init__(session, plan, kv)
        self.kv.max_length = self.model.max_seq_len
        self.runner = ModelRunner(self.model, self.session, self.kv)

    def ready(self, context: TextContext) -> bool:
        """Return whether the context can be scheduled.

        Starts compiling the grammar of the context if needed. If the result is True, a slot is reserved for
        the adapter of the context.

        Raises:
            PenstockError: the context can never be scheduled.
        """
        self.session.check_process()
        self.check_context_types([context])
        if self.grammars is not None and not self.grammars.ready(context):
            return False
        adapters = self.model.lora_manager  # checked last: `ready` reserves a slot if it returns True
        return adapters is None or adapters.ready(context)

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        """Run up to ``num_steps`` steps and return the new tokens of each context.

        A batch may contain whole prompts, prompt chunks (``active_idx < end_idx``; they yield no token) and
        decoding contexts. `reserve_steps` decides how many steps run, unless the batch is a `ReservedBatch`.
        With drafts, one step runs. The error of a context that fails after the forward is in `failures`, and
        the result contains the tokens of all other contexts.

        Raises:
            PenstockError: a context cannot be served. No context has received a token.
            InsufficientBlocksError: the KV cache has too few free blocks or recurrent states. No context has
                received a token, but contexts keep the slots and blocks that they have already received.
            ForkedProcessError: the model was loaded before this process was forked.
        """
        return self.collect(self.launch(batch, num_steps))

    def launch(self, batch: Mapping[str, TextContext], num_steps: int = 1) -> BatchHandle:
        """Launch a batch; see `execute` for parameters and errors.

        Returns:
            A handle for `collect`. If two batches have no common context, the second batch may be launched
            before the first batch is collected.
        """
        self.session.check_process()
        if not batch:
            return BatchHandle(batch, [], [], None, 0.0, 0.0)
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, was {num_steps}")
        contexts = list(batch.values())
        self._check_batch(contexts)
        if not isinstance(batch, ReservedBatch):
            for context in contexts:
                claim(self.kv, context)
            num_steps = reserve_steps(self.kv, contexts, num_steps)
        drafting_started_at = perf_counter()
        drafts, is_forced = self._draft(contexts)
        if any(drafts):
            num_steps = 1
            drafts = [
                draft[: reserve_drafts(self.kv, context, len(draft))]
                for context, draft in zip(contexts, drafts, strict=True)
            ]
        launched_at = perf_counter()
        self._set_end_tokens(contexts)
        launch = self.runner.launch(contexts, num_steps, drafts=drafts)
        proposal_seconds = launched_at - drafting_started_at
        return BatchHandle(batch, drafts, is_forced, launch, proposal_seconds, launched_at)

    def collect(self, handle: BatchHandle) -> dict[str, TextGenerationResponse]:
        """Return the new tokens of a launched batch, after updating its contexts with them.

        The error of a context that fails is in `failures`; the result does not contain this context.
        """
        if handle.launch is None:
            return {}
        batch, drafts, contexts = handle.batch, handle.drafts, list(handle.batch.values())
        sampled = self.runner.collect(handle.launch)
        is_timed = (
            self.draft_lengths is not None
            and handle.launch.num_steps == 1
            and all(context.active_length == 1 for context in contexts)
        )
        if self.draft_lengths is not None and is_timed:
            num_rows, longest_draft = len(contexts) + sum(map(len, drafts)), max(map(len, drafts))
            forward_seconds = perf_counter() - handle.launched_at
            self.draft_lengths.record_step(num_rows, longest_draft, forward_seconds, handle.proposal_seconds)
        responses = self._take_tokens(batch, sampled)
        if self.proposer is not None or any(drafts):
            num_matching = [len(result.tokens) - 1 for result in sampled]
            observers = [observer for observer in (self.proposer, self.draft_lengths) if observer is not None]
            report_drafts(contexts, drafts, handle.is_forced, num_matching, self.speculation_stats, observers)
        return responses

    def num_steps_for(self, seconds: float) -> int:
        """Return how many steps to request from `execute`, from the configuration or from a time budget.

        Returns ``max_num_steps`` of the configuration if it is set. Otherwise returns 1 if the pipeline has a
        draft proposer, if steps are not compiled, or if the last step did not run as a compiled step. In all
        other cases, returns the estimated number of decode steps that fit into ``seconds``.
        """
        if self.config.max_num_steps is not None:
            return self.config.max_num_steps
        graphs = self.session.graphs
        if graphs is None or graphs.last_graph is None or self.proposer is not None:
            return 1
        return self.runner.num_steps_for(seconds)

    @property
    def overlapped_steps(self) -> OverlappedSteps | None:
        """Launches a step while the previous step runs; None if steps cannot overlap.

        Steps cannot overlap if the back end is synchronous, if the pipeline has a draft proposer, if several
        ranks divide the model, or if ``overlap_steps`` of the configuration is False. The scheduler then
        calls `execute`.
        """
        queue = self.session.queue
        can_overlap = self.proposer is None and self.session.ranks is None and self.config.overlap_steps
        if queue is None or not can_overlap:
            return None

        def check(contexts: Sequence[TextContext]) -> None:
            self._check_batch(contexts)
            self._set_end_tokens(contexts)

        return OverlappedSteps(self.runner, self.model, queue, check=check, take_tokens=self._take_tokens)

    @property
    def lora_manager(self) -> LoRAManager | None:
        """The manager of LoRA adapters; None if adapters are not enabled."""
        return self.model.lora_manager

    @property
    def image_counts(self) -> tuple[int, int]:
        """The number of encoded images, and the number of hits in the encoder cache."""
        images = self.runner.images
        return (0, 0) if images is None else (images.cache.num_encoded, images.cache.num_hits)

    @property
    def supports_grammars(self) -> bool:
        """Whether grammars are enabled and a library that compiles them is installed."""
        return self.grammars is not None and self.grammars.is_available

    def close(self) -> None:
        """Stop the threads that compile grammars, and the other ranks."""
        if self.grammars is not None:
            self.grammars.close()
        super().close()

    def prepare_next(self) -> bool:
        if self.model.pack_pending() or super().prepare_next():
            return True
        return self.proposer is not None and self.proposer.prefault_next_pages()

    def pack_all_pending(self) -> None:
        """Pack all lazily packed weights, for example before a measurement."""
        self.model.pack_all_pending()

    def next_token(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> list[dict[str, TextResponse]]:
        """Return the tokens of `execute` as one dict per position.

        Dict i has token i of each context that has more than i new tokens.
        """
        responses = self.execute(batch, num_steps)
        max_tokens = max((len(response.tokens) for response in responses.values()), default=0)
        return [
            {
                request_id: response.tokens[step]
                for request_id, response in responses.items()
                if step < len(response.tokens)
            }
            for step in range(max_tokens)
        ]

    def release(self, context: TextContext) -> None:
        """Free the cache blocks, adapter and draft state of a context. Does nothing if they are freed."""
        self.kv.release(context)
        for component in (self.proposer, self.draft_lengths, self.model.lora_manager):
            if component is not None:
                component.release(context)

    def discard_cache(self) -> None:
        super().discard_cache()
        if self.proposer is not None:
            self.proposer.discard_cache()

    def _check_batch(self, contexts: Sequence[TextContext]) -> None:
        """Check that all contexts can be served, before any state changes.

        Raises:
            PenstockError: a context cannot be served.
        """
        if len({context.request_id for context in contexts}) < len(contexts):
            raise InputError("a request id occurs twice in the batch: give each context a unique request_id")
        self.check_context_types(contexts)
        vocab_size = self.runner.vocab_size
        for context in contexts:
            check_context(
                context,
                max_length=self.model.max_seq_len,
                has_adapters=self.model.lora_manager is not None,
                compiles_grammars=self.grammars is not None,
            )
            if vocab_size is not None:  # before the first forward, sampling checks the rules
                check_logit_rules(context, vocab_size)
        if self.model.lora_manager is not None:
            self.model.lora_manager.check(contexts)

    def _set_end_tokens(self, contexts: Sequence[TextContext]) -> None:
        """Add `eos_token_id` to contexts without end-of-sequence ids, unless they have ``ignore_eos``."""
        if self.eos_token_id is not None:
            for context in contexts:
                if not (context.eos_token_ids or context.ignore_eos):
                    context.eos_token_ids.add(self.eos_token_id)

    def _draft(self, contexts: Sequence[TextContext]) -> tuple[list[list[int]], list[bool]]:
        """Return drafts for each context, and whether its grammar forces them; see `draft_tokens`."""
        if self.proposer is None and all(context.matcher is None for context in contexts):
            return [[] for _ in contexts], [False] * len(contexts)
        limits = draft_limits(contexts, self.kv, self.memory_plan.max_batch_input_tokens)
        return draft_tokens(contexts, limits, self.proposer, self.draft_lengths, self.runner.vocab_size or 0)

    # -- Results -----------------------------------------------------------------------------

    def _take_tokens(
        self, batch: Mapping[str, TextContext], sampled: Sequence[SampledTokens]
    ) -> dict[str, TextGenerationResponse]:
        """Append the tokens to their contexts and return the new tokens.

        An error in one context ends only that context. The error is stored in `failures`.
        """
        responses = {}
        for (request_id, context), result in zip(batch.items(), sampled, strict=True):
            try:
                if result.has_no_allowed_token:
                    num_tokens = len(context.generated_tokens)
                    raise InputError(f"after {num_tokens} tokens {result.fault}: change the grammar")
                if result.fault is not None:
                    raise FloatingPointError(result.fault)
                matcher = context.matcher
                if matcher is not None:
                    check_sampled_tokens(context, result.tokens)
                append_tokens(context, result)
                if matcher is not None:
                    self.speculation_stats.num_forced += append_forced(
                        context, self.kv, self.runner.vocab_size or 0
                    )
                self.kv.commit(context)
                responses[request_id] = context.outstanding_response()
            except InputError as error:
                context.update_generation_status(TextGenerationStatus.CANCELLED)
                self.failures[request_id] = error
            except Exception as fault:
                _logger.exception("request %s ended because of an internal error", request_id)
                context.update_generation_status(TextGenerationStatus.CANCELLED)
                reason = f": {result.fault}" if result.fault is not None else f" ({type(fault).__name__})"
                self.failures[request_id] = RequestFailedError(
                    f"request {request_id} ended because of an internal error{reason}; the log shows details"
                )
        return responses
