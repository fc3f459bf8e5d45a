"""Mutations of the network and its KV cache, which the comparison with transformers must detect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import DECODERS, transformers_logits, write_checkpoint
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

from penstock.architectures.gemma4_text.network import (
    ExpertLayer,
    Gemma4Attention,
    Gemma4Block,
    Gemma4Network,
)
from penstock.kernels import XIELU, Activation, KVCacheInputs, Ops
from penstock.kv_cache import KVCacheManager
from penstock.nn import (
    MLP,
    Attention,
    Branch,
    DecoderBlock,
    DecoderNetwork,
    GatedAttention,
    GatedMLP,
    Head,
    LayerNorm,
    Linear,
    LinearAttention,
    ParallelBlock,
    RMSNorm,
    RotaryConfig,
)
from penstock.pipelines import TextGenerationPipeline

pytestmark = pytest.mark.families

TOKENS = random_tokens(50, 130, seed=9)


@pytest.fixture(scope="module")
def expected(reference: Any) -> torch.Tensor:  # [T, V]
    """Return the logits of transformers."""
    return transformers_logits(reference, TOKENS)


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, kernels="reference", kv_cache_block_size=16)


def relative_error(pipeline: TextGenerationPipeline, expected: torch.Tensor) -> float:
    """Return the largest error of a prefill and ten decode steps, in multiples of the tolerance."""
    context = make_context(TOKENS[:40])
    logits = [step_logits(pipeline, [context])[0]]
    for token in TOKENS[40:]:
        append_token(pipeline, context, token)
        logits.append(step_logits(pipeline, [context])[0])
    pipeline.release(context)
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    return float((torch.cat(logits) - expected[: len(torch.cat(logits))]).abs().max()) / tolerance


def test_the_unchanged_network_equals_transformers(
    pipeline: TextGenerationPipeline, expected: torch.Tensor
) -> None:
    assert relative_error(pipeline, expected) <= 1


def test_a_doubled_rope_base_is_detected(
    checkpoint: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.nn import rotary

    original_frequencies, calls = rotary._plain_frequencies, []

    def mutate_call(config: RotaryConfig) -> torch.Tensor:
        calls.append(config)
        return original_frequencies(replace(config, base=2 * config.base))

    monkeypatch.setattr(rotary, "_plain_frequencies", mutate_call)
    pipeline = open_pipeline(checkpoint, kernels="reference", kv_cache_block_size=16)
    if not calls:
        pytest.skip("has no rotary embedding")
    assert relative_error(pipeline, expected) > 10


def test_swapped_gate_and_up_are_detected(
    pipeline: TextGenerationPipeline, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_end: Any = type(pipeline.model.session.ops)
    original_activation, calls = back_end.gated_activation, []

    def mutate_call(self: Ops, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        calls.append(activation)
        return original_activation(self, x.roll(x.shape[1] // 2, dims=1), activation)

    monkeypatch.setattr(back_end, "gated_activation", mutate_call)
    error = relative_error(pipeline, expected)
    if not calls:
        pytest.skip("has no gated layer")
    assert error > 10


def test_swapped_keys_and_values_are_detected(
    pipeline: TextGenerationPipeline, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_end: Any = type(pipeline.model.session.ops)
    original_store = back_end.store_kv
    monkeypatch.setattr(back_end, "store_kv", lambda self, k, v, kv: original_store(self, v, k, kv))
    assert relative_error(pipeline, expected) > 10


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_window_off_by_one_is_detected(
    pipeline: TextGenerationPipeline, expected: torch.Tensor, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if all(group.window is None for group in pipeline.model.kv_cache_spec.groups):
        pytest.skip("has no window")
    original_inputs = KVCacheManager.inputs

    def mutate_call(self: KVCacheManager, *args: Any, **kwargs: Any) -> KVCacheInputs:
        inputs = original_inputs(self, *args, **kwargs)
        shifted_groups = [
            replace(g, window=None if g.window is None else g.window + shift) for g in inputs.groups
        ]
        return replace(inputs, groups=tuple(shifted_groups))

    monkeypatch.setattr(KVCacheManager, "inputs", mutate_call)
    assert relative_error(pipeline, expected) > 10


def has_attention(block: Any) -> bool:
    """Return whether a block has softmax attention instead of linear attention."""
    return isinstance(block.attention, Attention)


def replace_attention_parts(**parts: Any) -> Callable[[Any], Any]:
    """Return a function that replaces fields of the attention in all blocks with softmax attention.

    The function returns None if all fields have these values already.
    """

    def mutate(network: Any) -> Any:
        blocks = [
            replace(block, attention=replace(block.attention, **parts)) if has_attention(block) else block
            for block in network.blocks
        ]
        is_unchanged = all(
            getattr(block.attention, part) is value
            for block in filter(has_attention, network.blocks)
            for part, value in parts.items()
        )
        return None if is_unchanged else replace(network, blocks=tuple(blocks))

    return mutate


def set_final_norm_to_one(network: Any) -> Any:
    unit_weight = torch.ones_like(network.norm.weight)
    return replace(network, norm=replace(network.norm, weight=unit_weight))


def swap_ropes(network: Any) -> Any:
    if not isinstance(network, DecoderNetwork) or len(network.rotaries) < 2:
        return None
    return replace(network, rotaries=network.rotaries[::-1])


def apply_rope_in_every_layer(network: Any) -> Any:
    if not isinstance(network, DecoderNetwork) or all(
        block.attention.rotary_index == 0 for block in network.blocks if has_attention(block)
    ):
        return None
    return replace_attention_parts(rotary_index=0)(network)


def drop_logit_scale_and_soft_cap(network: Any) -> Any:
    head = network.head
    return None if (head.scale, head.soft_cap) == (1, None) else replace(network, head=Head(head.linear))


def drop_embedding_scale(network: Any) -> Any:
    embedding = network.embedding
    return None if embedding.scale == 1 else replace(network, embedding=replace(embedding, scale=1.0))


def set_residual_scales_to_one(network: Any) -> Any:
    blocks = [block for block in network.blocks if isinstance(block, DecoderBlock)]
    if all(block.mlp_branch.scale == 1 for block in blocks):
        return None
    return replace(
        network, blocks=tuple(replace(b, mlp_branch=replace(b.mlp_branch, scale=1.0)) for b in blocks)
    )


def mutate_blocks(mutate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that mutates the blocks of a network, and returns None if no block changes."""

    def mutated_network(network: Any) -> Any:
        blocks = tuple(mutate(block) for block in network.blocks)
        is_unchanged = all(new is old for new, old in zip(blocks, network.blocks, strict=True))
        return None if is_unchanged else replace(network, blocks=blocks)

    return mutated_network


def swap_rotary_layout(block: Any) -> Any:
    """Swap the layout of the rotary pairs: adjacent dimensions instead of halves, or the reverse."""
    if not has_attention(block) or block.attention.rotary_index is None:
        return block
    return replace(
        block, attention=replace(block.attention, is_interleaved=not block.attention.is_interleaved)
    )


def use_base_attention(block: Any) -> Any:
    """Replace a family's attention class by the base class."""
    attention = block.attention
    # The base class cannot read the projections of some classes.
    if type(attention) in (Attention, GatedAttention, Gemma4Attention, LinearAttention):
        return block
    rotary_index = None if attention.rotary_index is None else 0
    values = {field.name: getattr(attention, field.name) for field in fields(attention)}
    return replace(block, attention=Attention(**values | {"rotary_index": rotary_index}))


def drop_qkv_clipping(block: Any) -> Any:
    attention = block.attention
    if not has_attention(block) or type(attention.qkv) is Linear:
        return block
    return replace(block, attention=replace(attention, qkv=Linear(attention.qkv.packed)))


def drop_mlp_norm(block: Any) -> Any:
    is_parallel = isinstance(block, ParallelBlock) and block.mlp_norm is not None
    return replace(block, mlp_norm=None) if is_parallel else block


def make_block_sequential(block: Any) -> Any:
    """Run a parallel block sequentially: the feed-forward layer reads the attention's output."""
    if not isinstance(block, ParallelBlock):
        return block
    norms = Branch(block.norm, None), Branch(block.mlp_norm or block.norm, None)
    return DecoderBlock(norms[0], block.attention, norms[1], block.mlp)


def change_activation(block: Any) -> Any:
    if isinstance(block.mlp, MLP | GatedMLP):
        other_activation = "silu" if block.mlp.activation == "relu" else "relu"
        return replace(block, mlp=replace(block.mlp, activation=other_activation))
    if isinstance(getattr(block.mlp, "activation", None), XIELU):
        return replace(block, mlp=replace(block.mlp, activation=XIELU(0.5, 0.5, 0.5, -1e-6)))
    return block


def mutate_linear_attention(**parts: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that mutates fields of the linear attention of a block."""

    def mutate(block: Any) -> Any:
        attention = block.attention
        if not isinstance(attention, LinearAttention):
            return block
        values = {name: change(getattr(attention, name)) for name, change in parts.items()}
        return replace(block, attention=replace(attention, **values))

    return mutate_blocks(mutate)


def mutate_gemma4_attention(change: Callable[[Gemma4Attention], Gemma4Attention]) -> Callable[[Any], Any]:
    """Return a function that mutates the attention of a Gemma 4 block."""

    def mutate(block: Any) -> Any:
        attention = block.attention
        if not isinstance(attention, Gemma4Attention):
            return block
        changed_attention = change(attention)
        return block if changed_attention is attention else replace(block, attention=changed_attention)

    return mutate_blocks(mutate)


def read_keys_of_another_layer(attention: Gemma4Attention) -> Gemma4Attention:
    """Read the keys and values of the layer of the same type before the source of a layer without its own."""
    return replace(attention, layer=attention.layer - 2) if attention.is_kv_shared else attention


def mutate_gemma4_blocks(**parts: Any) -> Callable[[Any], Any]:
    """Return a function that replaces fields of Gemma 4's blocks."""
    return mutate_blocks(lambda block: replace(block, **parts) if isinstance(block, Gemma4Block) else block)


def mutate_gemma4_experts(change: Callable[[ExpertLayer], ExpertLayer]) -> Callable[[Any], Any]:
    """Return a function that mutates the experts of Gemma 4's blocks."""
    return mutate_blocks(
        lambda block: (
            replace(block, experts=change(block.experts)) if isinstance(block, Gemma4Block) else block
        )
    )


def drop_per_layer_token_embeddings(network: Any) -> Any:
    if not isinstance(network, Gemma4Network):
        return None
    embedding = replace(network.per_layer.embedding, scale=0.0)
    return replace(network, per_layer=replace(network.per_layer, embedding=embedding))


def drop_head_bias(network: Any) -> Any:
    packed_weight = network.head.linear.packed
    if packed_weight.bias is None:
        return None
    return replace(network, head=replace(network.head, linear=Linear(replace(packed_weight, bias=None))))


def set_final_norm_bias_to_zero(network: Any) -> Any:
    norm = network.norm
    if not isinstance(norm, LayerNorm) or not norm.bias.any():
        return None
    return replace(network, norm=replace(norm, bias=torch.zeros_like(norm.bias)))


@dataclass(frozen=True)
class SwappedHalves:
    """A linear layer whose output halves are swapped."""

    linear: Linear

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        y = self.linear(x, step)
        return y.roll(y.shape[1] // 2, dims=1)


MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "other rotary layout": mutate_blocks(swap_rotary_layout),
    "attention of the base class": mutate_blocks(use_base_attention),
    "clipping of queries, keys and values dropped": mutate_blocks(drop_qkv_clipping),
    "one shared norm instead of two": mutate_blocks(drop_mlp_norm),
    "sequential instead of parallel blocks": mutate_blocks(make_block_sequential),
    "other activation": mutate_blocks(change_activation),
    "convolution reversed": mutate_linear_attention(convolution=lambda weight: weight.flip(0)),
    "decay of the state dropped": mutate_linear_attention(decay=torch.zeros_like),
    "gates swapped": mutate_linear_attention(gates=lambda gates: SwappedHalves(gates)),
    "value norm doubled": mutate_gemma4_attention(
        lambda attention: replace(attention, v_norm=RMSNorm(2 * attention.v_norm.weight, 1e-6))
    ),
    "keys of another layer": mutate_gemma4_attention(read_keys_of_another_layer),
    "output scale of blocks set to 1": mutate_gemma4_blocks(output_scale=1.0),
    "per-layer inputs dropped": mutate_gemma4_blocks(layer_input=None),
    "experts beside the MLP dropped": mutate_gemma4_blocks(experts=None),
    "router scale set to 1": mutate_gemma4_experts(
        lambda experts: replace(
            experts, router_norm=RMSNorm(torch.ones_like(experts.router_norm.weight), 1e-6)
        )
    ),
    "output scales of experts dropped": mutate_gemma4_experts(
        lambda experts: replace(experts, experts=replace(experts.experts, output_scales=None))
    ),
    "per-layer embeddings of tokens dropped": drop_per_layer_token_embeddings,
    "head bias dropped": drop_head_bias,
    "bias of the final norm set to 0": set_final_norm_bias_to_zero,
    "query norm dropped": replace_attention_parts(q_norm=None),
    "key norm dropped": replace_attention_parts(k_norm=None),
    "soft cap of scores dropped": replace_attention_parts(soft_cap=None),
    "soft cap and scale of logits dropped": drop_logit_scale_and_soft_cap,
    "embedding scale dropped": drop_embedding_scale,
    "residual multiplier set to 1": set_residual_scales_to_one,
    "weight of the final norm set to 1": set_final_norm_to_one,
    "local and global rope swapped": swap_ropes,
    "rope in layers without rope": apply_rope_in_every_layer,
}


def test_each_mutation_changes_the_logits(pipeline: TextGenerationPipeline, expected: torch.Tensor) -> None:
    model: Any = pipeline.model
    network = model.network
    for name, mutate in MUTATIONS.items():
        mutated_network = mutate(network)
        if mutated_network is not None:
            model.network = mutated_network
            assert relative_error(pipeline, expected) > 10, name


def test_every_mutation_applies_to_some_architecture(tmp_path: Path) -> None:
    networks = []
    for architecture in DECODERS:
        assert architecture.tiny_config is not None
        folder = write_checkpoint(tmp_path / architecture.name, architecture.tiny_config())
        model: Any = open_pipeline(folder).model
        networks.append(model.network)
    for name, mutate in MUTATIONS.items():
        assert any(mutate(network) is not None for network in networks), name


def test_a_shifted_block_table_is_detected(
    pipeline: TextGenerationPipeline, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_inputs = KVCacheManager.inputs

    def mutate_call(self: KVCacheManager, *args: Any, **kwargs: Any) -> KVCacheInputs:
        inputs = original_inputs(self, *args, **kwargs)
        shifted_groups = [replace(g, block_tables=g.block_tables.roll(1, dims=1)) for g in inputs.groups]
        return replace(inputs, groups=tuple(shifted_groups))

    monkeypatch.setattr(KVCacheManager, "inputs", mutate_call)
    assert relative_error(pipeline, expected) > 10


def test_keys_stored_one_slot_late_are_detected(
    pipeline: TextGenerationPipeline, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_inputs = KVCacheManager.inputs

    def mutate_call(self: KVCacheManager, *args: Any, **kwargs: Any) -> KVCacheInputs:
        inputs = original_inputs(self, *args, **kwargs)
        return replace(inputs, groups=tuple(replace(g, slots=g.slots + 1) for g in inputs.groups))

    monkeypatch.setattr(KVCacheManager, "inputs", mutate_call)
    assert relative_error(pipeline, expected) > 10


def test_a_changed_block_of_the_prefix_cache_is_detected(
    pipeline: TextGenerationPipeline, expected: torch.Tensor
) -> None:
    """Adding 1 to a cached block of all layers changes the logits of a request that reuses the block."""
    assert relative_error(pipeline, expected) <= 1  # fills the prefix cache with the blocks of the prompt
    context = make_context(TOKENS)
    pipeline.kv.claim(context)
    pipeline.kv.reserve(context)
    assert context.start_idx >= 32
    manager = pipeline.kv
    assert isinstance(manager, KVCacheManager)
    groups = manager.inputs([context]).groups
    for cache, group_index in zip(manager.storage.caches, manager.spec.group_of_layer, strict=True):
        cache[:, groups[group_index].block_tables[0, context.start_idx // 16 - 1]] += 1.0
    pipeline.release(context)
    second_context = make_context(TOKENS)
    logits = step_logits(pipeline, [second_context])[0]
    difference = float((logits - expected[second_context.start_idx :]).abs().max())
    assert difference > 1e-3 * max(1.0, float(expected.std()))


def test_swapped_layers_change_the_logits(tmp_path: Path) -> None:
    """The test swaps the first two blocks of the network of each decoder architecture."""
    for architecture in DECODERS:
        assert architecture.tiny_config is not None
        folder = write_checkpoint(tmp_path / architecture.name, architecture.tiny_config())
        original_logits = step_logits(open_pipeline(folder), [make_context(TOKENS)])[0]
        model: Any = open_pipeline(folder).model
        blocks = list(model.network.blocks)
        swapped_pipeline = open_pipeline(folder)
        swapped_model: Any = swapped_pipeline.model
        swapped_model.network = replace(swapped_model.network, blocks=(blocks[1], blocks[0], *blocks[2:]))
        assert not torch.allclose(
            step_logits(swapped_pipeline, [make_context(TOKENS)])[0], original_logits, atol=1e-2
        )
