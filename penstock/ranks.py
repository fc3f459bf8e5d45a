"""Loads a model that is divided among ranks: rank 0 in the calling process, the other ranks in new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias
from weakref import finalize

from penstock.architectures.decoder import DecoderModel
from penstock.architectures.followers import Follower
from penstock.config import PipelineConfig
from penstock.distributed.placement import rank_processors
from penstock.distributed.processes import RankProcesses, RankSettings
from penstock.distributed.ranks import Ranks
from penstock.driver import Device, load_devices
from penstock.engine import InferenceSession
from penstock.errors import ConfigError
from penstock.host.processors import pin

if TYPE_CHECKING:
    from penstock.architectures.registry import SupportedArchitecture
    from penstock.pipelines.task_pipeline import AnyTaskPipeline
    from penstock.pipelines.tasks import PipelineRequirements, TaskRecord


Resolve: TypeAlias = "Callable[[PipelineConfig], tuple[SupportedArchitecture, TaskRecord]]"
"""Returns the architecture and the task of a configuration; picklable."""


def load_on_ranks(
    pipeline_inputs: PipelineRequirements, task: TaskRecord, resolve: Resolve
) -> AnyTaskPipeline:
    """Start the other ranks, load the model on all ranks, and return the pipeline of rank 0.

    Raises:
        ConfigError: the model or its settings do not allow several processes.
        PenstockError: the model cannot be loaded on a rank.
    """
    config = pipeline_inputs.config
    check_divisible(config, pipeline_inputs.architecture)
    devices = rank_devices(config)
    pins_ranks = config.parallel.pin_ranks and devices[0].is_host
    shares = rank_processors(len(devices)) if pins_ranks else ()
    settings = RankSettings(
        world_size=config.parallel.tensor_parallel_size,
        devices=tuple(device.torch_device for device in devices),
        timeout=config.parallel.collective_timeout,
        by_expert=config.parallel.expert_parallel,
        shares_memory=config.parallel.collective_transport != "torch",
        cores=tuple(share.processors for share in shares),
    )
    processes = RankProcesses(settings, partial(run_rank, config, resolve))
    try:
        if settings.cores:
            pin(settings.cores[0])
        pipeline = task.load_factory()(replace(pipeline_inputs, ranks=processes.join()))
        processes.wait_for("loaded")
    except BaseException:
        processes.close()
        raise
    pipeline.processes = processes
    finalize(pipeline, processes.close)  # ends the ranks of programs that do not close the model
    return pipeline


def run_rank(config: PipelineConfig, resolve: Resolve, ranks: Ranks) -> None:
    """Load this rank's part of the model, and run its steps until rank 0 closes the model.

    Runs in the processes of all ranks except rank 0.

    Raises:
        PenstockError: this rank's part of the model cannot be loaded.
        EOFError: rank 0 has closed the model or has ended.
        RankFailedError: another rank has ended.
    """
    architecture, _ = resolve(config)
    session = InferenceSession(
        [rank_devices(config)[ranks.rank]],
        num_threads=threads_per_rank(config),
        kernels=config.model.kernels,
        deterministic=config.deterministic,
        ranks=ranks,
    )
    model = architecture.load_pipeline_model()(config, session)
    kv = model.load_kv_manager(session, model.memory_plan.kv_cache_size)
    ranks.mark("loaded")
    Follower(model, kv).run(ranks)


def threads_per_rank(config: PipelineConfig) -> int | None:
    """Return the number of threads of each rank, at least 1; None if the configuration sets no total."""
    if config.num_threads is None:
        return None
    return max(config.num_threads // config.parallel.tensor_parallel_size, 1)


def rank_devices(config: PipelineConfig) -> Sequence[Device]:
    """Return the device of each rank.

    Raises:
        ConfigError: the number of GPUs differs from the number of ranks.
    """
    world_size, devices = config.parallel.tensor_parallel_size, load_devices(config.model.devices)
    if devices[0].is_host:
        return devices * world_size
    if len(devices) != world_size:
        raise ConfigError(
            "tensor_parallel_size",
            f"{world_size} processes need {world_size} GPUs, but devices lists {len(devices)}: use --devices "
            f"gpu:{','.join(map(str, range(world_size)))}",
        )
    return devices


def check_divisible(config: PipelineConfig, architecture: SupportedArchitecture) -> None:
    """Check that the configured model can be divided among several processes.

    Raises:
        ConfigError: the model cannot be divided, or a setting does not allow it. The message names the
            setting.
    """
    model = architecture.load_pipeline_model()
    if not (issubclass(model, DecoderModel) and model.supports_tensor_parallelism):
        raise ConfigError(
            "tensor_parallel_size",
            f"{model.__name__} ({architecture.name}, {architecture.task.option}) cannot be divided among "
            "processes: remove this setting",
        )
    if config.speculative.method == "draft_model":
        raise ConfigError(
            "tensor_parallel_size",
            "a draft model is not supported with a model that is divided among several processes: use "
            "--speculative-method ngram",
        )
