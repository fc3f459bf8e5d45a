"""The connection to a Ray cluster, or a Ray of this machine."""

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
        purpose: what needs it, for the error message.

    Raises:
        MissingDependencyError: names the extra that installs it.
    """
    if find_spec("ray") is None:
        raise MissingDependencyError("ray", "ray", purpose)
    # Ray would report usage statistics to its authors; a server does not call other servers unasked.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    return ray


@contextmanager
def connected(config: RayConfig, purpose: str) -> Iterator[bool]:
    """Connect to the cluster of the configuration while the block runs. Start Ray here if there is none.

    Yields:
        Whether this call has started Ray on this machine; it ends with the block. A connection that exists
        is used, and stays.

    Raises:
        ConfigError: the cluster cannot be reached.
    """
    ray = import_ray(purpose)
    if ray.is_initialized():
        yield False
        return
    is_local = not _joined(ray, config.ray_address)
    if is_local:
        # One more than there are: tasks that read and write data run beside actors that have all CPUs.
        ray.init(address=_LOCAL, include_dashboard=False, num_cpus=usable_cpus() + 1)
    try:
        yield is_local
    finally:
        ray.shutdown()


def _joined(ray: Any, address: str | None) -> bool:
    """Connect to a cluster; return False if Ray should start here: no address is given and there is none."""
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
