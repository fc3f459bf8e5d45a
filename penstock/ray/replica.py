"""`EngineReplica`: runs the engine of one model in a replica of a Ray Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

from penstock.assembly import close_tokenizer, load_tokenizer
from penstock.config import PipelineConfig
from penstock.driver import CPU
from penstock.engines import make_engine
from penstock.errors import PenstockError, UnavailableError
from penstock.ray.cache_log import CacheLog
from penstock.ray.deployment import usable_cpus
from penstock.ray.messages import ReplicaReport, ReplicaResults, encoder
from penstock.serve.config import ServeConfig
from penstock.serve.observability.logs import configure_logging
from penstock.serve.warmup import warm_up_model
from penstock.worker.engine_client import EngineClient
from penstock.worker.messages import ErrorRecord, Submit, command_decoder


class EngineReplica:
    """Runs a model for the HTTP processes. Ray Serve creates one object in each replica.

    The model runs in a worker process. The engine client restarts the worker process if it ends unexpectedly.

    Args:
        config: the configuration of the model.
        serve_config: the configuration of the server.
        max_queue_size: maximum number of waiting requests.
        num_cpus: number of CPUs that the replica has reserved. A replica on CPUs may use a share of the
            node's memory that is proportional to this number, because other replicas may run on the node.
        engine: an engine client that has not been launched. The default runs the model in a worker process.
        name: the id of the replica. The default is its id in Ray Serve.
    """

    def __init__(
        self,
        config: PipelineConfig,
        serve_config: ServeConfig,
        max_queue_size: int,
        num_cpus: int,
        engine: EngineClient | None = None,
        name: str | None = None,
    ) -> None:
        configure_logging(serve_config)
        self._name = name or _own_id()
        self._config = config
        self._engine = engine or make_engine(
            config,
            max_queue_size=max_queue_size,
            hang_limit=serve_config.worker_timeout,
            memory_limit=serve_config.worker_memory_limit,
            memory=_replica_memory(config, num_cpus),
        )
        self._cache_log = CacheLog()
        self._engine.watch_cache(lambda worker, events: self._cache_log.add(events, worker))
        self._decode, self._encode = command_decoder(), encoder()
        self._is_started = False

    async def reconfigure(self, user_config: object) -> None:
        """Load the model if it is not loaded. Ray Serve calls this method before the replica gets requests.

        Raises:
            PenstockError: the model cannot be loaded.
        """
        if self._is_started:
            return
        tokenizer = await asyncio.to_thread(partial(load_tokenizer, self._config))
        await self._engine.start()
        tokenizer.max_length = self._engine.info.max_length
        await warm_up_model(self._engine, tokenizer, self._config.model.pipeline_task)
        close_tokenizer(tokenizer)
        self._is_started = True

    def check_health(self) -> None:
        """Check that the worker is alive or is being restarted. Ray Serve replaces an unhealthy replica.

        Raises:
            UnavailableError: the worker has ended and is not restarted.
        """
        state = self._engine.state
        if self._is_started and state in ("stopping", "stopped"):
            raise UnavailableError(f"the worker is {state}")

    async def generate(self, frames: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
        """Run a request and yield encoded `ReplicaResults`. If the request fails, the last one has the error.

        Args:
            frames: an encoded `Submit`.
        """
        command = self._decode(frames)
        assert isinstance(command, Submit)
        generation = None
        try:
            generation = self._engine.submit(command.context)
            await generation.admitted()
            while results := await generation.next_results():
                yield self._encode(ReplicaResults(generation.num_cached_tokens, results))
        except PenstockError as error:
            yield self._encode(ReplicaResults(error=ErrorRecord.from_error(error)))
        finally:
            if generation is not None:
                generation.cancel()

    async def report(self, positions: Mapping[str, int]) -> bytes:
        """Return the encoded `ReplicaReport`.

        Args:
            positions: name of each replica -> position up to which the caller has read its `CacheLog`.
        """
        engine, changes = self._engine, self._cache_log.since(positions.get(self._name, 0))
        return self._encode(
            ReplicaReport(self._name, engine.info, engine.stats, engine.num_restarts, changes)
        )

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        """Stop the worker. Without this call, the worker ends when the process of the replica ends."""
        await self._engine.stop(0)


def _own_id() -> str:
    """Return the id of the replica that runs in this process."""
    from ray.serve import get_replica_context

    return str(get_replica_context().replica_tag)


def _replica_memory(config: PipelineConfig, num_cpus: int) -> int | None:
    """Return the bytes of host memory that a replica may use; None for a model on GPUs."""
    if not config.model.devices[0].is_host:
        return None
    share = min(num_cpus / usable_cpus(), 1.0)
    return int(CPU().stats["total_memory"] * share * config.kv_cache.device_memory_utilization)
