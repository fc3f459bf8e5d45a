"""`SimulatedWorker`: the engine's scheduler and KV cache, with a pipeline that only adds up the times of its
steps and runs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from penstock.bench.simulation.clock import Clock
from penstock.bench.simulation.costs import ClusterCosts, StepCostTable, StepShape
from penstock.dtype import DType
from penstock.kv_cache.manager import KVCacheManager
from penstock.kv_cache.spec import KVCacheSpec, KVGroup
from penstock.pipelines.core import RequestContext, TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler
from penstock.testing import FakePipeline
from penstock.worker.engine_client import CacheListener
from penstock.worker.messages import Admission, RequestResult, StepResults, WorkerInfo, WorkerStats
from penstock.worker.outputs import result_message
from penstock.worker.results import Generation

_LATENCY_BUDGET = 0.02
"""Maximum seconds of decode steps in one call of the pipeline, like
`penstock.assembly.STREAMING_LATENCY_BUDGET`."""
_MAX_STEPS = 8
"""Maximum number of steps in one call of the pipeline, as in `penstock.pipelines.runner`."""
_READY_POLL_SECONDS = 0.004
"""Virtual seconds between calls of `Scheduler.step` while no context is ready, as in a worker process."""
_VOCAB_SIZE = 32_000


class TimedPipeline(FakePipeline):
    """A pipeline without a model, which adds up the time that its steps would take.

    Args:
        costs: the formula for the time of a step.
        kv: the KV cache.
    """

    def __init__(self, costs: StepCostTable, kv: KVCacheManager) -> None:
        super().__init__(_next_token, kv=kv)
        self._costs = costs
        self._decode_seconds = 0.0
        self.seconds = 0.0
        """Total seconds of all steps so far."""

    def num_steps_for(self, seconds: float) -> int:
        """Return how many steps like the last decode step fit into ``seconds``, from 1 to `_MAX_STEPS`.

        Returns 1 before the first decode step.
        """
        if not self._decode_seconds:
            return 1
        return max(1, min(int(seconds / self._decode_seconds), _MAX_STEPS))

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        outputs = super().execute(batch, num_steps)
        self.batches.clear()
        return outputs

    def _step(self, batch: Mapping[str, TextContext]) -> None:
        running = [context for context in batch.values() if not context.is_done]
        if running:
            seconds = self._costs.step_seconds(StepShape.from_contexts(running))
            self.seconds += seconds
            if all(context.active_length == 1 for context in running):
                self._decode_seconds = seconds
        super()._step(batch)


def _next_token(context: TextContext) -> int:
    """Return a token that depends on the position and the prompt, so that answers to different prompts
    differ.
    """
    return int(context.tokens[context.current_length * 7 % len(context.prompt_tokens)] + 1) % _VOCAB_SIZE


class SimulatedWorker:
    """A worker in virtual time, with all members of `EngineClient` that `WorkerRouter` uses.

    Args:
        clock: the virtual time.
        costs: the times of steps and messages, and the limits of the worker.
        send: called when the report of a step arrives at the router. The arguments are the report and the
            function that processes it.
    """

    state = "ready"

    def __init__(
        self,
        clock: Clock,
        costs: ClusterCosts,
        send: Callable[[StepResults, Callable[[StepResults], None]], None],
    ) -> None:
        limits = costs.limits
        spec = KVCacheSpec((KVGroup((0,), 1, 1, DType.float16),))
        # On the meta device, tensors have no memory. Blocks are counted, but no keys are stored.
        kv = KVCacheManager(spec, [limits.num_blocks + 1], limits.block_size, device=torch.device("meta"))
        kv.max_length = limits.max_length
        self._pipeline = TimedPipeline(costs.step, kv)
        self._scheduler: Scheduler[TextContext, TextGenerationResponse] = Scheduler(
            self._pipeline,
            max_batch_size=limits.max_batch_size,
            max_batch_input_tokens=limits.max_batch_input_tokens,
            clock=lambda: self._pipeline.seconds,
        )
        self._clock = clock
        self._message_seconds = costs.message_seconds
        self._send = send
        self._generations: dict[str, Generation] = {}
        self._listener: CacheListener | None = None
        self._is_busy = False
        self._inbox: list[TextContext] = []
        self._contexts: dict[str, TextContext] = {}
        self.busy_seconds = 0.0
        """Total virtual seconds of steps so far."""
        self.info = WorkerInfo(
            max_length=limits.max_length,
            max_batch_size=limits.max_batch_size,
            max_batch_input_tokens=limits.max_batch_input_tokens,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            vocab_size=_VOCAB_SIZE,
            prefix_limits=[],
        )
        self.stats = WorkerStats()

    # -- The client --------------------------------------------------------------------------------------

    def watch_cache(self, listener: CacheListener) -> None:
        """Register a listener for the events of the prefix cache."""
        self._listener = listener
        self._scheduler.kv.record_events()

    def submit(self, context: RequestContext) -> Generation:
        """Send a request to the worker."""
        assert isinstance(context, TextContext)
        generation = Generation(context.request_id, lambda request_id: None)
        self._generations[context.request_id] = generation
        self._clock.call_after(self._message_seconds, lambda: self._receive(context))
        return generation

    # -- The worker --------------------------------------------------------------------------------------

    def _receive(self, context: TextContext) -> None:
        self._inbox.append(context)
        if not self._is_busy:
            self._step()

    def _step(self) -> None:
        """Run one step of the scheduler. The results are sent after the virtual time of the step."""
        for context in self._inbox:
            self._scheduler.submit(context)
            self._contexts[context.request_id] = context
        self._inbox.clear()
        scheduler, pipeline = self._scheduler, self._pipeline
        self._is_busy = scheduler.has_work
        if not self._is_busy:
            return
        start = pipeline.seconds
        outputs = scheduler.step(pipeline.num_steps_for(_LATENCY_BUDGET))
        if scheduler.failures:
            raise next(iter(scheduler.failures.values()))
        seconds = pipeline.seconds - start
        self.busy_seconds += seconds
        if not seconds:  # no context ran: all wait for a prefix that another context computes
            self._clock.call_after(_READY_POLL_SECONDS, self._step)
            return
        report = StepResults(
            WorkerStats(),
            [Admission(context.request_id, context.num_cached_tokens) for context in scheduler.admitted],
            [result for item in outputs.items() if (result := self._result(*item)) is not None],
            cache_events=scheduler.kv.take_events(),
        )

        def end() -> None:
            self._clock.call_after(self._message_seconds, lambda: self._send(report, self._deliver))
            self._step()

        self._clock.call_after(seconds, end)

    def _result(self, request_id: str, output: TextGenerationResponse) -> RequestResult | None:
        context = self._contexts[request_id]
        if output.is_done:
            del self._contexts[request_id]
        return result_message(context, output)

    def _deliver(self, report: StepResults) -> None:
        """Pass the cache events of a step's report to the router, and the results to the requests."""
        if report.cache_events and self._listener is not None:
            self._listener(0, report.cache_events)
        for admission in report.admissions:
            self._generations[admission.request_id].admit(admission.num_cached_tokens)
        for result in report.results:
            self._generations[result.request_id].add(result)
            if result.status.is_done:
                del self._generations[result.request_id]
