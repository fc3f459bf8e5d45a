"""A server on Ray Serve. HTTP processes with the OpenAI-compatible routes call replicas of one model."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

import click

from penstock.config import PipelineConfig
from penstock.config.sources import collect_values
from penstock.errors import ConfigError, PenstockError
from penstock.ray.cluster import import_ray, ray_connection
from penstock.ray.config import RayConfig, ray_fields
from penstock.ray.deployment import (
    ROUTER_CLASS,
    Resources,
    check_supported,
    engine_options,
    ingress_options,
    max_outstanding,
    replica_config,
)
from penstock.ray.ingress import Ingress
from penstock.ray.replica import EngineReplica
from penstock.serve.config import ServeConfig, serve_fields
from penstock.serve.http.lifecycle import listening_socket

_LOG = logging.getLogger("penstock.ray")


def build_app(config: Mapping[str, object]) -> Any:
    """Return a Ray Serve application that serves a model through the OpenAI API.

    There are three ways to deploy the application: the command ``serve run penstock.ray:build_app
    model_path=./model ray_max_replicas=4``, a Serve configuration file with this ``import_path`` and the
    settings in ``args``, or ``serve.run(build_app({...}))`` in a program.

    Args:
        config: settings of the model, the server and Ray by their flat names (docs/configuration.md). Numbers
            and booleans may be texts, as in command line flags.

    Returns:
        The ``ray.serve.Application``.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: a setting is unknown or has an invalid value.
        CheckpointError: the model cannot be found.
        UnsupportedFeatureError: a server setting is not supported on Ray.
    """
    from penstock.config import config_fields

    fields = [*config_fields(), *serve_fields(), *ray_fields()]
    given_values = collect_values(fields, dict(config), "flag", {})
    return application(
        PipelineConfig.from_given(given_values),
        ServeConfig.from_given(given_values),
        RayConfig.from_given(given_values),
    )


def application(config: PipelineConfig, serve_config: ServeConfig, ray_config: RayConfig) -> Any:
    """Return the Ray Serve application for three configurations. `build_app` is the public function."""
    import_ray("penstock.ray.build_app")
    from ray import serve

    check_supported(serve_config)
    config.model.checkpoint  # noqa: B018  # raises here, not in a replica, if the model is missing
    resources = Resources.of(config, ray_config)
    engine_config = replica_config(config, resources)
    options = engine_options(engine_config, serve_config, ray_config, resources)
    options["request_router_config"] = {"request_router_class": ROUTER_CLASS}
    engine = serve.deployment(EngineReplica, **options)
    ingress = serve.deployment(serve.ingress()(Ingress), **ingress_options(serve_config, ray_config))
    replicas = engine.bind(engine_config, serve_config, ray_config.ray_max_requests, resources.num_cpus)
    return ingress.bind(
        replicas,
        config,
        serve_config,
        max_outstanding(serve_config, ray_config),
        ray_config.ray_ingress_replicas,
    )


def run_server(config: PipelineConfig, serve_config: ServeConfig, ray_config: RayConfig) -> int:
    """Deploy a model on Ray Serve.

    After SIGTERM or SIGINT, delete the application, which waits up to ``shutdown_grace`` seconds for running
    requests. Then stop Ray Serve if this call has started Ray.

    Returns:
        The exit status, 0.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: the cluster cannot be reached, or the address is invalid or in use.
        UnsupportedFeatureError: a server setting is not supported on Ray.
        PenstockError: the model cannot be found or loaded.
    """
    import_ray("penstock serve --ray")
    app = application(config, serve_config, ray_config)
    with ray_connection(ray_config, "penstock serve --ray") as is_local:
        from ray import serve

        port = serve_config.port or _free_port(serve_config.host)
        if is_local:
            listening_socket(serve_config.host, port).close()  # fails here if the port is in use
        serve.start(
            http_options={
                "host": serve_config.host,
                "port": port,
                "request_timeout_s": serve_config.request_timeout,
                "keep_alive_timeout_s": int(serve_config.keep_alive),
            }
        )
        name = ray_config.ray_app_name
        try:
            serve.run(app, name=name, route_prefix="/")
        except BaseException as error:
            serve.delete(name)
            if not isinstance(error, RuntimeError):
                raise
            raise PenstockError(f"the deployment failed: {str(error).strip().splitlines()[-1]}") from error
        stop = _stop_at_signals()
        click.echo(
            f"penstock: serving {config.model.name} at http://{serve_config.host}:{port} on Ray, "
            f"{ray_config.ray_min_replicas} to {ray_config.max_replicas} replicas",
            err=True,
        )
        stop.wait()
        _LOG.info("stopping: running requests have %s s to finish", serve_config.shutdown_grace)
        serve.delete(name)
        if is_local:
            serve.shutdown()
    return 0


def _stop_at_signals() -> threading.Event:
    """Return an event that the first SIGTERM or SIGINT sets. The second signal raises KeyboardInterrupt."""
    stop = threading.Event()

    def handle(signal_number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, handle)
    return stop


def _free_port(host: str) -> int:
    """Return a port that is currently free, because Ray Serve does not accept port 0."""
    try:
        with socket.create_server((host, 0)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise ConfigError("host", f"cannot listen at {host}: {error.strerror}") from error
