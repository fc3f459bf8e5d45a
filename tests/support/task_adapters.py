"""A small checkpoint in the published layout of Jina Embeddings v3, and its reference in transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.encoders import ENCODERS, save_encoder
from support.token_heads import write_layout, write_tokenizer
from torch import Tensor

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
INSTRUCTIONS = {"retrieval.query": "query how ", "retrieval.passage": "passage ", "separation": ""}
RANK = 2
TABLES = ("embeddings.word_embeddings", "embeddings.token_type_embeddings")


@dataclass(frozen=True)
class JinaV3:
    """A saved model, with its weights by name and the LoRA matrices of all tasks by layer."""

    folder: Path
    weights: dict[str, Tensor]
    adapters: dict[str, tuple[Tensor, Tensor]]
    plain_folder: Path
    """The folder of the model without adapters, as transformers saves it."""

    def load_merged(self, task: str | None, folder: Path) -> Any:
        """Return the model of transformers with the adapter of a task merged into its weights.

        Without a task, the weights are unchanged. The checkpoint is written to the new ``folder``.
        """
        from transformers import AutoModel

        weights = dict(self.weights)
        if task is not None:
            index = TASKS.index(task)
            for name, (first_matrix, second_matrix) in self.adapters.items():
                a, b = first_matrix[index], second_matrix[index]
                delta = a @ b if name in TABLES else b @ a
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta * (1.5 / RANK)
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_bytes((self.plain_folder / "config.json").read_bytes())
        return AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def mean_embedding(model: Any, tokens: list[int]) -> Tensor:  # [E]
    """Return the mean ``[E]`` of the hidden states of a model of transformers, normalized to length 1."""
    with torch.inference_mode():
        return F.normalize(model(torch.tensor([tokens])).last_hidden_state[0].mean(0), dim=-1)


def write_jina_v3(folder: Path, plain_folder: Path) -> JinaV3:
    """Write a random model with adapters in the published layout to ``folder``.

    Write the same model without adapters, in the layout of transformers, to ``plain_folder``.
    """
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == "jina_embeddings_v3")
    model = save_encoder(architecture, plain_folder, "", vocab_size=900)
    weights = load_file(plain_folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors, adapters = {}, {}
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if tensor.dim() != 2:
            tensors[f"roberta.{name}"] = tensor
            continue
        (rows, columns), n = tensor.shape, len(TASKS)
        is_table = layer in TABLES
        shapes = ((n, rows, RANK), (n, RANK, columns)) if is_table else ((n, RANK, columns), (n, rows, RANK))
        first_matrix, second_matrix = (torch.randn(shape, generator=generator) * 0.3 for shape in shapes)
        adapters[layer] = first_matrix, second_matrix
        stored_name = f"roberta.{layer}.parametrizations.weight"
        tensors |= {
            f"{stored_name}.original": tensor,
            f"{stored_name}.0.lora_A": first_matrix,
            f"{stored_name}.0.lora_B": second_matrix,
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = model.config
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
    names += ("max_position_embeddings", "vocab_size", "type_vocab_size", "layer_norm_eps", "pad_token_id")
    values = {name: getattr(config, name) for name in names} | {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
        "lora_adaptations": list(TASKS),
        "lora_alpha": 1.5,
        "lora_rank": RANK,
        "matryoshka_dimensions": [8, 16],
        "task_instructions": INSTRUCTIONS,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(values))
    write_tokenizer(folder)
    write_layout(folder, "mean")
    return JinaV3(folder, weights, adapters, plain_folder)
