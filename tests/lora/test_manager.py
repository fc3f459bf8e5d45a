"""Names, contents, slots and turns of `LoRAManager`, over a model of two small layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.running import context_of

from penstock.config import LoRAConfig
from penstock.errors import CheckpointError, ConfigError, InputError, UnknownModelError
from penstock.kernels import LinearSlice, pack_linear
from penstock.lora import LoRAManager
from penstock.lora.manager import MAX_SKIPS
from penstock.lora.slots import AdapterSlots
from penstock.pipelines.core import TextContext
from penstock.weights import Weights

FUSED = pack_linear(
    torch.zeros(12, 6), "float32", slices=[LinearSlice("m.q_proj", 0, 8), LinearSlice("m.k_proj", 8, 12)]
)
LAYERS = {"m.q_proj": FUSED, "m.k_proj": FUSED}


def write(folder: Path, value: float = 1.0, layer: str = "m.q_proj", out_features: int = 8) -> Path:
    """Write an adapter of rank 2 with scale 2 whose numbers are all ``value``."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [layer]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{layer}.lora_A.weight": torch.full((2, 6), value),
        f"base_model.model.{layer}.lora_B.weight": torch.full((out_features, 2), value),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., LoRAManager]:
    """Return a manager with loaded adapters named a, b, c, ..."""
    save_file({"m.norm.weight": torch.ones(6)}, tmp_path / "model.safetensors")

    def make(count: int = 3, **config: Any) -> LoRAManager:
        names = "abcdefgh"[:count]
        lora = tuple(f"{name}={write(tmp_path / name, 1.0 + i)}" for i, name in enumerate(names))
        options = LoRAConfig(**{"lora": lora, "enable_lora": True, "max_lora_rank": 4, **config})
        base = Weights.open(tmp_path / "model.safetensors")
        device = torch.device("cpu")
        return LoRAManager(options, LAYERS, base, ["./base"], dtype=torch.float32, device=device)

    return make


def request(name: str | None, **fields: Any) -> TextContext:
    return context_of([1, 2, 3], adapter=name, **fields)


def terms_of_rows(
    manager: LoRAManager, contexts: Sequence[TextContext], counts: Sequence[int]
) -> list[float]:
    """Return the term that each row's adapter adds to the first output of a row of ones, or 0."""
    inputs = manager.inputs(contexts, np.array(counts))
    if inputs is None:
        return [0.0] * sum(counts)
    down, up = inputs.matrices["m.q_proj"]
    ranks = inputs.ranks["m.q_proj"]
    return [
        0.0 if i < 0 else float(up[i, 0, : ranks[i]] @ down[i, : ranks[i]].sum(-1))
        for i in inputs.rows.tolist()
    ]


def sum_of(value: float) -> float:
    return 2 * (2 * 6 * value * value)  # scale * rank * inputs * A * B


# -- Layout ----------------------------------------------------------------------------------------------


def test_each_row_gets_its_own_adapter(make: Callable[..., LoRAManager]) -> None:
    contexts = [request(name) for name in ("b", None, "a", "b")]
    expected = [sum_of(2)] * 3 + [0.0] + [sum_of(1)] * 2 + [sum_of(2)]
    assert terms_of_rows(make(), contexts, [3, 1, 2, 1]) == expected


def test_a_batch_without_adapters_costs_nothing(make: Callable[..., LoRAManager]) -> None:
    assert make().inputs([request(None), request(None)], np.array([1, 2])) is None


def test_inputs_hold_only_layers_with_adapters(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make(1)
    manager.load("k", str(write(tmp_path / "k", 3.0, "m.k_proj", 4)))
    found = []
    for names in ("a", "k", "ak", "a"):
        inputs = manager.inputs([request(name) for name in names], np.ones(len(names), int))
        assert inputs is not None
        found.append(inputs)
    layers = [set(inputs.matrices) for inputs in found]
    assert layers == [set(inputs.ranks) for inputs in found]
    assert layers == [{"m.q_proj"}, *[{"m.q_proj", "m.k_proj"}] * 3], "earlier inputs do not change"
    for layer in ("m.q_proj", "m.k_proj"):
        assert inputs.ranks[layer].tolist().count(2) == 1
        assert inputs.ranks[layer].tolist().count(0) == 3


def test_the_memory_of_a_layer_is_never_moved(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    """Recorded steps use the address. New layers get new memory; slots change in place."""
    manager = make(3, max_loras=1)
    manager.load("k", str(write(tmp_path / "k", 3.0, "m.k_proj", 4)))
    places: list[dict[str, list[int]]] = []
    for name in ("a", "b", "k", "c"):
        inputs = manager.inputs([request(name)], np.ones(1, int))
        assert inputs is not None
        places.append(
            {
                layer: [one.data_ptr() for one in (*inputs.matrices[layer], inputs.ranks[layer])]
                for layer in inputs.matrices
            }
        )
    for before, after in pairwise(places):
        assert before.items() <= after.items()


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=30))
def test_slots_hold_the_requested_adapters_and_evict_the_oldest(steps: list[list[int]]) -> None:
    from penstock.lora.adapter import Adapter

    def adapter(i: int) -> Adapter:
        matrices = {"m.q_proj": (torch.full((i % 4 + 1, 6), float(i)), torch.full((8, i % 4 + 1), float(i)))}
        return Adapter(str(i), bytes([i]), matrices)

    slots = AdapterSlots(3, 4, LAYERS, torch.float32, torch.device("cpu"))
    recent: list[int] = []  # the last used at the end
    for step in steps:
        before = {digest[0] for digest in slots.held if digest}
        places = slots.assign({bytes([i]): adapter(i) for i in step})
        assert len(set(places.values())) == len(step)
        for i in step:
            slot = places[bytes([i])]
            rank = int(slots.ranks["m.q_proj"][slot])
            assert rank == i % 4 + 1
            assert (slots.matrices["m.q_proj"][0][slot, :rank] == i).all()
            assert (slots.matrices["m.q_proj"][1][slot, :, :rank] == i).all()
            recent = [*(one for one in recent if one != i), i]
        held = {digest[0] for digest in slots.held if digest}
        evicted = before - held
        assert set(recent[-len(held) :]) == held, "the least recently used adapters were evicted"
        assert len(evicted) <= len(step)


def test_a_slot_is_cleared_before_reuse(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make(2, max_loras=2)
    manager.load("k", str(write(tmp_path / "k", 3.0, "m.k_proj", 4)))
    a, b, k = request("a"), request("b"), request("k")
    assert terms_of_rows(manager, [a, b], [1, 1]) == [sum_of(1), sum_of(2)]
    assert terms_of_rows(manager, [b, k], [1, 1]) == [sum_of(2), 0.0]


# -- Names and contents ----------------------------------------------------------------------------------


def test_the_digest_is_of_the_content(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make(2)
    first, second = manager.digest(request("a")), manager.digest(request("b"))
    manager.load("copy", str(write(tmp_path / "elsewhere", 1.0)))
    assert manager.digest(request("copy")) == first != second
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 5}))
    manager.load("a", str(tmp_path / "a"))
    assert manager.digest(request("a")) not in (first, second), "the scale is content, too"


def test_a_failed_load_changes_nothing(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make(2)
    before, names = manager.digest(request("a")), manager.names()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        manager.load("a", str(tmp_path / "a"))
    with pytest.raises(CheckpointError):
        manager.load("new", str(tmp_path / "a"))
    assert manager.names() == names
    assert manager.digest(request("a")) == before


def test_names_and_their_limits(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make(2, max_loaded_loras=2)
    assert [name for name, _ in manager.names()] == ["a", "b"]
    path = str(tmp_path / "a")
    with pytest.raises(InputError, match="2 adapters are loaded, and the maximum is 2"):
        manager.load("c", path)
    manager.load("b", path)  # replaces an adapter: the number stays the same
    manager.unload("a")
    manager.load("c", path)
    assert manager.names() == [("b", path), ("c", path)]
    for name in ("", " x", "x\n", "x" * 257):
        with pytest.raises(InputError, match="cannot be named"):
            manager.load(name, path)
    with pytest.raises(InputError, match="the base model"):
        manager.load("./base", path)
    with pytest.raises(UnknownModelError, match="'a' is not served"):
        manager.unload("a")


def test_a_request_keeps_its_adapter_content(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make(1, max_loras=2)
    old, later = request("a"), request("a")
    began = manager.digest(old)
    manager.load("a", str(write(tmp_path / "new", 7.0)))
    assert manager.digest(old) == began != manager.digest(later)
    assert terms_of_rows(manager, [old, later], [1, 1]) == [sum_of(1), sum_of(7)]
    manager.unload("a")
    assert terms_of_rows(manager, [later, old], [1, 1]) == [sum_of(7), sum_of(1)]
    manager.release(old)
    manager.release(old)
    with pytest.raises(UnknownModelError):
        manager.digest(old)


def test_a_new_request_with_the_same_id_uses_its_own_adapter(
    make: Callable[..., LoRAManager], tmp_path: Path
) -> None:
    manager = make(2, max_loras=1)
    first, second = request("a", request_id="same"), request("b", request_id="same")
    assert manager.ready(first)
    assert manager.digest(first) != manager.digest(second)
    assert manager.ready(second), "the slot of the first is taken, although it was not released"
    manager.release(first)
    assert not manager.ready(request("a")), "releasing the first again does not release the second"


# -- Turns -----------------------------------------------------------------------------------------------


def test_no_more_adapters_run_than_there_are_slots(make: Callable[..., LoRAManager]) -> None:
    manager = make(3, max_loras=2)
    a, a2, b, c = request("a"), request("a"), request("b"), request("c")
    assert [manager.ready(one) for one in (a, b, c, a2, request(None))] == [True, True, False, True, True]
    manager.release(a)
    assert not manager.ready(c), "another request with adapter a still runs"
    manager.release(a2)
    assert manager.ready(c)
    assert manager.ready(b), "a repeated check has the same result"
    assert not manager.ready(a)


def test_old_and_new_content_count_as_two_adapters(make: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make(1, max_loras=1)
    old, new = request("a"), request("a")
    assert manager.ready(old)
    manager.load("a", str(write(tmp_path / "new", 7.0)))
    assert not manager.ready(new)
    manager.release(old)
    assert manager.ready(new)


def test_a_stream_for_one_adapter_does_not_starve_another(make: Callable[..., LoRAManager]) -> None:
    manager = make(3, max_loras=1)
    running, starved, rival = request("a"), request("b"), request("c")
    assert manager.ready(running)
    for _ in range(MAX_SKIPS):
        assert not manager.ready(starved)
        fresh = request("a")
        if manager.ready(fresh):
            manager.release(running)
            running = fresh
    assert not manager.ready(request("a")), "the starved request blocks new requests"
    assert manager.ready(running)
    manager.release(running)
    assert not manager.ready(rival), "the free slot is reserved for the starved request"
    assert manager.ready(starved)
    manager.release(starved)
    assert manager.ready(rival)


def test_a_cancelled_request_does_not_block_others(make: Callable[..., LoRAManager]) -> None:
    manager = make(2, max_loras=1)
    assert manager.ready(request("a"))
    starved = request("b")
    for _ in range(MAX_SKIPS):
        manager.ready(starved)
    assert not manager.ready(request("a"))
    manager.release(starved)
    assert manager.ready(request("a"))


def test_a_batch_beyond_the_slots_is_refused(make: Callable[..., LoRAManager]) -> None:
    manager = make(3, max_loras=2)
    manager.check([request("a"), request("b"), request("a"), request(None)])
    with pytest.raises(InputError, match="uses 3 adapters, and at most 2 can run at once"):
        manager.check([request("a"), request("b"), request("c")])
    with pytest.raises(UnknownModelError, match=r"'z' is not served here; served are: ./base, a, b, c"):
        manager.check([request("z")])


def test_batches_take_turns_without_a_scheduler(make: Callable[..., LoRAManager]) -> None:
    """Without a scheduler, all batches together may use more adapters than there are slots."""
    manager = make(3, max_loras=2)
    a, b, c = (request(name) for name in "abc")
    for _ in range(2):
        assert terms_of_rows(manager, [a, b], [1, 1]) == [sum_of(1), sum_of(2)]
        assert terms_of_rows(manager, [c, b], [1, 1]) == [sum_of(3), sum_of(2)]


# -- Configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [("a",), ("=x",), ("a=",), ("a=x", "a=y"), (" =x",)])
def test_invalid_lora_values_are_refused(lora: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lora: must be name=path, each name once"):
        LoRAConfig(lora=lora)


def test_a_path_may_hold_an_equals_sign() -> None:
    config = LoRAConfig(lora=("a=/x=y", "b = /z"))
    assert config.adapters == (("a", "/x=y"), ("b", "/z"))
    assert config.is_enabled
    assert not LoRAConfig().is_enabled
