"""The connection to a Ray cluster, or to a local Ray instance."""

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
        purpose: the feature that needs Ray, for the error message.

    Raises:
        MissingDependencyError: Ray is not installed. The message names the extra.
    """
    if find_spec("ray") is None:
        raise MissingDependencyError("ray", "ray", purpose)
    # disables the usage statistics that Ray sends by default
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    return ray


@contextmanager
def ray_connection(config: RayConfig, purpose: str) -> Iterator[bool]:
    """Connect to the configured cluster during the block. Start Ray on this machine if there is no cluster.

    Yields:
        Whether this call has started Ray on this machine. Ray then ends with the block. An existing
        connection is used, and stays open.

    Raises:
        ConfigError: the cluster cannot be reached.
    """
    ray = import_ray(purpose)
    if ray.is_initialized():
        yield False
        return
    is_local = not _join_cluster(ray, config.ray_address)
    if is_local:
        # One CPU more than available, because actors may reserve all CPUs and tasks that read and write data
        # need one.
        ray.init(address=_LOCAL, include_dashboard=False, num_cpus=usable_cpus() + 1)
    try:
        yield is_local
    finally:
        ray.shutdown()


def _join_cluster(ray: Any, address: str | None) -> bool:
    """Connect to a cluster. Return False if there is no address and no cluster."""
    if (address or os.environ.get("RAY_ADDRESS")) == _LOCAL:
        return False
    try:
        ray.init(address=address or "auto")
    except (ConnectionError, ValueError) as error:
        if address is None and not os.environ.get("RAY_ADDRESS"):
            return False
        given = address or os.environ["RAY_ADDRESS"]
        raise ConfigError("ray_address", f"there is no Ray cluster at {given!r}: {error}") from error
    return True
