"""The operations that models consist of. A back end is a subclass of `Ops`; a session owns one instance.

Models apply only these operations and views (slicing, reshaping) to activations, so that a step can be
recorded and replayed (`kernels.recording`). `kernels.reference.ReferenceOps` defines the correct results.
Other back ends inherit from it and override the operations that they compute faster.

Each method marked with `operation` is a row of the table of operations, see `kernels.operations`. The
operations of audio codecs are in `kernels.convolution`, those of encoders in `kernels.encoder_ops`, those of
linear attention in `kernels.recurrent_ops`, those of routers in `kernels.routing`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.host.memory import PrefaultedMemory
from penstock.kernels.activations import XIELU, Activation
from penstock.kernels.collectives import CollectiveOps
from penstock.kernels.convolution import ConvolutionOps
from penstock.kernels.encoder_ops import EncoderOps
from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
from penstock.kernels.inputs import LayerKV, LoRAInputs, SamplingInputs
from penstock.kernels.linear import ROWS, Layout, LinearSlice, PackedLinear, pack_linear, pack_quantized
from penstock.kernels.operations import (
    Arguments,
    CFunction,
    Operation,
    UnrecordableStepError,
    collect_operations,
    operation,
)
from penstock.kernels.recurrent_ops import RecurrentOps
from penstock.kernels.routing import RoutingOps
from penstock.kernels.spans import ImageSpans

Gating = Activation | ClampedSwiGLU
"""The function of a gated MLP: the name of the gate's activation, or `ClampedSwiGLU`."""


def _keep_layer_adapters(arguments: Arguments) -> Arguments:
    """Return the arguments with only the adapter matrices of this layer; ``lora`` is None if it has none."""
    lora, packed = arguments["lora"], arguments["packed"]
    return {**arguments, "lora": lora and lora.for_slices(part.name for part in packed.slices)}


def _refuse_expert_adapters(arguments: Arguments) -> Arguments:
    """Return the arguments without adapters.

    Raises:
        UnrecordableStepError: adapters apply to these experts, which cannot be recorded.
    """
    lora, packed = arguments["lora"], arguments["packed"]
    if lora is not None and lora.for_slices(packed.slice_names()):
        raise UnrecordableStepError("adapters on experts")
    return {**arguments, "lora": None}


class Ops(EncoderOps, RecurrentOps, ConvolutionOps, RoutingOps, CollectiveOps):
    """The operations of a back end. An instance keeps no state of a step, so several models can share it."""

    name: str
    """Name of the back end, as ``penstock env`` prints it."""

    layout: Layout = ROWS
    """Memory layout of the weights that this back end packs."""

    @property
    def packs_weights(self) -> bool:
        """Whether this back end packs weights into a layout other than `ROWS`.

        Weights in such a layout can be cached in a file.
        """
        return self.layout != ROWS

    @property
    def description(self) -> str:
        """Name of the back end, followed by its variant if it has several, for example by instruction set."""
        return self.name

    def pack_into(self, memory: PrefaultedMemory) -> None:  # optional
        """Make the pack methods allocate weights from this prefaulted memory until it is used up.

        Does nothing in a back end that packs no weights in host memory.
        """

    def require_determinism(self) -> None:  # optional
        """From now on, compute the result of a row with the same bits in every batch.

        Does nothing in a back end whose results never depend on the batch.
        """

    def pack_linear(
        self,
        weight: Tensor | Sequence[Tensor],  # [out, in], or its parts in order
        encoding: str,
        *,
        bias: Tensor | None = None,  # [out]
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        """Pack a weight of floats for `linear`, in the given encoding and in the `layout` of this back end.

        Raises:
            ConfigError: the encoding is unknown.
        """
        return pack_linear(weight, encoding, bias=bias, slices=slices)

    def pack_lazily(
        self,
        weight: Sequence[Tensor],  # [out, in], its parts in order
        encoding: str,
        *,
        bias: Tensor | None = None,  # [out]
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        """Pack a weight of floats whose parts stay valid, such as those of a mapped file. May defer packing.

        If packing is deferred, the tensors are a `LazyWeight`. `linear` may then multiply by the floats of
        the parts until the weight is packed.

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
        order: Tensor | None = None,  # [in] int32
    ) -> PackedLinear:
        """Pack a quantized weight. ``rows`` are its tensors, as `LinearEncoding.pack` returns them.

        ``order`` is described in `PackedLinear.order`. An unknown encoding may raise `ConfigError`.
        """
        return pack_quantized(rows, encoding, bias=bias, slices=slices, order=order)

    @operation(weights=["table"])
    @abstractmethod
    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return the rows ``[T, E]`` of ``table [V, E]`` for ``tokens [T]``.

        On a CPU, a token outside the table raises `IndexError`. A GPU kernel cannot raise an error. It
        returns NaN as the row of such a token, or 0 if the table has integers. NaN makes `sample` return -1
        for this row. The same applies to the indices of `take_rows` and `rope_rows`.
        """

    @operation(
        weights=["packed"],
        simplify=_keep_layer_adapters,
        functions={
            "linear": CFunction("2q P q 5P 5q", can_be_long=True),
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
        """Return ``x @ weight.T + bias``, plus ``(x @ A.T) @ B.T`` in slices that the row's adapter adapts.

        Rows without an adapter have the same bits as in a call without ``lora``.
        """

    @operation(weights=["packed"], simplify=_keep_layer_adapters)
    @abstractmethod
    def activated_linear(
        self,
        x: Tensor,  # [T, in]
        packed: PackedLinear,
        activation: Activation,
        *,
        lora: LoRAInputs | None = None,
    ) -> Tensor:  # [T, out]
        """Return ``activation(linear(x))``, bit-equal to the two separate operations."""

    @operation(weights=["weight"], functions={"rms_norm": CFunction("2q 3P 5q d")})
    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide each row of ``x [..., E]`` by its root mean square and multiply it by ``weight [E]``.

        Computed in float32, returned in x's type (Zhang and Sennrich 2019, arXiv:1910.07467). If the weight
        has x's type, the normalized row is rounded to this type before it is multiplied, as in the training
        of most checkpoints. If the weight is float32 and x is narrower, only the product is rounded, as in
        Gemma.
        """

    @operation(weights=["weight"], functions={"add_rms_norm": CFunction("2q 5P 4q d")})
    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``, both ``[T, E]``."""

    @operation(weights=["weight", "bias"], functions={"layer_norm": CFunction("2q 4P 6q d")})
    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalize each row of ``x [..., E]`` to mean 0 and variance 1, then scale and shift it.

        The scale is ``weight [E]``, the shift ``bias [E]``. For ``x [T, H, D]`` both can also be ``[H, D]``,
        one row for each head. Computed in float32, returned in x's type (Ba et al. 2016, arXiv:1607.06450).
        """

    @operation(weights=["weight", "bias"], functions={"add_layer_norm": CFunction("2q 6P 4q d")})
    @abstractmethod
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``(layer_norm(x + residual), x + residual)``, both ``[T, E]``."""

    @operation(weights=["weight", "bias"], functions={"layer_norm_of_sum": CFunction("2q 5P 4q d")})
    @abstractmethod
    def layer_norm_of_sum(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Return ``layer_norm(x + residual) [T, E]``. The sum is not rounded, unlike in `add_layer_norm`."""

    @operation(functions={"add": CFunction("q 3P 4q")})
    @abstractmethod
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``x + y``; both have the same shape."""

    @operation(functions={"multiply": CFunction("q 3P 4q")})
    @abstractmethod
    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``x * y``; both have the same shape."""

    @operation()
    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return ``x * factor``, rounded once to x's type."""

    @operation()
    @abstractmethod
    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        """Return ``x [T, F]`` clamped to ``low..high``. NaN stays NaN."""

    @operation()
    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Return ``cap * tanh(x / cap)``, computed in float32, returned in x's type."""

    @operation(weights=["cos", "sin"])
    @abstractmethod
    def rope_rows(
        self,
        positions: Tensor,  # [T] int64
        cos: Tensor,  # [P, R / 2] float32
        sin: Tensor,  # [P, R / 2] float32
    ) -> tuple[Tensor, Tensor]:  # [T, R / 2], [T, R / 2]
        """Return the rows of the rotary tables for the positions of a step. All layers share the result."""

    @operation(functions={"rotary": CFunction("q 6P 10q")})
    @abstractmethod
    def rotary(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, K, D]
        cos: Tensor,  # [T, R / 2] float32, R <= D
        sin: Tensor,  # [T, R / 2] float32
        *,
        is_interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:  # [T, H, D], [T, K, D]
        """Rotate the first R dimensions of queries and keys by the angles of their positions.

        Pairs are (i, i + R / 2), or (2 i, 2 i + 1) if they are interleaved. The other D - R dimensions
        stay unchanged (Su et al. 2021, arXiv:2104.09864). Computed in float32, returned in q's type.
        """

    @operation(functions={"store_kv": CFunction("2q 5P 9q")})
    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        """Write ``k, v [T, K, D]`` into ``kv.cache`` at ``kv.slots``.

        In a cache of int8 or float8_e4m3fn, rows are divided by their scales. The scale of a row of a head is
        its largest magnitude, at least 1e-12, divided by 127 (int8) or 448 (float8_e4m3fn). It is written to
        ``kv.scales``. With ``kv.has_fixed_scales`` the scale is read from ``kv.scales``, and quotients are
        clamped to magnitudes of at most 127 or 448.
        """

    @operation(weights=["sinks"], functions={"attention": CFunction("2q 9P 13q 2d", can_be_long=True)})
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
        spans: ImageSpans | None = None,
    ) -> Tensor:  # [T, H, D]
        """Return causal attention of a ragged batch over the paged cache, which already holds the new rows.

        The rows of sequence b are its last positions: row j of n is at ``lengths[b] - n + j``. A row attends
        to at most ``kv.window`` keys at or before its position. With ``kv.is_chunked`` it attends only to
        keys from the last multiple of the window size on. Query head h reads kv head ``h // (H / K)``.
        ``soft_cap`` replaces each score by ``cap * tanh(score / cap)``. A sink is an additional score in the
        softmax, without a value. The softmax is computed in float32.

        With ``spans`` row t also attends to the keys after its position and before ``spans.bounds[t, 1]``, so
        that the tokens of an image attend to each other in both directions. All rows of a span must be in the
        step. ``kv.window`` still limits the keys before the position.
        """

    @operation(functions={"gated_activation": CFunction("2q 2P 3q")})
    @abstractmethod
    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return ``activation(x[:, :F]) * x[:, F:]``, ``[T, F]``, for ``x [T, 2F]``."""

    @operation(functions={"apply_function": CFunction("2q 2P 3q 2d")})
    @abstractmethod
    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return ``activation(x)`` for ``x [T, F]``, computed in float32, returned in x's type."""

    @operation(functions={"xielu": CFunction("q 2P 3q 4d")})
    @abstractmethod
    def xielu(self, x: Tensor, parameters: XIELU) -> Tensor:
        """Return xIELU of ``x [T, F]``, computed in float32, returned in x's type."""

    @operation(functions={"clamped_swiglu": CFunction("q 2P 3q 2d")})
    @abstractmethod
    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        """Return `ClampedSwiGLU` of the gates ``x[:, :F]`` and ups ``x[:, F:]`` of ``x [T, 2F]``: ``[T, F]``.

        Computed in float32, returned in x's type.
        """

    @operation(
        weights=["packed"],
        simplify=_refuse_expert_adapters,
        functions={"experts": CFunction("2q P q P q P q 2P 9q 2d", can_be_long=True)},
    )
    @abstractmethod
    def experts(
        self,
        x: Tensor,  # [T, E]
        packed: PackedExperts,
        topk_weights: Tensor,  # [T, k] float32
        topk_ids: Tensor,  # [T, k] int64, distinct in each row
        gating: Gating,
        *,
        lora: LoRAInputs | None = None,
    ) -> Tensor:  # [T, E]
        """Return the weighted sum of each row's top-k experts; an expert is ``down(gating(gate_up(x)))``.

        With ``packed.is_part``, experts of other ranks are left out. Outputs are weighted and summed in
        float32, in the order of the expert ids.
        """

    @operation(functions={"take_rows": CFunction("3P 4q")})
    @abstractmethod
    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return ``x[rows]``, ``[R, E]``, for ``x [T, E]`` and ``rows [R]`` int64."""

    @operation(functions={"put_rows": CFunction("4P 5q")})
    @abstractmethod
    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """Return ``x [T, E]`` with its rows ``rows [P]`` replaced by ``values [P, E]``.

        A row outside ``x`` raises `IndexError` on a CPU and is skipped on a GPU.
        """

    @operation(functions={"sample": CFunction("q P 3q 6P q P", can_be_long=True)})
    @abstractmethod
    def sample(
        self,
        logits: Tensor,  # [R, V]
        sampling: SamplingInputs,
        bitmask: Tensor | None = None,  # [R, ceil(V / 32)] int32; a bit of 1 allows its token
    ) -> Tensor:  # [R] int64
        """Sample one token per row.

        First the tokens that ``bitmask`` forbids are removed. Then top_k, top_p and min_p restrict the
        softmax of ``logits / temperature``, in this order. Each rule applies to the result of the previous
        rule. The token is the inverse CDF at ``uniforms`` over the kept tokens in token-id order, summed in
        float64. With temperature 0 or top_k 1 the token has the largest logit, and the smallest id on a tie.

        Returns -1 for a row with non-finite logits: any logit, allowed or not, is NaN or +inf, or no allowed
        logit is above -inf.
        """

    def implementations(self) -> dict[str, str]:
        """Return, by operation name, the name of the back end whose class defines the method."""
        return {name: self._implementation(name) for name in collect_operations(type(self))}

    def _implementation(self, operation: str) -> str:
        classes = (cls for cls in type(self).__mro__ if operation in vars(cls))
        return str(getattr(next(classes), "name", self.name))


OPERATIONS: Mapping[str, Operation] = collect_operations(Ops)
"""All operations by name."""
