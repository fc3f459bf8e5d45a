"""Several LoRA adapters of one model in one batch.

An adapter is a directory in the format of PEFT. This script writes two adapters with random weights for the
demo model. The example only shows how adapters are used. The text that these adapters generate makes no
sense.

    python examples/lora.py                 # writes adapters/tone and adapters/accent
    penstock serve --lora tone=adapters/tone --enable-lora
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams

RANK = 4
NUM_LAYERS, HIDDEN_SIZE = 5, 256  # of the demo model, whose query projection is square


def write_adapter(folder: Path, *, seed: int, scale: float = 0.1) -> Path:
    """Write a PEFT directory with an adapter of the query projections, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for matrix, shape in (("lora_A", (RANK, HIDDEN_SIZE)), ("lora_B", (HIDDEN_SIZE, RANK))):
            tensors[f"{name}.{matrix}.weight"] = (scale * random.standard_normal(shape)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def main() -> None:
    """Write two adapters, and complete a prompt without adapter and with each adapter in one batch."""
    parser = argparse.ArgumentParser(description="Write two LoRA adapters and generate with them.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("adapters"), help="folder for the adapters"
    )
    folder = parser.parse_args().folder
    paths = {name: write_adapter(folder / name, seed=seed) for seed, name in enumerate(("tone", "accent"))}
    adapters: list[str | None] = [None, *paths]
    with LLM("demo", lora=[f"{name}={path}" for name, path in paths.items()]) as llm:
        outputs = llm.generate(
            ["Once upon a time"] * len(adapters),
            SamplingParams(max_new_tokens=25),
            adapter=adapters,
        )
    for adapter, output in zip(adapters, outputs, strict=True):
        print(f"{adapter or 'no adapter'}: {output.text!r}")
    print(f"adapters: {', '.join(map(str, paths.values()))}")


if __name__ == "__main__":
    main()
