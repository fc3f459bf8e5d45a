"""The vision encoders of Qwen2.5-VL and Qwen3-VL give the results of transformers.

Unsupported configurations of Qwen3-VL are refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_sources import load_module
from support.vision_towers import assert_close, randomize

from penstock.architectures.qwen2_5_vl.vision import Qwen25Vision
from penstock.architectures.qwen3_vl.vision import Qwen3Vision
from penstock.config import HuggingFaceConfig
from penstock.driver import CPU
from penstock.engine import InferenceSession
from penstock.errors import ConfigError
from penstock.kernels import Ops
from penstock.kernels.reference import ReferenceOps
from penstock.nn.vision import EncoderRunner

GRIDS = [(4, 6), (10, 14), (2, 2), (8, 8)]
QWEN = {
    "depth": 4,
    "hidden_size": 48,
    "out_hidden_size": 40,
    "intermediate_size": 56,
    "num_heads": 3,
    "patch_size": 4,
}


@pytest.fixture(scope="module", params=["reference", "best"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "reference" else InferenceSession([CPU()]).ops


@pytest.mark.parametrize(("window", "full_attention_layers"), [(32, [1]), (16, [0, 3]), (1000, [2])])
@torch.inference_mode()
def test_qwen2_5_rows_equal_transformers(ops: Ops, window: int, full_attention_layers: list[int]) -> None:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    values = QWEN | {"window_size": window, "fullatt_block_indexes": full_attention_layers}
    model = randomize(Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**values)))
    tower = Qwen25Vision.load(load_module(model, "tower", ops), "tower", HuggingFaceConfig(values), 40)
    patches = torch.randn(sum(height * width for height, width in GRIDS), 3 * 2 * 4 * 4)
    reference_output = model(patches, torch.tensor([(1, *grid) for grid in GRIDS])).pooler_output
    assert_close(tower.encode(patches, GRIDS, EncoderRunner(ops)), reference_output)


@pytest.mark.parametrize("deepstack_layers", [[2, 0], [1], []])
@torch.inference_mode()
def test_qwen3_deepstack_rows_equal_transformers(ops: Ops, deepstack_layers: list[int]) -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    values = QWEN | {"num_position_embeddings": 49, "deepstack_visual_indexes": deepstack_layers}
    model = randomize(Qwen3VLVisionModel(Qwen3VLVisionConfig(**values)))
    tower = Qwen3Vision.load(load_module(model, "tower", ops), "tower", HuggingFaceConfig(values), 40)
    patches = torch.randn(sum(height * width for height, width in GRIDS), 3 * 2 * 4 * 4)
    reference_output = model(patches, torch.tensor([(1, *grid) for grid in GRIDS]))
    expected = [reference_output.pooler_output, *reference_output.deepstack_features]
    rows = tower.encode(patches, GRIDS, EncoderRunner(ops)).split(40, dim=1)
    assert len(rows) == len(expected)
    for actual, reference in zip(rows, expected, strict=True):
        assert_close(actual, reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_hidden_size": 39}, "out_hidden_size.*39.*40"),
        ({"num_heads": 5}, "5 heads do not divide hidden_size 48"),
        ({"num_heads": 8}, "multiple of 4, was 6"),
        ({"num_position_embeddings": 50}, "must be a square, was 50"),
        ({"deepstack_visual_indexes": [4]}, "from 0 to 3, were 4"),
        ({"deepstack_visual_indexes": [1, 1]}, "different blocks"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "must be axial or default, was 'yarn'"),
    ],
    ids=str,
)
def test_unsupported_qwen3_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    values = QWEN | {"num_position_embeddings": 49, "deepstack_visual_indexes": [1]}
    source = load_module(Qwen3VLVisionModel(Qwen3VLVisionConfig(**values)), "tower", ReferenceOps())
    with pytest.raises(ConfigError, match=message):
        Qwen3Vision.load(source, "tower", HuggingFaceConfig(values | changes), 40)
