"""The composition root: builds tokenizer, pipeline, scheduler and worker runtime from a configuration.

`LLM` and the worker process call the functions of this module. The functions look up tasks and architectures
in a `Catalog`. No code of this module is specific to a task.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.architectures.registry import PIPELINE_REGISTRY, PipelineRegistry, SupportedArchitecture
from penstock.architectures.transformers_record import is_in_transformers, transformers_architecture
from penstock.config import PipelineConfig
from penstock.driver import CPU
from penstock.errors import ConfigError, PenstockError, UnknownArchitectureError, UnsupportedTaskError
from penstock.host.memory import PrefaultedMemory
from penstock.pipelines.tasks import TASKS, PipelineRequirements, TaskRecord, TaskTable
from penstock.scheduler import AnyScheduler, OverlappedScheduler, Scheduler

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.architectures.network_model import NetworkModel
    from penstock.config import ModelConfig
    from penstock.kernels import Ops, PackedLinear
    from penstock.pipelines.core import PipelineTask
    from penstock.pipelines.task_pipeline import AnyTaskPipeline
    from penstock.weights import Weights
    from penstock.worker.process import WorkerRuntime

_MIN_PREFAULTED = 64 << 20
"""Minimum size of packed weights to prefault, in bytes. Page faults of smaller sizes take negligible time."""
_PREFAULT_SHARE = 0.7
"""Maximum fraction of the free memory that is prefaulted. The memory planner may reject larger weights."""
_STARTUP_PHASES = ("tokenizer", "libraries", "model")
STREAMING_LATENCY_BUDGET = 0.02
"""Default time limit of a scheduler step in seconds. New requests wait up to this long, and streamed tokens
arrive in groups at this interval."""


@dataclass(frozen=True)
class Catalog:
    """The known architectures and tasks."""

    registry: PipelineRegistry = PIPELINE_REGISTRY
    tasks: TaskTable = field(default_factory=lambda: TASKS)

    def resolve(self, config: PipelineConfig) -> tuple[SupportedArchitecture, TaskRecord]:
        """Return the architecture and the task of the configured checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing, or its architecture is unknown.
            UnsupportedTaskError: there is no pipeline for the checkpoint's task.
            ConfigError: the architecture does not support the checkpoint's quantization.
        """
        model = config.model
        task = model.pipeline_task
        architecture = self._architecture(model, task)
        if task not in self.tasks:
            tasks = [record.option for record in self.tasks]
            raise UnsupportedTaskError(model.checkpoint, architecture.name, task.option, tasks)
        return architecture, self.tasks[task]

    def _architecture(self, model: ModelConfig, task: PipelineTask) -> SupportedArchitecture:
        """Return the architecture that ``model_impl`` selects."""
        if model.model_impl == "transformers":
            return transformers_architecture(model.huggingface_config, model.checkpoint, task)
        try:
            return self.registry.retrieve_architecture(model.huggingface_config, model.checkpoint, task=task)
        except UnknownArchitectureError as error:
            if model.model_impl == "auto" and is_in_transformers(error.architecture):
                return transformers_architecture(model.huggingface_config, model.checkpoint, task)
            raise


CATALOG = Catalog()
"""The architectures and tasks of this process."""


def load_tokenizer(config: PipelineConfig, catalog: Catalog = CATALOG) -> Any:
    """Return the tokenizer of the configured model, without importing torch.

    The model's architecture or its task determines the class. The ``max_length`` of the tokenizer is the
    checkpoint's limit. The caller sets it to the planned maximum length.

    Raises:
        CheckpointError: the model cannot be served, or its tokenizer is missing or damaged.
        ConfigError: the configured chat template is invalid.
    """
    architecture, task = catalog.resolve(config)
    options: dict[str, Any] = {
        "chat_template": config.model.chat_template,
        "special_tokens_in_content": config.model.special_tokens_in_content,
        **{name: config.value_of(name) for name in task.tokenizer_settings},
    }
    family = architecture.load_media()
    if family is not None:
        from penstock.media.tokenizer import TextAndVisionTokenizer

        return TextAndVisionTokenizer(config.model.checkpoint, family, config.vision, **options)
    return task.load_tokenizer_class(architecture)(config.model.checkpoint, **options)


def load_serving_tokenizer(config: PipelineConfig, catalog: Catalog = CATALOG) -> Any:
    """Return the tokenizer of `load_tokenizer` for the server process, which must not import torch.

    If the model reads images, this function starts the processes that prepare them. `close_tokenizer` ends
    these processes.
    """
    tokenizer = load_tokenizer(config, catalog)
    if getattr(tokenizer, "reads_images", False):  # registered tokenizers may lack this attribute
        tokenizer.use_processes()
    return tokenizer


def close_tokenizer(tokenizer: object) -> None:
    """End the processes of a tokenizer. Do nothing if it does not have the optional method ``close``."""
    close = getattr(tokenizer, "close", None)
    if close is not None:
        close()


def prefault_weights(config: PipelineConfig) -> PrefaultedMemory:
    """Start a thread that prefaults memory for packed weights, and return this memory.

    The memory is empty if the model does not pack weights at load or cannot be loaded, if its packed weights
    are in a file, if the model is divided among ranks, or if the weights are very small or may not fit.
    Callers import torch after this call, while the thread runs.
    """
    from penstock.kernels.backend import BACKENDS
    from penstock.memory import estimate_packed_size

    packed_bytes, device = 0, config.model.devices[0]
    if config.parallel.is_divided:
        return PrefaultedMemory(0)
    with suppress(PenstockError):  # `load_pipeline` reports the error
        backend = BACKENDS.candidates(device.device_type, config.model.kernels)[0]
        if device.is_host and backend.packs_weights and not config.model.packed_key.file.is_file():
            packed_bytes = estimate_packed_size(config)
    has_room = packed_bytes < CPU().stats["free_memory"] * _PREFAULT_SHARE
    return PrefaultedMemory(packed_bytes if packed_bytes > _MIN_PREFAULTED and has_room else 0)


def load_pipeline(
    config: PipelineConfig,
    tokenizer: object,
    catalog: Catalog = CATALOG,
    prefaulted: PrefaultedMemory | None = None,
) -> AnyTaskPipeline:
    """Load the configured model and return the pipeline of its task.

    Args:
        config: the configuration.
        tokenizer: the result of `load_tokenizer`.
        catalog: the architectures and tasks.
        prefaulted: memory for packed weights, the result of `prefault_weights`.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: ``data_parallel_size`` is above 1, or the encoding is not supported.
        InsufficientMemoryError: weights and the smallest permitted KV cache do not fit.
    """
    if config.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size",
            f"must be 1 for a model in this process, was {config.data_parallel_size}: use penstock serve, "
            "penstock batch run or AsyncLLM",
        )
    architecture, task = catalog.resolve(config)
    architecture.check_encoding(config.model.encoding)
    requirements = PipelineRequirements(
        config=config,
        architecture=architecture,
        tokenizer=tokenizer,
        registry=catalog.registry,
        prefaulted=prefaulted or PrefaultedMemory(),
    )
    if not config.parallel.is_divided:
        return task.load_factory()(requirements)
    from penstock.ranks import load_on_ranks

    picklable_catalog = replace(catalog, tasks=dict(catalog.tasks))
    return load_on_ranks(requirements, task, picklable_catalog.resolve)


def check_checkpoint(config: PipelineConfig) -> Any:
    """Check that the configured model can be loaded, without reading its weights. Return its tokenizer.

    Checks the architecture, the encoding, the tokenizer, and the name and shape of every tensor.

    Raises:
        CheckpointError: the model cannot be loaded; the message lists all tensors with errors.
        ConfigError: the model does not support the configured encoding, the chat template is invalid, or the
            model has no native network.
    """
    import torch

    from penstock.kernels import encoding_named
    from penstock.nn import Loader
    from penstock.weights import Weights

    tokenizer = load_tokenizer(config)
    model = _network_model_class(config)
    weights = _with_model_names(Weights.open(config.model.checkpoint, shapes_only=True), model)
    max_seq_len = model.calculate_max_seq_len(config, config.model.huggingface_config)
    with torch.no_grad():
        encoding = encoding_named(config.model.encoding)
        loader = Loader(weights, encoding.compute_dtype.value, torch.device("meta"))  # reads floats
        model.build(loader, config.model.huggingface_config, max_seq_len)
    weights.finish(model.ignored_tensors(config.model.huggingface_config))
    return tokenizer


def pack_checkpoint(config: PipelineConfig) -> Path:
    """Pack the weights of the configured model, store them for later loads, and return the path of the file.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: the back end does not pack weights, the model is divided, or it has no native network.
        OSError: the file cannot be written.
    """
    from penstock.weights.packed_weights import write_packed

    ops = _load_ops(config)
    if config.parallel.is_divided:
        raise ConfigError(
            "tensor_parallel_size", "packed weights are stored for one rank only: remove this setting"
        )
    if not ops.packs_weights:
        raise ConfigError("devices", f"the {ops.name} kernels do not pack weights: remove --pack")
    layers, _ = load_packed_layers(config, ops)
    return write_packed(config.model.packed_key, layers)


def load_packed_layers(
    config: PipelineConfig, ops: Ops | None = None, *, is_uniform: bool = False
) -> tuple[list[PackedLinear], Weights]:
    """Read and pack all linear layers of the configured model, with calibration if the encoding needs it.

    Args:
        config: the configuration.
        ops: the back end that packs; by default the back end of the configuration.
        is_uniform: whether all linear layers have the configured encoding, see `penstock.nn.Loader`.

    Returns:
        The layers in load order, and the tensors of the checkpoint under the names that the model uses.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: the model has no native network.
    """
    from penstock.driver import load_devices
    from penstock.nn import Loader
    from penstock.weights import Weights

    model = _network_model_class(config)
    ops = ops or _load_ops(config)
    weights = _with_model_names(Weights.open(config.model.checkpoint), model)
    max_seq_len = model.calculate_max_seq_len(config, config.model.huggingface_config)
    loader = Loader(
        weights,
        config.model.encoding,
        load_devices(config.model.devices)[0].torch_device,
        ops,
        lazy="calibrated",
        keep_stored=config.model.keeps_stored_layers and not is_uniform,
        is_uniform=is_uniform,
    )
    network = model.read(weights, loader, config.model.huggingface_config, max_seq_len)
    model.calibrate(config, network, loader, ops)
    return loader.layers, weights


def _load_ops(config: PipelineConfig) -> Ops:
    from penstock.driver import load_devices
    from penstock.engine import InferenceSession

    devices = load_devices(config.model.devices)
    return InferenceSession(devices, num_threads=config.num_threads, kernels=config.model.kernels).ops


def _with_model_names(weights: Weights, model: type[NetworkModel[Any]]) -> Weights:
    return weights if model.weights_adapter is None else weights.renamed(model.weights_adapter)


def _network_model_class(config: PipelineConfig) -> type[NetworkModel[Any]]:
    from penstock.architectures.network_model import NetworkModel

    architecture, _ = CATALOG.resolve(config)
    architecture.check_encoding(config.model.encoding)
    model = architecture.load_pipeline_model()
    if not issubclass(model, NetworkModel):
        raise ConfigError(
            "model_path",
            f"{architecture.name} has no native network, so its weights cannot be checked or packed",
        )
    return model


def load_scheduler(
    config: PipelineConfig, pipeline: AnyTaskPipeline, *, isolates_faults: bool = False
) -> AnyScheduler:
    """Return the scheduler of a pipeline, with the limits of its memory plan.

    Args:
        config: the configuration.
        pipeline: the pipeline of the same configuration.
        isolates_faults: whether an error ends only the requests that cause it; otherwise ``step`` raises it.
    """
    plan, overlapped = pipeline.memory_plan, pipeline.overlapped_steps
    scheduler_class = Scheduler if overlapped is None else partial(OverlappedScheduler, steps=overlapped)
    return scheduler_class(
        pipeline,
        max_batch_size=plan.max_batch_size,
        max_batch_input_tokens=plan.max_batch_input_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        whole_prompts=not pipeline.chunks_prompts,
        ready=pipeline.ready,
        isolates_faults=isolates_faults,
    )


def load_runtime(config: PipelineConfig, catalog: Catalog = CATALOG) -> WorkerRuntime:
    """Load the runtime of a worker, in the worker's process.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: the configuration does not fit the model.
        InsufficientMemoryError: weights and the smallest permitted KV cache do not fit.
    """
    times = [perf_counter()]
    with prefault_weights(config) as prefaulted:
        tokenizer = load_tokenizer(config, catalog)  # before importing torch, so that errors come early
        times.append(perf_counter())
        catalog.resolve(config)[1].load_factory()  # imports torch
        times.append(perf_counter())
        pipeline = load_pipeline(config, tokenizer, catalog, prefaulted)
    scheduler = load_scheduler(config, pipeline, isolates_faults=True)
    times.append(perf_counter())
    seconds = [end - start for start, end in pairwise(times)]
    return _make_runtime(config, pipeline, scheduler, list(zip(_STARTUP_PHASES, seconds, strict=True)))


def _make_runtime(
    config: PipelineConfig,
    pipeline: AnyTaskPipeline,
    scheduler: AnyScheduler,
    startup: list[tuple[str, float]],
) -> WorkerRuntime:
    from penstock.worker.messages import WorkerInfo, WorkerStats
    from penstock.worker.process import WorkerRuntime

    limits = pipeline.kv.prefix_limits
    plan, adapters, speculation = pipeline.memory_plan, pipeline.lora_manager, pipeline.speculation_stats
    info = WorkerInfo(
        task=pipeline.task,
        max_length=plan.max_length,
        max_batch_size=plan.max_batch_size,
        max_batch_input_tokens=plan.max_batch_input_tokens,
        num_blocks=pipeline.kv.num_blocks,
        block_size=plan.block_size,
        prefix_limits=None if limits is None else list(limits),
        vocab_size=config.model.huggingface_config.vocabulary_size,
        adapters=adapters.names() if adapters is not None else [],
        startup=startup,
        memory=plan.rows(),
        isa=pipeline.session.kernels,
        pid=os.getpid(),
        lora_enabled=adapters is not None,
        grammars_enabled=pipeline.supports_grammars,
        outputs=list(pipeline.outputs),
        embedding_size=pipeline.embedding_size,
        sample_rate=pipeline.sample_rate,
        voices=list(pipeline.voices.values()),
    )

    def add_counts(stats: WorkerStats) -> None:
        stats.num_encoded_images, stats.num_cached_images = pipeline.image_counts
        if speculation is not None:
            stats.num_draft_tokens = speculation.num_proposed
            stats.num_accepted_draft_tokens = speculation.num_accepted
            stats.num_verified_steps = speculation.num_verified_steps

    return WorkerRuntime(
        scheduler=scheduler,
        info=info,
        load_adapter=adapters.load if adapters is not None else None,
        unload_adapter=adapters.unload if adapters is not None else None,
        num_steps=lambda: pipeline.num_steps_for(STREAMING_LATENCY_BUDGET),
        add_counts=add_counts,
        prepare_next=pipeline.prepare_next,
        discard_cache=pipeline.discard_cache,
        sentinel=None if pipeline.processes is None else pipeline.processes.sentinel,
        check=None if pipeline.processes is None else pipeline.processes.check,
    )
