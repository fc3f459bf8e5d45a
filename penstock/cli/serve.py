"""``penstock serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.options import config_options, configs_from_flags, print_settings, serve_options
from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.serve.config import ServeConfig
    from penstock.worker.process import WorkerRuntime

_PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
}
"""Module -> its package in the extra ``serve``."""


@click.command("serve", cls=GroupedCommand)
@serve_options
@config_options
def command(print_config: bool, **flags: object) -> int:
    """Serve a model through an OpenAI-compatible API until a signal arrives.

    After the first SIGTERM or Ctrl-C the server finishes the running requests; the second one stops it at
    once.
    """
    pipeline_config, config = configs_from_flags(flags)
    if print_config:
        print_settings([*config.describe(), *pipeline_config.describe()])
        return 0
    check_packages("penstock serve")
    from penstock.assembly import load_serving_tokenizer
    from penstock.engines import make_engine
    from penstock.serve.http.lifecycle import Server
    from penstock.serve.http.startup import Startup
    from penstock.worker.cache_publisher import CachePublisher

    engine = make_engine(
        pipeline_config,
        partial(load_served_work, serve_config=config),
        max_queue_size=config.max_queue_size,
        hang_limit=config.worker_timeout,
        memory_limit=config.worker_memory_limit,
    )
    server = Server(
        config, pipeline_config, engine, partial(load_serving_tokenizer, pipeline_config), Startup()
    )
    if config.cache_events is None:
        return server.run()
    publisher = CachePublisher(config.cache_events, config.cache_events_topic)
    engine.watch_cache(publisher.publish)
    try:
        return server.run()
    finally:
        publisher.close()


def check_packages(what: str) -> None:
    """Check that the extra ``serve`` is installed.

    Raises:
        MissingDependencyError: names the package that is missing and the command that installs it.
    """
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise MissingDependencyError(package, "serve", what)


def load_served_work(pipeline_config: PipelineConfig, serve_config: ServeConfig) -> WorkerRuntime:
    """Load what the worker runs, in the worker's process, with the log format of the server."""
    from penstock.assembly import load_work
    from penstock.host.profiler import StepProfiler
    from penstock.serve.observability.logs import configure_logging

    configure_logging(serve_config)
    work = load_work(pipeline_config)
    if serve_config.profile_dir is None:
        return work
    return replace(work, profiler=StepProfiler(serve_config.profile_dir, f"worker-{work.info.pid}"))
