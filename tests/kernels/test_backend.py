"""The registry of back ends: selection, default sizes and weight layouts. A fake back end runs a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_tiny_config, write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens

from penstock.driver import CPU, Device, DeviceSpec
from penstock.engine import InferenceSession
from penstock.errors import ConfigError
from penstock.kernels import (
    BACKENDS,
    Backend,
    BackendRegistry,
    DefaultSizes,
    LazyWeight,
    PackedLinear,
    pack_linear,
    unpack_linear,
)
from penstock.kernels.linear import Layout, multiply_floats
from penstock.kernels.reference import ReferenceOps

FAKE_BACKEND = '''
"""A back end that counts calls and replays recorded steps operation by operation."""

from penstock.kernels.backend import Backend, DefaultSizes
from penstock.kernels.graph import Graph, GraphCompiler
from penstock.kernels.recording import record
from penstock.kernels.reference import ReferenceOps

COUNTS = {"rms_norm": 0, "captures": 0, "replays": 0}


class FakeOps(ReferenceOps):
    name = "fake"

    def rms_norm(self, x, weight, eps):
        COUNTS["rms_norm"] += 1
        return super().rms_norm(x, weight, eps)


class FakeGraph(Graph):
    description = "a fake replay"

    def __init__(self, plan, ops, inputs):
        self.plan, self.ops, self.inputs = plan, ops, inputs

    def replay(self, inputs):
        COUNTS["replays"] += 1
        for recorded, new in zip(self.inputs.values(), inputs, strict=True):
            (recorded[:, : new.shape[1]] if new.dim() == 2 else recorded).copy_(new)
        return self.run()

    def run(self):
        return self.plan.replay(self.ops, self.inputs)


class FakeGraphs(GraphCompiler):
    max_rows = 4

    def __init__(self, ops):
        self.ops = ops

    def capture(self, step, inputs):
        COUNTS["captures"] += 1
        results = []
        plan = record(self.ops, inputs, lambda ops: results.extend(step(ops, inputs)) or results)
        return FakeGraph(plan, self.ops, inputs), tuple(results)


BACKEND = Backend(
    name="fake",
    default_sizes={"cpu": DefaultSizes(max_batch_size=3, step_tokens=77, block_size=64)},
    load=FakeOps,
    variants=lambda: [FakeOps()],
    priority=100,
    graphs=FakeGraphs,
)
'''


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), make_tiny_config("llama"))


@pytest.fixture
def backends_folder(tmp_path: Path) -> Iterator[Path]:
    package = tmp_path / "fake"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_BACKEND)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("penstock_kernels_")]:
        del sys.modules[name]


def get_call_counts(registry: BackendRegistry) -> dict[str, int]:
    (fake_backend,) = registry.candidates("cpu", "fake")
    ops: Any = fake_backend.load()
    result: dict[str, int] = sys.modules[type(ops).__module__].COUNTS  # type: ignore[attr-defined]
    return result


def test_a_fake_back_end_runs_a_model_eagerly_and_with_replayed_steps(
    backends_folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(9, 130)
    reference = open_pipeline(checkpoint, kernels="reference")
    expected = generate_tokens(reference, [make_context(prompt, 12)])
    registry = BackendRegistry([backends_folder])
    monkeypatch.setattr("penstock.kernels.backend.BACKENDS", registry)
    pipeline = open_pipeline(checkpoint, max_batch_size=None)
    assert pipeline.session.kernels == "fake"
    plan = pipeline.memory_plan
    assert (plan.max_batch_size, plan.max_batch_input_tokens, plan.block_size) == (3, 77, 64)
    assert generate_tokens(pipeline, [make_context(prompt, 12)]) == expected
    counts = get_call_counts(registry)
    assert counts["rms_norm"] > 0
    assert counts["captures"] == 1
    assert counts["replays"] >= 8
    assert pipeline.session.graph_status == "compiled: a fake replay"
    assert pipeline.session.compiled_steps == "of up to 4 rows without " + ", ".join(
        name for name, owner in pipeline.session.ops.implementations().items() if owner != "fake"
    )
    pipeline.session.use_graphs = False
    assert generate_tokens(pipeline, [make_context(prompt, 12)]) == expected
    assert counts["captures"] == 1


def test_the_setting_kernels_selects_a_back_end(checkpoint: Path) -> None:
    assert InferenceSession([CPU()]).backend is BACKENDS.open("cpu")[0]
    assert open_pipeline(checkpoint, kernels="reference").session.kernels == "reference"
    session = InferenceSession([CPU()], kernels="reference")
    assert session.backend.name == session.kernels == "reference"
    assert type(session.ops) is ReferenceOps
    assert session.graph_status == "eager: the reference kernels cannot compile steps"


def test_a_back_end_that_does_not_support_the_device_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no kernels 'tpu' for cpu devices: use one of cpu, reference$"):
        _ = InferenceSession([CPU()], kernels="tpu").ops
    with pytest.raises(ConfigError, match=r"no kernels 'cpu' for gpu devices: use one of cuda, reference$"):
        BACKENDS.default_sizes("gpu", "cpu")


def unusable_backend(name: str = "broken") -> Backend:
    sizes = {"cpu": DefaultSizes(max_batch_size=1, step_tokens=1)}
    return Backend(name=name, default_sizes=sizes, load=lambda: None, variants=list, priority=50)


def test_a_back_end_that_cannot_run_is_skipped_by_default_and_refused_by_name() -> None:
    registry = BackendRegistry()
    registry.register(unusable_backend())
    assert [backend.name for backend in registry.backends] == ["broken", "cpu", "cuda", "reference"]
    assert registry.open("cpu")[0].name != "broken"
    with pytest.raises(ConfigError, match="the broken kernels cannot run on this machine"):
        registry.open("cpu", "broken")
    with pytest.raises(ConfigError, match="'cpu' exists already"):
        registry.register(unusable_backend("cpu"))
    assert "broken" not in {backend.name for backend in BACKENDS.backends}


def test_default_sizes_depend_on_the_device_type() -> None:
    sizes = {device_type: BACKENDS.default_sizes(device_type) for device_type in ("cpu", "gpu")}
    assert [
        (defaults.max_batch_size, defaults.step_tokens, defaults.block_size) for defaults in sizes.values()
    ] == [
        (32, 1024, 32),
        (256, 8192, 32),
    ]
    gpu = InferenceSession([Device(DeviceSpec.accelerator())], kernels="reference")
    assert type(gpu.ops) is ReferenceOps
    assert gpu.graphs is None


def test_only_a_deterministic_session_calls_require_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class NonDeterministicOps(ReferenceOps):
        def require_determinism(self) -> None:
            calls.append("required")

    registry = BackendRegistry()
    registry.register(replace(unusable_backend("hasty"), load=NonDeterministicOps))
    monkeypatch.setattr("penstock.kernels.backend.BACKENDS", registry)
    assert type(InferenceSession([CPU()]).ops) is NonDeterministicOps
    assert not calls
    assert type(InferenceSession([CPU()], deterministic=True).ops) is NonDeterministicOps
    assert calls == ["required"]


def test_linear_and_unpack_linear_read_the_layout_of_a_back_end() -> None:
    weight, x = torch.randn(12, 40), torch.randn(3, 40)
    flipped_layout = Layout(
        "flipped", lambda packed_weight: {"weight": packed_weight.tensors["flipped"].flip(0)}
    )

    class FlippingOps(ReferenceOps):
        layout = flipped_layout

        def pack_linear(
            self, weight: Any, encoding: str, *, bias: Any = None, slices: Any = ()
        ) -> PackedLinear:
            packed_weight = pack_linear(weight, encoding, bias=bias, slices=slices)
            tensors = {"flipped": packed_weight.tensors["weight"].flip(0)}
            return replace(packed_weight, tensors=tensors, layout=flipped_layout)

    ops = FlippingOps()
    assert ops.packs_weights
    for packed_weight in (
        ops.pack_linear(weight, "float32"),
        ops.pack_lazily([weight[:5], weight[5:]], "float32"),
    ):
        assert torch.equal(unpack_linear(packed_weight), weight)
        assert torch.equal(ops.linear(x, packed_weight), multiply_floats(x, weight, None))
    packed_weight = ops.pack_lazily([weight], "int4")
    assert not isinstance(packed_weight.tensors, LazyWeight)  # ReferenceOps defers only in layout ROWS


@pytest.mark.parametrize("backend", BACKENDS.backends, ids=lambda backend: backend.name)
def test_the_description_of_a_back_end_matches_its_operations(backend: Backend) -> None:
    for ops in backend.variants():
        assert ops.layout.name == backend.layout
        assert ops.packs_weights == backend.packs_weights
        assert ops.description.split()[0] == ops.name == backend.name
