"""The shares of workers: processors, devices and memory."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock import engines
from penstock.config import PipelineConfig
from penstock.driver import DeviceSpec
from penstock.engines import WorkerShare, divide, load_share, make_engine
from penstock.errors import ConfigError
from penstock.host.processors import ProcessorShare


def config_of(**flat: Any) -> PipelineConfig:
    return PipelineConfig.from_flat({"model_path": "demo", **flat})


@pytest.fixture(autouse=True)
def _eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(engines.divide_processors.__globals__["limits"], "cores", lambda: None)


def loaded(config: PipelineConfig, share: WorkerShare, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    """Return the configuration that a worker loads."""
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(engines, "pin", pinned.append)
    found = load_share(config, share, cast(Any, lambda given: given))
    assert pinned == ([] if share.processors is None else [share.processors.processors])
    return cast(PipelineConfig, found)


def test_one_worker_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    (share,) = divide(config)
    assert share == WorkerShare((DeviceSpec.cpu(),))
    assert loaded(config, share, monkeypatch) == config


def test_workers_on_a_cpu_divide_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"free_memory": 1000}
    monkeypatch.setattr(engines, "CPU", lambda: SimpleNamespace(stats=free))
    config = config_of(data_parallel_size=2, device_memory_utilization=0.8)
    shares = divide(config)
    assert [(len(share.processors.processors), share.memory) for share in shares if share.processors] == [
        (4, 400),
        (4, 400),
    ]
    first = loaded(config, shares[0], monkeypatch)
    assert (first.data_parallel_size, first.num_threads) == (1, 4)
    assert first.kv_cache.device_memory_utilization == 0.4
    free["free_memory"] = 600  # the other worker has allocated its part
    assert loaded(config, shares[1], monkeypatch).kv_cache.device_memory_utilization == pytest.approx(2 / 3)
    free["free_memory"] = 300
    assert loaded(config, shares[1], monkeypatch).kv_cache.device_memory_utilization == 0.8


def test_given_threads_are_those_of_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(data_parallel_size=2, num_threads=3)
    assert loaded(config, divide(config)[1], monkeypatch).num_threads == 3


def test_workers_divide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(DeviceSpec(number, "gpu") for number in range(4))
    shares = divide(config_of(data_parallel_size=2, devices=gpus))
    assert [share.devices for share in shares] == [gpus[:2], gpus[2:]]
    one = config_of(data_parallel_size=2, devices=gpus[:1], device_memory_utilization=0.8)
    shares = divide(one)
    assert [share.devices for share in shares] == [gpus[:1]] * 2
    assert loaded(one, shares[0], monkeypatch).kv_cache.device_memory_utilization == 0.4
    with pytest.raises(ConfigError, match="2 workers cannot divide 3 devices"):
        divide(config_of(data_parallel_size=2, devices=gpus[:3]))


def test_a_given_memory_limits_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CPU", lambda: SimpleNamespace(stats={"free_memory": 1000}))
    config = config_of()
    (share,) = divide(config, 250)
    assert loaded(config, share, monkeypatch).kv_cache.device_memory_utilization == 0.25


def test_the_engine_has_a_client_for_each_worker() -> None:
    assert len(make_engine(config_of(data_parallel_size=3)).workers) == 3
    assert make_engine(config_of(), is_asleep=True).state == "asleep"


def test_a_model_in_this_process_has_one_worker() -> None:
    from penstock import LLM

    with pytest.raises(ConfigError, match="must be 1 for a model in this process, was 2"):
        LLM("demo", data_parallel_size=2)


def test_a_share_is_shown_in_the_log() -> None:
    assert str(ProcessorShare((0, 1, 4), 3)) == "processors 0-1,4, 3 threads"
