"""Gauges with names that external routers read, such as those of the Kubernetes Gateway API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from penstock.worker.engine_client import EngineClient


_HELP_TEXTS = {
    "waiting": "Requests that wait for admission",
    "running": "Requests in the batch",
    "kv_usage": "Used fraction of the KV cache, 0 to 1",
    "adapters": "The loaded LoRA adapters",
}


def parse_gauges(gauges: Sequence[str]) -> dict[str, str]:
    """Parse the texts ``QUANTITY=NAME`` of ``--router-gauge``. Return quantity -> gauge name.

    >>> parse_gauges(["waiting=vllm:num_requests_waiting"])
    {'waiting': 'vllm:num_requests_waiting'}
    """
    return dict(text.partition("=")[::2] for text in gauges)


def kv_usage(engine: EngineClient) -> float:
    """Return the used fraction of the KV cache, from 0 to 1; 0 for a model without a KV cache."""
    stats = engine.stats
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


def router_gauges(engines: Mapping[str, EngineClient], names: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the configured gauges, with the label ``model_name``.

    The gauge of ``adapters`` has the value 1 and the labels that the inference extension of the Kubernetes
    Gateway API reads: ``running_lora_adapters`` (all loaded adapters), ``waiting_lora_adapters`` (empty), and
    ``max_lora`` (the number of loaded adapters).

    Args:
        engines: model name -> engine.
        names: quantity -> name of the quantity's gauge.
    """
    for quantity, name in names.items():
        labels = ["model_name"]
        if quantity == "adapters":
            labels += ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        gauge = GaugeMetricFamily(name, _HELP_TEXTS[quantity], labels=labels)
        for model, engine in engines.items():
            match quantity:
                case "waiting":
                    gauge.add_metric([model], engine.stats.num_waiting)
                case "running":
                    gauge.add_metric([model], engine.stats.num_running)
                case "kv_usage":
                    gauge.add_metric([model], kv_usage(engine))
                case _:
                    adapters = engine.adapters
                    gauge.add_metric([model, ",".join(sorted(adapters)), "", str(len(adapters))], 1)
        yield gauge
