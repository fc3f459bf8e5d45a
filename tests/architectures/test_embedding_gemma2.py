"""EmbeddingGemma 2: its projection, refused inputs and sizes, ignored tensors, and its last layer."""

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


def save_checkpoint(folder: Path, name: str = "embedding_gemma2") -> Path:
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == name)
    save_encoder(architecture, folder, "")
    return folder


def test_dense_embeddings_and_multi_vectors_have_the_size_of_the_projection(tmp_path: Path) -> None:
    pipeline = open_encoder(save_checkpoint(tmp_path))
    assert pipeline.embedding_size == 40
    [response] = encode_all(pipeline, [TOKENS], outputs=("dense", "multi_vector"))
    assert response.embeddings.shape == (40,)
    assert response.multi_vector is not None
    assert response.multi_vector.shape == (len(TOKENS), 40)


@pytest.mark.parametrize(("token", "input_type"), [(2, "image"), (1, "audio")])
def test_tokens_of_images_and_audio_are_refused_with_their_input_type(
    tmp_path: Path, token: int, input_type: str
) -> None:
    pipeline = open_encoder(save_checkpoint(tmp_path))
    context = embeddings_context([*TOKENS[:4], token, 7])
    with pytest.raises(UnsupportedFeatureError, match=f"input of type {input_type}.* token 4 .*id {token}"):
        pipeline.ready(context)
    assert pipeline.ready(embeddings_context(TOKENS))


def test_tensors_of_the_image_and_audio_encoders_are_not_loaded(tmp_path: Path) -> None:
    """Published checkpoints contain encoders of images and audio in addition to the text model."""
    pipeline = open_encoder(save_checkpoint(tmp_path))
    [expected] = encode_all(pipeline, [TOKENS])
    path = tmp_path / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    example_tensor = next(iter(tensors.values())).clone()
    for name in ("vision_tower.layers.0.weight", "embed_vision.weight", "audio_tower.a", "embed_audio.b"):
        tensors[name] = example_tensor.clone()
    save_file(tensors, path)
    [result] = encode_all(open_encoder(tmp_path), [TOKENS])
    assert np.array_equal(result.embeddings, expected.embeddings)


def test_a_window_of_the_last_layer_is_ignored(tmp_path: Path) -> None:
    """transformers also ignores the window: it replaces the layer type when it reads the configuration."""
    [expected] = encode_all(open_encoder(save_checkpoint(tmp_path, "embedding_gemma2_text")), [TOKENS])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["layer_types"][-1] = "sliding_attention"
    path.write_text(json.dumps(config))
    [result] = encode_all(open_encoder(tmp_path), [TOKENS])
    assert np.array_equal(result.embeddings, expected.embeddings)


def test_a_number_of_kv_heads_that_does_not_divide_the_heads_is_refused(tmp_path: Path) -> None:
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == "embedding_gemma2_text")
    save_encoder(architecture, tmp_path, "")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"num_key_value_heads": 2', '"num_key_value_heads": 4')
    )
    with pytest.raises(ConfigError, match="4 kv heads do not divide 6 heads of layer 1"):
        open_encoder(tmp_path)
