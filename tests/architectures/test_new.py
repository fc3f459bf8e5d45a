"""GTE with ``model_type`` ``new`` (custom code): rotary frequencies, token weights, refused options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.encoders import ENCODERS, encode_all, open_encoder, save_encoder
from support.token_heads import write_layout, write_tokenizer

from penstock.architectures.new.model import NewModel
from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError

(GTE,) = (candidate for candidate in ENCODERS if candidate.name == "new")
TOKENS = np.array([0, 9, 5, 9, 3, 17, 5, 2])


def make_config(**changes: Any) -> HuggingFaceConfig:
    assert GTE.tiny_config is not None
    return HuggingFaceConfig(GTE.tiny_config() | changes, "config.json")


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_ntk_scaling_gives_the_published_frequencies(factor: float) -> None:
    """The frequency of pair i is ``base ** (-2 i / D) / factor ** (2 (i + 1) / D)``.

    Scaling divides the frequency of the last pair by the whole factor.
    """
    dim = 16
    rotary = NewModel.rotary(make_config(rope_scaling={"type": "ntk", "factor": factor}), dim)
    pair_indices = np.arange(dim // 2)
    expected = 20000.0 ** (-2 * pair_indices / dim) / factor ** (2 * (pair_indices + 1) / dim)
    frequencies = rotary.base ** (-2 * pair_indices / dim) / rotary.parameters["factor"]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)
    assert rotary.kind == "linear"
    assert rotary.max_length == 130, (
        "the model is trained with the scaling, so the maximum length does not grow"
    )


def test_a_token_classification_head_gives_the_sparse_embedding(tmp_path: Path) -> None:
    """The head computes one logit per token. The dense embedding does not change."""
    model = save_encoder(GTE, tmp_path, "")
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.nn.Linear(model.config.hidden_size, 1)
    tensors = {f"new.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"classifier.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    names = ["NewModel", "NewForTokenClassification"]
    config |= {"architectures": names, "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    write_layout(tmp_path)
    pipeline = open_encoder(tmp_path)
    assert pipeline.outputs == ("dense", "sparse", "multi_vector")
    [response] = encode_all(pipeline, [TOKENS], outputs=("dense", "sparse"))
    with torch.inference_mode():
        hidden = model(torch.from_numpy(TOKENS)[None]).last_hidden_state[0]
        weights = head(hidden).relu()[:, 0]
    np.testing.assert_allclose(response.embeddings, hidden[0] / hidden[0].norm(), atol=1e-5)
    expected = {
        int(token): float(weights[TOKENS == token].max())
        for token in sorted(set(TOKENS.tolist()) - {0, 1, 2, 3})
    }
    assert response.sparse is not None
    result = dict(zip(response.sparse.token_ids.tolist(), response.sparse.weights.tolist(), strict=True))
    assert result == pytest.approx(
        {token: weight for token, weight in expected.items() if weight > 0}, abs=1e-5
    )
    assert result, "the test needs a weight above 0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type.*'absolute' is not supported"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type.*only 'layer_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale.*only False"),
        ({"pack_qkv": False}, "pack_qkv.*only True"),
        ({"rope_scaling": {"type": "ntk"}}, "factor.*is missing"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b.*0.6 is not supported"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "unknown rope type 'spiral'"),
    ],
)
def test_unsupported_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NewModel.sizes(make_config(**changes))
