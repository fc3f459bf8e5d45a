"""Vision encoders of transformers with random weights, and loaders that read their tensors."""

from __future__ import annotations

from typing import Any

import torch

from penstock.kernels import Ops
from penstock.nn import Loader


class ModuleTensors:
    """The tensors of a transformers module, with the prefix ``tower.``."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = {f"tower.{name}": tensor for name, tensor in module.state_dict().items()}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert self.tensors[name].shape == shape
        return self.tensors[name]

    def stored_encoding(self, name: str) -> str | None:
        return None

    def input_order(self, name: str) -> bytes:
        return b""

    def is_mapped(self, name: str) -> bool:
        return False

    def release(self, name: str) -> None:
        pass


def make_loader(module: torch.nn.Module, ops: Ops) -> Loader:
    source: Any = ModuleTensors(module)
    return Loader(source, "float32", torch.device("cpu"), ops)


def randomize(module: Any) -> Any:
    """Give all parameters random values, so that a missing bias or norm changes the results."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_scale = parameter.dim() == 1 and name.endswith(
                ("norm.weight", "1.weight", "2.weight", "ln_q.weight")
            )
            parameter.copy_(0.2 * torch.randn_like(parameter) + is_scale)
    return module.eval()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, float(theirs.std())), rtol=0)
