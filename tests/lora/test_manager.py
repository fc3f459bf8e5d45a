"""`LoRAManager` over a model of two small layers: names, contents, slots, and the order of requests."""

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
from support.pipeline_steps import make_context

from penstock.config import LoRAConfig
from penstock.errors import CheckpointError, ConfigError, InputError, UnknownModelError
from penstock.kernels import LinearSlice, pack_linear
from penstock.lora import LoRAManager
from penstock.lora.manager import MAX_SKIPS
from penstock.lora.slots import AdapterSlots
from penstock.pipelines.core import TextContext
from penstock.weights import Weights

FUSED_LAYER = pack_linear(
    torch.zeros(12, 6), "float32", slices=[LinearSlice("m.q_proj", 0, 8), LinearSlice("m.k_proj", 8, 12)]
)
LAYERS = {"m.q_proj": FUSED_LAYER, "m.k_proj": FUSED_LAYER}


def write_constant_adapter(
    folder: Path, value: float = 1.0, layer: str = "m.q_proj", out_features: int = 8
) -> Path:
    """Write an adapter of rank 2 and scale 2 in which all numbers are ``value``."""
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
def make_manager(tmp_path: Path) -> Callable[..., LoRAManager]:
    """Return a function that makes a manager with ``num_adapters`` adapters, named a, b, c, and so on."""
    save_file({"m.norm.weight": torch.ones(6)}, tmp_path / "model.safetensors")

    def make_manager(num_adapters: int = 3, **config: Any) -> LoRAManager:
        names = "abcdefgh"[:num_adapters]
        lora = tuple(
            f"{name}={write_constant_adapter(tmp_path / name, 1.0 + i)}" for i, name in enumerate(names)
        )
        options = LoRAConfig(**{"lora": lora, "enable_lora": True, "max_lora_rank": 4, **config})
        base = Weights.open(tmp_path / "model.safetensors")
        device = torch.device("cpu")
        return LoRAManager(options, LAYERS, base, ["./base"], dtype=torch.float32, device=device)

    return make_manager


def make_adapted_context(name: str | None, **fields: Any) -> TextContext:
    return make_context([1, 2, 3], adapter=name, **fields)


def adapter_terms(
    manager: LoRAManager, contexts: Sequence[TextContext], row_counts: Sequence[int]
) -> list[float]:
    """Return the number that each row's adapter adds to the first output of ``m.q_proj`` if all inputs are 1.

    The number is 0 for rows without an adapter.
    """
    inputs = manager.inputs(contexts, np.array(row_counts))
    if inputs is None:
        return [0.0] * sum(row_counts)
    down, up = inputs.matrices["m.q_proj"]
    ranks = inputs.ranks["m.q_proj"]
    return [
        0.0 if i < 0 else float(up[i, 0, : ranks[i]] @ down[i, : ranks[i]].sum(-1))
        for i in inputs.rows.tolist()
    ]


def expected_term(value: float) -> float:
    return 2 * (2 * 6 * value * value)  # the scale 2, times the rank 2, times 6 inputs, times A * B


# -- Layout ----------------------------------------------------------------------------------------------


def test_each_row_gets_the_matrices_of_its_adapter(make_manager: Callable[..., LoRAManager]) -> None:
    contexts = [make_adapted_context(name) for name in ("b", None, "a", "b")]
    expected = [expected_term(2)] * 3 + [0.0] + [expected_term(1)] * 2 + [expected_term(2)]
    assert adapter_terms(make_manager(), contexts, [3, 1, 2, 1]) == expected


def test_a_batch_without_adapters_has_no_lora_inputs(make_manager: Callable[..., LoRAManager]) -> None:
    assert (
        make_manager().inputs([make_adapted_context(None), make_adapted_context(None)], np.array([1, 2]))
        is None
    )


def test_inputs_hold_only_layers_with_adapters(
    make_manager: Callable[..., LoRAManager], tmp_path: Path
) -> None:
    manager = make_manager(1)
    manager.load("k", str(write_constant_adapter(tmp_path / "k", 3.0, "m.k_proj", 4)))
    all_inputs = []
    for names in ("a", "k", "ak", "a"):
        inputs = manager.inputs([make_adapted_context(name) for name in names], np.ones(len(names), int))
        assert inputs is not None
        all_inputs.append(inputs)
    layers = [set(inputs.matrices) for inputs in all_inputs]
    assert layers == [set(inputs.ranks) for inputs in all_inputs]
    assert layers == [{"m.q_proj"}, *[{"m.q_proj", "m.k_proj"}] * 3], (
        "adding a layer does not modify the inputs of earlier batches"
    )
    for layer in ("m.q_proj", "m.k_proj"):
        assert inputs.ranks[layer].tolist().count(2) == 1
        assert inputs.ranks[layer].tolist().count(0) == 3


def test_the_memory_of_a_layer_is_never_moved(
    make_manager: Callable[..., LoRAManager], tmp_path: Path
) -> None:
    """Compiled steps contain the addresses of the matrices, so loading an adapter must not move them."""
    manager = make_manager(3, max_loras=1)
    manager.load("k", str(write_constant_adapter(tmp_path / "k", 3.0, "m.k_proj", 4)))
    addresses: list[dict[str, list[int]]] = []
    for name in ("a", "b", "k", "c"):
        inputs = manager.inputs([make_adapted_context(name)], np.ones(1, int))
        assert inputs is not None
        addresses.append(
            {
                layer: [tensor.data_ptr() for tensor in (*inputs.matrices[layer], inputs.ranks[layer])]
                for layer in inputs.matrices
            }
        )
    for earlier_addresses, later_addresses in pairwise(addresses):
        assert earlier_addresses.items() <= later_addresses.items()


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=30))
def test_slots_evict_the_least_recently_used_adapters(steps: list[list[int]]) -> None:
    from penstock.lora.adapter import Adapter

    def make_adapter(i: int) -> Adapter:
        matrices = {"m.q_proj": (torch.full((i % 4 + 1, 6), float(i)), torch.full((8, i % 4 + 1), float(i)))}
        return Adapter(str(i), bytes([i]), matrices)

    slots = AdapterSlots(3, 4, LAYERS, torch.float32, torch.device("cpu"))
    recently_used: list[int] = []  # the most recently used adapter is last
    for step in steps:
        digests_before = {digest[0] for digest in slots.slot_digests if digest}
        slots_by_digest = slots.assign({bytes([i]): make_adapter(i) for i in step})
        assert len(set(slots_by_digest.values())) == len(step)
        for i in step:
            slot = slots_by_digest[bytes([i])]
            rank = int(slots.ranks["m.q_proj"][slot])
            assert rank == i % 4 + 1
            assert (slots.matrices["m.q_proj"][0][slot, :rank] == i).all()
            assert (slots.matrices["m.q_proj"][1][slot, :, :rank] == i).all()
            recently_used = [*(adapter for adapter in recently_used if adapter != i), i]
        loaded_ids = {digest[0] for digest in slots.slot_digests if digest}
        evicted_ids = digests_before - loaded_ids
        assert set(recently_used[-len(loaded_ids) :]) == loaded_ids, (
            "the least recently used adapters were evicted"
        )
        assert len(evicted_ids) <= len(step)


def test_a_slot_is_cleared_before_reuse(make_manager: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make_manager(2, max_loras=2)
    manager.load("k", str(write_constant_adapter(tmp_path / "k", 3.0, "m.k_proj", 4)))
    a, b, k = make_adapted_context("a"), make_adapted_context("b"), make_adapted_context("k")
    assert adapter_terms(manager, [a, b], [1, 1]) == [expected_term(1), expected_term(2)]
    assert adapter_terms(manager, [b, k], [1, 1]) == [expected_term(2), 0.0]


# -- Names and contents ----------------------------------------------------------------------------------


def test_the_digest_identifies_the_content(make_manager: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make_manager(2)
    digest_a, digest_b = manager.digest(make_adapted_context("a")), manager.digest(make_adapted_context("b"))
    manager.load("copy", str(write_constant_adapter(tmp_path / "elsewhere", 1.0)))
    assert manager.digest(make_adapted_context("copy")) == digest_a != digest_b
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 5}))
    manager.load("a", str(tmp_path / "a"))
    assert manager.digest(make_adapted_context("a")) not in (digest_a, digest_b), (
        "the scale is part of the content"
    )


def test_a_failed_load_changes_nothing(make_manager: Callable[..., LoRAManager], tmp_path: Path) -> None:
    manager = make_manager(2)
    digest_before, names = manager.digest(make_adapted_context("a")), manager.names()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        manager.load("a", str(tmp_path / "a"))
    with pytest.raises(CheckpointError):
        manager.load("new", str(tmp_path / "a"))
    assert manager.names() == names
    assert manager.digest(make_adapted_context("a")) == digest_before


def test_the_number_of_loaded_adapters_is_limited(
    make_manager: Callable[..., LoRAManager], tmp_path: Path
) -> None:
    manager = make_manager(2, max_loaded_loras=2)
    assert [name for name, _ in manager.names()] == ["a", "b"]
    path = str(tmp_path / "a")
    with pytest.raises(InputError, match="2 adapters are loaded, and the maximum is 2"):
        manager.load("c", path)
    manager.load("b", path)  # replaces a loaded adapter, so the number of adapters does not grow
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


def test_a_request_keeps_its_adapter_content(
    make_manager: Callable[..., LoRAManager], tmp_path: Path
) -> None:
    manager = make_manager(1, max_loras=2)
    earlier_context, later_context = make_adapted_context("a"), make_adapted_context("a")
    digest = manager.digest(earlier_context)
    manager.load("a", str(write_constant_adapter(tmp_path / "new", 7.0)))
    assert manager.digest(earlier_context) == digest != manager.digest(later_context)
    assert adapter_terms(manager, [earlier_context, later_context], [1, 1]) == [
        expected_term(1),
        expected_term(7),
    ]
    manager.unload("a")
    assert adapter_terms(manager, [later_context, earlier_context], [1, 1]) == [
        expected_term(7),
        expected_term(1),
    ]
    manager.release(earlier_context)
    manager.release(earlier_context)
    with pytest.raises(UnknownModelError):
        manager.digest(earlier_context)


def test_a_new_request_with_the_same_id_uses_its_own_adapter(
    make_manager: Callable[..., LoRAManager], tmp_path: Path
) -> None:
    manager = make_manager(2, max_loras=1)
    first_context, second_context = (
        make_adapted_context("a", request_id="same"),
        make_adapted_context("b", request_id="same"),
    )
    assert manager.ready(first_context)
    assert manager.digest(first_context) != manager.digest(second_context)
    assert manager.ready(second_context), (
        "the slot of the first request is free, although it was not released"
    )
    manager.release(first_context)
    assert not manager.ready(make_adapted_context("a")), (
        "releasing the first request again does not release the second"
    )


# -- Order of requests ---------------------------------------------------------------------------------------


def test_requests_are_ready_only_while_a_slot_is_free(make_manager: Callable[..., LoRAManager]) -> None:
    manager = make_manager(3, max_loras=2)
    a, a2, b, c = (
        make_adapted_context("a"),
        make_adapted_context("a"),
        make_adapted_context("b"),
        make_adapted_context("c"),
    )
    assert [manager.ready(context) for context in (a, b, c, a2, make_adapted_context(None))] == [
        True,
        True,
        False,
        True,
        True,
    ]
    manager.release(a)
    assert not manager.ready(c), "another request with adapter a still runs"
    manager.release(a2)
    assert manager.ready(c)
    assert manager.ready(b), "a repeated check has the same result"
    assert not manager.ready(a)


def test_old_and_new_content_of_an_adapter_use_two_slots(
    make_manager: Callable[..., LoRAManager], tmp_path: Path
) -> None:
    manager = make_manager(1, max_loras=1)
    earlier_context, later_context = make_adapted_context("a"), make_adapted_context("a")
    assert manager.ready(earlier_context)
    manager.load("a", str(write_constant_adapter(tmp_path / "new", 7.0)))
    assert not manager.ready(later_context)
    manager.release(earlier_context)
    assert manager.ready(later_context)


def test_a_steady_load_on_one_adapter_does_not_starve_another(
    make_manager: Callable[..., LoRAManager],
) -> None:
    manager = make_manager(3, max_loras=1)
    running_context, waiting_context, third_context = (
        make_adapted_context("a"),
        make_adapted_context("b"),
        make_adapted_context("c"),
    )
    assert manager.ready(running_context)
    for _ in range(MAX_SKIPS):
        assert not manager.ready(waiting_context)
        next_context = make_adapted_context("a")
        if manager.ready(next_context):
            manager.release(running_context)
            running_context = next_context
    assert not manager.ready(make_adapted_context("a")), "the waiting request blocks new requests"
    assert manager.ready(running_context)
    manager.release(running_context)
    assert not manager.ready(third_context), "the free slot is reserved for the waiting request"
    assert manager.ready(waiting_context)
    manager.release(waiting_context)
    assert manager.ready(third_context)


def test_a_cancelled_request_does_not_block_others(make_manager: Callable[..., LoRAManager]) -> None:
    manager = make_manager(2, max_loras=1)
    assert manager.ready(make_adapted_context("a"))
    waiting_context = make_adapted_context("b")
    for _ in range(MAX_SKIPS):
        manager.ready(waiting_context)
    assert not manager.ready(make_adapted_context("a"))
    manager.release(waiting_context)
    assert manager.ready(make_adapted_context("a"))


def test_a_batch_with_more_adapters_than_slots_is_refused(make_manager: Callable[..., LoRAManager]) -> None:
    manager = make_manager(3, max_loras=2)
    manager.check(
        [
            make_adapted_context("a"),
            make_adapted_context("b"),
            make_adapted_context("a"),
            make_adapted_context(None),
        ]
    )
    with pytest.raises(InputError, match="uses 3 adapters, and at most 2 can run at once"):
        manager.check([make_adapted_context("a"), make_adapted_context("b"), make_adapted_context("c")])
    with pytest.raises(UnknownModelError, match=r"'z' is not served here; served are: ./base, a, b, c"):
        manager.check([make_adapted_context("z")])


def test_batches_without_a_scheduler_share_the_slots(make_manager: Callable[..., LoRAManager]) -> None:
    """Without a scheduler, successive batches may use more adapters than there are slots."""
    manager = make_manager(3, max_loras=2)
    a, b, c = (make_adapted_context(name) for name in "abc")
    for _ in range(2):
        assert adapter_terms(manager, [a, b], [1, 1]) == [expected_term(1), expected_term(2)]
        assert adapter_terms(manager, [c, b], [1, 1]) == [expected_term(3), expected_term(2)]


# -- Configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [("a",), ("=x",), ("a=",), ("a=x", "a=y"), (" =x",)])
def test_invalid_lora_values_are_refused(lora: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lora: must be name=path, each name once"):
        LoRAConfig(lora=lora)


def test_a_path_may_contain_an_equals_sign() -> None:
    config = LoRAConfig(lora=("a=/x=y", "b = /z"))
    assert config.adapters == (("a", "/x=y"), ("b", "/z"))
    assert config.is_enabled
    assert not LoRAConfig().is_enabled
