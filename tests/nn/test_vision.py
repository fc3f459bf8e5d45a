"""The vision towers of SigLIP and CLIP give the results of transformers."""

from __future__ import annotations

import pytest
import torch
from support.tensor_sources import load_module
from support.vision_towers import assert_close, randomize
from torch.nn.functional import pad

from penstock.config import HuggingFaceConfig
from penstock.driver import CPU
from penstock.engine import InferenceSession
from penstock.kernels import Ops
from penstock.kernels.reference import ReferenceOps
from penstock.nn.vision import VisionSizes, VisionTower, flatten_patches, image_step

DEVICE = torch.device("cpu")
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture(scope="module", params=["reference", "best"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "reference" else InferenceSession([CPU()]).ops


@torch.inference_mode()
def test_siglip_rows_equal_transformers(ops: Ops) -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    model = randomize(SiglipVisionModel(SiglipVisionConfig(**SIZES, vision_use_head=False)))
    sizes = VisionSizes.from_huggingface(
        HuggingFaceConfig(SIZES), activation="gelu_pytorch_tanh", norm_eps=1e-6
    )
    tower = VisionTower.load(load_module(model, "tower", ops), "tower", sizes)
    pixels = torch.randn(2, 3, 32, 32)
    step = image_step(ops, [16, 16], DEVICE)
    rows = tower(flatten_patches(pixels, 8), step.positions, step)
    assert_close(rows.view(2, 16, 48), model(pixels).last_hidden_state)


@pytest.mark.parametrize("num_blocks", [3, 2])
@torch.inference_mode()
def test_clip_rows_equal_transformers(ops: Ops, num_blocks: int) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = randomize(CLIPVisionModel(CLIPVisionConfig(**SIZES)))
    sizes = VisionSizes.from_huggingface(HuggingFaceConfig(SIZES), activation="quick_gelu", norm_eps=1e-5)
    tower = VisionTower.load(
        load_module(model, "tower", ops),
        "tower",
        sizes,
        is_clip=True,
        num_blocks=num_blocks,
        has_post_norm=False,
    )
    pixels = torch.randn(2, 3, 32, 32)
    step = image_step(ops, [17, 17], DEVICE)
    patches = pad(flatten_patches(pixels, 8).view(2, 16, -1), (0, 0, 1, 0)).flatten(0, 1)
    reference_output = model(pixels, output_hidden_states=True).hidden_states[num_blocks]
    assert_close(tower(patches, step.positions, step).view(2, 17, 48), reference_output)
