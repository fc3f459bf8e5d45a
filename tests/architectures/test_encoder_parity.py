"""Every encoder gives the results of transformers, for single inputs and batches, with each output head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.encoders import ENCODERS, encode_all, open_encoder, save_encoder

from penstock.architectures.registry import SupportedArchitecture
from penstock.errors import ConfigError
from penstock.pipelines.embeddings import EmbeddingsPipeline

pytestmark = pytest.mark.models

LENGTHS = [1, 2, 17, 40, 90]


def random_inputs(vocab_size: int, lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab_size, length) for length in lengths]


def vocabulary_size(model: Any) -> int:
    size: int = model.config.get_text_config().vocab_size
    return size


@pytest.fixture(scope="module", params=ENCODERS, ids=lambda architecture: architecture.name)
def architecture(request: pytest.FixtureRequest) -> SupportedArchitecture:
    architecture: SupportedArchitecture = request.param
    return architecture


@pytest.fixture(scope="module")
def encoder(
    architecture: SupportedArchitecture, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, EmbeddingsPipeline, Path]:
    folder = tmp_path_factory.mktemp(architecture.name)
    model = save_encoder(architecture, folder, "")
    return model, open_encoder(folder), folder


def reference_hidden_states(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the hidden states ``[n, E]`` of transformers."""
    with torch.inference_mode():
        hidden: np.ndarray = model(torch.from_numpy(tokens)[None]).last_hidden_state[0].numpy()
    return hidden


def assert_close(actual: Any, expected: Any) -> None:
    """Check that the error is at most 1e-4, or 1e-4 standard deviations of the values if that is more."""
    np.testing.assert_allclose(actual, expected, atol=1e-4 * max(1.0, float(np.std(expected))), rtol=0)


def test_hidden_states_equal_transformers(encoder: tuple[Any, EmbeddingsPipeline, Path]) -> None:
    model, pipeline, _ = encoder
    inputs = random_inputs(vocabulary_size(model))
    responses = encode_all(pipeline, inputs, outputs=("dense",), pooling="mean", normalize=False)
    for tokens, response in zip(inputs, responses, strict=True):
        assert_close(response.embeddings, reference_hidden_states(model, tokens).mean(0))
    [last_token_response] = encode_all(
        pipeline, inputs[3:4], outputs=("dense",), pooling="last_token", normalize=False
    )
    assert_close(last_token_response.embeddings, reference_hidden_states(model, inputs[3])[-1])


WIDE_LAST_LAYER = {"per_layer_config": {"3": {"head_dim": 24, "num_key_value_heads": 1}}}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"num_attention_heads": 4, "hidden_size": 36, "intermediate_size": 50, "type_vocab_size": 1}),
    ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    ("roberta", {"pad_token_id": 0, "hidden_act": "relu", "layer_norm_eps": 1e-3}),
    ("roberta", {"pad_token_id": 2, "type_vocab_size": 3, "num_attention_heads": 4, "hidden_size": 20}),
    ("xlm-roberta", {"num_attention_heads": 1, "intermediate_size": 7, "vocab_size": 91}),
    ("distilbert", {"activation": "relu", "n_heads": 4, "dim": 36, "hidden_dim": 50}),
    ("distilbert", {"sinusoidal_pos_embds": True, "n_layers": 1}),
    ("mpnet", {"pad_token_id": 0, "relative_attention_num_buckets": 40}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6, "rope_theta": 99.0}),
    ("mistral", {"sliding_window": 5, "head_dim": 10}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen3", {"num_key_value_heads": 3, "attention_bias": True, "head_dim": 6}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 31, "head_dim": 8}),
    ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 7}),
    ("modernbert", {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads": 4}),
    ("nomic_bert", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "hidden_act": "gelu"}),
    ("gte", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "type_vocab_size": 2}),
    ("new", {"rope_scaling": None, "type_vocab_size": 0, "rope_theta": 77.0}),
    ("new", {"rope_scaling": {"factor": 2.0, "type": "ntk"}, "rope_theta": 500000, "num_attention_heads": 4}),
    ("jina_embeddings_v3", {"num_attention_heads": 4, "type_vocab_size": 2, "hidden_act": "relu"}),
    ("embedding_gemma2_text", {"per_layer_config": {}, "attention_bias": True, "sliding_window": 30}),
    (
        "embedding_gemma2_text",
        {"layer_types": ["sliding_attention"] * 4, **WIDE_LAST_LAYER, "rms_norm_eps": 1e-3},
    ),
    (
        "embedding_gemma2_text",
        {
            "num_hidden_layers": 12,
            "layer_types": ["sliding_attention"] * 12,
            "per_layer_config": {"11": {"head_dim": 24, "num_key_value_heads": 1}},
        },
    ),
    ("embedding_gemma2_text", {"rope_parameters": None, "num_key_value_heads": 1, "embedding_dim": 7}),
    ("eurobert", {"num_key_value_heads": 3, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("mpnet", {"max_position_embeddings": 400, "num_attention_heads": 4, "hidden_act": "gelu_new"}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=str)
def test_variants_of_the_configuration_equal_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == name)
    model = save_encoder(architecture, tmp_path, "", **changes)
    pipeline = open_encoder(tmp_path)
    max_length = pipeline.memory_plan.max_length
    inputs = random_inputs(vocabulary_size(model), [1, 40, min(max_length, 300)])
    responses = encode_all(pipeline, inputs, outputs=("dense",), pooling="mean", normalize=False)
    for tokens, response in zip(inputs, responses, strict=True):
        assert_close(response.embeddings, reference_hidden_states(model, tokens).mean(0))


def test_mpnet_with_few_relative_position_buckets_is_refused(tmp_path: Path) -> None:
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == "mpnet")
    save_encoder(architecture, tmp_path, "", relative_attention_num_buckets=8)
    with pytest.raises(ConfigError, match="is 8, but this family needs at least 32"):
        open_encoder(tmp_path)


def test_outputs_of_a_batch_are_bit_equal_to_single_inputs(
    encoder: tuple[Any, EmbeddingsPipeline, Path],
) -> None:
    model, _, folder = encoder
    pipeline = open_encoder(folder, deterministic=True)
    inputs = random_inputs(vocabulary_size(model))
    batch_responses = encode_all(pipeline, inputs, outputs=("dense",))
    for tokens, response in zip(inputs, batch_responses, strict=True):
        [single_response] = encode_all(pipeline, [tokens], outputs=("dense",))
        assert np.array_equal(single_response.embeddings, response.embeddings)


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize(("encoding", "min_cosine"), [("bfloat16", 0.998), ("int8", 0.99), ("int4", 0.9)])
def test_embeddings_in_bfloat16_int8_and_int4_are_close_to_transformers(
    encoder: tuple[Any, EmbeddingsPipeline, Path], encoding: str, min_cosine: float
) -> None:
    model, _, folder = encoder
    inputs = random_inputs(vocabulary_size(model), [12, 40])
    pipeline = open_encoder(folder, quantization_encoding=encoding)
    for tokens, response in zip(
        inputs, encode_all(pipeline, inputs, outputs=("dense",), pooling="mean"), strict=True
    ):
        reference_output = reference_hidden_states(model, tokens).mean(0)
        cosine = (
            response.embeddings
            @ reference_output
            / np.linalg.norm(response.embeddings)
            / np.linalg.norm(reference_output)
        )
        assert cosine > min_cosine


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("labels", [1, 3])
def test_logits_of_the_classification_head_equal_transformers(
    architecture: SupportedArchitecture, tmp_path: Path, labels: int
) -> None:
    try:
        model = save_encoder(architecture, tmp_path, "ForSequenceClassification", num_labels=labels)
    except ValueError:
        pytest.skip(f"transformers has no classifier of {architecture.name}")
    pipeline = open_encoder(tmp_path)
    assert pipeline.outputs == ("scores",)
    inputs = random_inputs(vocabulary_size(model))
    responses = encode_all(pipeline, inputs, activation=False)
    for tokens, response in zip(inputs, responses, strict=True):
        with torch.inference_mode():
            logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
        assert_close(response.scores, logits)


def test_logits_of_the_masked_language_model_head_equal_transformers(
    architecture: SupportedArchitecture, tmp_path: Path
) -> None:
    try:
        model = save_encoder(architecture, tmp_path, "ForMaskedLM")
    except ValueError:
        pytest.skip(f"transformers has no masked language model of {architecture.name}")
    pipeline = open_encoder(tmp_path)
    assert pipeline.outputs[0] == "sparse"
    inputs = random_inputs(vocabulary_size(model))
    for tokens, response in zip(inputs, encode_all(pipeline, inputs), strict=True):
        with torch.inference_mode():
            logits = model(torch.from_numpy(tokens)[None]).logits[0]
        expected = torch.log1p(logits.relu()).amax(0).numpy()
        assert response.sparse is not None
        weights = np.zeros_like(expected)
        weights[response.sparse.token_ids] = response.sparse.weights
        assert_close(weights, expected)


def test_hidden_states_with_token_types_equal_transformers(
    encoder: tuple[Any, EmbeddingsPipeline, Path],
) -> None:
    model, pipeline, _ = encoder
    if not getattr(model.config, "type_vocab_size", 0) > 1:
        pytest.skip("the family has no token types")
    tokens = random_inputs(vocabulary_size(model))[2]
    types = np.arange(len(tokens)) % 2
    [response] = encode_all(
        pipeline, [tokens], outputs=("dense",), pooling="cls", normalize=False, token_type_ids=types
    )
    with torch.inference_mode():
        reference_output = model(torch.from_numpy(tokens)[None], token_type_ids=torch.from_numpy(types)[None])
    assert_close(response.embeddings, reference_output.last_hidden_state[0, 0].numpy())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("modernbert", {"classifier_pooling": "mean", "classifier_bias": True}),
        ("eurobert", {"classifier_pooling": "mean"}),
        ("eurobert", {"classifier_pooling": "bos"}),
    ],
    ids=str,
)
def test_pooling_of_the_classification_head_equals_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == name)
    model = save_encoder(architecture, tmp_path, "ForSequenceClassification", num_labels=3, **changes)
    inputs = random_inputs(vocabulary_size(model), [7])
    [response] = encode_all(open_encoder(tmp_path), inputs, activation=False)
    with torch.inference_mode():
        assert_close(response.scores, model(torch.from_numpy(inputs[0])[None]).logits[0].numpy())
