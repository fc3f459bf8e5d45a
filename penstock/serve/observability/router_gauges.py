"""Gauges under the names that routers outside the server expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from penstock.worker.engine_client import EngineClient


def parse_gauges(given: Sequence[str]) -> dict[str, str]:
    """Return the names of gauges, by quantity.

    >>> parse_gauges(["waiting=vllm:num_requests_waiting"])
    {'waiting': 'vllm:num_requests_waiting'}
    """
    return dict(text.partition("=")[::2] for text in given)


def kv_usage(engine: EngineClient) -> float:
    """Return the used part of the KV cache, from 0 to 1; 0 for a model without one."""
    stats = engine.stats
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


def router_gauges(engine: EngineClient, names: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the gauges that `names` configures, by quantity.

    The gauge of ``adapters`` has the value 1 and the labels that the inference extension of the Kubernetes
    Gateway API reads: ``running_lora_adapters``, ``waiting_lora_adapters`` and ``max_lora``.
    """
    for quantity, name in names.items():
        match quantity:
            case "waiting":
                yield GaugeMetricFamily(name, "Requests that wait for admission", engine.stats.num_waiting)
            case "running":
                yield GaugeMetricFamily(name, "Requests in the batch", engine.stats.num_running)
            case "kv_usage":
                yield GaugeMetricFamily(name, "Used part of the KV cache, 0 to 1", kv_usage(engine))
            case _:
                labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
                gauge = GaugeMetricFamily(name, "The loaded LoRA adapters", labels=labels)
                gauge.add_metric([",".join(sorted(engine.adapters)), "", str(len(engine.adapters))], 1)
                yield gauge
