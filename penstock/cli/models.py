"""The models of ``penstock serve``. Each flag ``--model PATH,setting=value,...`` adds one model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.cli.options import configs_from_flags
from penstock.config.settings import NUM_BYTES, read_size
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.serve.config import ServeConfig
    from penstock.serve.models.registry import ServedModel
    from penstock.worker.engine_client import CacheListener
    from penstock.worker.process import WorkerRuntime
    from penstock.worker.router import WorkerRouter

_SETTING_SEPARATOR = re.compile(r",(?=[a-z][a-z0-9_-]*=)")
_MEMORY = "memory"
_RESERVED_BYTES_PER_WORKER = 512 << 20  # bytes per worker, in addition to 1.5 times the weights


@dataclass(frozen=True, slots=True)
class ModelFlag:
    """One ``--model`` flag."""

    path: str | None
    """None if the environment, the configuration file or the default sets the model."""
    settings: Mapping[str, str]
    """Name of a setting, with ``_`` instead of ``-`` -> its text in this flag.

    These settings override the common flags.
    """
    memory: int | None = None
    """Bytes that the model may use; None if the flag does not set them."""


def parse_model(text: str) -> ModelFlag:
    """Parse ``PATH,setting=value,...``.

    ``setting`` is the name of a setting in docs/configuration.md, with ``-`` or ``_``, or ``memory``.

    >>> parse_model("./a,served-model-name=small,devices=gpu:0,1").settings
    {'served_model_name': 'small', 'devices': 'gpu:0,1'}

    Raises:
        ConfigError: a setting is given twice, or the memory is not a size.
    """
    path, *setting_texts = _SETTING_SEPARATOR.split(text)
    settings: dict[str, str] = {}
    for setting_text in setting_texts:
        name, _, value = setting_text.partition("=")
        name = name.replace("-", "_")
        if name in settings:
            raise ConfigError(name, f"is given twice in --model {text!r}")
        settings[name] = value
    memory_text = settings.pop(_MEMORY, None)
    if memory_text is None:
        return ModelFlag(path, settings)
    memory_bytes = read_size(memory_text)
    if isinstance(memory_bytes, str):
        memory_bytes = int(memory_bytes) if memory_bytes.isdecimal() else 0
    if not NUM_BYTES.is_allowed(memory_bytes):
        allowed = NUM_BYTES.allowed_values
        raise ConfigError(_MEMORY, f"must be {allowed}, was {memory_text!r} (in --model {text!r})")
    return ModelFlag(path, settings, memory_bytes)


def model_configs(
    models: Sequence[ModelFlag], flags: Mapping[str, object]
) -> list[tuple[PipelineConfig, ServeConfig]]:
    """Return the configurations of each model, from the common flags and the settings in its ``--model``.

    Raises:
        ConfigError: unknown name, wrong type or invalid value.
    """
    return [configs_from_flags({**flags, **model.settings, "model_path": model.path}) for model in models]


def served_engine(
    pipeline_config: PipelineConfig,
    config: ServeConfig,
    listener: CacheListener | None,
    *,
    memory: int | None = None,
    is_asleep: bool = False,
) -> WorkerRouter:
    """Return the engine client of one model of a server, not launched yet."""
    from penstock.engines import make_engine

    engine = make_engine(
        pipeline_config,
        partial(load_served_runtime, serve_config=config),
        max_queue_size=config.max_queue_size,
        hang_limit=config.worker_timeout,
        memory_limit=config.worker_memory_limit,
        memory=memory,
        is_asleep=is_asleep,
    )
    if listener is not None:
        engine.watch_cache(listener)
    return engine


def load_served_runtime(pipeline_config: PipelineConfig, serve_config: ServeConfig) -> WorkerRuntime:
    """Load the runtime of the worker, in the worker's process, with the log format of the server."""
    from penstock.assembly import load_runtime
    from penstock.host.profiler import StepProfiler
    from penstock.serve.observability.logs import configure_logging

    configure_logging(serve_config)
    runtime = load_runtime(pipeline_config)
    if serve_config.profile_dir is None:
        return runtime
    return replace(runtime, profiler=StepProfiler(serve_config.profile_dir, f"worker-{runtime.info.pid}"))


def served_models(
    models: Sequence[ModelFlag],
    configs: Sequence[PipelineConfig],
    config: ServeConfig,
    listener: CacheListener | None,
) -> list[ServedModel]:
    """Return the models of a server. All engines except the first are asleep.

    A flag without ``memory`` downloads its model if needed, because the estimate needs the weights' sizes.
    """
    from penstock.assembly import load_serving_tokenizer
    from penstock.serve.models.registry import ServedModel

    memory_sizes = [
        flag.memory or estimate_memory(model_config)
        for flag, model_config in zip(models, configs, strict=True)
    ]
    return [
        ServedModel(
            config=model_config,
            engine=served_engine(model_config, config, listener, memory=size, is_asleep=number > 0),
            load_tokenizer=partial(load_serving_tokenizer, model_config),
            memory=size,
        )
        for number, (model_config, size) in enumerate(zip(configs, memory_sizes, strict=True))
    ]


def estimate_memory(config: PipelineConfig) -> int:
    """Return the bytes that a model without ``memory=`` may use.

    Each worker may use 1.5 times the size of the weights plus 512 MiB.
    """
    size = sum(header.num_bytes for header in config.model.tensor_headers.values())
    return config.data_parallel_size * (size + size // 2 + _RESERVED_BYTES_PER_WORKER)


def memory_budget(config: ServeConfig, pipeline_config: PipelineConfig) -> int:
    """Return the bytes that all loaded models may use together.

    The value is ``--model-memory``, or by default ``--device-memory-utilization`` of the free host memory.
    """
    from penstock.driver import CPU

    if config.model_memory is not None:
        return config.model_memory
    return int(CPU().stats["free_memory"] * pipeline_config.kv_cache.device_memory_utilization)
