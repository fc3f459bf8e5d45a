"""Computes the options of Ray Serve deployments and Ray actors. Does not import Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config import PipelineConfig
from penstock.driver import DeviceSpec
from penstock.errors import ConfigError, UnsupportedFeatureError
from penstock.host.processors import divide_processors
from penstock.ray.config import RayConfig
from penstock.serve.config import ServeConfig

ENGINE_DEPLOYMENT = "engine"
"""Name of the deployment whose replicas run the model."""
INGRESS_DEPLOYMENT = "ingress"
"""Name of the deployment that serves HTTP."""
ROUTER_CLASS = "penstock.ray.request_router:PreferredReplicaRouter"
"""Import path of the class that Ray Serve uses as request router."""
_HEALTH_CHECK_PERIOD = 5.0
"""Seconds between two health checks of a replica."""
_MAX_CONSTRUCTOR_RETRIES = 3
"""Number of failed starts of a replica after which the deployment fails.

Most causes of failed starts, such as a missing file, are permanent.
"""
_MAX_INGRESS_REQUESTS = 10_000
"""Maximum number of concurrent requests in a replica of the HTTP deployment."""
_MIN_QUEUE_SIZE = 64
"""Minimum default of ``max_queue_size``, the number of waiting requests."""
_LOGGING = {"enable_access_log": False}  # the ingress writes Penstock's access log


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a replica or an actor reserves."""

    num_cpus: int
    num_gpus: int

    @classmethod
    def of(cls, config: PipelineConfig, ray: RayConfig) -> Resources:
        """Return the resources of a replica or an actor.

        Raises:
            ConfigError: a replica on CPUs has fewer CPUs than the model has processes.
        """
        devices = config.model.devices
        num_gpus = 0 if devices[0].device_type == "cpu" else len(set(devices))
        num_ranks = config.parallel.tensor_parallel_size
        num_cpus = ray.ray_cpus or config.num_threads
        if num_cpus is None and num_gpus:
            num_cpus = num_gpus
        if num_cpus is None:
            num_cpus = max(usable_cpus() // ray.ray_min_replicas, num_ranks)
        if num_cpus < num_ranks and not num_gpus:
            raise ConfigError(
                "ray_cpus",
                f"must be at least tensor_parallel_size, {num_ranks}, was {num_cpus}: each process of the "
                "model needs one CPU",
            )
        return cls(num_cpus, num_gpus)

    @property
    def options(self) -> dict[str, object]:
        """The resources as options of an actor."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, within the limit of its container."""
    (cpu_share,) = divide_processors(1)
    return cpu_share.num_threads


def replica_config(config: PipelineConfig, resources: Resources) -> PipelineConfig:
    """Return the configuration of one replica, with its devices and its number of threads.

    Inside a replica, only the GPUs that it has reserved are visible, with numbers from 0.
    """
    devices = config.model.devices
    if resources.num_gpus:
        device_type = devices[0].device_type
        devices = tuple(DeviceSpec(number, device_type) for number in range(resources.num_gpus))
    return replace(
        config,
        num_threads=config.num_threads or (None if resources.num_gpus else resources.num_cpus),
        model=replace(config.model, devices=devices),
    )


def engine_options(
    config: PipelineConfig, serve: ServeConfig, ray: RayConfig, resources: Resources
) -> dict[str, object]:
    """Return the ``serve.deployment`` options of the deployment whose replicas run the model.

    The processes of a model with tensor parallelism communicate through shared memory, so they must run on
    one node. The resources of these processes form one bundle of a placement group, because Ray places a
    bundle on a single node.
    """
    options: dict[str, object] = {
        "name": ENGINE_DEPLOYMENT,
        "ray_actor_options": resources.options,
        "max_ongoing_requests": ray.ray_max_requests,
        "graceful_shutdown_timeout_s": serve.shutdown_grace,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": _HEALTH_CHECK_PERIOD,
        "health_check_timeout_s": max(serve.worker_timeout, 2 * _HEALTH_CHECK_PERIOD),
        "max_constructor_retry_count": _MAX_CONSTRUCTOR_RETRIES,
        "logging_config": _LOGGING,
        "user_config": {},  # Ray Serve then calls `EngineReplica.reconfigure`, which starts the engine
    }
    if config.parallel.is_divided:
        bundle = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
        options["placement_group_bundles"] = [{name: count for name, count in bundle.items() if count}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if ray.max_replicas == ray.ray_min_replicas:
        options["num_replicas"] = ray.ray_min_replicas
    else:
        options["autoscaling_config"] = {
            "min_replicas": ray.ray_min_replicas,
            "max_replicas": ray.max_replicas,
            "target_ongoing_requests": ray.ray_target_requests,
        }
    return options


def ingress_options(serve: ServeConfig, ray: RayConfig) -> dict[str, object]:
    """Return the ``serve.deployment`` options of the deployment that serves HTTP."""
    return {
        "name": INGRESS_DEPLOYMENT,
        "num_replicas": ray.ray_ingress_replicas,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": _MAX_INGRESS_REQUESTS,
        "logging_config": _LOGGING,
        "graceful_shutdown_timeout_s": serve.shutdown_grace,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": _MAX_CONSTRUCTOR_RETRIES,
    }


def max_outstanding(serve: ServeConfig, ray: RayConfig) -> int:
    """Return the maximum number of running and waiting requests of one HTTP process, in all replicas.

    The process refuses further requests.
    """
    queue = serve.max_queue_size or max(4 * ray.ray_max_requests, _MIN_QUEUE_SIZE)
    return ray.max_replicas * ray.ray_max_requests + queue


def check_supported(serve: ServeConfig) -> None:
    """Raise if a server setting is not supported on Ray, where replicas run on several nodes.

    Raises:
        UnsupportedFeatureError: names the setting.
    """
    reasons = {
        "state_dir": "a replica may move to another node, which does not have the folder",
        "cache_events": "the replicas run on several nodes, and the ingress routes by cached prefixes",
        "profile_dir": "the replicas run on several nodes: use Ray's profiling",
        "model_memory": "a server on Ray has one model: deploy several applications",
    }
    for name, reason in reasons.items():
        if getattr(serve, name) is not None:
            raise UnsupportedFeatureError(f"--{name.replace('_', '-')} with --ray", reason)
