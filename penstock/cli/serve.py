"""``penstock serve``: an OpenAI-compatible server for one or several models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.models import (
    ModelFlag,
    memory_budget,
    model_configs,
    parse_model,
    served_engine,
    served_models,
)
from penstock.cli.options import (
    print_settings,
    ray_options,
    serve_options,
    several_models_options,
    take_ray_config,
)
from penstock.errors import MissingDependencyError, UnsupportedFeatureError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.ray.config import RayConfig
    from penstock.serve.config import ServeConfig
    from penstock.serve.http.lifecycle import Server
    from penstock.worker.engine_client import CacheListener

_PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
}
"""Module -> its package in the extra ``serve``."""


@click.command("serve", cls=GroupedCommand)
@serve_options
@ray_options
@several_models_options
def command(print_config: bool, **flags: object) -> int:
    """Serve models through an OpenAI-compatible API until a signal arrives.

    Give --model several times to serve several models. In --model PATH,name=value,... each setting applies to
    this model only, and memory=SIZE limits its memory. The first model is loaded at the start, every other
    model when a request names it.

    With --ray, one model is served on a Ray cluster, in replicas whose number follows the load.

    After the first SIGTERM or Ctrl-C, the server finishes the running requests. A second signal stops the
    server at once.
    """
    ray_config = take_ray_config(flags)
    models = _models(flags)
    configs, (config, *_) = zip(*model_configs(models, flags), strict=True)
    if print_config:
        _print_settings(config, configs, ray_config)
        return 0
    check_packages("penstock serve")
    if config.mcp_server:
        from penstock.serve.mcp.tool_server import check_package

        check_package(config.mcp_server)
    if ray_config.ray:
        return _run_on_ray(config, configs, ray_config)
    from penstock.worker.cache_publisher import CachePublisher

    publisher = None
    if config.cache_events is not None:
        publisher = CachePublisher(config.cache_events, config.cache_events_topic)
    try:
        return _server(config, models, configs, None if publisher is None else publisher.publish).run()
    finally:
        if publisher is not None:
            publisher.close()


def _models(flags: dict[str, object]) -> list[ModelFlag]:
    """Remove the models from the flags and return them.

    Raises:
        click.UsageError: MODEL and --model are both given and differ.
    """
    argument, model_flags = flags.pop("model"), flags.pop("model_path")
    assert isinstance(model_flags, tuple)
    if argument is not None and model_flags not in ((), (argument,)):
        flag_list = " ".join(f"--model {text!r}" for text in model_flags)
        raise click.UsageError(f"the model is given twice, as {argument!r} and as {flag_list}: give one")
    texts = model_flags or (() if argument is None else (argument,))
    return [parse_model(str(text)) for text in texts] or [ModelFlag(None, {})]


def _run_on_ray(config: ServeConfig, configs: Sequence[PipelineConfig], ray_config: RayConfig) -> int:
    """Serve one model on a Ray cluster.

    Raises:
        UnsupportedFeatureError: there are several models.
        PenstockError: the model cannot be served.
    """
    from penstock.ray.online import run_server

    if len(configs) > 1:
        raise UnsupportedFeatureError(
            f"--ray with {len(configs)} models",
            "start one server for each model, with its own --ray-app-name",
        )
    return run_server(configs[0], config, ray_config)


def _print_settings(config: ServeConfig, configs: Sequence[PipelineConfig], ray_config: RayConfig) -> None:
    """Print the settings of the server and the first model, and the settings in which other models differ."""
    first_config, *other_configs = configs
    print_settings([*config.describe(), *ray_config.describe(), *first_config.describe()])
    for other_config in other_configs:
        click.echo(f"\n{other_config.model.name}")
        print_settings(row for row in other_config.describe() if row not in first_config.describe())


def _server(
    config: ServeConfig,
    models: Sequence[ModelFlag],
    configs: Sequence[PipelineConfig],
    listener: CacheListener | None,
) -> Server:
    from penstock.serve.http.startup import Startup

    startup = Startup()
    if len(models) > 1:
        from penstock.serve.models.server import ModelsServer

        served_model_list = served_models(models, configs, config, listener)
        return ModelsServer(config, served_model_list, memory_budget(config, configs[0]), startup)
    from penstock.assembly import load_serving_tokenizer
    from penstock.serve.http.lifecycle import Server

    engine = served_engine(configs[0], config, listener, memory=models[0].memory)
    return Server(config, configs[0], engine, partial(load_serving_tokenizer, configs[0]), startup)


def check_packages(command_name: str) -> None:
    """Check that the extra ``serve`` is installed.

    Raises:
        MissingDependencyError: names the package that is missing and the command that installs it.
    """
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise MissingDependencyError(package, "serve", command_name)
