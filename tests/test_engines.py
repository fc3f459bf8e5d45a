"""Division of processors, devices and memory among workers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock import engines
from penstock.config import PipelineConfig
from penstock.driver import DeviceSpec
from penstock.engines import WorkerShare, divide_resources, load_worker_runtime, make_engine
from penstock.errors import ConfigError
from penstock.host.processors import ProcessorShare


def make_config(**values: Any) -> PipelineConfig:
    return PipelineConfig.from_flat({"model_path": "demo", **values})


@pytest.fixture(autouse=True)
def _fake_eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(engines.divide_processors.__globals__["limits"], "cores", lambda: None)


def load_config(
    config: PipelineConfig, share: WorkerShare, monkeypatch: pytest.MonkeyPatch
) -> PipelineConfig:
    """Return the configuration of a worker. Check that it is pinned if its share names processors."""
    pinned_processors: list[tuple[int, ...]] = []
    monkeypatch.setattr(engines, "pin", pinned_processors.append)
    worker_config = load_worker_runtime(config, share, cast(Any, lambda config: config))
    assert pinned_processors == ([] if share.processors is None else [share.processors.processors])
    return cast(PipelineConfig, worker_config)


def test_one_worker_gets_all_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    (share,) = divide_resources(config)
    assert share == WorkerShare((DeviceSpec.cpu(),))
    assert load_config(config, share, monkeypatch) == config


def test_workers_on_a_cpu_divide_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"free_memory": 1000}
    monkeypatch.setattr(engines, "CPU", lambda: SimpleNamespace(stats=stats))
    config = make_config(data_parallel_size=2, device_memory_utilization=0.8)
    shares = divide_resources(config)
    assert [(len(share.processors.processors), share.memory) for share in shares if share.processors] == [
        (4, 400),
        (4, 400),
    ]
    first_config = load_config(config, shares[0], monkeypatch)
    assert (first_config.data_parallel_size, first_config.num_threads) == (1, 4)
    assert first_config.kv_cache.device_memory_utilization == 0.4
    stats["free_memory"] = 600  # the other worker has allocated its part
    assert load_config(config, shares[1], monkeypatch).kv_cache.device_memory_utilization == pytest.approx(
        2 / 3
    )
    stats["free_memory"] = 300
    assert load_config(config, shares[1], monkeypatch).kv_cache.device_memory_utilization == 0.8


def test_num_threads_applies_to_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(data_parallel_size=2, num_threads=3)
    assert load_config(config, divide_resources(config)[1], monkeypatch).num_threads == 3


def test_workers_divide_gpus_or_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(DeviceSpec(number, "gpu") for number in range(4))
    shares = divide_resources(make_config(data_parallel_size=2, devices=gpus))
    assert [share.devices for share in shares] == [gpus[:2], gpus[2:]]
    shared_gpu_config = make_config(data_parallel_size=2, devices=gpus[:1], device_memory_utilization=0.8)
    shares = divide_resources(shared_gpu_config)
    assert [share.devices for share in shares] == [gpus[:1]] * 2
    assert load_config(shared_gpu_config, shares[0], monkeypatch).kv_cache.device_memory_utilization == 0.4
    with pytest.raises(ConfigError, match="2 workers cannot divide 3 devices"):
        divide_resources(make_config(data_parallel_size=2, devices=gpus[:3]))


def test_the_memory_of_a_share_sets_the_memory_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CPU", lambda: SimpleNamespace(stats={"free_memory": 1000}))
    config = make_config()
    (share,) = divide_resources(config, 250)
    assert load_config(config, share, monkeypatch).kv_cache.device_memory_utilization == 0.25


def test_the_engine_has_one_client_per_worker_and_can_start_asleep() -> None:
    assert len(make_engine(make_config(data_parallel_size=3)).workers) == 3
    assert make_engine(make_config(), is_asleep=True).state == "asleep"


def test_an_in_process_model_refuses_several_workers() -> None:
    from penstock import LLM

    with pytest.raises(ConfigError, match="must be 1 for a model in this process, was 2"):
        LLM("demo", data_parallel_size=2)


def test_the_text_of_a_share_has_processors_and_threads() -> None:
    assert str(ProcessorShare((0, 1, 4), 3)) == "processors 0-1,4, 3 threads"
