"""Operations that run on a device, with arguments and results on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import Ops, PackedExperts
from penstock.kernels.operations import collect_operations


def copy_to_device(value: Any, device: torch.device | str) -> Any:
    """Return a value (a tensor, dataclass, mapping, tuple or other object) with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, Mapping):
        return {name: copy_to_device(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(copy_to_device(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        copied_fields = {f.name: copy_to_device(getattr(value, f.name), device) for f in fields(value)}
        if isinstance(value, PackedExperts):
            return PackedExperts(**copied_fields)
        return replace(value, **copied_fields)
    return value


def on_device(ops: Ops, device: str) -> Ops:
    """Return operations that copy their arguments to the device and their results back.

    Operations that call other operations copy only once. `store_kv` copies the written cache back.
    """
    depth = [0]

    def wrap_operation(name: str) -> Any:
        method = getattr(type(ops), name)

        def run_on_device(self: Ops, *args: Any, **kwargs: Any) -> Any:
            if depth[0]:
                return method(self, *args, **kwargs)
            depth[0] += 1
            try:
                device_arguments = copy_to_device((args, kwargs), device)
                result = method(self, *device_arguments[0], **device_arguments[1])
            finally:
                depth[0] -= 1
            if name == "store_kv":
                kv, device_kv = args[2], device_arguments[0][2]
                kv.cache.copy_(device_kv.cache)
                if kv.scales is not None and not kv.has_fixed_scales:
                    kv.scales.copy_(device_kv.scales)
            return copy_to_device(result, "cpu")

        return run_on_device

    names = collect_operations(type(ops))
    cls = type(type(ops).__name__, (type(ops),), {name: wrap_operation(name) for name in names})
    return cls()
