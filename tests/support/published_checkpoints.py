"""Conversion of checkpoints from the format of transformers to the format of their authors.

The formats differ in the keys of ``config.json`` and in tensor names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def transformers_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the transformers configuration of a published configuration.

    Only configurations with ``model_type`` ``new`` are converted; others are returned unchanged.
    """
    if values["model_type"] != "new":
        return values
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    scaling = values["rope_scaling"] or {"type": "default"}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(values["rope_theta"])}
    if scaling["type"] == "ntk":
        factor = scaling["factor"]
        rope = {
            "rope_type": "linear",
            "rope_theta": values["rope_theta"] * factor,
            "factor": factor ** (2 / head_dim),
        }
    copied_names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
    )
    copied_names += (
        "max_position_embeddings",
        "vocab_size",
        "type_vocab_size",
        "layer_norm_eps",
        "pad_token_id",
    )
    label_values = {name: values[name] for name in ("num_labels",) if name in values}
    return (
        {"model_type": "gte", "rope_parameters": rope}
        | {name: values[name] for name in copied_names}
        | label_values
    )


def rewrite_as_published(folder: Path, values: dict[str, Any], head: str) -> None:
    """Convert a folder that transformers saved to the published format of ``values["model_type"]``.

    Does nothing for model types other than ``new``.
    """
    if values["model_type"] != "new":
        return
    saved_config = json.loads((folder / "config.json").read_text())
    label_names = {name: saved_config[name] for name in ("id2label", "label2id") if name in saved_config}
    config = values | label_names | {"architectures": [f"New{head or 'Model'}"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    head_prefixes = ("classifier.", "lm_head.")
    tensors = {
        name.removeprefix("gte.").removeprefix("new."): tensor for name, tensor in load_file(path).items()
    }
    renamed_tensors = {
        name if not head or name.startswith(head_prefixes) else f"new.{name}": tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed_tensors, path)
