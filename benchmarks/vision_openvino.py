"""OpenVINO as an engine of ``vision.py``; runs in a separate virtual environment.

    python vision_openvino.py CHECKPOINT ENCODING THREADS

Exports the checkpoint by ``optimum-cli`` if needed. Reads requests from standard input, one JSON object a
line, and writes the times of each to standard output. The pipeline of optimum-intel takes the same pixels and
tokens as the other engines. (`openvino_genai.VLMPipeline` takes text and images only.)

optimum-intel 2.2 exports SmolVLM with transformers up to 4.57.6.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

FORMATS = {"bfloat16": "fp16", "float32": "fp32", "int8": "int8", "int4": "int4"}


def with_older_keys(folder: Path) -> Path:
    """Return a folder with the same weights and the rotary parameters under the names of transformers 4."""
    target = folder / "transformers-4"
    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    rope = text.get("rope_parameters", {})
    text["rope_theta"] = rope.get("rope_theta", 10000.0)
    if "mrope_section" in rope:
        text["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    (target / "config.json").write_text(json.dumps(config))
    weights = target / "model.safetensors"
    if not weights.exists():
        weights.symlink_to(folder / "model.safetensors")
    return target


def exported(folder: Path, encoding: str) -> Path:
    """Return the folder of the exported model. Exports it if it does not exist."""
    target = folder / f"openvino-{encoding}"
    if not target.exists():
        part = folder / f"openvino-{encoding}.part"
        source = with_older_keys(folder)
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", source]
        command += ["--task", "image-text-to-text", "--weight-format", FORMATS[encoding], part]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
        part.rename(target)
    return target


def main() -> None:
    """Answer requests until standard input ends."""
    folder, encoding, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    from optimum.intel.openvino import OVModelForVisualCausalLM

    config = json.loads((folder / "config.json").read_text())
    settings = {"INFERENCE_NUM_THREADS": str(threads), "PERFORMANCE_HINT": "LATENCY"}
    model: Any = OVModelForVisualCausalLM.from_pretrained(exported(folder, encoding), ov_config=settings)

    def reply(**fields: object) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    reply(name="openvino")
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["tokens"]])
        given: dict[str, Any] = {"pixel_values": torch.from_numpy(np.load(request["pixels"]))}
        if config["model_type"] == "qwen3_vl":
            side = round(len(given["pixel_values"]) ** 0.5)
            given["image_grid_thw"] = torch.tensor([[1, side, side]])
            given["mm_token_type_ids"] = (ids == config["image_token_id"]).long()
        else:
            given["pixel_values"] = given["pixel_values"][None]
        times: list[float] = []

        def note_time(ids: torch.Tensor, _: object, times: list[float] = times) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        begin = time.perf_counter()
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["count"],
            min_new_tokens=request["count"],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note_time],
            **given,
        )
        reply(first=times[0] - begin, total=time.perf_counter() - begin)


if __name__ == "__main__":
    main()
