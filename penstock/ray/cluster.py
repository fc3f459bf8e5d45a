"""Imports Ray, and connects to a Ray cluster or starts Ray on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from penstock.errors import ConfigError, MissingDependencyError
from penstock.ray.config import RayConfig
from penstock.ray.deployment import usable_cpus

_LOCAL = "local"


def import_ray(purpose: str) -> Any:
    """Return the module ``ray``.

    Args:
        purpose: the feature that requires Ray, for the error message.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise MissingDependencyError("ray", "ray", purpose)
    # By default Ray sends usage statistics over the network.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    return ray


@contextmanager
def ray_connection(config: RayConfig, purpose: str) -> Iterator[bool]:
    """Connect to the configured cluster for the duration of the ``with`` block.

    Starts Ray on this machine if the address is ``local``, or if no address is set and there is no cluster.
    An existing connection is used and stays open.

    Args:
        config: has the address of the cluster. By default, the address is ``RAY_ADDRESS`` of the environment.
        purpose: the feature that requires Ray, for the error message.

    Yields:
        Whether this call has started Ray on this machine. If so, Ray stops at the end of the block.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: the cluster cannot be reached.
    """
    ray = import_ray(purpose)
    if ray.is_initialized():
        yield False
        return
    is_local = not _join_cluster(ray, config.ray_address)
    if is_local:
        # Actors may reserve all CPUs of the machine. The extra CPU is for tasks that read and write data.
        ray.init(address=_LOCAL, include_dashboard=False, num_cpus=usable_cpus() + 1)
    try:
        yield is_local
    finally:
        ray.shutdown()


def _join_cluster(ray: Any, address: str | None) -> bool:
    """Connect to a cluster. Return False if Ray must be started on this machine instead."""
    if (address or os.environ.get("RAY_ADDRESS")) == _LOCAL:
        return False
    try:
        ray.init(address=address or "auto")
    except (ConnectionError, ValueError) as error:
        if address is None and not os.environ.get("RAY_ADDRESS"):
            return False
        cluster_address = address or os.environ["RAY_ADDRESS"]
        raise ConfigError(
            "ray_address", f"there is no Ray cluster at {cluster_address!r}: {error}"
        ) from error
    return True
