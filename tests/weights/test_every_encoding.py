"""Models whose linear layers are stored in each quantized encoding: adapters and compiled steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import peft_logits, write_adapter
from support.checkpoints import make_tiny_config, write_checkpoint
from support.networks import modules_and_weights
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits
from torch import Tensor

from penstock.bench.stored_encodings import StoredFormat, write_stored
from penstock.kernels import ENCODINGS, PackedLinear, encoding_named
from penstock.kernels.cpu import available_isas
from penstock.weights.formats import FORMATS

TOKENS = random_tokens(20, 120, seed=5)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
QUANTIZED_ENCODINGS = [name for name, encoding in ENCODINGS.items() if not encoding.is_float]


@pytest.fixture(scope="module")
def float_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("floats"), make_tiny_config("llama") | SIZES)


@pytest.fixture(params=QUANTIZED_ENCODINGS)
def checkpoint(request: pytest.FixtureRequest, float_checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """Yield a checkpoint of an encoding. The folder ``plain`` next to it has the same weights as floats."""
    encoding = encoding_named(request.param)
    (tmp_path / "plain").mkdir()
    tensors = {
        name: encoding.unpack(encoding.pack(tensor)).contiguous() if name.endswith("_proj.weight") else tensor
        for name, tensor in load_file(float_checkpoint / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(float_checkpoint / "config.json", tmp_path / "plain" / "config.json")
    with FORMATS.extended(StoredFormat()):
        yield write_stored(float_checkpoint, tmp_path / "model", encoding.name)


def test_adapter_logits_are_close_to_those_of_peft(checkpoint: Path, tmp_path: Path) -> None:
    plain_path = checkpoint.parent / "plain"
    adapter = write_adapter(plain_path, tmp_path / "adapter")
    expected = peft_logits(plain_path, adapter, TOKENS)
    pipeline = open_pipeline(checkpoint, quantization_encoding=None, lora=(f"tone={adapter}",))
    model: Any = pipeline.model
    encoding = json.loads((checkpoint / "config.json").read_text())["quantization_config"]["encoding"]
    layers = [layer for layer in modules_and_weights(model.network) if isinstance(layer, PackedLinear)]
    assert {layer.encoding for layer in layers if layer.slices[0].name.endswith("_proj")} == {encoding}

    def compute_error(adapter: str | None) -> float:
        context = make_context(TOKENS, adapter=adapter)
        logits = step_logits(pipeline, [context])[0].float()
        pipeline.release(context)
        return float((logits - expected).norm() / expected.norm())

    assert compute_error("tone") < 0.09  # activations are rounded to 8 bits
    assert compute_error(None) > 0.2


@pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")
def test_compiled_steps_give_equal_logits(checkpoint: Path) -> None:
    logits: dict[bool, list[Tensor]] = {}
    graph_statuses: dict[bool, str] = {}
    for is_compiled in (False, True):
        pipeline = open_pipeline(checkpoint, quantization_encoding=None, enable_prefix_caching=False)
        pipeline.session.use_graphs = is_compiled
        context, logits[is_compiled] = make_context(TOKENS), []
        for _ in range(6):
            (row,) = step_logits(pipeline, [context])
            logits[is_compiled].append(row)
            append_token(pipeline, context, int(row[-1].argmax()))
        graph_statuses[is_compiled] = pipeline.session.graph_status
    assert graph_statuses[True].startswith("compiled"), graph_statuses
    assert not graph_statuses[False].startswith("compiled")
    assert all(
        torch.equal(eager_logits, compiled_logits)
        for eager_logits, compiled_logits in zip(*logits.values(), strict=True)
    )
