"""The interface between the server and the workers that run the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from penstock.pipelines.core import RequestContext
from penstock.pipelines.core.cache_events import CacheEvent
from penstock.worker.messages import WorkerInfo, WorkerStats
from penstock.worker.results import Generation

EngineState: TypeAlias = Literal["starting", "ready", "asleep", "restarting", "stopping", "stopped"]
"""`penstock.worker.supervisor` shows the transitions between the states."""

SleepLevel: TypeAlias = Literal[1, 2]
"""Memory that a sleeping worker releases. 1: the KV cache. 2: all memory of the process, including weights.
"""

CacheListener: TypeAlias = Callable[[int, Sequence[CacheEvent]], None]
"""Receives the number of a worker and the events of its prefix cache."""


class EngineClient(Protocol):
    """The only interface through which the server uses workers.

    `WorkerClient` implements the interface for one worker, `WorkerRouter` for several, and
    `penstock.ray.engine.RayEngine` for the replicas of a Ray cluster. All methods except `launch` must be
    called on the event loop. They block it only while a worker is launched or ended. `Generation.cancel`
    cancels a request.
    """

    @property
    def state(self) -> EngineState:
        """The state of the engine. Only a ``ready`` engine accepts requests."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the model is loaded and a worker responds. Can be true during a shutdown or a sleep."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """The model and the limits that a worker reported after loading. A worker must have started."""
        ...

    @property
    def stats(self) -> WorkerStats:
        """The newest statistics from the workers."""
        ...

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path of the loaded LoRA adapters."""
        ...

    @property
    def num_outstanding(self) -> int:
        """The number of submitted requests that have not ended."""
        ...

    @property
    def max_outstanding(self) -> int:
        """The maximum number of requests that run or wait."""
        ...

    @property
    def workers(self) -> Sequence[EngineClient]:
        """The clients of the individual workers, by worker number."""
        ...

    @property
    def num_restarts(self) -> int:
        """The number of times that a worker ended unexpectedly or a restart failed."""
        ...

    def submit(self, context: RequestContext) -> Generation:
        """Send a request to a worker.

        Raises:
            UnavailableError: no worker is ready.
            OverloadedError: the queue is full.
            InputError: another request with the same id is running.
        """
        ...

    def request_ended(self) -> asyncio.Future[None]:
        """Return a future that completes when a submitted request has ended after this call.

        At this time, ``num_outstanding`` no longer includes the request. The future also completes when a
        worker ends.
        """
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter. A restarted worker loads the adapter again.

        Raises:
            PenstockError: the adapter cannot be loaded, or a worker is not ready.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter.

        Raises:
            PenstockError: the adapter is unknown, or a worker is not ready.
        """
        ...

    def watch_cache(self, listener: CacheListener) -> None:
        """Register a listener for the events of the prefix caches. Must be called before the start."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Remove all cached prefixes. Running requests keep their blocks.

        Raises:
            PenstockError: a worker is not ready.
        """
        ...

    async def sleep(self, level: SleepLevel, grace: float) -> None:
        """Reject new requests, finish running requests, and release memory.

        Does nothing if the engine is asleep.

        Args:
            level: the memory that is released.
            grace: seconds after which requests that are still running fail.

        Raises:
            PenstockError: a worker is not ready, its device cannot release this memory, or a reload runs.
                Afterwards, the engine is not asleep.
        """
        ...

    async def wake_up(self) -> None:
        """Accept requests again. Load the weights if needed. Does nothing if the engine is not asleep.

        Raises:
            PenstockError: the model cannot be loaded. The engine is still asleep.
        """
        ...

    async def reload(self, grace: float) -> None:
        """Replace the workers one after the other by new workers, which read the checkpoint again.

        Args:
            grace: seconds after which the running requests of a worker fail.

        Raises:
            PenstockError: a replacement cannot start, the engine is asleep, or another reload runs.
        """
        ...

    async def start_profile(self) -> None:
        """Start recording a profile of each worker, until `stop_profile`.

        Raises:
            PenstockError: a worker is not ready or is already recording, or no folder is configured.
        """
        ...

    async def stop_profile(self) -> None:
        """Stop recording, and write the profiles.

        Raises:
            PenstockError: a worker is not ready or is not recording, or a file cannot be written.
        """
        ...

    def launch(self) -> None:
        """Launch the workers. Needs no event loop. Does nothing if the workers are already launched."""
        ...

    async def start(self) -> None:
        """Launch the workers if needed, and return when the engine is ready.

        Raises:
            PenstockError: the reason why a worker could not start. All workers are stopped then.
        """
        ...

    async def stop(self, grace: float) -> None:
        """Stop accepting requests, wait up to ``grace`` seconds for running requests, and end the workers."""
        ...
