"""``support.gpu_mode`` with and without a fake GPU: the device of pipelines, and the markers of tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support import gpu_mode

from penstock.config import PipelineConfig


@pytest.fixture(params=[True, False], ids=["GPU", "no GPU"])
def has_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(gpu_mode, "has_gpu", lambda: request.param)
    monkeypatch.setattr(gpu_mode, "is_interpreted", lambda: False)
    return bool(request.param)


@pytest.fixture
def _restore_from_flat() -> Iterator[None]:
    previous_value = PipelineConfig.__dict__["from_flat"]
    yield
    PipelineConfig.from_flat = previous_value  # type: ignore[method-assign]


@pytest.mark.usefixtures("_restore_from_flat")
def test_pipelines_open_on_the_gpu_if_there_is_one(has_gpu: bool) -> None:
    gpu_mode.open_pipelines_on_gpu()
    config = PipelineConfig.from_flat({"max_batch_size": 2})
    assert str(config.model.devices[0]) == ("gpu:0" if has_gpu else "cpu")
    assert config.max_batch_size == 2
    config_with_kernels = PipelineConfig.from_flat({"kernels": "reference"})
    assert str(config_with_kernels.model.devices[0]) == "cpu", (
        "a configuration that sets its kernels must not move to the GPU"
    )


class FakeTestItem:
    """A fake of `pytest.Item` that has only markers."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.names else None

    def add_marker(self, marker: Any) -> None:
        self.names.append(marker if isinstance(marker, str) else marker.name)


@pytest.mark.parametrize("expression", ["gpu", "gpu and not slow", "", "not gpu"])
def test_model_tests_get_the_marker_gpu_only_if_it_is_selected(has_gpu: bool, expression: str) -> None:
    """Tests with the marker ``models`` get the marker ``gpu`` only if ``-m`` selects GPU tests.

    Without a GPU, marked tests are skipped.
    """
    config: Any = SimpleNamespace(getoption=lambda name, default: expression)
    items: Any = [FakeTestItem("gpu"), FakeTestItem("models"), FakeTestItem()]
    gpu_mode.mark_gpu_tests(config, items)
    gpu_item, model_item, unmarked_item = items
    assert ("skip" in gpu_item.names) == (not has_gpu)
    assert ("gpu" in model_item.names) == expression.startswith("gpu")
    assert ("skip" in model_item.names) == (expression.startswith("gpu") and not has_gpu)
    assert unmarked_item.names == []
