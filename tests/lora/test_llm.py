"""`LLM` with ``lora`` and ``adapter``: several prompts with several adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_llm import write_tiny_llm

from penstock import LLM, SamplingParams
from penstock.errors import UnknownModelError, UnsupportedFeatureError

GREEDY = SamplingParams(temperature=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model and of two adapters of its query and up projections."""
    root = tmp_path_factory.mktemp("llm")
    write_tiny_llm(root / "base")
    for seed, name in enumerate(("loud", "quiet")):
        generator = torch.Generator().manual_seed(seed)
        (root / name).mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]}
        (root / name / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for layer in range(2):
            for module, size in (("self_attn.q_proj", 32), ("mlp.up_proj", 48)):
                key = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(4, 32, generator=generator)
                tensors[f"{key}.lora_B.weight"] = torch.randn(size, 4, generator=generator)
        save_file(tensors, root / name / "adapter_model.safetensors")
    return root


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    lora = (f"loud={folder / 'loud'}", f"quiet={folder / 'quiet'}")
    with LLM(str(folder / "base"), lora=lora, max_loras=1, deterministic=True) as llm:
        yield llm


def test_each_prompt_gets_the_text_of_its_own_adapter(llm: LLM, folder: Path) -> None:
    """There are two adapters and one slot, so requests with different adapters run one after the other."""
    names = ["loud", None, "quiet", "loud"]
    batch_texts = [output.text for output in llm.generate(["Hello there"] * 4, GREEDY, adapter=names)]
    single_texts = [llm.generate("Hello there", GREEDY, adapter=name)[0].text for name in names]
    assert batch_texts == single_texts
    assert batch_texts[0] == batch_texts[3]
    assert len(set(batch_texts)) == 3
    with LLM(str(folder / "base"), deterministic=True) as plain_llm:
        assert plain_llm.generate("Hello there", GREEDY)[0].text == batch_texts[1]


def test_an_unknown_adapter_is_refused(llm: LLM) -> None:
    with pytest.raises(UnknownModelError, match=r"'loader' is not served here; served are: .*loud, quiet"):
        llm.generate("Hello there", GREEDY, adapter="loader")


def test_adapters_are_refused_if_not_enabled(folder: Path) -> None:
    with (
        LLM(str(folder / "base")) as plain_llm,
        pytest.raises(UnsupportedFeatureError, match="no LoRA adapters are enabled"),
    ):
        plain_llm.generate("Hello there", GREEDY, adapter="loud")
