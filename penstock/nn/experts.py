"""A feed-forward layer of experts. A router chooses a few experts for each row (Shazeer et al. 2017,
arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.distributed import Part
from penstock.errors import ConfigError
from penstock.kernels import Gating, PackedExperts, Routing, StepInputs
from penstock.kernels.collectives import Collectives
from penstock.nn.config_values import ConfigValues
from penstock.nn.layer_parts import LayerPart, joined
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.mlp import GatedMLP


@dataclass(frozen=True, slots=True)
class Experts:
    """A router and its experts: ``x [T, E] -> [T, E]``.

    The router selects `top` experts for each row. Their outputs are summed with weights from the router.
    """

    router: Linear  # [E] -> [N]
    packed: PackedExperts
    top: int
    """The number of experts for each row."""
    routing: Routing
    gating: Gating
    bias: Tensor | None = None  # [N] float32, added to the scores for the selection; see `ScoreRouting`
    is_wide: bool = False
    """Whether the router computes in float32."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        logits = self.router(step.ops.widen(x) if self.is_wide else x, step)
        topk_weights, topk_ids = step.ops.route(logits, self.top, self.routing, self.bias)
        y = step.ops.experts(x, self.packed, topk_weights, topk_ids, self.gating, lora=step.lora)
        return y if self.packed.ranks is None else step.ops.all_reduce(y, self.packed.ranks)


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts that a router selects, and a gated layer that every row uses (Dai et al. 2024,
    arXiv:2401.06066)."""

    experts: Experts
    shared: GatedMLP
    gate: Linear | None = None  # [E] -> [1]: the logit of the weight of the shared layer

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        shared = self.shared(x, step)
        if self.gate is not None:
            shared = step.ops.scale_rows(shared, self.gate(x, step), are_logits=True)
        return step.ops.add(self.experts(x, step), shared)


def num_experts_per_token(
    config: ConfigValues,
    experts: int,
    default: int,
    *,
    key: str = "num_experts_per_tok",
    has_shared: bool = False,
) -> int:
    """Return the number of experts that the router selects for a token.

    Args:
        config: the checkpoint's configuration.
        experts: the number of experts of a layer.
        default: the family's value if the key is absent.
        key: the key of the number.
        has_shared: whether the family has experts that every token uses.

    Raises:
        ConfigError: the number exceeds ``experts``, or the file has shared experts in a family without them.
    """
    top = config.integer(key, default=default)
    if top > experts:
        raise ConfigError(key, f"{top} experts per token exceed the {experts} experts of a layer")
    if has_shared:
        return top
    for key in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        if config.get(key):
            raise ConfigError(key, f"was {config[key]!r}: shared experts are not supported in this family")
    return top


def load_router(
    load: Loader, name: str, experts: int, hidden: int, *, bias: bool = False, is_wide: bool = False
) -> Linear:
    """Read the router with this full name.

    It keeps the type of the activations, or float32 if it is wide. It is small, and a rounding error can
    route a row to a different expert.
    """
    weight = load.source.tensor(f"{name}.weight", (experts, hidden))
    if not is_wide:
        weight = weight.to(load.dtype)
    offset = load.tensor(f"{name}.bias", experts) if bias else None
    return load.pack(weight.to(load.device), {name: experts}, bias=offset, plain=True, is_wide=is_wide)


def load_correction_bias(load: Loader, name: str, *shape: int) -> Tensor:
    """Read the bias for the selection of experts, ``[N]`` float32; ``shape`` is the stored shape."""
    return load.source.tensor(name, shape).float().flatten().contiguous().to(load.device)


def load_experts(
    load: Loader,
    name: str,
    experts: int,
    hidden: int,
    inner: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> PackedExperts:
    """Read the experts with the common name ``name``, from either of two checkpoint layouts.

    Most checkpoints hold three matrices for each expert, ``{name}.0.gate_proj.weight`` and so on. Newer ones
    hold two tensors for all experts, ``{name}.gate_up_proj [N, 2F, E]`` and ``{name}.down_proj [N, E, F]``.

    Args:
        load: reads and packs the tensors.
        name: the common name of the experts.
        experts: the number of experts.
        hidden: E.
        inner: F.
        parts: the family's names of an expert's gate, up and down matrix.
    """
    if f"{name}.gate_up_proj" in load.source:
        tensors = f"{name}.gate_up_proj", f"{name}.down_proj"
        names = [tuple(f"{name}.{i}.{part}" for part in parts) for i in range(experts)]
        return load_stacked_experts(load, tensors, experts, hidden, inner, names=names)
    held = expert_part(load, experts, inner, f"{name}.0.{parts[2]}")
    gate, up, down = parts
    outputs = {gate: held.rows, up: held.rows}
    for i in held.others(experts):  # experts of other ranks
        for part in parts:
            shape = (hidden, inner) if part == down else (inner, hidden)
            load.source.expect(f"{name}.{i}.{part}.weight", shape)
    gate_ups = (
        load.fused(f"{name}.{i}", {gate: inner, up: inner}, hidden, is_expert=True, outputs=outputs)
        for i in held.experts
    )
    downs = (
        load.linear(f"{name}.{i}.{down}", hidden, inner, is_expert=True, inputs=held.inputs)
        for i in held.experts
    )
    return held.packed(gate_ups, downs)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """The part of a layer's experts on one rank: whole experts, or a part of each."""

    experts: range
    """The ids of the experts."""
    inputs: Part | None
    """The part of F; None for all."""
    is_part: bool
    """Whether other ranks hold other experts."""
    ranks: Collectives | None
    """The ranks that divide the experts; None for one rank."""

    @property
    def rows(self) -> tuple[Part, ...]:
        """The outputs of a gate or up matrix, see `LayerPart.outputs`."""
        return () if self.inputs is None else (self.inputs,)

    def others(self, experts: int) -> list[int]:
        """Return the ids of the experts that other ranks hold."""
        return [i for i in range(experts) if i not in self.experts]

    def packed(self, gate_ups: Iterable[Linear], downs: Iterable[Linear]) -> PackedExperts:
        """Return the experts of these layers. All gate-and-up layers are read before the down layers."""
        first = tuple(linear.packed for linear in gate_ups)
        second = tuple(linear.packed for linear in downs)
        return PackedExperts(first, second, self.experts.start, self.is_part, self.ranks)


def expert_part(load: Loader, experts: int, inner: int, down: str) -> ExpertPart:
    """Return the part of a layer's experts on this rank.

    Args:
        load: the loader of the rank.
        experts: N.
        inner: F.
        down: the name of a down matrix. Its groups of inputs that share a scale are not cut.
    """
    load.has_experts = True
    ranks = load.shard.collectives
    if load.shard.is_whole:
        return ExpertPart(range(experts), None, False, ranks)
    if load.shard.by_expert:
        part = load.shard.part(experts, "experts")
        return ExpertPart(range(part.start, part.stop), None, True, ranks)
    return ExpertPart(range(experts), load.inner_part(down, inner), False, ranks)


def load_stacked_experts(
    load: Loader,
    tensors: tuple[str, str],
    experts: int,
    hidden: int,
    inner: int,
    *,
    names: Sequence[tuple[str, ...]] | None = None,
    transposed: bool = False,
) -> PackedExperts:
    """Read experts that are stored in two tensors ``[N, 2F, E]`` and ``[N, E, F]``.

    Args:
        load: reads and packs the tensors.
        tensors: the full names of the tensors of gates and ups, and of downs.
        experts: N.
        hidden: E.
        inner: F.
        names: the names of gate, up and down of each expert, for adapters. Without names, adapters do not
            apply.
        transposed: whether the tensors are stored ``[N, E, 2F]`` and ``[N, F, E]``.
    """
    held = expert_part(load, experts, inner, tensors[1])

    def read(tensor: str, out_features: int, in_features: int) -> Sequence[Tensor]:
        if transposed:
            matrices = load.source.tensor(tensor, (experts, in_features, out_features))
            return [matrix.T for matrix in matrices]
        return list(load.source.tensor(tensor, (experts, out_features, in_features)))

    gate_ups, downs = read(tensors[0], 2 * inner, hidden), read(tensors[1], hidden, inner)

    def pack(weight: Tensor, keys: Sequence[str], part: LayerPart) -> Linear:
        divided = None if held.inputs is None else dict.fromkeys(keys, part)
        return load.pack(weight, dict.fromkeys(keys, part.out_features), is_expert=True, held=divided)

    def gate_up(i: int) -> Linear:
        weight, part = gate_ups[i], LayerPart(inner, hidden, held.rows)
        if held.inputs is not None:
            pair = (held.inputs, held.inputs.shifted(inner))
            weight = joined(LayerPart(2 * inner, hidden, pair).of_rows(weight))
        return pack(weight, names[i][:2] if names else (), part)

    def down(i: int) -> Linear:
        part = LayerPart(hidden, inner, (), held.inputs)
        (weight,) = part.of_weight(downs[i])
        return pack(weight, names[i][2:] if names else (), part)

    packed = held.packed((gate_up(i) for i in held.experts), (down(i) for i in held.experts))
    for tensor in tensors:
        load.source.release(tensor)
    return packed
