"""The operations a model is made of. A back end is a subclass of `Ops`; a session owns one instance.

Models call nothing else on activations but these operations and views (slicing, reshaping), so that a
step can be recorded and replayed (`kernels.recording`). `kernels.reference.ReferenceOps` defines what
is correct; other back ends inherit from it and override what they do faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from penstock.host.memory import PrefaultedMemory
from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
from penstock.kernels.inputs import LayerKV, LoRAInputs, SamplingInputs
from penstock.kernels.linear import Layout, LinearSlice, PackedLinear, pack_linear, pack_quantized
from penstock.kernels.operations import (
    Arguments,
    CFunction,
    Operation,
    UnrecordableStepError,
    operation,
    operations_of,
)

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Gating = Activation | ClampedSwiGLU
Routing = Literal["all", "all_normed", "chosen"]


def _own_adapters(arguments: Arguments) -> Arguments:
    """Keep only the adapters of the slices of this layer."""
    lora, packed = arguments["lora"], arguments["packed"]
    return {**arguments, "lora": lora and lora.on(part.name for part in packed.slices)}


def _no_adapters(arguments: Arguments) -> Arguments:
    """Refuse adapters on experts."""
    lora, packed = arguments["lora"], arguments["packed"]
    if lora is not None and lora.on(packed.slice_names()):
        raise UnrecordableStepError("adapters on experts")
    return {**arguments, "lora": None}


class Ops(ABC):
    """One back end's kernels. Instances hold no state of a step and may serve several models."""

    name: str
    """What ``penstock env`` calls the back end."""

    layout: Layout = "rows"
    """Memory layout of the weights that it packs."""

    @property
    def packs_weights(self) -> bool:
        """Whether it packs weights into a layout of its own. Such weights can be cached in a file."""
        return self.layout != "rows"

    @property
    def description(self) -> str:
        """Name of the back end, followed by its instruction set if it has several."""
        return self.name

    def pack_into(self, memory: PrefaultedMemory) -> None:  # noqa: B027  # optional
        """Allocate packed weights from this prefaulted memory while it lasts.

        Does nothing in a back end that packs no weights in host memory.
        """

    def pack_linear(
        self,
        weight: Tensor | Sequence[Tensor],  # [out, in], or its parts one behind the other
        encoding: str,
        *,
        bias: Tensor | None = None,  # [out]
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        """Packs a weight for `linear`, in the encoding named and the layout that this back end reads fastest.

        Raises:
            ConfigError: the encoding is unknown.
        """
        return pack_linear(weight, encoding, bias=bias, slices=slices)

    def pack_lazily(
        self,
        weight: Sequence[Tensor],  # [out, in], parts one behind the other
        encoding: str,
        *,
        bias: Tensor | None = None,  # [out]
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        """As `pack_linear`, of parts that stay in memory by themselves, as those of a mapped file do: where
        the back end can do without packing for a while, the tensors are `LazyWeight`, and `linear` multiplies
        by the floats that there are.

        Raises:
            ConfigError: the encoding is unknown.
        """
        return self.pack_linear(weight, encoding, bias=bias, slices=slices)

    def pack_quantized(
        self,
        rows: Mapping[str, Tensor],
        encoding: str,
        *,
        bias: Tensor | None = None,  # [out]
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        """Packs for `linear` a weight that is in the form of its encoding already: ``weight [out, in]`` and
        what goes with it.

        Raises:
            ConfigError: the encoding is unknown.
        """
        return pack_quantized(rows, encoding, bias=bias, slices=slices)

    @operation(weights=["table"])
    @abstractmethod
    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Looks up ``tokens [T]`` in ``table [V, E]``: ``[T, E]``."""

    @operation(
        weights=["packed"],
        simplify=_own_adapters,
        functions={
            "linear": CFunction("2q P q 4P 4q", can_be_long=True),
            "lora": CFunction("q P q P q 2P 4q", can_be_long=True),
        },
    )
    @abstractmethod
    def linear(
        self,
        x: Tensor,  # [T, in]
        packed: PackedLinear,
        *,
        lora: LoRAInputs | None = None,
    ) -> Tensor:  # [T, out]
        """``x @ weight.T + bias``, plus ``(x @ A.T) @ B.T`` of each row's adapter on the slices it has.

        Rows without an adapter are, to the bit, what they are without ``lora``.
        """

    @operation(weights=["weight"], functions={"rms_norm": CFunction("2q 3P 5q d")})
    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divides each row of ``x [..., E]`` by its root mean square and scales by ``weight [E]``.

        Computed in float32, returned in x's type (Zhang and Sennrich 2019, arXiv:1910.07467). A weight of x's
        type scales what is rounded to it already, as most checkpoints were trained; a float32 weight beside a
        narrower x is applied before the one rounding, as Gemma's were.
        """

    @operation(weights=["weight"], functions={"add_rms_norm": CFunction("2q 5P 4q d")})
    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``(rms_norm(x + residual), x + residual)``, both ``[T, E]``: the seam between two layers."""

    @operation(weights=["weight", "bias"], functions={"layer_norm": CFunction("2q 4P 5q d")})
    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Gives each row of ``x [..., E]`` mean 0 and variance 1, then ``* weight [E] + bias [E]``.

        Computed in float32, returned in x's type (Ba et al. 2016, arXiv:1607.06450).
        """

    @operation(functions={"add": CFunction("q 3P 4q")})
    @abstractmethod
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y`` of one shape."""

    @operation()
    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """``x * factor``, rounded to x's type once."""

    @operation()
    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)``: bounds x smoothly. Computed in float32, returned in x's type."""

    @operation(weights=["cos", "sin"])
    @abstractmethod
    def rope_rows(
        self,
        positions: Tensor,  # [T] int64
        cos: Tensor,  # [P, R / 2] float32
        sin: Tensor,  # [P, R / 2] float32
    ) -> tuple[Tensor, Tensor]:  # [T, R / 2], [T, R / 2]
        """The rows of the rotary tables that this step's positions need, once for all layers."""

    @operation(functions={"rotary": CFunction("q 6P 9q")})
    @abstractmethod
    def rotary(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, K, D]
        cos: Tensor,  # [T, R / 2] float32, R <= D
        sin: Tensor,  # [T, R / 2] float32
    ) -> tuple[Tensor, Tensor]:  # [T, H, D], [T, K, D]
        """Rotates the first R dims of queries and keys by their positions' angles.

        Pairs are (i, i + R / 2), the layout of Hugging Face checkpoints; the remaining D - R dims pass
        unchanged (Su et al. 2021, arXiv:2104.09864). Computed in float32, returned in q's type.
        """

    @operation(functions={"store_kv": CFunction("2q 5P 9q")})
    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        """Writes ``k, v [T, K, D]`` into ``kv.cache`` at ``kv.slots``; quantises to an int8 cache."""

    @operation(weights=["sinks"], functions={"attention": CFunction("2q 8P 10q 2d", can_be_long=True)})
    @abstractmethod
    def attention(
        self,
        q: Tensor,  # [T, H, D]
        kv: LayerKV,
        row_offsets: Tensor,  # [B + 1] int32
        lengths: Tensor,  # [B] int32
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,  # [H] float32
    ) -> Tensor:  # [T, H, D]
        """Causal attention of a ragged batch over the paged cache, whose new rows are stored already.

        The rows of sequence b are its last positions: row j of n is at ``lengths[b] - n + j`` and sees
        the keys at or before it, at most ``kv.window`` of them. Query head h reads kv head
        ``h // (H / K)``. ``soft_cap`` bounds the scores to ``cap * tanh(score / cap)``; a sink is one
        more score in the softmax that has no value. Softmax in float32.
        """

    @operation(functions={"gated_activation": CFunction("2q 2P 3q")})
    @abstractmethod
    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """``activation(x[:, :F]) * x[:, F:]`` for ``x [T, 2F]``: ``[T, F]``."""

    @operation(functions={"change": CFunction("2q 2P 3q d")})
    @abstractmethod
    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """``activation(x)`` of every number of ``x [T, F]``, in float32, returned in x's type."""

    @operation(functions={"clamped_swiglu": CFunction("q 2P 3q 2d")})
    @abstractmethod
    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        """`ClampedSwiGLU` of the gates ``x[:, :F]`` and ups ``x[:, F:]`` of ``x [T, 2F]``: ``[T, F]``.

        Computed in float32, returned in x's type.
        """

    @operation(functions={"route": CFunction("2q 3P 4q")})
    @abstractmethod
    def route(self, logits: Tensor, top: int, routing: Routing) -> tuple[Tensor, Tensor]:
        """Shares and numbers of the ``top`` experts with the largest logits of each row of ``logits [T, N]``.

        Shares ``[T, top]`` float32 are a softmax over all N, as it is (``all``) or divided by the sum of the
        chosen (``all_normed``), or a softmax over the chosen (``chosen``). Numbers are ``[T, top]`` int64.
        """

    @operation(
        weights=["packed"],
        simplify=_no_adapters,
        functions={"experts": CFunction("2q P q P q P q 2P 7q 2d", can_be_long=True)},
    )
    @abstractmethod
    def experts(
        self,
        x: Tensor,  # [T, E]
        packed: PackedExperts,
        shares: Tensor,  # [T, k] float32
        chosen: Tensor,  # [T, k] int64, in each row different ones
        gating: Gating,
        *,
        lora: LoRAInputs | None = None,
    ) -> Tensor:  # [T, E]
        """The sum of each row's chosen experts, ``down(gating(gate_up(x)))``, each times its share.

        The rows of an expert are multiplied together. Shares are applied and summed in float32, in the
        order of the experts' numbers.
        """

    @operation(functions={"take_rows": CFunction("3P 4q")})
    @abstractmethod
    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x[rows]``: ``[R, E]`` of ``x [T, E]`` and ``rows [R]`` int64."""

    @operation(functions={"put_rows": CFunction("4P 5q")})
    @abstractmethod
    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """``x [T, E]`` with ``values [P, E]`` in place of its rows ``rows [P]``: given embeddings."""

    @operation(functions={"sample": CFunction("q P 3q 6P q P", can_be_long=True)})
    @abstractmethod
    def sample(
        self,
        logits: Tensor,  # [R, V]
        sampling: SamplingInputs,
        bitmask: Tensor | None = None,  # [R, ceil(V / 32)] int32, bit 1 = allowed
    ) -> Tensor:  # [R] int64
        """Draws one token a row.

        Tokens that ``bitmask`` forbids are left out; then top_k, top_p and min_p each narrow the softmax
        of ``logits / temperature``, in this order, each measured on the distribution that the one before
        left. The token is the inverse CDF at ``uniforms`` over the kept tokens in token-id order, summed
        in float64. Temperature 0 or top_k 1 takes the largest logit, the smallest id on a tie.

        -1 stands for a row that is no distribution: some logit is NaN or +inf, allowed or not, or no allowed
        one is above -inf.
        """

    def chosen(self) -> dict[str, str]:
        """Operation -> name of the back end that implements it here."""
        return {name: self._owner(name) for name in operations_of(type(self))}

    def _owner(self, operation: str) -> str:
        owners = (cls for cls in type(self).__mro__ if operation in vars(cls))
        return str(getattr(next(owners), "name", self.name))


OPERATIONS: Mapping[str, Operation] = operations_of(Ops)
"""All operations by name."""
