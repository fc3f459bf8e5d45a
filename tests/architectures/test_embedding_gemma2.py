"""EmbeddingGemma 2: its differences from other encoders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.encoders import ENCODERS, embeddings_context, encode_all, open_encoder, save_encoder
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedFeatureError

TOKENS = np.arange(3, 40)


def saved(folder: Path, name: str = "embedding_gemma2") -> Path:
    (architecture,) = (one for one in ENCODERS if one.name == name)
    save_encoder(architecture, folder, "")
    return folder


def test_dense_embeddings_have_the_size_of_the_projection(tmp_path: Path) -> None:
    pipeline = open_encoder(saved(tmp_path))
    assert pipeline.embedding_size == 40
    [dense] = encode_all(pipeline, [TOKENS], outputs=("dense", "multi_vector"))
    assert dense.embeddings.shape == (40,)
    assert dense.multi_vector is not None
    assert dense.multi_vector.shape == (len(TOKENS), 40)


@pytest.mark.parametrize(("token", "kind"), [(2, "image"), (1, "audio")])
def test_other_inputs_than_text_are_refused_by_name(tmp_path: Path, token: int, kind: str) -> None:
    pipeline = open_encoder(saved(tmp_path))
    context = embeddings_context([*TOKENS[:4], token, 7])
    with pytest.raises(UnsupportedFeatureError, match=f"input of type {kind}.* token 4 .* id {token}"):
        pipeline.ready(context)
    assert pipeline.ready(embeddings_context(TOKENS))


def test_towers_are_not_read(tmp_path: Path) -> None:
    """Published checkpoints contain encoders of images and audio beside the text model; they are not
    loaded."""
    pipeline = open_encoder(saved(tmp_path))
    [expected] = encode_all(pipeline, [TOKENS])
    path = tmp_path / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    some = next(iter(tensors.values())).clone()
    for name in ("vision_tower.layers.0.weight", "embed_vision.weight", "audio_tower.a", "embed_audio.b"):
        tensors[name] = some.clone()
    save_file(tensors, path)
    [found] = encode_all(open_encoder(tmp_path), [TOKENS])
    assert np.array_equal(found.embeddings, expected.embeddings)


def test_the_last_layer_has_no_window(tmp_path: Path) -> None:
    """transformers also ignores a window of the last layer: it changes such a configuration when it reads
    it."""
    [expected] = encode_all(open_encoder(saved(tmp_path, "embedding_gemma2_text")), [TOKENS])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["layer_types"][-1] = "sliding_attention"
    path.write_text(json.dumps(config))
    [found] = encode_all(open_encoder(tmp_path), [TOKENS])
    assert np.array_equal(found.embeddings, expected.embeddings)


def test_kv_heads_that_do_not_divide_the_heads(tmp_path: Path) -> None:
    (architecture,) = (one for one in ENCODERS if one.name == "embedding_gemma2_text")
    save_encoder(architecture, tmp_path, "")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"num_key_value_heads": 2', '"num_key_value_heads": 4')
    )
    with pytest.raises(ConfigError, match="4 kv heads do not divide 6 heads of layer 1"):
        open_encoder(tmp_path)
