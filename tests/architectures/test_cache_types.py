"""KV caches in bfloat16 and 8-bit types: accuracy, stored scales, and shared, copied and discarded blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens, step_logits
from torch import Tensor

from penstock.architectures.cache_types import fixed_scales
from penstock.architectures.llama import tiny_config
from penstock.distributed import Shard
from penstock.dtype import DType
from penstock.errors import WeightsError
from penstock.pipelines import TextGenerationPipeline

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
PROMPT = random_tokens(60, 130)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config() | SIZES)


def write_checkpoint_with_scales(
    checkpoint: Path, folder: Path, tensors: dict[str, Tensor], scheme: object = SCHEME, layers: int = 2
) -> Path:
    """Write a copy of the checkpoint with a ``kv_cache_scheme`` and scales in the first ``layers`` layers."""
    folder.mkdir(exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer_scales = {
        f"model.layers.{layer}.self_attn.{name}": tensor.clone()
        for layer in range(layers)
        for name, tensor in tensors.items()
    }
    save_file(load_file(checkpoint / "model.safetensors") | layer_scales, folder / "model.safetensors")
    return folder


def open_with_kv_cache(
    checkpoint: Path, kv_type: str | None = "fp8", **config: Any
) -> TextGenerationPipeline:
    options = {
        "kernels": "reference",
        "kv_cache_block_size": 16,
        "max_length": 128,
        "kv_cache_memory": 80_000,
    }
    return open_pipeline(checkpoint, kv_cache_dtype=kv_type, **(options | config))


def compute_logits(pipeline: TextGenerationPipeline) -> Tensor:
    return step_logits(pipeline, [make_context(PROMPT)])[0]


def mean_absolute_difference(logits: Tensor, reference: Tensor) -> float:
    """Return the mean absolute difference of the log probabilities."""
    return float((logits.log_softmax(-1) - reference.log_softmax(-1)).abs().mean())


def test_logits_of_bfloat16_int8_and_fp8_caches_are_close_to_float32(checkpoint: Path) -> None:
    float32_logits = compute_logits(open_with_kv_cache(checkpoint, "float32"))
    errors = {
        kv_type: mean_absolute_difference(
            compute_logits(open_with_kv_cache(checkpoint, kv_type)), float32_logits
        )
        for kv_type in ("bfloat16", "int8", "fp8")
    }
    # fp8 has a mantissa of 3 bits and bfloat16 one of 7 bits, so fp8 rounds 2**4 times as coarsely.
    assert 0 < errors["bfloat16"] < errors["fp8"] < 16 * errors["bfloat16"]
    assert 0 < errors["int8"] < errors["fp8"] < 0.2  # The bound is large because the weights are random.


def test_scales_are_computed_for_each_row_unless_the_checkpoint_stores_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    row_scales_pipeline = open_with_kv_cache(checkpoint)
    fixed_scales_pipeline = open_with_kv_cache(
        write_checkpoint_with_scales(
            checkpoint, tmp_path, {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
        )
    )
    (row_scales_group,), (fixed_scales_group,) = (
        pipeline.model.kv_cache_spec.groups for pipeline in (row_scales_pipeline, fixed_scales_pipeline)
    )
    assert row_scales_group.dtype is fixed_scales_group.dtype is DType.float8_e4m3fn
    assert row_scales_group.bytes_per_block(16) == 2 * 2 * 2 * 16 * (16 + 4)
    assert fixed_scales_group.bytes_per_block(16) == 2 * 2 * 2 * 16 * 16
    assert fixed_scales_pipeline.memory_plan.num_blocks[0] > row_scales_pipeline.memory_plan.num_blocks[0]
    assert row_scales_pipeline.kv.storage.scales[0].is_contiguous()
    assert fixed_scales_pipeline.kv.storage.scales[0].untyped_storage().nbytes() == 2 * 2 * 4


SCALE_NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "early": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.mark.parametrize("names", SCALE_NAMES.values(), ids=SCALE_NAMES)
def test_scales_stored_in_the_checkpoint_are_used(
    checkpoint: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    float32_logits = compute_logits(open_with_kv_cache(checkpoint, "float32"))
    for scales, is_close in (((0.02, 0.03), True), ((0.0001, 0.03), False), ((0.02, 0.0001), False)):
        tensors = {name: torch.tensor(value) for name, value in zip(names, scales, strict=True)}
        pipeline = open_with_kv_cache(write_checkpoint_with_scales(checkpoint, tmp_path, tensors))
        assert pipeline.kv.storage.scales[1][:, 0, 1, 3].tolist() == pytest.approx(scales)
        error = mean_absolute_difference(compute_logits(pipeline), float32_logits)
        # A scale that is too small clips the values.
        assert 0 < error < 0.2 if is_close else error > 0.4, (
            scales,
            error,
        )


def test_scales_for_each_kv_head_are_sharded_with_the_heads(checkpoint: Path, tmp_path: Path) -> None:
    tensors = {
        "k_scale": torch.tensor([0.02, 0.03]).view(2, 1, 1),
        "v_scale": torch.tensor([0.01]).bfloat16(),
    }
    pipeline = open_with_kv_cache(
        write_checkpoint_with_scales(checkpoint, tmp_path, tensors, {**SCHEME, "strategy": "attn_head"})
    )
    scales = pipeline.kv.storage.scales[0]
    assert scales[0, 5, :, 7].tolist() == pytest.approx([0.02, 0.03])
    assert scales[1, 0, :, 0].tolist() == pytest.approx([0.01, 0.01], rel=0.01)
    config = pipeline.model.pipeline_config
    spec = type(pipeline.model).kv_spec(config, config.model.huggingface_config)
    assert spec is not None
    for rank, world_size, expected in ((0, 2, [0.02]), (1, 2, [0.03]), (3, 4, [0.03]), (1, 4, [0.02])):
        result = fixed_scales(config, spec, Shard(rank, world_size))
        assert result is not None
        assert result[1][0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "scheme", [{**SCHEME, "type": "int"}, {**SCHEME, "num_bits": 4}, {**SCHEME, "dynamic": True}], ids=str
)
def test_scales_of_an_unsupported_scheme_are_ignored(
    checkpoint: Path, tmp_path: Path, scheme: object
) -> None:
    tensors = {"k_scale": torch.tensor(1e-5), "v_scale": torch.tensor(1e-5)}
    pipeline = open_with_kv_cache(write_checkpoint_with_scales(checkpoint, tmp_path, tensors, scheme))
    assert pipeline.model.kv_cache_spec is not None
    assert not pipeline.model.kv_cache_spec.groups[0].has_fixed_scales


def test_incomplete_scales_are_ignored_with_a_warning(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both_scales = {"k_scale": torch.tensor(0.1), "v_scale": torch.tensor(0.1)}
    for number, (tensors, layers) in enumerate(((both_scales, 1), ({"k_scale": torch.tensor(0.1)}, 2))):
        pipeline = open_with_kv_cache(
            write_checkpoint_with_scales(checkpoint, tmp_path / str(number), tensors, layers=layers)
        )
        assert pipeline.model.kv_cache_spec is not None
        assert not pipeline.model.kv_cache_spec.groups[0].has_fixed_scales
    assert "layers [0, 1] lack the key or the value scale" in caplog.text


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.zeros(1), "k_scale is 0.0: a scale must be positive"),
        (torch.tensor(torch.nan), "k_scale is nan"),
        (
            torch.ones(3),
            r"is F32 \[3\]: the scale of a KV cache has one float, or one for each of 2 kv heads",
        ),
        (torch.ones(1).int(), r"is I32 \[1\]"),
    ],
)
def test_invalid_scales_are_refused(checkpoint: Path, tmp_path: Path, scale: Tensor, message: str) -> None:
    folder = write_checkpoint_with_scales(checkpoint, tmp_path, {"k_scale": scale, "v_scale": torch.ones(1)})
    with pytest.raises(WeightsError, match=message):
        open_with_kv_cache(folder)
    compute_logits(open_with_kv_cache(folder, "int8"))  # an int8 cache does not read the scales


@pytest.mark.parametrize("has_fixed_scales", [False, True])
def test_tokens_do_not_depend_on_the_batch_or_the_prefix_cache(
    checkpoint: Path, tmp_path: Path, has_fixed_scales: bool
) -> None:
    """The test also checks that copying and discarding blocks includes row scales but not fixed scales."""
    if has_fixed_scales:
        scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor(0.02)}
        checkpoint = write_checkpoint_with_scales(checkpoint, tmp_path, scales)
    prompts = [PROMPT, PROMPT[:40], [*PROMPT[:33], 7], [3, 4]]
    single_pipeline = open_with_kv_cache(checkpoint, deterministic=True, enable_prefix_caching=False)
    expected = [generate_tokens(single_pipeline, [make_context(prompt, 12)])[0] for prompt in prompts]
    pipeline = open_with_kv_cache(checkpoint, deterministic=True)
    for _ in range(2):  # the second run reads the prefix cache
        assert generate_tokens(pipeline, [make_context(prompt, 12) for prompt in prompts]) == expected
    storage = pipeline.kv.storage
    storage.caches[0].view(torch.uint8)[:, 3] = 7
    scales_before = [None if has_fixed_scales else scale.clone() for scale in storage.scales]
    storage.copy_block(0, 3, 4)
    assert (storage.caches[0][:, 4].view(torch.uint8) == 7).all()
    assert has_fixed_scales or torch.equal(storage.scales[0][:, 4], scales_before[0][:, 3])
    assert len(storage.block_tensors(0)) == (1 if has_fixed_scales else 2)
    storage.discard()
    assert not storage.caches[0].view(torch.uint8).any()
    assert bool(storage.scales[0].any()) == has_fixed_scales


def test_the_cpu_kernels_fall_back_to_the_reference_and_log_the_fallback_at_most_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.kernels import cpu

    if not cpu.available_isas():
        pytest.skip("the C++ kernels are not built")
    pipeline = open_with_kv_cache(checkpoint, kernels="best")
    expected = generate_tokens(open_with_kv_cache(checkpoint), [make_context(PROMPT, 5)])
    assert generate_tokens(pipeline, [make_context(PROMPT, 5)]) == expected
    assert caplog.text.count("attention runs on the reference kernels") <= 1
    assert pipeline.session.graph_status == "eager: store_kv has no kernel for its arguments"
