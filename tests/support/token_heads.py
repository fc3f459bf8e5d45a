"""A small checkpoint in the layout of BGE-M3, and its reference outputs from transformers and torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.encoders import ENCODERS, save_encoder
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = "a the sky is blue green grass red query passage how many colours has it".split()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words with the special tokens of XLM-RoBERTa."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": 0, "cls": 0, "eos": 2, "sep": 2, "pad": 1, "unk": 3}
    special_tokens: dict[str, object] = {f"{name}_token": SPECIAL[i] for name, i in names.items()}
    write_json(folder / "tokenizer_config.json", special_tokens | {"tokenizer_class": "XLMRobertaTokenizer"})


def write_layout(folder: Path, pooling: str = "cls") -> None:
    """Write the sentence-transformers layout with pooling and normalization modules."""
    module_paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{module}"}
        for i, (module, path) in enumerate(module_paths.items())
    ]
    write_json(folder / "modules.json", rows)
    flag = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}[pooling]
    write_json(folder / "1_Pooling" / "config.json", {flag: True})


@dataclass(frozen=True)
class BgeM3:
    """A saved model with its sparse and multi-vector heads."""

    folder: Path
    model: Any
    sparse: nn.Linear
    colbert: nn.Linear

    def hidden_states(self, tokens: list[int]) -> Tensor:  # [T, E]
        """Return the hidden states ``[T, E]`` of one input, computed by transformers."""
        with torch.inference_mode():
            states: Tensor = self.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def dense(self, tokens: list[int]) -> Tensor:  # [E]
        """Return the hidden state ``[E]`` of the first token, normalized to length 1."""
        return F.normalize(self.hidden_states(tokens)[0], dim=-1)

    def sparse_weights(self, tokens: list[int]) -> dict[int, float]:
        """Return token id -> largest positive weight, without special tokens."""
        weights: dict[int, float] = {}
        with torch.inference_mode():
            token_weights = self.sparse(self.hidden_states(tokens)).relu()[:, 0].tolist()
        for token, weight in zip(tokens, token_weights, strict=True):
            if token >= len(SPECIAL) and weight > weights.get(token, 0):
                weights[token] = weight
        return weights

    def vectors(self, tokens: list[int]) -> Tensor:  # [T - 1, out]
        """Return the normalized vectors ``[T - 1, out]`` of all tokens except the first."""
        with torch.inference_mode():
            return F.normalize(self.colbert(self.hidden_states(tokens)[1:]), dim=-1)


def write_bge_m3(folder: Path, *, out_features: int = 48) -> BgeM3:
    """Write a random model in the layout of BGE-M3, with heads in float16 as in the published model."""
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == "xlm-roberta")
    model = save_encoder(architecture, folder, "")
    hidden = model.config.hidden_size
    torch.manual_seed(1)
    heads = nn.Linear(hidden, 1).half(), nn.Linear(hidden, out_features).half()
    for head, name in zip(heads, ("sparse_linear.pt", "colbert_linear.pt"), strict=True):
        torch.save(head.state_dict(), folder / name)
    write_tokenizer(folder)
    write_layout(folder)
    sparse, colbert = (head.float() for head in heads)
    return BgeM3(folder, model, sparse, colbert)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file. Create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
