"""Default values of sampling parameters, with and without ``generation_config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig, PipelineConfig, SamplingConfig
from penstock.errors import CheckpointError, InputError
from penstock.pipelines.core import SamplingParams


def make_config(
    folder: Path, generation_config: Any, *, use_generation_config: bool = True
) -> PipelineConfig:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return PipelineConfig(
        model=ModelConfig(model_path=str(folder)),
        sampling=SamplingConfig(use_generation_config=use_generation_config),
    )


def test_the_defaults_without_a_file_are_those_of_openai(tmp_path: Path) -> None:
    config = make_config(tmp_path, {})
    (tmp_path / "generation_config.json").unlink()
    expected = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, seed=5)
    assert config.default_sampling_params(seed=5) == expected


def test_given_values_precede_the_file_and_the_defaults(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        {"temperature": 0.6, "top_k": 20, "min_p": None, "repetition_penalty": 1.1, "max_new_tokens": 99},
    )
    params = config.default_sampling_params(top_k=3, temperature=None, seed=0, stop=["x"])
    assert params == SamplingParams(
        temperature=0.6,
        top_k=3,
        top_p=1.0,
        repetition_penalty=1.1,
        max_new_tokens=99,
        seed=0,
        stop=["x"],
    )


def test_do_sample_false_means_greedy_unless_a_temperature_is_given(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"do_sample": False, "temperature": 0.6})
    assert config.default_sampling_params().temperature == 0
    assert config.default_sampling_params(temperature=0.5).temperature == 0.5


def test_do_sample_true_has_no_effect(tmp_path: Path) -> None:
    assert make_config(tmp_path, {"do_sample": True}).default_sampling_params().temperature == 1


def test_keys_unrelated_to_sampling_are_ignored(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"eos_token_id": [1, 2], "max_length": "x", "num_beams": 4})
    assert config.default_sampling_params(seed=1) == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, seed=1
    )


def test_a_missing_seed_is_random(tmp_path: Path) -> None:
    config = make_config(tmp_path, {})
    assert len({config.default_sampling_params().seed for _ in range(5)}) > 1
    assert config.default_sampling_params(seed=0).seed == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_k", -2),
        ("top_p", 3),
        ("max_new_tokens", "16"),
        ("repetition_penalty", 0),
        ("do_sample", "no"),
        ("do_sample", 0),
    ],
)
def test_an_invalid_value_in_the_file_is_a_checkpoint_error(tmp_path: Path, key: str, value: Any) -> None:
    config = make_config(tmp_path, {key: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: {key} "):
        config.default_sampling_params()


def test_the_file_can_be_ignored_by_setting(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"temperature": "hot", "top_k": 2}, use_generation_config=False)
    assert config.default_sampling_params(seed=1) == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, seed=1
    )


def test_a_given_value_out_of_range_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="top_p"):
        make_config(tmp_path, {}).default_sampling_params(top_p=2.0)


def test_a_malformed_file_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, [])
    with pytest.raises(CheckpointError, match=r"generation_config.json: must contain a JSON object"):
        config.default_sampling_params()
