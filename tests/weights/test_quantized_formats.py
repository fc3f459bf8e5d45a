"""Weights, encodings, logits and errors of quantized checkpoints.

`support.packed_checkpoints` writes the checkpoints according to the documents of the formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import packed_checkpoints as packers
from support.checkpoints import load_in_transformers, make_tiny_config, transformers_logits, write_checkpoint
from support.networks import modules_and_weights, weight_bytes
from support.packed_checkpoints import Packer, write_packed_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits

from penstock.config import PipelineConfig
from penstock.errors import ConfigError, WeightsError
from penstock.kernels import PackedLinear
from penstock.weights import Weights
from penstock.weights.checkpoint import open_checkpoint
from penstock.weights.formats._stored import StoredTensors
from penstock.weights.safetensors import TensorHeader

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
TOKENS = random_tokens(24, 120, seed=3)

QuantizedFormat = tuple[Packer | Mapping[str, Packer], dict[str, Any], str | None]
"""The packer, the ``quantization_config``, and the encoding of the loaded weights (None: they are floats)."""


def make_compressed_tensors_config(bits: int = 8, number_type: str = "int", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": number_type, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


MIXED_BITS = make_compressed_tensors_config(4, group_size=32)
MIXED_BITS["config_groups"]["group_1"] = {
    "targets": [r"re:.*down_proj$", "model.layers.0.self_attn.o_proj"],
    "weights": {"num_bits": 8, "type": "int", "group_size": 32},
}

CASES: dict[str, QuantizedFormat] = {
    "fp8-tensor": (packers.fp8(per_tensor=True), {"quant_method": "fp8"}, "fp8"),
    "fp8-channel": (packers.fp8(), {"quant_method": "fbgemm_fp8"}, "fp8"),
    "fp8-block": (
        packers.fp8((128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "fp8",
    ),
    "fp8-small-blocks": (
        packers.fp8((24, 40), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [24, 40]},
        None,
    ),
    "ct-w4-symmetric": (
        packers.compressed_codes(),
        make_compressed_tensors_config(4, group_size=32),
        "uint4",
    ),
    "ct-w4-asymmetric": (
        packers.compressed_codes(symmetric=False),
        make_compressed_tensors_config(4, group_size=32),
        "uint4",
    ),
    "ct-w4-channel": (packers.compressed_codes(size=-1), make_compressed_tensors_config(4), "uint4"),
    "ct-w4-groups-of-16": (
        packers.compressed_codes(size=16),
        make_compressed_tensors_config(4, group_size=16),
        None,
    ),
    "ct-w8-groups": (packers.compressed_codes(8), make_compressed_tensors_config(8, group_size=32), "uint8"),
    "ct-w8a8": (packers.int8_rows, make_compressed_tensors_config(8), "int8"),
    "ct-fp8": (packers.fp8(), make_compressed_tensors_config(8, "float", strategy="channel"), "fp8"),
    "ct-nvfp4": (
        packers.nvfp4("compressed"),
        make_compressed_tensors_config(4, "float", group_size=16),
        "nvfp4",
    ),
    "ct-mxfp4": (packers.mxfp4, make_compressed_tensors_config(4, "float", group_size=32), "mxfp4"),
    "modelopt-fp8": (packers.fp8(per_tensor=True), {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    "modelopt-nvfp4": (
        packers.nvfp4("modelopt"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "nvfp4",
    ),
    "gptq-4": (packers.gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32}, "uint4"),
    "gptq-4-rows": (packers.gptq(size=-1), {"quant_method": "gptq", "bits": 4, "group_size": -1}, "uint4"),
    "gptq-4-v2": (
        packers.gptq(version=2, symmetric=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        "uint4",
    ),
    "gptq-2": (packers.gptq(2), {"quant_method": "gptq", "bits": 2, "group_size": 32}, "uint4"),
    "gptq-3": (packers.gptq(3), {"quant_method": "gptq", "bits": 3, "group_size": 32}, "uint4"),
    "gptq-8": (packers.gptq(8), {"quant_method": "gptq", "bits": 8, "group_size": 32}, "uint8"),
    "gptq-desc-act": (
        packers.gptq(order="inputs"),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        "uint4",
    ),
    "gptq-8-desc-act": (
        packers.gptq(8, version=2, order="layer"),
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 32,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
        "uint8",
    ),
    "gptq-desc-act-groups-of-16": (
        packers.gptq(size=16, order="inputs"),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        None,
    ),
    "ct-w4-actorder": (
        packers.compressed_codes(order="inputs", symmetric=False),
        make_compressed_tensors_config(4, group_size=32, actorder="group"),
        "uint4",
    ),
    "bnb-nf4": (packers.bitsandbytes(), {"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
    "bnb-nested-nf4": (packers.bitsandbytes(nested=True), {"quant_method": "bitsandbytes"}, "nf4"),
    "bnb-fp4": (packers.bitsandbytes("fp4", 256), {"quant_method": "bitsandbytes"}, "fp4"),
    "bnb-small-blocks": (packers.bitsandbytes(block=32), {"quant_method": "bitsandbytes"}, None),
    "bnb-other-table": (
        packers.bitsandbytes(table=torch.linspace(-1, 1, 16)),
        {"quant_method": "bitsandbytes"},
        None,
    ),
    "torchao-int4": (packers.torchao_int4(), {"quant_method": "torchao"}, "q4_z"),
    "torchao-int4-groups-of-16": (packers.torchao_int4(16), {"quant_method": "torchao"}, None),
    "awq-gemm": (packers.awq(), {"quant_method": "awq", "bits": 4, "group_size": 32}, "uint4"),
    "awq-gemv": (
        packers.awq(version="gemv"),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        "uint4",
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def write_family_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    config = make_tiny_config(family)
    return write_checkpoint(folder, config | {key: SIZES[key] for key in SIZES if key in config} | changes)


def compute_logits(checkpoint: Path, **config: Any) -> torch.Tensor:
    pipeline = open_pipeline(checkpoint, **({"quantization_encoding": None} | config))
    return step_logits(pipeline, [make_context(TOKENS, log_probabilities_echo=True)])[0]


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected).norm() / expected.norm())


def can_store(encoding: str | None, shape: tuple[int, ...]) -> bool:
    """Return whether an encoding can store a weight of a shape.

    Blocks of nf4 and fp4 have 64 numbers and must not cross rows.
    """
    return encoding not in ("nf4", "fp4") or shape[1] % 64 == 0


@pytest.mark.parametrize("case", CASES)
def test_weights_of_each_format_equal_the_original_weights(case: str, llama: Path, tmp_path: Path) -> None:
    packer, quantization, encoding = CASES[case]
    folder = write_packed_checkpoint(
        llama, tmp_path, packer, quantization, ignore=("1.mlp.up_proj",), num_shards=2
    )
    weights, num_packed_weights = Weights.open(folder), 0
    for name, expected in load_file(tmp_path / "plain" / "model.safetensors").items():
        shape = tuple(expected.shape)
        is_packed = "_proj" in name and "1.mlp.up_proj" not in name
        num_packed_weights += is_packed
        expected_encoding = encoding if is_packed and can_store(encoding, shape) else None
        assert weights.stored_encoding(name) == expected_encoding
        torch.testing.assert_close(weights.tensor(name, shape).float(), expected, rtol=1e-5, atol=1e-7)
        if is_packed:
            stored_encoding, tensors = weights.read_linear(name, (shape[0], shape[1]))
            assert stored_encoding == expected_encoding
            assert all(len(tensor) == shape[0] for tensor in tensors.values()), (
                "each tensor must have one row per output"
            )
    assert num_packed_weights == 13
    weights.finish()
    assert weights.num_bytes == sum(
        tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values()
    )


@pytest.mark.parametrize(
    "case",
    [
        "fp8-block",
        "fp8-tensor",
        "ct-w4-asymmetric",
        "ct-w8a8",
        "ct-nvfp4",
        "gptq-4",
        "gptq-8",
        "gptq-desc-act",
        "gptq-desc-act-groups-of-16",
        "ct-w4-actorder",
        "awq-gemm",
        "bnb-nested-nf4",
        "bnb-fp4",
        "torchao-int4",
    ],
)
def test_logits_are_close_to_those_of_the_float_weights(
    case: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bound of 0.06 allows for rounding errors. The bound of 1e-4 applies to float32."""
    packer, quantization, encoding = CASES[case]
    folder = write_packed_checkpoint(llama, tmp_path, packer, quantization, ignore=("1.mlp.up_proj",))
    expected = transformers_logits(load_in_transformers(folder / "plain"), TOKENS)
    assert relative_error(compute_logits(folder), expected) < 0.06
    assert relative_error(compute_logits(folder, quantization_encoding="float32"), expected) < 1e-4
    pipeline = open_pipeline(folder, quantization_encoding=None)
    model: Any = pipeline.model
    assert model.pipeline_config.model.encoding == (encoding or "float32")
    linears = {
        layer_slice.name: layer
        for layer in modules_and_weights(model.network)
        if isinstance(layer, PackedLinear)
        for layer_slice in layer.slices
    }
    float_type = "bfloat16" if encoding else "float32"
    assert linears["model.layers.0.self_attn.o_proj"].encoding == (encoding or float_type)
    has_order = linears["model.layers.0.mlp.down_proj"].order is not None
    assert has_order == (encoding is not None and ("desc-act" in case or "actorder" in case))
    assert linears["model.layers.1.mlp.up_proj"].encoding == float_type
    assert ("13 quantized weights are dequantized to float32" in caplog.text) == (encoding is None)
    estimated_bytes = model.estimate_weights_size(model.pipeline_config)
    assert 0.995 * weight_bytes(pipeline) <= estimated_bytes <= 1.5 * weight_bytes(pipeline)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("phi3", "gptq-4"),
        ("qwen3_moe", "fp8-block"),
        ("mixtral", "awq-gemm"),
        ("mixtral", "gptq-desc-act"),
        ("mixtral", "bnb-nf4"),
        ("phi3", "gptq-8-desc-act"),
        ("gemma3_text", "ct-w4-symmetric"),
        ("qwen2", "ct-w8-groups"),
    ],
)
def test_quantized_models_of_families_besides_llama_compute_the_expected_logits(
    family: str, case: str, tmp_path: Path
) -> None:
    """The families have fused layers, experts, tied heads or biases."""
    packer, quantization, _ = CASES[case]
    folder = write_packed_checkpoint(
        write_family_checkpoint(family, tmp_path / "floats"), tmp_path / "packed", packer, quantization
    )
    expected = transformers_logits(load_in_transformers(folder / "plain"), TOKENS)
    bfloat16_error = relative_error(
        compute_logits(folder / "plain", quantization_encoding="bfloat16"), expected
    )
    # Rounding can change the selected experts, so the error of bfloat16 is part of the bound.
    assert relative_error(compute_logits(folder), expected) < 1.5 * bfloat16_error + 0.02
    assert relative_error(compute_logits(folder, quantization_encoding="float32"), expected) < 1e-4


def test_a_fused_layer_with_different_input_orders_is_dequantized(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In layer 0 only v_proj has another input order, so v_proj becomes a separate layer in its encoding."""
    _, quantization, _ = CASES["gptq-desc-act"]
    pack_input_order, pack_layer_order = packers.gptq(order="inputs"), packers.gptq(order="layer")
    packer = {
        "0.self_attn.v_proj": pack_layer_order,
        "1.self_attn.k_proj": pack_layer_order,
        "": pack_input_order,
    }
    folder = write_packed_checkpoint(llama, tmp_path, packer, quantization)
    expected = transformers_logits(load_in_transformers(folder / "plain"), TOKENS)
    assert relative_error(compute_logits(folder), expected) < 0.06
    model: Any = open_pipeline(folder, quantization_encoding=None).model
    linears = {
        layer.slices[0].name: layer
        for layer in modules_and_weights(model.network)
        if isinstance(layer, PackedLinear)
    }
    assert linears["model.layers.0.self_attn.v_proj"].encoding == "uint4"
    assert linears["model.layers.0.self_attn.q_proj"].encoding == "uint4"
    assert linears["model.layers.1.self_attn.q_proj"].encoding == "bfloat16"
    assert "form one layer but are stored with inputs in different orders (desc_act)" in caplog.text


def test_layer_names_and_patterns_precede_layer_types(llama: Path, tmp_path: Path) -> None:
    pack_8_bits = packers.compressed_codes(8)
    packer = {"down_proj": pack_8_bits, "0.self_attn.o_proj": pack_8_bits, "": packers.compressed_codes()}
    weights = Weights.open(write_packed_checkpoint(llama, tmp_path, packer, MIXED_BITS))
    for name, expected in load_file(tmp_path / "plain" / "model.safetensors").items():
        torch.testing.assert_close(weights.tensor(name, tuple(expected.shape)).float(), expected)
    encodings = {
        name: weights.stored_encoding(f"model.layers.0.{name}.weight")
        for name in ("mlp.down_proj", "mlp.up_proj")
    }
    assert encodings == {"mlp.down_proj": "uint8", "mlp.up_proj": "uint4"}
    expected = transformers_logits(load_in_transformers(tmp_path / "plain"), TOKENS)
    assert relative_error(compute_logits(tmp_path), expected) < 0.06


def test_a_fused_layer_with_different_encodings_is_dequantized(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantization = json.loads(json.dumps(MIXED_BITS))
    quantization["config_groups"]["group_1"]["targets"] = ["re:.*k_proj"]
    packer = {"k_proj": packers.compressed_codes(8), "": packers.compressed_codes()}
    folder = write_packed_checkpoint(llama, tmp_path, packer, quantization)
    model: Any = open_pipeline(folder, quantization_encoding=None).model
    linears = [layer for layer in modules_and_weights(model.network) if isinstance(layer, PackedLinear)]
    (fused_encoding,) = {layer.encoding for layer in linears if len(layer.slices) == 3}
    assert fused_encoding == "bfloat16"
    assert (
        "v_proj form one layer but are stored as uint4 and uint8: they are dequantized to bfloat16"
        in caplog.text
    )
    assert (
        relative_error(
            compute_logits(folder), transformers_logits(load_in_transformers(tmp_path / "plain"), TOKENS)
        )
        < 0.06
    )


def test_the_quantization_configuration_is_read_from_a_separate_file(llama: Path, tmp_path: Path) -> None:
    packer, quantization, _ = CASES["gptq-4"]
    for number, (name, content) in enumerate(
        [
            ("quantization_config.json", quantization),
            ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}),
            ("quantize_config.json", {key: quantization[key] for key in ("bits", "group_size")}),
        ]
    ):
        folder = write_packed_checkpoint(llama, tmp_path / str(number), packer, quantization)
        (folder / "config.json").write_text((folder / "plain" / "config.json").read_text())
        (folder / name).write_text(json.dumps(content))
        checkpoint = open_checkpoint(folder)
        if name == "hf_quant_config.json":
            assert checkpoint.format.name == "modelopt"
            continue
        assert checkpoint.format.name == "gptq"
        assert checkpoint.headers["model.layers.0.mlp.up_proj.weight"].encoding == "uint4"


def test_scales_of_activations_and_caches_are_accepted(llama: Path, tmp_path: Path) -> None:
    extra_tensors = {
        f"model.layers.0.self_attn.{name}": torch.ones(1)
        for name in ("k_proj.input_scale", "k_scale", "v_scale")
    }
    folder = write_packed_checkpoint(llama, tmp_path, *CASES["fp8-tensor"][:2], extra=extra_tensors)
    assert compute_logits(folder).isfinite().all()


def test_a_bias_that_the_model_lacks_must_be_zero(llama: Path, tmp_path: Path) -> None:
    for value in (0.0, 0.5):
        extra_tensors = {"model.layers.0.mlp.up_proj.bias": torch.full((96,), value)}
        folder = write_packed_checkpoint(
            llama, tmp_path / str(value), *CASES["gptq-4"][:2], extra=extra_tensors
        )
        if value:
            with pytest.raises(WeightsError, match=r"1 unexpected: model\.layers\.0\.mlp\.up_proj\.bias"):
                compute_logits(folder)
        else:
            assert compute_logits(folder).isfinite().all()


# -- Errors ---------------------------------------------------------------------------------------------

LAYER = "model.layers.0.mlp.up_proj"
# Fault -> (key of CASES, name of the changed tensor, its new value or None to delete it, error message).
FAULTS: dict[str, tuple[str, str, Any, str]] = {
    "no scales": ("gptq-4", "scales", None, "qweight and scales must be matrices"),
    "no zero points": ("gptq-4", "qzeros", None, "qzeros is missing"),
    "too few columns of zero points": ("gptq-4", "qzeros", torch.zeros(2, 3).int(), "gptq needs I32 [2, 12]"),
    "integer scales": ("gptq-4", "scales", torch.zeros(2, 96).long(), "scales is I64 [2, 96] where"),
    "no packed rows": ("gptq-4", "qweight", torch.zeros(0, 96).int(), "qweight and scales must be matrices"),
    "too many groups": ("gptq-4", "scales", torch.zeros(50, 96).half(), "has 50 groups for 64 inputs"),
    "too few group indices": (
        "gptq-4",
        "g_idx",
        torch.zeros(7).int(),
        "bits where 2, 3, 4 or 8 can be read",
    ),
    "too few columns of scales": (
        "awq-gemm",
        "scales",
        torch.zeros(2, 8).half(),
        "awq needs F16 or BF16 or F32 [2, 96]",
    ),
    "vector of packed weights": ("awq-gemm", "qweight", torch.zeros(7).int(), "qweight must be a matrix"),
    "inputs not a multiple of the group size": (
        "awq-gemm",
        "qweight",
        torch.zeros(33, 12).int(),
        "not a multiple of group_size 32",
    ),
    "too few zero points": ("awq-gemv", "qzeros", torch.zeros(96, 0).int(), "for 2 groups"),
    "too many blocks": (
        "fp8-block",
        "weight_scale_inv",
        torch.zeros(3, 3),
        "[3, 3] where [1] or [96, 1] or [1, 1] is needed",
    ),
    "no scale": ("fp8-channel", "weight_scale", None, "weight_scale is missing"),
    "indivisible groups": (
        "ct-w4-symmetric",
        "weight_scale",
        torch.zeros(96, 5),
        "which does not match 64 inputs in groups of 32",
    ),
    "too few packed rows": (
        "ct-w4-symmetric",
        "weight_packed",
        torch.zeros(9, 8).int(),
        "one row for each output",
    ),
    "too few rows of zero points": (
        "ct-w4-asymmetric",
        "weight_zero_point",
        torch.zeros(1, 2).int(),
        "needs I32 [12, 2]",
    ),
    "too few scales of int8": (
        "ct-w8a8",
        "weight_scale",
        torch.zeros(95, 1),
        "is [95, 1] for a weight of [96, 64]",
    ),
    "too few scales of fp4": (
        "ct-nvfp4",
        "weight_scale",
        torch.zeros(96, 3).to(torch.float8_e4m3fn),
        "F8_E4M3 [96, 4]",
    ),
    "no global scale": (
        "ct-nvfp4",
        "weight_global_scale",
        None,
        "one scale per 16 inputs and one global scale",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_inconsistent_tensors_are_refused(fault: str, llama: Path, tmp_path: Path) -> None:
    case, tensor_name, tensor, message = FAULTS[fault]
    folder = write_packed_checkpoint(llama, tmp_path, *CASES[case][:2])
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[f"{LAYER}.{tensor_name}"]
    else:
        tensors[f"{LAYER}.{tensor_name}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=re.escape(message)) as caught:
        Weights.open(folder)
    assert LAYER in str(caught.value)


def test_a_missing_tensor_is_reported_after_another_tensor_of_its_layer_is_taken() -> None:
    header = TensorHeader(Path("model.safetensors"), "I32", (96, 8), 96 * 8 * 4, f"{LAYER}.qweight")
    tensors = StoredTensors({f"{LAYER}.qweight": header}, "awq")
    tensors.take(LAYER, "qweight", ("I32",))
    with pytest.raises(WeightsError, match=f"model.safetensors: {LAYER}.scales is missing"):
        tensors.take(LAYER, "scales", ("F16",))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' cannot be read"),
        ({"quant_method": "awq", "bits": 8}, "AWQ weights of 4 bits can be read"),
        ({"quant_method": "awq", "bits": 4, "version": "exllama"}, "use gemm or gemv"),
        (
            make_compressed_tensors_config(4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "use a dense model",
        ),
        (
            make_compressed_tensors_config(4) | {"transform_config": {"config_groups": {"r1": {}}}},
            "transforms of activations",
        ),
        ({"quant_method": "aqlm"}, "checkpoints of 'aqlm' cannot be read: use one of plain floats, awq"),
    ],
)
def test_unsupported_configurations_are_refused(
    quantization: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    folder = write_packed_checkpoint(llama, tmp_path, packers.gptq(), quantization)
    with pytest.raises(ConfigError, match=message):
        assert PipelineConfig.from_flat({"model_path": str(folder)}).model.tensor_headers


def test_invalid_group_indices_are_refused(llama: Path, tmp_path: Path) -> None:
    packer, quantization, _ = CASES["gptq-desc-act"]
    folder = write_packed_checkpoint(llama, tmp_path, packer, quantization | {"desc_act": False})
    name = f"{LAYER}.weight"
    with pytest.raises(WeightsError, match="g_idx is not sorted, but desc_act is not set"):
        Weights.open(folder).read_linear(name, (96, 64))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.g_idx"][5] = 2
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="g_idx refers to groups that do not exist"):
        Weights.open(folder).tensor(name, (96, 64))
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(WeightsError, match="g_idx refers to groups that do not exist"):
        Weights.open(folder)


def test_a_layer_with_groups_of_different_sizes_is_dequantized(llama: Path, tmp_path: Path) -> None:
    packer, quantization, _ = CASES["gptq-desc-act"]
    folder = write_packed_checkpoint(llama, tmp_path, packer, quantization)
    tensors = load_file(folder / "model.safetensors")
    weights_before = Weights.open(folder).tensor(f"{LAYER}.weight", (96, 64)).clone()
    group_indices = tensors[f"{LAYER}.g_idx"]
    index = int((group_indices == 0).nonzero()[0])
    group_indices[index] = 1
    save_file(tensors, folder / "model.safetensors")
    weights = Weights.open(folder)
    assert weights.stored_encoding(f"{LAYER}.weight") is None
    changed_columns = (weights.tensor(f"{LAYER}.weight", (96, 64)) != weights_before).any(0).nonzero()
    assert changed_columns.flatten().tolist() == [index]
