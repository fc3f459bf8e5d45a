"""Heads that are applied to each token, for sparse embeddings and for multi-vector embeddings.

BGE-M3 (Chen et al. 2024, arXiv:2402.03216) publishes these heads as separate torch files. In other families,
such as GTE, the token-weight head is part of the model's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.architectures.encoder import EncoderModel
from penstock.dtype import DType
from penstock.kernels import Ops, StepInputs
from penstock.pipelines.core import SparseEmbedding
from penstock.pipelines.pooling import Dense
from penstock.text.tokenizer_files import read_tokenizer_files
from penstock.weights.hub import TOKEN_VECTORS_FILE, TOKEN_WEIGHTS_FILE
from penstock.weights.pickled import PickledWeights

_UNWEIGHTED_TOKENS = ("cls_token", "eos_token", "pad_token", "unk_token")
"""The special tokens without a weight in sparse embeddings, by their names in the tokenizer's files."""


@dataclass(frozen=True, kw_only=True)
class TokenHeads:
    """The token heads of a model; a missing head is None."""

    weight_head: Callable[[Tensor, StepInputs], Tensor] | None = None
    """``[n, E] -> [n, 1]``: the weight of each token; weights below 0 count as 0."""
    unweighted_ids: frozenset[int] = frozenset()
    """The ids of tokens without a weight."""
    vector_head: Dense | None = None
    """``[n, E] -> [n, out]``: the vector of each token. The first token of an input has no vector."""

    def sparse(
        self,
        tokens: npt.NDArray[np.integer],  # [n]
        hidden: Tensor,  # [n, E]
        step: StepInputs,
    ) -> SparseEmbedding:
        """Return the largest weight of each token id of an input, sorted by id. Weights of 0 are omitted."""
        assert self.weight_head is not None, "the model has no token-weight head"
        token_weights = self.weight_head(hidden, step)[:, 0].float().numpy(force=True)  # [n]
        has_weight = (token_weights > 0) & ~np.isin(tokens, list(self.unweighted_ids))
        ids, indices = np.unique(tokens[has_weight], return_inverse=True)
        weights = np.zeros(len(ids), np.float32)
        np.maximum.at(weights, indices, token_weights[has_weight])
        return SparseEmbedding(ids.astype(np.int32), weights)


def load_token_heads(checkpoint: Path, model: EncoderModel, hidden_size: int) -> TokenHeads:
    """Read the token heads of a checkpoint.

    Args:
        checkpoint: the folder of the checkpoint.
        model: the model, which may include a token-weight head.
        hidden_size: E, the size of the hidden states.

    Raises:
        CheckpointError: a file cannot be read, or a tensor is missing, unexpected or of a wrong shape.
    """
    ops, device = model.session.ops, model.torch_device
    weight_head, vector_head = model.token_weights, None
    if (checkpoint / TOKEN_WEIGHTS_FILE).is_file():
        linear = _read_linear(checkpoint / TOKEN_WEIGHTS_FILE, 1, hidden_size, ops, device)

        def weight_head(hidden: Tensor, step: StepInputs) -> Tensor:
            return linear(hidden.float(), step.ops)

    if (checkpoint / TOKEN_VECTORS_FILE).is_file():
        vector_head = _read_linear(checkpoint / TOKEN_VECTORS_FILE, None, hidden_size, ops, device)
    unweighted_ids = frozenset[int]() if weight_head is None else _unweighted_ids(checkpoint)
    return TokenHeads(weight_head=weight_head, unweighted_ids=unweighted_ids, vector_head=vector_head)


def _read_linear(
    file: Path, out_features: int | None, in_features: int, ops: Ops, device: torch.device
) -> Dense:
    """Read a linear layer from a file, in float32. If ``out_features`` is None, the file determines it."""
    weights = PickledWeights(file)
    size = weights.shape("weight")[0] if out_features is None else out_features
    weight = weights.tensor("weight", (size, in_features)).float().to(device)
    bias = weights.tensor("bias", (size,)).float().to(device)
    weights.finish()
    return Dense(ops.pack_linear(weight, DType.float32.value, bias=bias), lambda x: x)


def _unweighted_ids(checkpoint: Path) -> frozenset[int]:
    """Return the ids of the special tokens that have no weight."""
    files = read_tokenizer_files(checkpoint)
    texts = (files.special_tokens.get(name) for name in _UNWEIGHTED_TOKENS)
    ids = (files.tokenizer.token_to_id(text) for text in texts if text is not None)
    return frozenset(token for token in ids if token is not None)
