"""Mistakes that the parity tests must notice: each is made on purpose and seen to be caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import oracle_logits, write_checkpoint
from support.running import context_of, feed, open_pipeline, random_tokens, step_logits

from penstock.kernels import KVCacheInputs, PackedLinear
from penstock.kernels.reference import ReferenceOps
from penstock.pipelines import PIPELINE_REGISTRY, TextGenerationPipeline
from penstock.pipelines.kv_cache import KVCacheManager

TOKENS = random_tokens(60, 130, seed=9)


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)


def deviation(pipeline: TextGenerationPipeline, reference: Any) -> float:
    """How far the logits of a prefill and twenty decode steps are from transformers', in tolerances."""
    expected = oracle_logits(reference, TOKENS)
    context = context_of(TOKENS[:40])
    ours = [step_logits(pipeline, [context])[0]]
    for token in TOKENS[40:]:
        feed(pipeline, context, token)
        ours.append(step_logits(pipeline, [context])[0])
    pipeline.release(context)
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    return float((torch.cat(ours) - expected[: len(torch.cat(ours))]).abs().max()) / tolerance


def test_without_a_mistake_there_is_no_deviation(pipeline: TextGenerationPipeline, reference: Any) -> None:
    assert deviation(pipeline, reference) <= 1


def test_rope_base_doubled(checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.nn import rotary

    original = rotary._plain_frequencies
    monkeypatch.setattr(
        rotary, "_plain_frequencies", lambda config: original(replace(config, base=2 * config.base))
    )
    pipeline = open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)
    assert deviation(pipeline, reference) > 10


def swap_halves(part: str) -> Callable[[ReferenceOps, torch.Tensor, PackedLinear], PackedLinear]:
    def mutated(self: ReferenceOps, x: torch.Tensor, packed: PackedLinear, **kwargs: Any) -> Any:
        y = original(self, x, packed, **kwargs)
        names = [one.name for one in packed.slices]
        if part in names[0]:
            first, second = packed.slices[-2:]
            assert first.stop - first.start == second.stop - second.start
            left, right = y[:, first.start : first.stop], y[:, second.start : second.stop]
            y = torch.cat([y[:, : first.start], right, left], dim=1)
        return y

    original = ReferenceOps.linear
    return mutated


@pytest.mark.parametrize("part", ["gate_proj", "q_proj"], ids=["gate and up", "keys and values"])
def test_fused_halves_swapped(
    pipeline: TextGenerationPipeline, reference: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceOps, "linear", swap_halves(part))
    assert deviation(pipeline, reference) > 10


def test_block_table_off_by_one(
    pipeline: TextGenerationPipeline, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = KVCacheManager.inputs

    def mutated(self: KVCacheManager, *args: Any, **kwargs: Any) -> KVCacheInputs:
        inputs = original(self, *args, **kwargs)
        shifted = [replace(g, block_tables=g.block_tables.roll(1, dims=1)) for g in inputs.groups]
        return replace(inputs, groups=tuple(shifted))

    monkeypatch.setattr(KVCacheManager, "inputs", mutated)
    assert deviation(pipeline, reference) > 10


def test_rows_stored_one_slot_late(
    pipeline: TextGenerationPipeline, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = KVCacheManager.inputs

    def mutated(self: KVCacheManager, *args: Any, **kwargs: Any) -> KVCacheInputs:
        inputs = original(self, *args, **kwargs)
        return replace(inputs, groups=tuple(replace(g, slots=g.slots + 1) for g in inputs.groups))

    monkeypatch.setattr(KVCacheManager, "inputs", mutated)
    assert deviation(pipeline, reference) > 10


def test_stale_prefix_block(pipeline: TextGenerationPipeline, reference: Any) -> None:
    """A cached block whose content is another prompt's shows in the logits of whoever finds it."""
    assert deviation(pipeline, reference) <= 1  # leaves its blocks in the prefix cache
    context = context_of(TOKENS)
    pipeline.kv.claim(context)
    pipeline.kv.reserve(context)
    assert context.start_idx >= 32
    manager = pipeline.kv
    assert isinstance(manager, KVCacheManager)
    stale = manager.inputs([context]).groups[0].block_tables[0, 0]
    for cache in manager.storage.caches:
        cache[:, stale] += 1.0
    pipeline.release(context)
    again = context_of(TOKENS)
    logits = step_logits(pipeline, [again])[0]
    expected = oracle_logits(reference, TOKENS)[again.start_idx :]
    assert float((logits - expected).abs().max()) > 1e-3 * max(1.0, float(expected.std()))


def test_swapped_layers(tmp_path: Path) -> None:
    """Two layers of the checkpoint exchanged: the oracle is not blind to the order of blocks."""
    for architecture in PIPELINE_REGISTRY.architectures:
        assert architecture.tiny_config is not None
        folder = write_checkpoint(tmp_path / architecture.name, architecture.tiny_config())
        straight = step_logits(open_pipeline(folder), [context_of(TOKENS)])[0]
        model: Any = open_pipeline(folder).model
        blocks = list(model.network.blocks)
        swapped = open_pipeline(folder)
        network: Any = swapped.model
        network.network = replace(network.network, blocks=(blocks[1], blocks[0], *blocks[2:]))
        assert not torch.allclose(step_logits(swapped, [context_of(TOKENS)])[0], straight, atol=1e-2)
