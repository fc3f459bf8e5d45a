"""A feed-forward layer made of experts, of which a router chooses a few for each row (Shazeer et al. 2017,
arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import Gating, PackedExperts, Routing, StepInputs
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader


@dataclass(frozen=True, slots=True)
class Experts:
    """The chosen experts' outputs, summed by the shares that the router gives them."""

    router: Linear  # [E] -> [N]
    packed: PackedExperts
    top: int
    """How many experts a row visits."""
    routing: Routing
    gating: Gating

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        shares, chosen = step.ops.route(self.router(x, step), self.top, self.routing)
        return step.ops.experts(x, self.packed, shares, chosen, self.gating, lora=step.lora)


def num_chosen(config: Any, experts: int, default: int) -> int:
    """``num_experts_per_tok`` of a `HuggingFaceConfig`, of so many experts.

    Raises:
        ConfigError: there are fewer experts, or others besides these, which every token visits.
    """
    top: int = config.count("num_experts_per_tok", default=default)
    if top > experts:
        raise ConfigError(
            "num_experts_per_tok", f"{top} experts for each token cannot be chosen of {experts}"
        )
    for key in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        if config.get(key):
            raise ConfigError(key, f"was {config[key]!r}: experts that every token visits are not supported")
    return top


def load_router(load: Loader, name: str, experts: int, hidden: int, *, bias: bool = False) -> Linear:
    """Reads the router called ``name``.

    It stays in the activations' type: it is small, and a rounding may send a row to another expert.
    """
    weight = load.tensor(f"{name}.weight", experts, hidden)
    offset = load.tensor(f"{name}.bias", experts) if bias else None
    return load.pack(weight, {name: experts}, bias=offset, plain=True)


def load_experts(
    load: Loader,
    name: str,
    experts: int,
    hidden: int,
    inner: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> PackedExperts:
    """Reads the experts under ``name``, from either layout of checkpoints.

    Most hold three matrices an expert, ``{name}.0.gate_proj.weight`` and so on; newer ones two tensors for
    all, ``{name}.gate_up_proj [N, 2F, E]`` and ``{name}.down_proj [N, E, F]``.

    Args:
        load: where from.
        name: the experts' common name.
        experts: how many there are.
        hidden: E.
        inner: F.
        parts: what the family calls an expert's gate, up and down.
    """
    gate, up, down = parts
    if f"{name}.gate_up_proj" not in load.source:
        return PackedExperts(
            tuple(
                load.fused(f"{name}.{i}", {gate: inner, up: inner}, hidden, is_expert=True).packed
                for i in range(experts)
            ),
            tuple(
                load.linear(f"{name}.{i}.{down}", hidden, inner, is_expert=True).packed
                for i in range(experts)
            ),
        )
    gate_ups = load.source.tensor(f"{name}.gate_up_proj", (experts, 2 * inner, hidden))
    downs = load.source.tensor(f"{name}.down_proj", (experts, hidden, inner))
    packed = PackedExperts(
        tuple(
            load.pack(weight, {f"{name}.{i}.{gate}": inner, f"{name}.{i}.{up}": inner}, is_expert=True).packed
            for i, weight in enumerate(gate_ups)
        ),
        tuple(
            load.pack(weight, {f"{name}.{i}.{down}": hidden}, is_expert=True).packed
            for i, weight in enumerate(downs)
        ),
    )
    for tensor in ("gate_up_proj", "down_proj"):
        load.source.release(f"{name}.{tensor}")
    return packed
