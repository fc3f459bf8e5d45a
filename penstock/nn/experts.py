"""A feed-forward layer of experts. A router chooses a few experts for each row (Shazeer et al. 2017,
arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import Gating, PackedExperts, Routing, StepInputs
from penstock.nn.config_values import ConfigValues
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader


@dataclass(frozen=True, slots=True)
class Experts:
    """Each row's chosen experts; their outputs are summed with the weights from the router."""

    router: Linear  # [E] -> [N]
    packed: PackedExperts
    top: int
    """The number of experts for each row."""
    routing: Routing
    gating: Gating

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        topk_weights, topk_ids = step.ops.route(self.router(x, step), self.top, self.routing)
        return step.ops.experts(x, self.packed, topk_weights, topk_ids, self.gating, lora=step.lora)


def num_experts_per_token(config: ConfigValues, experts: int, default: int) -> int:
    """Return ``num_experts_per_tok``.

    Args:
        config: the checkpoint's configuration.
        experts: the number of experts of a layer.
        default: the family's value if the key is absent.

    Raises:
        ConfigError: the number exceeds ``experts``, or the model has shared experts, which every token uses.
    """
    top = config.integer("num_experts_per_tok", default=default)
    if top > experts:
        raise ConfigError(
            "num_experts_per_tok", f"{top} experts for each token cannot be topk_ids of {experts}"
        )
    for key in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        if config.get(key):
            raise ConfigError(key, f"was {config[key]!r}: experts that every token visits are not supported")
    return top


def load_router(load: Loader, name: str, experts: int, hidden: int, *, bias: bool = False) -> Linear:
    """Read the router with this full name.

    It keeps the type of the activations. It is small, and a rounding error can send a row to another expert.
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
