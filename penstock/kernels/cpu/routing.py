"""Mixture-of-experts routers with C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu.convolution import CpuConvolution
from penstock.kernels.cpu.linear import DTYPE_CODES
from penstock.kernels.routing import Routing, ScoreRouting, SparseMixer

_RULE_CODES = {"all": 0, "all_normed": 1, "chosen": 2}
"""Codes of the softmax routings in csrc/routing.inl."""


class CpuRouting(CpuConvolution):
    """Routers, `scale_rows` and `widen`, for float32 and bfloat16 activations."""

    def route(
        self, logits: Tensor, top_k: int, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        dtype_code, strides = DTYPE_CODES.get(logits.dtype), logits.stride()
        rows, experts = logits.shape
        bias_fits = bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
        if dtype_code is None or strides[1] != 1 or not 0 < top_k <= experts or not bias_fits:
            self._report_fallback(
                "route",
                {
                    f"{logits.dtype} logits": dtype_code is not None,
                    "rows that are not contiguous": strides[1] == 1,
                    f"{top_k} of {experts} experts": 0 < top_k <= experts,
                    "a bias that is not contiguous float32": bias_fits,
                },
            )
            return super().route(logits, top_k, routing, bias)
        topk_weights, topk_ids = (
            self._empty((rows, top_k), torch.float32),
            self._empty((rows, top_k), torch.int64),
        )
        pointers = (topk_weights.data_ptr(), topk_ids.data_ptr())
        sizes = (rows, experts, top_k, strides[0])
        if isinstance(routing, ScoreRouting):
            self._kernels.route_scores(
                dtype_code,
                logits.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                *pointers,
                *sizes,
                int(routing.scores == "sigmoid"),
                int(routing.is_normed),
                routing.num_groups,
                routing.num_top_groups,
                routing.scale,
                routing.min_sum,
            )
        elif isinstance(routing, SparseMixer):
            self._kernels.route_sparse_mixer(dtype_code, logits.data_ptr(), *pointers, *sizes, routing.eps)
        else:
            self._kernels.route(dtype_code, _RULE_CODES[routing], logits.data_ptr(), *pointers, *sizes)
        return topk_weights, topk_ids

    def scale_rows(self, x: Tensor, factors: Tensor, *, are_logits: bool = False) -> Tensor:
        dtype_code, factor_dtype_code, strides = (
            DTYPE_CODES.get(x.dtype),
            DTYPE_CODES.get(factors.dtype),
            x.stride(),
        )
        rows_fit = len(strides) == 2 and strides[1] == 1 and factors.shape == (len(x), 1)
        if dtype_code is None or factor_dtype_code is None or not rows_fit:
            self._report_fallback(
                "scale_rows",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    f"{factors.dtype} factors": factor_dtype_code is not None,
                    "this memory layout": rows_fit,
                },
            )
            return super().scale_rows(x, factors, are_logits=are_logits)
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), factors.data_ptr(), out.data_ptr())
        self._kernels.scale_rows(
            dtype_code, factor_dtype_code, *pointers, *x.shape, strides[0], factors.stride(0), int(are_logits)
        )
        return out

    def widen(self, x: Tensor) -> Tensor:
        dtype_code, strides = DTYPE_CODES.get(x.dtype), x.stride()
        if dtype_code is None or len(strides) != 2 or strides[1] != 1:
            self._report_fallback(
                "widen",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    "this memory layout": len(strides) == 2 and strides[1] == 1,
                },
            )
            return super().widen(x)
        out = self._empty(x.shape, torch.float32)
        self._kernels.widen(dtype_code, x.data_ptr(), out.data_ptr(), *x.shape, strides[0])
        return out
