"""Configurations: values from all sources, invalid values, encodings, model names and aliases."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.encodings import HalvedEncoding

from penstock.config import (
    FLOAT_ENCODINGS,
    KVCacheConfig,
    ModelConfig,
    PipelineConfig,
    SamplingConfig,
    config_fields,
    parse_devices,
    upper_bounded_default,
)
from penstock.config.model import _warn_encoding_fallback
from penstock.driver import DeviceSpec
from penstock.errors import ConfigError
from penstock.kernels import ENCODINGS
from penstock.serve.config import serve_fields

VALID_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model_path": st.sampled_from(["demo", "./folder", "name/space"]),
    "revision": st.sampled_from(["main", "v1"]),
    "gguf_file": st.sampled_from([None, "Q4_K_M"]),
    "quantization_encoding": st.sampled_from([None, *FLOAT_ENCODINGS]),
    "max_length": st.none() | st.integers(1, 2**40),
    "devices": st.sampled_from([parse_devices(text) for text in ("cpu", "gpu", "gpu:0,1")]),
    "kernels": st.sampled_from([None, "reference"]),
    "chat_template": st.sampled_from([None, "template.jinja"]),
    "special_tokens_in_content": st.booleans(),
    "served_model_name": st.sampled_from([None, "name"]),
    "task": st.sampled_from(["auto", "text-generation"]),
    "model_impl": st.sampled_from(["auto", "penstock", "transformers"]),
    "trust_remote_code": st.booleans(),
    "matryoshka_dimensions": st.sampled_from([(), (64, 128)]),
    "kv_cache_block_size": st.sampled_from([16, 32, 64, 128]),
    "enable_prefix_caching": st.booleans(),
    "device_memory_utilization": st.floats(0, 1, exclude_min=True),
    "kv_cache_dtype": st.sampled_from([None, "float32", "bfloat16", "float16", "int8", "fp8"]),
    "kv_cache_memory": st.none() | st.integers(1, 2**40),
    "kv_offload_memory": st.none(),  # needs a GPU
    "use_generation_config": st.booleans(),
    "lora": st.sampled_from([(), ("tone=/adapters/tone",), ("a=x", "b=y=z")]),
    "enable_lora": st.booleans(),
    "lora_dir": st.sampled_from([None, "/adapters"]),
    "max_loras": st.integers(1, 100),
    "max_loaded_loras": st.integers(1, 1000),
    "max_lora_rank": st.integers(1, 1024),
    "speculative_method": st.sampled_from([None, "ngram"]),
    "draft_model_path": st.none(),  # another speculative method needs this setting
    "draft_quantization_encoding": st.none(),
    "num_speculative_tokens": st.integers(1, 64),
    "adaptive_speculation": st.booleans(),
    "ngram_min": st.integers(1, 3),
    "ngram_max": st.integers(3, 9),
    "enable_structured_output": st.booleans(),
    "grammar_compile_timeout": st.floats(0.01, 1000),
    "grammar_backend": st.just("llguidance"),  # xgrammar has fewer limits
    "max_grammar_symbols": st.integers(1, 2**30),
    "grammar_mask_items": st.integers(1, 2**30),
    "grammar_mask_fuel": st.integers(1, 2**30),
    "max_grammar_states": st.integers(1, 2**30),
    "max_grammar_size": st.integers(1, 2**30),
    "grammar_cache_size": st.integers(1, 2**40),
    "json_whitespace": st.sampled_from(["flexible", "compact"]),
    "encoder_cache_memory": st.none() | st.integers(1, 2**40),
    "max_images_per_request": st.integers(1, 2**20),
    "max_image_pixels": st.integers(1, 2**40),
    "max_image_bytes": st.integers(1, 2**40),
    "image_processes": st.integers(1, 64),
    "image_timeout": st.floats(0.001, 1e6),
    "codec": st.sampled_from([None, "./codec"]),
    "codec_encoding": st.sampled_from([None, "int8"]),
    "speech_format": st.sampled_from([None, "neutts"]),
    "voice": st.sampled_from([(), ("anna=anna.wav", "ben=1,2,3")]),
    "audio_chunk_frames": st.none() | st.integers(1, 1000),
    "tensor_parallel_size": st.integers(1, 64),
    "expert_parallel": st.just(False),  # needs several processes
    "collective_timeout": st.floats(0.01, 1000),
    "collective_transport": st.none(),  # needs several processes
    "pin_ranks": st.booleans(),
    "max_batch_size": st.none() | st.integers(1, 2**20),
    "max_batch_input_tokens": st.integers(1, 2**20),
    "enable_chunked_prefill": st.booleans(),
    "max_num_steps": st.integers(1, 100),
    "overlap_steps": st.booleans(),
    "deterministic": st.just(False),
    "num_threads": st.none() | st.integers(1, 1000),
    "data_parallel_size": st.integers(1, 256),
}


def config_values(config: PipelineConfig) -> dict[str, Any]:
    return {name: value for name, value, _ in config.describe()}


def to_flag_text(value: Any) -> str:
    if isinstance(value, tuple) and all(isinstance(element, str | int) for element in value):
        return ",".join(map(str, value))
    if isinstance(value, tuple):
        ids = ",".join(str(device.id) for device in value)
        return f"gpu:{ids}" if value[0].device_type == "gpu" else "cpu"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_setting_has_a_test_value() -> None:
    assert [field.name for field in config_fields()] == list(VALID_VALUES)


@given(values=st.fixed_dictionaries({}, optional=VALID_VALUES))
def test_valid_values_are_stored(values: dict[str, Any]) -> None:
    config = PipelineConfig.from_flat(values)
    assert config_values(config) == config_values(PipelineConfig()) | values
    assert PipelineConfig.from_flat(config_values(config)) == config


@given(values=st.fixed_dictionaries({}, optional=VALID_VALUES))
def test_flags_and_environment_variables_are_parsed_alike(values: dict[str, Any]) -> None:
    flag_texts = {name: to_flag_text(value) for name, value in values.items() if value is not None}
    expected = config_values(PipelineConfig.from_flat(values))
    variables = {f"PENSTOCK_{name.upper()}": value for name, value in flag_texts.items()}
    assert config_values(PipelineConfig.from_flat(flag_texts, "flag")) == expected
    assert config_values(PipelineConfig.from_flat({}, environment=variables)) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_length": 0}, "a whole number of at least 1, was 0"),
        ({"max_length": -3}, "a whole number of at least 1, was -3"),
        ({"max_length": 4.0}, "a whole number of at least 1, was 4.0"),
        ({"max_length": True}, "a whole number of at least 1, was True"),
        ({"max_length": "12"}, "a whole number of at least 1, was '12'"),
        ({"max_batch_size": 0}, "at least 1"),
        ({"max_batch_input_tokens": 0}, "at least 1"),
        ({"max_num_steps": 0}, "at least 1"),
        ({"num_threads": 0}, "from 1 to 1024, was 0"),
        ({"num_threads": 100_000}, "from 1 to 1024, was 100000"),
        ({"kv_cache_memory": 0}, "a number of bytes"),
        ({"kv_cache_block_size": 8}, "a power of two from 16 to 128, was 8"),
        ({"kv_cache_block_size": 48}, "a power of two from 16 to 128, was 48"),
        ({"kv_cache_block_size": 256}, "a power of two from 16 to 128, was 256"),
        ({"device_memory_utilization": 0.0}, "above 0 and at most 1, was 0.0"),
        ({"device_memory_utilization": 1.01}, "above 0 and at most 1"),
        ({"device_memory_utilization": float("nan")}, "above 0 and at most 1, was nan"),
        ({"device_memory_utilization": float("inf")}, "above 0 and at most 1, was inf"),
        ({"enable_prefix_caching": 1}, "true or false, was 1"),
        ({"kv_cache_dtype": "float64"}, "one of float32, bfloat16, float16, int8, fp8"),
        ({"quantization_encoding": "q9"}, "use one of float32"),
        ({"quantization_encoding": 16}, "the name of an encoding, was 16"),
        ({"devices": "tpu"}, "cpu, gpu, gpu:1 or gpu:0,1, was 'tpu'"),
        ({"devices": "cpu:1"}, "was 'cpu:1'"),
        ({"devices": "gpu:"}, "was 'gpu:'"),
        ({"devices": "gpu:-1"}, "was 'gpu:-1'"),
        ({"devices": "gpu:0,0"}, "names a device twice"),
        ({"devices": ()}, r"was \(\)"),
        ({"devices": ["cpu"]}, "was"),
        ({"model_path": ""}, "not empty"),
        ({"served_model_name": " "}, "not empty"),
        (
            {"grammar_mask_fuel": 1000, "grammar_backend": "xgrammar"},
            "grammar_mask_fuel: grammar_backend xgrammar has no such limit",
        ),
    ],
)
def test_the_error_for_an_invalid_value_states_valid_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        PipelineConfig.from_flat(values)
    assert error.value.field == next(iter(values))


@pytest.mark.parametrize(
    ("make_config", "field"),
    [
        (lambda: ModelConfig(max_length=-1), "max_length"),
        (lambda: KVCacheConfig(block_size=17), "kv_cache_block_size"),
        (lambda: SamplingConfig(use_generation_config=None), "use_generation_config"),  # type: ignore[arg-type]
        (lambda: PipelineConfig(max_num_steps="2"), "max_num_steps"),  # type: ignore[arg-type]
    ],
)
def test_values_are_checked_when_a_class_is_built_directly(make_config: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config()
    assert error.value.field == field


def test_numpy_scalars_are_converted() -> None:
    values: dict[str, Any] = {
        "max_length": np.int64(64),
        "device_memory_utilization": np.float32(0.5),
        "deterministic": np.True_,
    }
    config = PipelineConfig.from_flat(values)
    assert (config.model.max_length, config.deterministic) == (64, True)
    assert repr(KVCacheConfig(**{"block_size": np.int16(64)})) == repr(KVCacheConfig(block_size=64))
    plain_config = PipelineConfig(max_batch_size=4, deterministic=False)
    assert repr(PipelineConfig(max_batch_size=np.int8(4), deterministic=np.False_)) == repr(plain_config)


@pytest.mark.parametrize("value", [np.float64("nan"), np.float32("inf"), np.int64(0), np.True_], ids=repr)
def test_invalid_numpy_scalars_are_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="device_memory_utilization: must be a number above 0 and at most 1"
    ):
        PipelineConfig.from_flat({"device_memory_utilization": value})


@pytest.mark.parametrize("text", ["yes", "on", "2", "x"])
def test_text_that_is_not_a_boolean_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="true or false"):
        PipelineConfig.from_flat({"deterministic": text}, "flag")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("max_lenght", "max_length"),
        ("block_size", "kv_cache_block_size"),
        ("max-batch-size", "max_batch_size"),
    ],
)
def test_the_error_for_an_unknown_field_suggests_the_closest_name(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {suggestion}"):
        PipelineConfig.from_flat({name: 1})


def test_the_error_for_an_unrecognisable_field_lists_all_fields() -> None:
    with pytest.raises(ConfigError, match=r"the fields are model_path, .*, config_file"):
        PipelineConfig.from_flat({"zzz": 1})


def test_flags_precede_environment_file_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max_length = 1\nmax_batch_size = 1\nnum_threads = 1\n")
    config = PipelineConfig.from_flat(
        {"max_length": "3", "config_file": file, "revision": None},
        "flag",
        environment={"PENSTOCK_MAX_LENGTH": "2", "PENSTOCK_MAX_BATCH_SIZE": "2", "PENSTOCK_REVISION": ""},
    )
    described_settings = {name: (value, source) for name, value, source in config.describe()}
    assert described_settings["max_length"] == (3, "flag")
    assert described_settings["max_batch_size"] == (2, "environment PENSTOCK_MAX_BATCH_SIZE")
    assert described_settings["num_threads"] == (1, f"file {file}")
    assert described_settings["revision"] == ("main", "default")


def test_describe_reports_default_or_argument_for_a_directly_built_configuration() -> None:
    described_settings = {name: source for name, _, source in PipelineConfig(max_batch_size=3).describe()}
    assert described_settings["max_batch_size"] == "argument"
    assert described_settings["max_num_steps"] == "default"


def test_the_environment_can_name_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"model_path": "a/b", "devices": "gpu:1", "device_memory_utilization": 1}))
    config = PipelineConfig.from_flat({}, environment={"PENSTOCK_CONFIG_FILE": str(file)})
    assert config.model.devices == (DeviceSpec(1, "gpu"),)
    assert config.kv_cache.device_memory_utilization == 1.0


def test_the_argument_for_the_file_precedes_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"max_num_steps": 2}')
    environment = {"PENSTOCK_CONFIG_FILE": str(tmp_path / "gone.json")}
    config = PipelineConfig.from_flat({"config_file": str(tmp_path / "a.json")}, environment=environment)
    assert config.max_num_steps == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[1]", "must contain a JSON object, contains a list"),
        ("a.toml", "x = = 1", "is not valid TOML"),
        ("a.toml", "x = " + "[" * 10_000, "is not valid TOML"),
        ("a.yaml", "x: 1", r"must end in .json or .toml"),
        ("a.json", '{"max_length": "12"}', r"max_length: must be .*, was '12' \(from file .*a.json\)"),
        ("a.json", '{"max_lenght": 12}', r"\(from file .*a.json\): did you mean max_length"),
        ("a.toml", "config_file = 'b.toml'", "config_file: is not a configuration field"),
    ],
)
def test_malformed_or_invalid_configuration_files_are_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        PipelineConfig.from_flat({"config_file": str(file)})


def test_a_missing_file_and_an_invalid_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config_file: .*gone.toml: cannot be read: No such file"):
        PipelineConfig.from_flat({"config_file": tmp_path / "gone.toml"})
    with pytest.raises(ConfigError, match="config_file: must be a path, was 3"):
        PipelineConfig.from_flat({"config_file": 3})


def test_environment_variables_need_known_names_and_valid_values() -> None:
    assert (
        PipelineConfig.from_flat({}, environment={"PENSTOCK_HOME": "/x", "MAX_LENGTH": "1"})
        == PipelineConfig()
    )
    with pytest.raises(ConfigError, match=r"from environment PENSTOCK_MAX_LENGHT\): did you mean max_length"):
        PipelineConfig.from_flat({}, environment={"PENSTOCK_MAX_LENGHT": "1"})
    with pytest.raises(ConfigError, match=r"was 'many' \(from environment PENSTOCK_MAX_LENGTH\)"):
        PipelineConfig.from_flat({}, environment={"PENSTOCK_MAX_LENGTH": "many"})


def test_deterministic_is_refused_in_float16_on_a_gpu_and_never_on_a_cpu() -> None:
    assert PipelineConfig.from_flat({"deterministic": True}).model.encoding == "bfloat16", (
        "the demo model must run in bfloat16"
    )
    for encoding in ENCODINGS.names:  # a CPU replaces float16 by bfloat16
        PipelineConfig.from_flat({"deterministic": True, "quantization_encoding": encoding})
    gpu_values = {"devices": "gpu", "quantization_encoding": "float16"}
    PipelineConfig.from_flat(gpu_values)
    with pytest.raises(ConfigError, match=r"deterministic: .* one of float32, bfloat16, .* is 'float16'"):
        PipelineConfig.from_flat({"deterministic": True} | gpu_values)


def test_float16_falls_back_to_bfloat16_on_cpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _warn_encoding_fallback.cache_clear()
    assert ModelConfig(quantization_encoding="float16").encoding == "bfloat16"
    assert write_typed_checkpoint(tmp_path, {"dtype": "float16"}).encoding == "bfloat16"
    (message,) = caplog.messages
    assert "float16 weights run in bfloat16 on cpu" in message
    assert "--quantization-encoding float32" in message
    gpu_config = ModelConfig(quantization_encoding="float16", devices=(DeviceSpec.accelerator(),))
    assert gpu_config.encoding == "float16"
    assert len(caplog.messages) == 1


def test_configurations_are_frozen_hashable_and_picklable() -> None:
    config = PipelineConfig.from_flat({"max_length": 7})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_steps = 2  # type: ignore[misc]
    unpickled = pickle.loads(pickle.dumps(config))
    assert (unpickled, unpickled.describe(), hash(unpickled)) == (config, config.describe(), hash(config))


def test_encodings_are_listed_floats_first_and_then_by_descending_bits() -> None:
    assert FLOAT_ENCODINGS == ("float32", "bfloat16", "float16")
    assert ENCODINGS.names[:3] == FLOAT_ENCODINGS
    assert {"int8", "int4"} <= set(ENCODINGS.names)
    assert not any(ENCODINGS[name].is_internal for name in ENCODINGS.names)
    assert [ENCODINGS[name].bits for name in ENCODINGS.names[3:]] == sorted(
        (ENCODINGS[name].bits for name in ENCODINGS.names[3:]), reverse=True
    )


def test_an_added_encoding_can_be_configured() -> None:
    with ENCODINGS.extended(HalvedEncoding("fake")):
        assert ModelConfig(quantization_encoding="fake").encoding == "fake"
    with pytest.raises(ConfigError, match=r"unknown encoding 'fake': use one of float32, .* int8, int4"):
        ModelConfig(quantization_encoding="fake")


def write_typed_checkpoint(folder: Path, config: Mapping[str, Any]) -> ModelConfig:
    from safetensors.torch import save_file
    from torch import zeros

    tensors = {"norm": zeros(2).float(), "table": zeros(3, 4).bfloat16()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model_path=str(folder))


@pytest.mark.parametrize(
    ("config", "encoding"),
    [
        ({"torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"text_config": {"dtype": "float32"}}, "float32"),
        ({"torch_dtype": None}, "bfloat16"),  # without torch_dtype, the type of the largest tensor counts
    ],
)
def test_the_default_encoding_follows_the_type_of_the_checkpoint(
    tmp_path: Path, config: dict[str, Any], encoding: str
) -> None:
    assert write_typed_checkpoint(tmp_path, config).encoding == encoding


def test_quantization_encoding_has_precedence_over_the_type_of_the_checkpoint(tmp_path: Path) -> None:
    config = write_typed_checkpoint(tmp_path, {"dtype": "float16"})
    assert dataclasses.replace(config, quantization_encoding="float32").encoding == "float32"


def test_a_checkpoint_of_an_unsupported_type_needs_an_encoding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be one of float32, .* stored in float64"):
        _ = write_typed_checkpoint(tmp_path, {"dtype": "float64"}).encoding


def test_a_missing_generation_config_is_empty(tmp_path: Path) -> None:
    assert write_typed_checkpoint(tmp_path, {}).generation_config == {}


def test_a_model_is_named_by_path_or_served_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine-1.5b"
    folder.mkdir()
    file = tmp_path / "small.Q4_K_M.gguf"
    file.touch()
    monkeypatch.chdir(folder)
    names = {
        str(folder): "mine-1.5b",
        f"{folder}/": "mine-1.5b",
        ".": "mine-1.5b",
        "../mine-1.5b": "mine-1.5b",
        "/models/not-there": "not-there",
        str(file): "small.Q4_K_M",
        "demo": "demo",
        "owner/model-0.6B": "owner/model-0.6B",
        "/": "/",
    }
    for path, name in names.items():
        assert ModelConfig(model_path=path).name == name
        assert ModelConfig(model_path=path, served_model_name="other").name == "other"


def test_upper_bounded_default_refuses_values_above_the_bound() -> None:
    assert upper_bounded_default(10, None) == 10
    assert upper_bounded_default(10, 10) == 10
    with pytest.raises(ConfigError, match=r"max_length: .*\(11\) exceeds .*\(10\)"):
        upper_bounded_default(upper_bound=10, default=11)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("1.5 mib", 3 << 19), ("500MB", 500_000_000), ("2kB", 2000), ("1TiB", 1 << 40)],
)
def test_sizes_with_units_are_parsed(text: str, size: int) -> None:
    assert PipelineConfig.from_flat({"kv_cache_memory": text}).kv_cache.memory == size
    assert KVCacheConfig(memory=text).memory == size  # type: ignore[arg-type]
    environment = {"PENSTOCK_KV_CACHE_MEMORY": text}
    assert PipelineConfig.from_flat({}, environment=environment).kv_cache.memory == size


def test_every_setting_in_bytes_accepts_units() -> None:
    sizes = {
        "kv_cache_memory",
        "kv_offload_memory",
        "grammar_cache_size",
        "encoder_cache_memory",
        "max_image_bytes",
        "max_body_size",
        "max_file_size",
        "model_memory",
        "response_store_size",
        "worker_memory_limit",
    }
    fields = {field.name: field for field in (*config_fields(), *serve_fields())}
    assert {
        name for name, field in fields.items() if re.search(r"\bbytes\b", field.help, re.IGNORECASE)
    } <= sizes
    assert all(fields[name].convert("3MiB", from_text=True) == 3 << 20 for name in sizes)


@pytest.mark.parametrize("text", ["4", "4 G", "GiB", "-1GiB", "4GiBs", "1,5GiB", "0.0001KiB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory: must be a number of bytes.* such as 4GiB"):
        PipelineConfig.from_flat({"kv_cache_memory": text})


# -- Aliases of settings --------------------------------------------------------------------------------


def test_an_alias_is_accepted_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("gpu_memory_utilization = 0.4")
    for values, environment, expected, source in (
        ({"gpu_memory_utilization": 0.3}, {}, 0.3, "argument"),
        ({"config_file": file}, {}, 0.4, f"file {file}"),
        ({"config_file": file}, {"PENSTOCK_DEVICE_MEMORY_UTILIZATION": "0.5"}, 0.5, None),
        ({}, {"PENSTOCK_GPU_MEMORY_UTILIZATION": "0.6"}, 0.6, "environment PENSTOCK_GPU_MEMORY_UTILIZATION"),
        ({"device_memory_utilization": 0.7}, {"PENSTOCK_GPU_MEMORY_UTILIZATION": "0.6"}, 0.7, "argument"),
    ):
        config = PipelineConfig.from_flat(values, environment=environment)
        assert config.kv_cache.device_memory_utilization == expected
        assert source is None or config.sources["device_memory_utilization"] == source
    names = [name for name, _, _ in config.describe()]
    assert "gpu_memory_utilization" not in names


def test_an_alias_is_refused_with_its_setting_in_one_source_or_with_an_invalid_value(tmp_path: Path) -> None:
    settings = {"device_memory_utilization": 0.5, "gpu_memory_utilization": 0.5}
    with pytest.raises(ConfigError, match="gpu_memory_utilization: is another name of device_memory_util"):
        PipelineConfig.from_flat(settings)
    file = tmp_path / "settings.toml"
    file.write_text("\n".join(f"{name} = {value}" for name, value in settings.items()))
    with pytest.raises(ConfigError, match=r"is another name of device_memory_utilization .from file"):
        PipelineConfig.from_flat({"config_file": file})
    environment = {f"PENSTOCK_{name.upper()}": "0.5" for name in settings}
    with pytest.raises(ConfigError, match=r"is another name of device_memory_utilization .from environment"):
        PipelineConfig.from_flat({}, environment=environment)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilisation: .* did you mean gpu_memory_utilization"):
        PipelineConfig.from_flat({"gpu_memory_utilisation": 0.5})
    with pytest.raises(ConfigError, match="must be a number above 0"):
        PipelineConfig.from_flat({"gpu_memory_utilization": 0.0})
