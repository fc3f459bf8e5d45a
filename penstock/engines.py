"""The engine client of a configuration: a router for one or several worker processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from penstock.assembly import load_runtime
from penstock.config import PipelineConfig
from penstock.driver import CPU, DeviceSpec
from penstock.errors import ConfigError
from penstock.host.processors import ProcessorShare, divide_processors, pin
from penstock.worker.client import WorkerClient
from penstock.worker.router import WorkerRouter

if TYPE_CHECKING:
    from penstock.worker.process import WorkerRuntime

_LOG = logging.getLogger("penstock.worker")

LoadRuntime: TypeAlias = "Callable[[PipelineConfig], WorkerRuntime]"
"""Loads the runtime of a worker, in its process; `load_runtime` or a picklable function that calls it."""


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The resources of a worker."""

    devices: tuple[DeviceSpec, ...]
    processors: ProcessorShare | None = None
    """The processors of the worker; None if it may use all processors."""
    memory: int | None = None
    """Maximum bytes of host memory for weights, activations and KV cache; None for no limit besides
    `utilization`."""
    utilization: float | None = None
    """Fraction of the device's free memory that this worker uses; None for ``device_memory_utilization``."""


def make_engine(
    config: PipelineConfig,
    load: LoadRuntime = load_runtime,
    *,
    max_queue_size: int | None = None,
    hang_limit: float = 20.0,
    memory_limit: int | None = None,
    memory: int | None = None,
    is_asleep: bool = False,
) -> WorkerRouter:
    """Return the engine client of a configuration. Its workers are not started yet.

    Args:
        config: the configuration; ``data_parallel_size`` is the number of workers.
        load: loads the runtime of a worker, in its process.
        max_queue_size: see `WorkerClient`; applies to each worker.
        hang_limit: see `WorkerClient`.
        memory_limit: see `WorkerClient`; applies to each worker.
        memory: bytes of host memory for all workers together; GPUs ignore it. By default, the workers
            together use ``device_memory_utilization`` of the free memory.
        is_asleep: whether the workers are asleep at first. `wake_up` then starts the workers, not `start`.

    Raises:
        ConfigError: the devices cannot be divided among the workers.
    """
    shares = divide_resources(config, memory)

    def make_worker(number: int) -> WorkerClient:
        return WorkerClient(
            partial(load_worker_runtime, config, shares[number], load),
            max_queue_size=max_queue_size,
            hang_limit=hang_limit,
            memory_limit=memory_limit,
            is_asleep=is_asleep,
        )

    if len(shares) > 1:
        for number, share in enumerate(shares):
            _LOG.info("worker %d: %s", number, share.processors)
    return WorkerRouter([make_worker(number) for number in range(len(shares))], make_worker=make_worker)


def divide_resources(config: PipelineConfig, memory: int | None = None) -> list[WorkerShare]:
    """Return the share of each worker: processors, devices and memory.

    Raises:
        ConfigError: the number of devices is neither 1 nor a multiple of the number of workers.
    """
    num_workers, devices = config.data_parallel_size, config.model.devices
    if num_workers == 1:
        return [WorkerShare(devices, memory=memory if devices[0].device_type == "cpu" else None)]
    if len(devices) > 1 and len(devices) % num_workers:
        raise ConfigError(
            "data_parallel_size",
            f"{num_workers} workers cannot divide {len(devices)} devices: give one device, or one for each "
            "worker",
        )
    utilization = config.kv_cache.device_memory_utilization
    if devices[0].device_type == "cpu":
        if memory is None:
            memory = int(CPU().stats["free_memory"] * utilization)
        return [
            WorkerShare(devices, processors, memory // num_workers)
            for processors in divide_processors(num_workers)
        ]
    devices_per_worker = len(devices) // num_workers
    return [
        WorkerShare(
            devices[number * devices_per_worker : (number + 1) * devices_per_worker]
            if devices_per_worker
            else devices,
            processors,
            utilization=None if devices_per_worker else utilization / num_workers,
        )
        for number, processors in enumerate(divide_processors(num_workers))
    ]


def load_worker_runtime(config: PipelineConfig, share: WorkerShare, load: LoadRuntime) -> WorkerRuntime:
    """Load the runtime of a worker with the resources of its share.

    Runs in the worker's process, before torch is loaded.
    """
    num_threads = config.num_threads
    if share.processors is not None:
        pin(share.processors.processors)
        num_threads = num_threads or share.processors.num_threads
    utilization = share.utilization or config.kv_cache.device_memory_utilization
    if share.memory is not None:
        free = max(CPU().stats["free_memory"], 1)
        utilization = min(utilization, share.memory / free) if share.utilization is None else utilization
    return load(
        replace(
            config,
            data_parallel_size=1,
            num_threads=num_threads,
            model=replace(config.model, devices=share.devices),
            kv_cache=replace(config.kv_cache, device_memory_utilization=utilization),
        )
    )
