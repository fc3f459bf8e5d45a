"""The models of a server, loaded when a request needs them. All loaded models fit into the memory budget.

    unloaded --- a request needs it ---> loaded --- another model needs its memory ---> unloaded

Models are loaded and unloaded one at a time. Before a model is unloaded, its running requests finish. New
requests for the model wait until the model is loaded again. If two models do not fit into the budget together
and both receive requests, the server loads the models alternately.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from penstock.config import PipelineConfig
from penstock.errors import ConfigError, UnknownModelError
from penstock.pipelines.core import PipelineTask
from penstock.serve.observability.logs import log_event
from penstock.serve.services import Services
from penstock.text.tokenizer import TextTokenizer
from penstock.worker.engine_client import EngineClient

_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """One of the models of a server."""

    config: PipelineConfig
    engine: EngineClient
    """The engine client; asleep while the model is not loaded."""
    load_tokenizer: Callable[[], TextTokenizer]
    memory: int
    """Bytes of host memory that the model may use."""

    num_active: int = 0
    """The number of requests that use the model now."""
    last_used: float = 0.0
    """The time of the last load or the end of the last request, from ``time.monotonic``."""
    is_loaded: bool = False
    was_loaded: bool = False
    """Whether the model has been loaded at least once."""
    is_unloading: bool = False
    """Whether the model is being unloaded, including the wait for the end of its running requests."""
    idle_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request uses the model, from the first load on."""
    services: Services | None = None
    """The services of the model's routes; set when the server is created."""
    app: ASGIApp | None = None
    """The application with the model's routes."""

    @property
    def name(self) -> str:
        """The name of the model in requests."""
        return self.config.model.name

    @property
    def task(self) -> PipelineTask:
        """The task that the model is served for."""
        return self.config.model.pipeline_task


class ModelRegistry:
    """Loads models when requests need them, and unloads models to free memory.

    Models without running requests are unloaded before models with running requests. Within each group, the
    least recently used model is unloaded first.

    Args:
        models: the models, the default first.
        budget: bytes of host memory for all loaded models.
        prepare: awaited after a model is loaded and before it receives requests.
        grace: seconds for the engine's outstanding requests to finish before the model is unloaded.

    Raises:
        ConfigError: two models have the same name, or one needs more memory than the budget.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        budget: int,
        prepare: Callable[[ServedModel], Awaitable[None]],
        grace: float,
    ) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) < len(models):
            names = [model.name for model in models]
            raise ConfigError(
                "served_model_name",
                f"two models have the same name: {', '.join(names)}: give one of them another name",
            )
        for model in models:
            if model.memory > budget:
                raise ConfigError(
                    "model_memory",
                    f"{model.name} needs {_gib(model.memory)}, and all models together may use "
                    f"{_gib(budget)}: raise --model-memory, or give the model memory=SIZE",
                )
        self._budget = budget
        self._prepare = prepare
        self._grace = grace
        self._load_lock = asyncio.Lock()

    def __iter__(self) -> Iterator[ServedModel]:
        """Iterate over the models, the default first."""
        return iter(self._models.values())

    @property
    def default(self) -> ServedModel:
        """The model for requests that name no model."""
        return next(iter(self._models.values()))

    @property
    def names(self) -> list[str]:
        """The names that a request may use: the models and their adapters."""
        return [*self._models, *(name for model in self for name in model.engine.adapters)]

    def find(self, name: str | None, task: PipelineTask | None) -> ServedModel:
        """Return the model with a name, or the model whose adapter has this name.

        Args:
            name: the name. None means the first model of the task, or the default model if no model has the
                task.
            task: the task of the route; None for routes of all tasks. Used only if ``name`` is None.

        Raises:
            UnknownModelError: there is no model or adapter of that name.
        """
        if name is None:
            return next((model for model in self if model.task is task), self.default)
        if name in self._models:
            return self._models[name]
        for model in self:
            if name in model.engine.adapters:
                return model
        raise UnknownModelError(name[:200], self.names)

    @asynccontextmanager
    async def keep_loaded(self, model: ServedModel) -> AsyncIterator[None]:
        """Keep a model loaded while the block runs. If the model is not loaded, load it first.

        Raises:
            PenstockError: the model cannot be loaded.
        """
        while not model.is_loaded or model.is_unloading:
            async with self._load_lock:
                if not model.is_loaded:
                    await self._load(model)
        model.num_active += 1
        model.idle_event.clear()
        try:
            yield
        finally:
            model.last_used = time.monotonic()
            model.num_active -= 1
            if not model.num_active:
                model.idle_event.set()

    async def stop(self) -> None:
        """Stop the workers of all models."""
        await asyncio.gather(*(model.engine.stop(0) for model in self))

    async def _load(self, model: ServedModel) -> None:
        while self._num_bytes_loaded + model.memory > self._budget:
            await self._unload(self._least_recently_used())
        started_at = time.perf_counter()
        if model.engine.state == "asleep":
            await model.engine.wake_up()
        await self._prepare(model)
        model.is_loaded = model.was_loaded = True
        model.last_used = time.monotonic()
        if not model.num_active:
            model.idle_event.set()
        seconds = round(time.perf_counter() - started_at, 1)
        log_event(_log, logging.INFO, "model loaded", model=model.name, for_s=seconds)

    async def _unload(self, model: ServedModel) -> None:
        model.is_unloading = True
        try:
            await model.idle_event.wait()
            await model.engine.sleep(2, self._grace)
            model.is_loaded = False
        finally:
            model.is_unloading = False
        log_event(_log, logging.INFO, "model unloaded", model=model.name)

    @property
    def _num_bytes_loaded(self) -> int:
        return sum(model.memory for model in self if model.is_loaded)

    def _least_recently_used(self) -> ServedModel:
        """Return the least recently used of the loaded models, preferably one without running requests."""
        loaded_models = [model for model in self if model.is_loaded]
        return min(loaded_models, key=lambda model: (model.num_active > 0, model.last_used))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
