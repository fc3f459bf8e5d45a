"""Errors name unsupported features, and the tensors and values of malformed adapters."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import peft_model, save_adapter, write_adapter
from support.pipeline_steps import open_pipeline

from penstock.errors import CheckpointError, CheckpointNotFoundError, UnsupportedFeatureError, WeightsError
from penstock.lora import LoRAManager
from penstock.lora.adapter_config import AdapterConfig

Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
DOWN_PROJ = "base_model.model.model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def manager(checkpoint: Path) -> LoRAManager:
    manager = open_pipeline(checkpoint, enable_lora=True, max_lora_rank=8).model.lora_manager
    assert manager is not None
    return manager


@pytest.fixture
def adapter(adapters: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of an adapter on all linear layers that a test may modify."""
    return Path(shutil.copytree(adapters["all"], tmp_path / "adapter"))


@pytest.fixture
def load(manager: LoRAManager, adapter: Path) -> Iterator[Callable[[], None]]:
    yield lambda: manager.load("x", str(adapter))
    assert manager.names() == []


def edit_config(adapter: Path, **fields: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


# -- Unsupported kinds of adapters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.w"]}, "target_parameters"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"alora_invocation_tokens": [5]}, "aLoRA"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"use_bdlora": {"a": 1}}, "use_bdlora"),
        ({"arrow_config": {"a": 1}}, "Arrow"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
        ({"peft_type": "LOHA"}, "adapter type 'LOHA'"),
        ({"peft_type": None}, "adapter type None"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
        ({"use_something_new": 3}, "the field 'use_something_new'"),
    ],
    ids=str,
)
def test_unsupported_features_of_the_configuration_are_named(
    adapter: Path, load: Callable[[], None], fields: dict[str, Any], feature: str
) -> None:
    edit_config(adapter, **fields)
    with pytest.raises(UnsupportedFeatureError) as refusal:
        load()
    assert feature in refusal.value.feature
    assert str(adapter) in str(refusal.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_something_new": None},
        {"use_something_new": False},
        {"init_lora_weights": "gaussian"},
        {"lora_dropout": 0.5},
        {"fan_in_fan_out": True},
        {"task_type": None},
        {"inference_mode": False},
    ],
    ids=str,
)
def test_fields_without_effect_are_accepted(
    manager: LoRAManager, adapter: Path, fields: dict[str, Any]
) -> None:
    edit_config(adapter, **fields)
    manager.load("x", str(adapter))
    manager.unload("x")


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["embed_tokens"]}, "an adapter on an embedding table"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "a retrained lm_head.weight"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "a bias trained with the adapter"),
        (
            {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
            "trained embeddings of some tokens",
        ),
    ],
    ids=str,
)
def test_tensors_of_unsupported_kinds_are_named(
    checkpoint: Path, load: Callable[[], None], adapter: Path, config: dict[str, Any], feature: str
) -> None:
    """The tensors of a feature are refused even if the configuration does not mention the feature."""
    write_adapter(checkpoint, adapter, **config)
    edit_config(adapter, **{key: None for key in config if key != "target_modules"})
    edit_tensors(adapter, lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
    with pytest.raises(UnsupportedFeatureError) as refusal:
        load()
    assert feature in refusal.value.feature


def test_a_retrained_head_is_refused_and_an_unchanged_one_accepted(
    checkpoint: Path, manager: LoRAManager, tmp_path: Path
) -> None:
    model = peft_model(checkpoint, r=2, target_modules=["lm_head"])
    save_adapter(model, tmp_path)
    assert any("base_layer" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    manager.load("x", str(tmp_path))
    manager.unload("x")
    edit_tensors(
        tmp_path, lambda tensors: tensors["base_model.model.lm_head.base_layer.weight"][3, 5].add_(1e-3)
    )
    with pytest.raises(UnsupportedFeatureError, match=r"a retrained lm_head.weight"):
        manager.load("x", str(tmp_path))
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update({"base_model.model.lm_head.base_layer.weight": torch.zeros(131, 48)}),
    )
    with pytest.raises(UnsupportedFeatureError, match=r"a resized lm_head.weight.*\[131, 48\].*\[130, 48\]"):
        manager.load("x", str(tmp_path))


def test_a_rank_above_the_maximum_is_refused(checkpoint: Path, manager: LoRAManager, tmp_path: Path) -> None:
    write_adapter(checkpoint, tmp_path, rank_pattern={"up_proj": 9})
    with pytest.raises(
        UnsupportedFeatureError, match=r"rank 9 .*up_proj, .*the maximum is 8: raise --max-lora-rank"
    ):
        manager.load("x", str(tmp_path))
    edit_config(tmp_path, rank_pattern={"up_proj": 9, "nowhere": 99})
    with pytest.raises(UnsupportedFeatureError, match="rank 9 "):
        manager.load("x", str(tmp_path))


# -- Malformed adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.lora_A.weight"), rf"1 missing: {Q_PROJ}.lora_A.weight$"),
        (lambda t: t.pop(f"{Q_PROJ}.lora_B.weight"), rf"1 missing: {Q_PROJ}.lora_B.weight$"),
        (
            lambda t: [t.pop(f"{Q_PROJ}.lora_{letter}.weight") for letter in "AB"],
            r"2 missing: .*lora_A.*lora_B",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.zeros(5, 47)}),
            rf"1 misshapen: {Q_PROJ}.lora_A.weight is \[5, 47\] where the model needs \[5, 48\]",
        ),
        (
            lambda t: t.update(
                {
                    f"{DOWN_PROJ}.lora_A.weight": torch.zeros(6, 88),
                    f"{DOWN_PROJ}.lora_B.weight": torch.zeros(48, 6),
                }
            ),
            r"2 misshapen: .*\[6, 88\] where the model needs \[5, 88\], .*\[48, 6\] .* needs \[48, 5\]",
        ),
        (
            lambda t: t.update(
                {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(5, 48)}
            ),
            r"up_proj, which is not a linear layer that adapters can change; the nearest is model.*up_proj$",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.lora_A.other.weight": torch.zeros(5, 48)}),
            r"q_proj.lora_A.weight and .*q_proj.lora_A.other.weight are the same matrix",
        ),
        (
            lambda t: t.update({"base_model.model.foo.weight": torch.zeros(1)}),
            "neither part of an adapter nor",
        ),
        (lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.zeros(5, 48).int()}), "not of a float type"),
        (
            lambda t: t[f"{Q_PROJ}.lora_B.weight"][3].fill_(torch.nan),
            "lora_B of .*1.self_attn.q_proj .*NaN or infinite",
        ),
        (
            lambda t: t[f"{Q_PROJ}.lora_A.weight"][3].fill_(torch.inf),
            "lora_A of .*1.self_attn.q_proj .*NaN or infinite",
        ),
        (lambda t: t.clear(), r"42 missing: .* and 34 more"),
    ],
    ids=range(12),
)
def test_malformed_tensors_are_refused_by_name(
    adapter: Path, load: Callable[[], None], change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    edit_tensors(adapter, change)
    with pytest.raises(WeightsError, match=message):
        load()


def test_an_adapter_without_matrices_is_refused(adapter: Path, load: Callable[[], None]) -> None:
    edit_tensors(adapter, lambda tensors: tensors.clear())
    edit_config(adapter, target_modules=["nothing"])
    with pytest.raises(WeightsError, match="has no matrices for any layer"):
        load()


def test_tensors_outside_the_target_modules_are_refused(adapter: Path, load: Callable[[], None]) -> None:
    edit_config(adapter, target_modules=["q_proj"])
    with pytest.raises(WeightsError, match=r"has matrices for .*, which target_modules does not include"):
        load()


def test_missing_files_are_refused_by_name(adapter: Path, manager: LoRAManager) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such folder"):
        manager.load("x", str(adapter / "nowhere"))
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights only \(adapter_model.bin\).*save_pretrained"):
        manager.load("x", str(adapter))
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors"):
        manager.load("x", str(adapter))
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not a LoRA adapter: it has no adapter_config.json"):
        manager.load("x", str(adapter))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r must be a whole number of at least 1, is 0"),
        ({"r": 4.5}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number, is '8'"),
        (
            {"rank_pattern": {"q_proj": -1}},
            "rank_pattern 'q_proj' must be a whole number of at least 1, is -1",
        ),
        ({"rank_pattern": [1]}, r"rank_pattern must be an object, is \[1\]"),
        ({"alpha_pattern": {"(": 1}}, r"'\(' is not a regular expression"),
        ({"target_modules": "("}, r"'\(' is not a regular expression"),
        ({"target_modules": [1]}, r"target_modules must be a string or a list of strings, is \[1\]"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false, is 'yes'"),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": ["0"]},
            "layers_to_transform must be a whole number or a list of them",
        ),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "needs a list of target_modules"),
    ],
    ids=str,
)
def test_malformed_configurations_are_refused(
    adapter: Path, load: Callable[[], None], fields: dict[str, Any], message: str
) -> None:
    edit_config(adapter, **fields)
    with pytest.raises(CheckpointError, match=message):
        load()


def test_another_base_model_gives_a_warning(
    adapter: Path, manager: LoRAManager, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(adapter, base_model_name_or_path="somebody/other-model")
    with caplog.at_level(logging.WARNING):
        manager.load("x", str(adapter))
    manager.unload("x")
    assert "was trained on somebody/other-model" in caplog.text


def test_an_unsupported_adapter_at_start_is_an_error(checkpoint: Path, adapter: Path) -> None:
    edit_config(adapter, use_dora=True)
    with pytest.raises(UnsupportedFeatureError, match="DoRA"):
        open_pipeline(checkpoint, lora=(f"x={adapter}",))


def test_an_adapter_without_target_modules_is_accepted(manager: LoRAManager, adapter: Path) -> None:
    edit_config(adapter, target_modules=None)
    manager.load("x", str(adapter))
    manager.unload("x")
    assert not AdapterConfig.read(adapter).targets("model.layers.0.mlp.up_proj")
