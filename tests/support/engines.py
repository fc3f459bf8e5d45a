"""A fake engine client without a process, a model or a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import CheckpointNotFoundError, InputError, UnavailableError
from penstock.pipelines.core import TextContext, TextGenerationStatus
from penstock.pipelines.core.cache_events import CacheEvent
from penstock.testing import FakeTokenizer
from penstock.worker.engine_client import CacheListener, EngineState, SleepLevel
from penstock.worker.messages import TextResult, WorkerInfo, WorkerStats
from penstock.worker.results import Generation

WORKER_INFO = WorkerInfo(
    max_length=2048,
    max_batch_size=8,
    max_batch_input_tokens=8192,
    num_blocks=100,
    block_size=32,
    vocab_size=257,
)


@dataclass
class FakeEngine:
    """An `EngineClient` that returns ``text`` for each request, one byte per iteration of the event loop.

    Tests set the attributes directly. Requests that are submitted while ``is_paused`` is true are admitted,
    but never generate tokens.
    """

    text: str = "Hello!"
    is_paused: bool = False
    state: EngineState = "ready"
    is_alive: bool = True
    info: WorkerInfo = WORKER_INFO
    stats: WorkerStats = field(default_factory=WorkerStats)
    adapters: dict[str, str] = field(default_factory=dict)
    num_outstanding: int = 0
    max_outstanding: int = 64
    num_restarts: int = 0
    contexts: list[TextContext] = field(default_factory=list)
    """All submitted contexts."""
    cancelled_ids: list[str] = field(default_factory=list)
    """The ids of all cancelled requests."""
    calls: list[str] = field(default_factory=list)
    """The names of the called lifecycle and control methods; `stop` and `sleep` with the first argument."""
    start_error: Exception | None = None
    """Raised by `start`."""
    control_error: Exception | None = None
    """Raised by `sleep`, `reload`, `reset_prefix_cache`, `start_profile` and `stop_profile`."""
    listeners: list[CacheListener] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _end_futures: list[asyncio.Future[None]] = field(default_factory=list)

    def submit(self, context: TextContext) -> Generation:
        if self.state != "ready":
            raise UnavailableError(f"the engine is {self.state}")
        self.contexts.append(context)
        self.num_outstanding += 1
        generation = Generation(context.request_id, self._cancel)
        if self.is_paused:
            generation.admit(0)
        else:
            task = asyncio.create_task(self._generate(context, generation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return generation

    def _cancel(self, request_id: str) -> None:
        self.cancelled_ids.append(request_id)
        self.num_outstanding -= 1
        self._report_end()

    def request_ended(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end_futures.append(future)
        return future

    def _report_end(self) -> None:
        for future in self._end_futures:
            if not future.done():
                future.set_result(None)
        self._end_futures.clear()

    async def _generate(self, context: TextContext, generation: Generation) -> None:
        generation.admit(0)
        tokens = [*self.text.encode(), FakeTokenizer.EOS]
        max_new_tokens = (context.max_length or self.info.max_length) - len(context.prompt_tokens)
        for num_tokens, token in enumerate(tokens, 1):
            await asyncio.sleep(0)
            if generation.is_done:
                return
            status = TextGenerationStatus.ACTIVE
            if token == FakeTokenizer.EOS:
                status = TextGenerationStatus.END_OF_SEQUENCE
            elif num_tokens == max_new_tokens:
                status = TextGenerationStatus.MAXIMUM_LENGTH
            step_tokens = [] if token == FakeTokenizer.EOS else [token]
            if status.is_done:
                self.num_outstanding -= 1
                self._report_end()
            generation.add(TextResult(context.request_id, step_tokens, status))
            if status.is_done:
                return

    async def load_adapter(self, name: str, path: str) -> None:
        if "missing" in path:
            raise CheckpointNotFoundError(path, "does not exist")
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise InputError(f"{name} is not loaded")

    def launch(self) -> None:
        self.calls.append("launch")

    async def start(self) -> None:
        self.calls.append("start")
        if self.start_error is not None:
            raise self.start_error

    async def stop(self, grace: float) -> None:
        self.calls.append(f"stop {grace}")
        self.state = "stopped"

    def watch_cache(self, listener: CacheListener) -> None:
        self.listeners.append(listener)

    def report(self, *events: CacheEvent) -> None:
        """Report events of the prefix cache to the listeners."""
        for listener in self.listeners:
            listener(0, events)

    async def reset_prefix_cache(self) -> None:
        self._control("reset_prefix_cache")

    async def start_profile(self) -> None:
        self._control("start_profile")

    async def stop_profile(self) -> None:
        self._control("stop_profile")

    async def sleep(self, level: SleepLevel, grace: float) -> None:
        self._control(f"sleep {level}")
        self.state = "asleep"

    async def wake_up(self) -> None:
        self.calls.append("wake_up")
        if self.state == "asleep":
            self.state = "ready"

    def _control(self, call: str) -> None:
        self.calls.append(call)
        if self.control_error is not None:
            raise self.control_error

    async def reload(self, grace: float) -> None:
        self._control("reload")

    @property
    def workers(self) -> Sequence[FakeEngine]:
        return (self,)
