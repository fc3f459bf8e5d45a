"""RoPE types give the logits of transformers in a Llama network, and invalid parameters are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import load_in_transformers, transformers_logits, transformers_step, write_checkpoint
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

from penstock.architectures.llama import tiny_config
from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.nn import Rotary, RotaryConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 5.0, 7.5],
    "original_max_position_embeddings": 32,
}
ROPE_PARAMETERS: dict[str, tuple[dict[str, Any], int]] = {  # parameters, and max_position_embeddings
    "default": ({"rope_type": "default"}, 256),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 48),
    "llama3": (LLAMA3, 256),
    "yarn": (YARN, 128),
    "yarn with magnitudes": (YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0}, 128),
    "longrope": (LONGROPE, 256),
    "longrope across its limit": (LONGROPE | {"original_max_position_embeddings": 100}, 256),
    "longrope, short texts": (LONGROPE | {"original_max_position_embeddings": 128}, 256),
    "longrope with a factor": (LONGROPE | {"factor": 3.0}, 256),
    "longrope with an attention factor": (LONGROPE | {"attention_factor": 1.2}, 256),
    "yarn with an attention factor": (YARN | {"attention_factor": 1.4, "beta_slow": 2.0}, 128),
}


@pytest.fixture(scope="module", params=ROPE_PARAMETERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parameters, positions = ROPE_PARAMETERS[request.param]
    config = tiny_config() | {
        "max_position_embeddings": positions,
        "rope_parameters": parameters | {"rope_theta": 500.0},
        "num_hidden_layers": 2,
    }
    del config["rope_theta"]
    return write_checkpoint(tmp_path_factory.mktemp("rope"), config)


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("kernels", ["best", "reference"])
def test_logits_equal_transformers(checkpoint: Path, kernels: str) -> None:
    reference = load_in_transformers(checkpoint)
    pipeline = open_pipeline(checkpoint, kernels=kernels)
    tokens = random_tokens(100, 130, seed=2)
    context = make_context(tokens[:90])
    logits = [step_logits(pipeline, [context])[0]]
    torch.testing.assert_close(logits[0], transformers_logits(reference, tokens[:90]), atol=1e-3, rtol=1e-4)
    _, cache = transformers_step(reference, tokens[:90])
    for length in range(91, 101):
        expected, cache = transformers_step(reference, tokens[:length], cache)
        append_token(pipeline, context, tokens[length - 1])
        actual = step_logits(pipeline, [context])[0][-1:]
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4)


def test_chunks_of_a_dynamically_scaled_prompt_give_the_logits_of_the_whole_prompt(tmp_path: Path) -> None:
    """With dynamic scaling, the angles depend on the length of the whole prompt, even in its first chunk."""
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    config = tiny_config() | {"max_position_embeddings": 48, "rope_parameters": parameters}
    pipeline = open_pipeline(write_checkpoint(tmp_path, config), deterministic=True)
    tokens = random_tokens(90, 130, seed=2)
    full_logits = step_logits(pipeline, [make_context(tokens)])[0]
    context, chunk_logits = make_context(tokens), []
    for end in (20, 60, 90):
        context.set_token_indices(active_idx=end)
        chunk_logits.append(step_logits(pipeline, [context])[0])
        append_token(pipeline, context, 0)
    assert torch.equal(torch.cat(chunk_logits), full_logits)


def test_the_older_and_the_newer_key_names_are_read() -> None:
    values = {"max_position_embeddings": 64, "rope_theta": 7.0}
    older_values = values | {"rope_scaling": {"type": "linear", "factor": 2}}
    newer_values = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 7},
    }
    configs = [
        RotaryConfig.from_huggingface(HuggingFaceConfig(values, "config.json"), 16)
        for values in (older_values, newer_values)
    ]
    assert (configs[0].kind, configs[0].base, configs[0].max_length) == ("linear", 7.0, 128)
    assert (configs[1].kind, configs[1].base, configs[1].max_length) == ("linear", 7.0, 128)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "spiral"}, "unknown rope type 'spiral'"),
        ({"rope_type": "linear"}, "factor: must be a positive number, was None"),
        ({"rope_type": "yarn", "factor": -1}, "factor: must be a positive number, was -1"),
        ({"rope_type": "dynamic", "factor": True}, "factor: must be a positive number, was True"),
        ({"rope_type": "linear", "factor": float("inf")}, r"factor: must be at most 1e\+09, was inf"),
        ({"rope_type": "linear", "factor": 10**400}, r"factor: must be at most 1e\+09"),
        ({"rope_type": "default", "rope_theta": 10**400}, r"rope_theta: must be at most 1e\+30"),
        ({"rope_type": "default", "partial_rotary_factor": 2}, "partial_rotary_factor: must be at most 1"),
        ({"rope_type": "default", "partial_rotary_factor": "half"}, "must be a positive number, was 'half'"),
        (YARN | {"original_max_position_embeddings": -1}, "original_max_position_embeddings: must be"),
        (YARN | {"original_max_position_embeddings": float("nan")}, "must be a positive number, was nan"),
    ],
)
def test_invalid_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    config = HuggingFaceConfig({"max_position_embeddings": 64, "rope_scaling": parameters}, "config.json")
    with pytest.raises(ConfigError, match=message):
        RotaryConfig.from_huggingface(config, 16)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_theta": 1.0}, "rope_theta: must be above 1 for rope type 'yarn'"),
        ({"beta_fast": "x"}, "beta_fast: must be a positive number, was 'x'"),
        ({"beta_slow": -1}, "beta_slow: must be a positive number, was -1"),
        ({"attention_factor": []}, r"attention_factor: must be a positive number, was \[\]"),
        ({"mscale": "x", "mscale_all_dim": 1.0}, "mscale: must be a positive number, was 'x'"),
    ],
)
def test_invalid_parameters_of_yarn_are_refused(parameters: dict[str, Any], message: str) -> None:
    values = {"max_position_embeddings": 64, "rope_scaling": YARN | parameters}
    config = RotaryConfig.from_huggingface(HuggingFaceConfig(values), 16)
    with pytest.raises(ConfigError, match=message):
        Rotary(config, 64, torch.device("cpu"))


def test_rope_parameters_that_are_not_an_object_are_refused() -> None:
    config = HuggingFaceConfig({"max_position_embeddings": 64, "rope_scaling": "linear"})
    with pytest.raises(CheckpointError, match="rope_scaling must be a JSON object, was 'linear'"):
        RotaryConfig.from_huggingface(config, 16)


def test_an_odd_head_dimension_is_refused() -> None:
    config = HuggingFaceConfig({"max_position_embeddings": 64}, "config.json")
    with pytest.raises(ConfigError, match="even number of dims, were given 15"):
        RotaryConfig.from_huggingface(config, 15)


def test_dynamic_scaling_of_a_single_pair_is_refused() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0}
    config = HuggingFaceConfig({"max_position_embeddings": 64, "rope_parameters": parameters}, "config.json")
    with pytest.raises(ConfigError, match="at least 4 dims, were given 2"):
        RotaryConfig.from_huggingface(config, 2)
