"""`RayConfig`: the settings of Penstock on Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any

from penstock.config import ConfigField, Rule
from penstock.config.settings import COUNT, FLAG, TEXT, check_fields, fields_of, setting
from penstock.errors import ConfigError

_POSITIVE = Rule("a number above 0", lambda value: isfinite(value) and value > 0)
_NAME = Rule("a name without spaces or slashes", lambda value: value and not set(value) & set(" /\t\n"))


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Configuration of Penstock on Ray: the cluster, replicas and actors.

    Raises:
        ConfigError: a field has an invalid value, or ``ray_max_replicas`` is below ``ray_min_replicas``.
    """

    ray: bool = setting(False, FLAG, "Run the model on Ray, in replicas or actors of a cluster.")
    ray_address: str | None = setting(
        None,
        TEXT,
        "Address of the Ray cluster, as in ray.init. The value local starts Ray on this machine. Default: "
        "RAY_ADDRESS, else a cluster that runs on this machine, else local.",
    )
    ray_min_replicas: int = setting(1, COUNT, "Minimum number of replicas or actors, each with the model.")
    ray_max_replicas: int | None = setting(
        None, COUNT, "Maximum number of replicas or actors. Default: ray-min-replicas."
    )
    ray_target_requests: float = setting(
        8.0,
        _POSITIVE,
        "Target number of running and waiting requests per replica, for the autoscaling of a server.",
    )
    ray_max_requests: int = setting(
        64,
        COUNT,
        "Maximum number of requests that run or wait in one replica; further requests wait in the ingress.",
    )
    ray_cpus: int | None = setting(
        None,
        COUNT,
        "Number of CPUs that each replica or actor reserves. For a model on CPUs, also the default of "
        "num-threads. Default: num-threads if it is set, else 1 per GPU for a model on GPUs, else the CPUs "
        "of this machine divided by ray-min-replicas, but at least tensor-parallel-size.",
    )
    ray_ingress_replicas: int = setting(
        1,
        COUNT,
        "Number of processes that serve HTTP, encode prompts and decode outputs. They reserve no CPU.",
    )
    ray_app_name: str = setting("penstock", _NAME, "Name of the application in Ray Serve.")
    ray_batch_size: int = setting(
        64,
        COUNT,
        "Rows per block of a dataset. If an actor ends, its blocks are computed again.",
    )
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Flat name -> source of the value, for fields that were set."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ray_max_replicas is not None and self.ray_max_replicas < self.ray_min_replicas:
            raise ConfigError(
                "ray_max_replicas",
                f"must be at least ray_min_replicas, {self.ray_min_replicas}, was {self.ray_max_replicas}",
            )

    @property
    def max_replicas(self) -> int:
        """The maximum number of replicas."""
        return self.ray_min_replicas if self.ray_max_replicas is None else self.ray_max_replicas

    @classmethod
    def from_given(cls, given_values: Mapping[str, tuple[Any, str]]) -> RayConfig:
        """Return the configuration for a mapping of flat name -> (converted value, source).

        Names of settings of other configuration classes are ignored.
        """
        settings = {
            field.name: given_values[field.name] for field in ray_fields() if field.name in given_values
        }
        values = {name: value for name, (value, _) in settings.items()}
        return cls(sources={name: source for name, (_, source) in settings.items()}, **values)

    def describe(self) -> list[tuple[str, Any, str]]:
        """Return name, value and source of every field, for ``--print-config``."""
        rows = []
        for config_field in ray_fields():
            value = getattr(self, config_field.attribute)
            source = "default" if value == config_field.default else "argument"
            rows.append((config_field.name, value, self.sources.get(config_field.name, source)))
        return rows


@cache
def ray_fields() -> tuple[ConfigField, ...]:
    """Return all settings of `RayConfig`.

    No other configuration class has a setting with the same name.
    """
    return fields_of(RayConfig)
