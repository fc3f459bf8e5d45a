"""Random LoRA adapters, written and applied by peft, which is the reference of the tests."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import load_in_transformers
from torch import Tensor


def peft_model(checkpoint: Path, seed: int = 0, *, standard_deviation: float = 0.1, **config: Any) -> Any:
    """Return the checkpoint in peft with an adapter of random matrices.

    PEFT initializes matrix B with zeros, so matrices A and B are overwritten.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_in_transformers(checkpoint), LoraConfig(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=standard_deviation)
    return model


def save_adapter(model: Any, folder: Path) -> Path:
    """Save a model's adapter with peft. Return the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def write_adapter(checkpoint: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a random adapter for a checkpoint, by default of rank 4 on all linear layers."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return save_adapter(peft_model(checkpoint, seed, **settings | config), folder)


def peft_logits(checkpoint: Path, adapter: Path, tokens: list[int]) -> Tensor:  # [T, V]
    """Return the logits ``[T, V]`` that peft computes for one sequence with a saved adapter."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_in_transformers(checkpoint), str(adapter)).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits
