"""The interface between the server and the workers that run the model."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol, TypeAlias

from penstock.pipelines.core import RequestContext
from penstock.worker.messages import WorkerInfo, WorkerStats
from penstock.worker.results import Generation

EngineState: TypeAlias = Literal["starting", "ready", "restarting", "stopping", "stopped"]


class EngineClient(Protocol):
    """The only interface of the workers that the server knows.

    `WorkerClient` implements it for one worker, `WorkerRouter` for several. All methods run on the event
    loop and never block it. `Generation.cancel` cancels a request.
    """

    @property
    def state(self) -> EngineState:
        """The state of the engine. Only a ``ready`` engine accepts requests."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the model is loaded and a worker responds. Stays true while the engine drains."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """The model and the limits that a worker reported when it had loaded. Needs a worker that started."""
        ...

    @property
    def stats(self) -> WorkerStats:
        """The newest statistics from the workers."""
        ...

    @property
    def adapters(self) -> dict[str, str]:
        """The loaded LoRA adapters, name to path."""
        ...

    @property
    def num_outstanding(self) -> int:
        """The number of submitted requests that have not ended."""
        ...

    @property
    def max_outstanding(self) -> int:
        """The number of requests that may run and wait together."""
        ...

    @property
    def num_restarts(self) -> int:
        """The number of times that a worker ended unexpectedly."""
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

        ``num_outstanding`` is lower then. The future is also completed when a worker ends.
        """
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter. A restarted worker loads it again.

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

    def launch(self) -> None:
        """Launch the workers. Needs no event loop. Does nothing if they are launched already."""
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
