"""OpenVINO as an engine of ``vision.py``. Runs in a separate virtual environment.

    python vision_openvino.py CHECKPOINT ENCODING THREADS

Exports the checkpoint with ``optimum-cli`` if needed. When the model is loaded, writes the name of the engine
to standard output. Then reads requests from standard input, one JSON object per line, and writes the times of
each request.

The model class of optimum-intel accepts pixels and tokens, so all engines get the same inputs.
(`openvino_genai.VLMPipeline` accepts only text and images.)

The SmolVLM export of optimum-intel 2.2 needs transformers 4.57.6 or older.
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

WEIGHT_FORMATS = {"bfloat16": "fp16", "float32": "fp32", "int8": "int8", "int4": "int4"}


def transformers_4_checkpoint(folder: Path) -> Path:
    """Return a folder with the same weights and a config.json for transformers 4.

    transformers 4 reads the rotary parameters from other keys than transformers 5.
    """
    checkpoint_folder = folder / "transformers-4"
    checkpoint_folder.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    text_config = config["text_config"]
    rope = text_config.get("rope_parameters", {})
    text_config["rope_theta"] = rope.get("rope_theta", 10000.0)
    if "mrope_section" in rope:
        text_config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    (checkpoint_folder / "config.json").write_text(json.dumps(config))
    weights = checkpoint_folder / "model.safetensors"
    if not weights.exists():
        weights.symlink_to(folder / "model.safetensors")
    return checkpoint_folder


def exported_model(folder: Path, encoding: str) -> Path:
    """Return the folder of the exported model. Exports the model if the folder does not exist."""
    model_folder = folder / f"openvino-{encoding}"
    if not model_folder.exists():
        partial_folder = folder / f"openvino-{encoding}.part"
        source = transformers_4_checkpoint(folder)
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", source]
        command += [
            "--task",
            "image-text-to-text",
            "--weight-format",
            WEIGHT_FORMATS[encoding],
            partial_folder,
        ]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
        partial_folder.rename(model_folder)
    return model_folder


def main() -> None:
    """Answer the requests of standard input until it ends."""
    folder, encoding, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the replies
    from optimum.intel.openvino import OVModelForVisualCausalLM

    config = json.loads((folder / "config.json").read_text())
    settings = {"INFERENCE_NUM_THREADS": str(threads), "PERFORMANCE_HINT": "LATENCY"}
    model: Any = OVModelForVisualCausalLM.from_pretrained(
        exported_model(folder, encoding), ov_config=settings
    )

    def reply(**fields: object) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    reply(name="openvino")
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["tokens"]])
        image_inputs: dict[str, Any] = {"pixel_values": torch.from_numpy(np.load(request["pixels"]))}
        if config["model_type"] == "qwen3_vl":
            side = round(len(image_inputs["pixel_values"]) ** 0.5)
            image_inputs["image_grid_thw"] = torch.tensor([[1, side, side]])
            image_inputs["mm_token_type_ids"] = (ids == config["image_token_id"]).long()
        else:
            image_inputs["pixel_values"] = image_inputs["pixel_values"][None]
        times: list[float] = []

        def record_time(ids: torch.Tensor, _: object, times: list[float] = times) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        begin = time.perf_counter()
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["num_new_tokens"],
            min_new_tokens=request["num_new_tokens"],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[record_time],
            **image_inputs,
        )
        reply(first=times[0] - begin, total=time.perf_counter() - begin)


if __name__ == "__main__":
    main()
