"""Mixtures of experts: a router selects a few experts per row (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.distributed import Part
from penstock.errors import ConfigError
from penstock.kernels import Gating, PackedExperts, Routing, StepInputs
from penstock.kernels.collectives import Collectives
from penstock.nn.config_values import ConfigValues
from penstock.nn.layer_parts import LayerPart, concatenated
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.mlp import GatedMLP


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router and its experts, ``x [T, E] -> [T, E]``.

    The router selects `top_k` experts for each row. The result is the sum of the outputs of the selected
    experts, weighted by the router.
    """

    router: Linear  # [E] -> [N]
    packed: PackedExperts
    top_k: int
    """The number of experts for each row."""
    routing: Routing
    activation: Gating
    correction_bias: Tensor | None = None
    """``[N]`` float32, added to the scores for the selection; see `ScoreRouting`."""
    is_router_float32: bool = False
    """Whether the router computes in float32."""
    output_scales: Tensor | None = None
    """``[N, 1]`` float32: factors of the outputs of the experts; None for no factors."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        return self.mix(x, x, step)

    def mix(self, router_input: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        """Return the weighted sum ``[T, E]`` of the outputs of the experts for ``x [T, E]``.

        The experts are selected by ``router_input [T, E]``.
        """
        ops = step.ops
        logits = self.router(ops.widen(router_input) if self.is_router_float32 else router_input, step)
        topk_weights, topk_ids = ops.route(logits, self.top_k, self.routing, self.correction_bias)
        if self.output_scales is not None:
            scales = ops.embedding(topk_ids.reshape(-1), self.output_scales)  # [T top_k, 1]
            topk_weights = ops.multiply(topk_weights, scales.view(len(x), self.top_k))
        y = ops.experts(x, self.packed, topk_weights, topk_ids, self.activation, lora=step.lora)
        return y if self.packed.ranks is None else ops.all_reduce(y, self.packed.ranks)


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts that a router selects, plus a shared expert that every row uses (Dai et al. 2024,
    arXiv:2401.06066): ``x [T, E] -> [T, E]``."""

    experts: Experts
    shared: GatedMLP
    gate: Linear | None = None  # [E] -> [1]: the shared expert's output is scaled by sigmoid(gate(x))

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        shared = self.shared(x, step)
        if self.gate is not None:
            shared = step.ops.scale_rows(shared, self.gate(x, step), are_logits=True)
        return step.ops.add(self.experts(x, step), shared)


def num_experts_per_token(
    config: ConfigValues,
    num_experts: int,
    default: int,
    *,
    key: str = "num_experts_per_tok",
    has_shared: bool = False,
) -> int:
    """Return the number of experts that the router selects for a token.

    Args:
        config: the checkpoint's configuration.
        num_experts: the number of experts of a layer.
        default: the family's value if the key is absent.
        key: the key of the number of selected experts in ``config.json``.
        has_shared: whether the family has shared experts, which every token uses.

    Raises:
        ConfigError: the result exceeds ``num_experts``, or the file configures shared experts in a family
            without them.
    """
    top_k = config.integer(key, default=default)
    if top_k > num_experts:
        raise ConfigError(key, f"{top_k} experts per token exceed the {num_experts} experts of a layer")
    if has_shared:
        return top_k
    for key in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        if config.get(key):
            raise ConfigError(key, f"was {config[key]!r}: shared experts are not supported in this family")
    return top_k


def load_router(
    load: Loader, name: str, num_experts: int, hidden: int, *, bias: bool = False, is_float32: bool = False
) -> Linear:
    """Read the router called ``name``, in the type of the activations or, with ``is_float32``, in float32.

    A router is never quantized, because it is small and a rounding error can route a row to another expert.
    """
    weight = load.source.tensor(f"{name}.weight", (num_experts, hidden))
    if not is_float32:
        weight = weight.to(load.dtype)
    biases = load.tensor(f"{name}.bias", num_experts) if bias else None
    return load.pack(
        weight.to(load.device), {name: num_experts}, bias=biases, is_unquantized=True, is_float32=is_float32
    )


def load_correction_bias(load: Loader, name: str, *shape: int) -> Tensor:
    """Return the bias ``[N]`` float32 that is added to the scores for selecting experts.

    ``shape`` is the stored shape.
    """
    return load.source.tensor(name, shape).float().flatten().contiguous().to(load.device)


def load_experts(
    load: Loader,
    name: str,
    num_experts: int,
    hidden: int,
    inner: int,
    matrix_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> PackedExperts:
    """Read the experts whose tensor names start with ``name``, from either of two checkpoint layouts.

    Most checkpoints have three matrices for each expert, ``{name}.0.gate_proj.weight`` and so on. Newer
    checkpoints have two tensors for all experts: ``{name}.gate_up_proj [N, 2F, E]`` and
    ``{name}.down_proj [N, E, F]``.

    Args:
        load: reads and packs the tensors.
        name: the start of the tensor names.
        num_experts: N.
        hidden: E.
        inner: F.
        matrix_names: the names of an expert's gate, up and down matrix in this family.
    """
    if f"{name}.gate_up_proj" in load.source:
        tensors = f"{name}.gate_up_proj", f"{name}.down_proj"
        names = [tuple(f"{name}.{i}.{part}" for part in matrix_names) for i in range(num_experts)]
        return load_stacked_experts(load, tensors, num_experts, hidden, inner, names=names)
    local_experts = find_local_experts(load, num_experts, inner, f"{name}.0.{matrix_names[2]}")
    gate, up, down = matrix_names
    outputs = {gate: local_experts.gate_outputs, up: local_experts.gate_outputs}
    # Other ranks read the remote experts. This rank checks their shapes.
    for i in local_experts.remote_experts(num_experts):
        for part in matrix_names:
            shape = (hidden, inner) if part == down else (inner, hidden)
            load.source.expect(f"{name}.{i}.{part}.weight", shape)
    gate_ups = (
        load.fused(f"{name}.{i}", {gate: inner, up: inner}, hidden, is_expert=True, outputs=outputs)
        for i in local_experts.experts
    )
    downs = (
        load.linear(f"{name}.{i}.{down}", hidden, inner, is_expert=True, inputs=local_experts.inner_part)
        for i in local_experts.experts
    )
    return local_experts.combine(gate_ups, downs)


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """The part of a layer's experts on one rank: a range of whole experts, or a part of each expert."""

    experts: range
    """The ids of the experts."""
    inner_part: Part | None
    """This rank's part of the inner dimension F of each expert; None for all of F."""
    has_remote_experts: bool
    """Whether some experts are on other ranks only."""
    ranks: Collectives | None
    """The ranks among which the experts are divided; None for one rank."""

    @property
    def gate_outputs(self) -> tuple[Part, ...]:
        """This rank's outputs of a gate or up matrix, see `LayerPart.outputs`."""
        return () if self.inner_part is None else (self.inner_part,)

    def remote_experts(self, num_experts: int) -> list[int]:
        """Return the ids of the experts that this rank does not have; ``num_experts`` is N."""
        return [i for i in range(num_experts) if i not in self.experts]

    def combine(self, gate_ups: Iterable[Linear], downs: Iterable[Linear]) -> PackedExperts:
        """Return the packed experts of this rank.

        Loads all gate-and-up layers before the down layers. This order is also the order of the layers in a
        file of packed weights.
        """
        packed_gate_ups = tuple(linear.packed for linear in gate_ups)
        packed_downs = tuple(linear.packed for linear in downs)
        return PackedExperts(
            packed_gate_ups, packed_downs, self.experts.start, self.has_remote_experts, self.ranks
        )


def find_local_experts(load: Loader, num_experts: int, inner: int, down: str) -> LocalExperts:
    """Return the part of a layer's experts that this rank has.

    Args:
        load: the loader of the rank. Its attribute ``has_experts`` is set to True.
        num_experts: N.
        inner: F.
        down: the name of a down matrix, whose stored encoding determines where F can be divided. Inputs that
            share a stored quantization scale stay on one rank.
    """
    load.has_experts = True
    ranks = load.shard.collectives
    if load.shard.is_whole:
        return LocalExperts(range(num_experts), None, False, ranks)
    if load.shard.by_expert:
        part = load.shard.part(num_experts, "experts")
        return LocalExperts(range(part.start, part.stop), None, True, ranks)
    return LocalExperts(range(num_experts), load.inner_part(down, inner), False, ranks)


def load_stacked_experts(
    load: Loader,
    tensors: tuple[str, str],
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    names: Sequence[tuple[str, ...]] | None = None,
    transposed: bool = False,
) -> PackedExperts:
    """Read experts that are stored in two tensors ``[N, 2F, E]`` and ``[N, E, F]``.

    Args:
        load: reads and packs the tensors.
        tensors: the full names of two tensors: the gate and up matrices, and the down matrices.
        num_experts: N.
        hidden: E.
        inner: F.
        names: for each expert the names of gate, up and down matrix in adapters. Without names, no adapter
            applies.
        transposed: whether the tensors are stored ``[N, E, 2F]`` and ``[N, F, E]``.
    """
    local_experts = find_local_experts(load, num_experts, inner, tensors[1])

    def read(tensor: str, out_features: int, in_features: int) -> Sequence[Tensor]:
        if transposed:
            matrices = load.source.tensor(tensor, (num_experts, in_features, out_features))
            return [matrix.T for matrix in matrices]
        return list(load.source.tensor(tensor, (num_experts, out_features, in_features)))

    gate_ups, downs = read(tensors[0], 2 * inner, hidden), read(tensors[1], hidden, inner)

    def pack(weight: Tensor, keys: Sequence[str], part: LayerPart) -> Linear:
        rank_parts = None if local_experts.inner_part is None else dict.fromkeys(keys, part)
        sizes = dict.fromkeys(keys, part.out_features)
        return load.pack(weight, sizes, is_expert=True, rank_parts=rank_parts)

    def gate_up(i: int) -> Linear:
        weight, part = gate_ups[i], LayerPart(inner, hidden, local_experts.gate_outputs)
        if local_experts.inner_part is not None:
            gate_and_up_rows = (local_experts.inner_part, local_experts.inner_part.shifted(inner))
            weight = concatenated(LayerPart(2 * inner, hidden, gate_and_up_rows).slice_rows(weight))
        return pack(weight, names[i][:2] if names else (), part)

    def down(i: int) -> Linear:
        part = LayerPart(hidden, inner, (), local_experts.inner_part)
        (weight,) = part.slice_weight(downs[i])
        return pack(weight, names[i][2:] if names else (), part)

    packed = local_experts.combine(
        (gate_up(i) for i in local_experts.experts), (down(i) for i in local_experts.experts)
    )
    for tensor in tensors:
        load.source.release(tensor)
    return packed
