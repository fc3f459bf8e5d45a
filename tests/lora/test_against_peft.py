"""Logits with adapters, and the layers that module patterns select, equal those of PEFT."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft.utils.error import NoMatchingPeftModuleError
from safetensors.torch import load_file, save_file
from support.adapters import peft_logits, peft_model, save_adapter, write_adapter
from support.checkpoints import write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits
from support.random_draws import num_examples

from penstock.architectures.llama import tiny_config
from penstock.lora.adapter_config import AdapterConfig
from penstock.weights import Weights

pytestmark = pytest.mark.models

PROMPT = random_tokens(23, 130, seed=3)

ADAPTER_CONFIGS: dict[str, dict[str, Any]] = {
    "all linear layers": {},
    "queries and values": {"target_modules": ["q_proj", "v_proj"]},
    "one slice of the fused gate-up layer": {"target_modules": ["up_proj"]},
    "full name of one layer": {"target_modules": ["model.layers.1.self_attn.o_proj"]},
    "regular expression": {"target_modules": r"model\.layers\.[02]\..*(q|down)_proj"},
    "layers_to_transform": {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [0, 2]},
    "excluded modules": {"exclude_modules": ["o_proj"]},
    "rank and alpha pattern": {
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp.*": 2, "^model.layers.0.mlp.up_proj": 16},
        "alpha_pattern": {"down_proj": 3, "self_attn.q_proj": 20.5},
    },
    "rank-stabilised scaling": {"use_rslora": True, "lora_alpha": 5, "rank_pattern": {"v_proj": 9}},
    "rank 1": {"r": 1},
    "rank 64": {"r": 64, "lora_alpha": 16},
    "output head": {"target_modules": ["lm_head", "q_proj"]},
}


def compute_adapted_logits(checkpoint: Path, adapter: Path, **config: Any) -> torch.Tensor:
    pipeline = open_pipeline(checkpoint, lora=(f"tone={adapter}",), **config)
    return step_logits(pipeline, [make_context(PROMPT, adapter="tone")])[0]


@pytest.mark.parametrize("kernels", ["best", "reference"])
@pytest.mark.parametrize("case", ADAPTER_CONFIGS)
def test_logits_equal_peft(checkpoint: Path, case: str, kernels: str, tmp_path: Path) -> None:
    adapter = write_adapter(checkpoint, tmp_path, **ADAPTER_CONFIGS[case])
    expected = peft_logits(checkpoint, adapter, PROMPT)
    actual = compute_adapted_logits(checkpoint, adapter, kernels=kernels)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)
    plain_logits = step_logits(open_pipeline(checkpoint), [make_context(PROMPT)])[0]
    assert float((actual - plain_logits).abs().max()) > 0.01


def test_an_adapter_on_a_tied_head_does_not_change_the_embedding(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "base", {**tiny_config(), "tie_word_embeddings": True})
    adapter = write_adapter(checkpoint, tmp_path / "adapter", target_modules=["lm_head"])
    expected = peft_logits(checkpoint, adapter, PROMPT)
    torch.testing.assert_close(compute_adapted_logits(checkpoint, adapter), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("is_head_tied", [False, True])
def test_adapters_apply_to_quantized_layers_and_heads(is_head_tied: bool, tmp_path: Path) -> None:
    """PEFT saves an unquantized copy of an adapted head. The adapter is added to the quantized head."""
    checkpoint = write_checkpoint(tmp_path / "base", {**tiny_config(), "tie_word_embeddings": is_head_tied})
    adapter = write_adapter(checkpoint, tmp_path / "adapter", target_modules=["lm_head", "up_proj"])
    plain_logits, quantized_logits = (
        step_logits(open_pipeline(checkpoint, quantization_encoding=encoding), [make_context(PROMPT)])[0]
        for encoding in ("float32", "int8")
    )
    exact_logits = compute_adapted_logits(checkpoint, adapter)
    quantized_adapted_logits = compute_adapted_logits(checkpoint, adapter, quantization_encoding="int8")
    assert float((quantized_logits - plain_logits).norm()) > 0
    assert float((quantized_adapted_logits - exact_logits).norm()) < 0.5 * float(
        (plain_logits - exact_logits).norm()
    )


@pytest.mark.parametrize("stored_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_adapters_stored_in_16_and_64_bit_floats_equal_peft(
    checkpoint: Path, stored_dtype: torch.dtype, tmp_path: Path
) -> None:
    adapter = write_adapter(checkpoint, tmp_path)
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.to(stored_dtype) for name, tensor in load_file(file).items()}, file)
    expected = peft_logits(checkpoint, adapter, PROMPT)
    torch.testing.assert_close(compute_adapted_logits(checkpoint, adapter), expected, atol=1e-4, rtol=1e-5)


def test_tensor_names_with_the_name_of_the_adapter_are_read(checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_adapter(checkpoint, tmp_path)
    expected = compute_adapted_logits(checkpoint, adapter)
    file = adapter / "adapter_model.safetensors"
    save_file(
        {name.replace(".weight", ".default.weight"): tensor for name, tensor in load_file(file).items()}, file
    )
    assert torch.equal(compute_adapted_logits(checkpoint, adapter), expected)


def test_bfloat16_logits_with_an_adapter_are_close_to_float32(checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_adapter(checkpoint, tmp_path)
    exact_logits = compute_adapted_logits(checkpoint, adapter)
    rounded_logits = compute_adapted_logits(checkpoint, adapter, quantization_encoding="bfloat16")
    plain_logits = step_logits(open_pipeline(checkpoint), [make_context(PROMPT)])[0]
    assert float((rounded_logits - exact_logits).abs().mean()) < 0.1 * float(
        (plain_logits - exact_logits).abs().mean()
    )


MODULE_PARTS = ["q_proj", "proj", "self_attn.v_proj", "layers.1.self_attn.q_proj", "lm_head"]
PATTERNS = st.sampled_from(
    [*MODULE_PARTS, "layers.1", r".*layers\.0.*", "^model.layers.2.mlp.up_proj", "q_proj|v_proj", ".*_proj"]
)


@settings(
    max_examples=num_examples(12),
    phases=(Phase.generate,),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    targets=st.one_of(
        st.just("all-linear"),
        st.sampled_from([r".*(q|up)_proj", r"model.layers.0.*_proj|lm_head", "q_proj|model.*v_proj"]),
        st.lists(st.sampled_from([*MODULE_PARTS, "down_proj"]), min_size=1, max_size=3, unique=True),
    ),
    excluded=st.none() | st.just(["lm_head", "v_proj"]) | st.just(r".*layers\.1.*"),
    layers=st.none() | st.sampled_from([0, 1]) | st.lists(st.integers(0, 2), max_size=2, unique=True),
    layers_pattern=st.sampled_from([None, "layers", ["model.layers"], ["layer", "l.*"], "ayers"]),
    ranks=st.dictionaries(PATTERNS, st.integers(1, 9), max_size=3),
    alphas=st.dictionaries(PATTERNS, st.integers(1, 99), max_size=3),
    rslora=st.booleans(),
)
def test_targets_ranks_and_scales_of_modules_equal_those_of_peft(
    checkpoint: Path, tmp_path: Path, **values: Any
) -> None:
    targets, layers = values["targets"], values["layers"]
    is_list = isinstance(targets, list)
    config = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": targets,
        "exclude_modules": values["excluded"],
        "layers_to_transform": layers if is_list else None,
        "layers_pattern": values["layers_pattern"] if is_list and layers not in (None, []) else None,
        "rank_pattern": values["ranks"],
        "alpha_pattern": values["alphas"],
        "use_rslora": values["rslora"],
    }
    expected = {}
    with suppress(NoMatchingPeftModuleError):
        expected = {
            name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
            for name, module in peft_model(checkpoint, **config).named_modules()
            if isinstance(getattr(module, "lora_A", None), torch.nn.ModuleDict)
        }
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    saved_adapter_config = AdapterConfig.read(tmp_path)
    names = Weights.open(checkpoint).names
    linears = [
        name.removesuffix(".weight") for name in names if name.endswith(("_proj.weight", "head.weight"))
    ]
    result = {
        name: (saved_adapter_config.layer_rank(name), saved_adapter_config.layer_scale(name))
        for name in linears
        if saved_adapter_config.targets(name)
    }
    assert result == expected


def test_every_field_that_peft_writes_is_known(checkpoint: Path, tmp_path: Path) -> None:
    """This test must fail if a new version of PEFT adds fields, because each field needs a decision."""
    adapter = save_adapter(peft_model(checkpoint, r=4, target_modules=["q_proj"]), tmp_path)
    assert AdapterConfig.read(adapter).rank == 4
    from penstock.lora import adapter_config

    known_names = {
        *adapter_config._READ_FIELDS,
        *adapter_config._REFUSED_FIELDS,
        *adapter_config._IGNORED_FIELDS,
    }
    assert set(json.loads((adapter / "adapter_config.json").read_text())) <= known_names
