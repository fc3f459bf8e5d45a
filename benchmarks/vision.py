"""One image and 64 tokens by Penstock and transformers, in turn: time to first token and total time.

    python benchmarks/vision.py --shape smolvlm-256m --tiles 1 --encoding bfloat16

The checkpoint has random weights of the given shape. Both engines get the same pixels and tokens, so the time
of the image processor is not part of the result. A round runs both engines once; the result is the median of
the rounds. The first request of a round has a new image, the second one repeats it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import ImageMetadata, SamplingParams, TextAndVisionContext, image_digest

IMAGE = 49190
SHAPES: dict[str, dict[str, Any]] = {
    "smolvlm-256m": {
        "model_type": "smolvlm",
        "image_token_id": IMAGE,
        "scale_factor": 4,
        "text_config": {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49280,
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
        },
        "vision_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
    },
    "qwen3-vl-2b": {
        "model_type": "qwen3_vl",
        "image_token_id": IMAGE,
        "video_token_id": IMAGE + 1,
        "vision_start_token_id": IMAGE + 2,
        "vision_end_token_id": IMAGE + 3,
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}
"""Configurations of published models."""
SIDE = 32
"""Patches in each direction of a tile, or of the image of a model without tiles."""
Request = tuple[list[int], np.ndarray]
Run = Callable[[Request, int], tuple[float, float]]
"""Runs a request with this many tokens. Returns the seconds to the first token and in all."""


def request_of(config: dict[str, Any], tiles: int, seed: int) -> Request:
    """Return the tokens of a prompt with an image, and the pixels of the image."""
    rng = np.random.default_rng(seed)
    if config["model_type"] == "qwen3_vl":
        pixels = rng.normal(size=(SIDE * SIDE, 6 * 16 * 16)).astype(np.float32)
        count = SIDE * SIDE // 4
    else:
        size = config["vision_config"]["image_size"]
        pixels = rng.normal(size=(tiles, 3, size, size)).astype(np.float32)
        count = tiles * (SIDE // config["scale_factor"]) ** 2
    words = rng.integers(1, 40000, 20).tolist()
    return [*words, *[IMAGE] * count, *words], pixels


def grid_arguments(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arguments of an image besides its pixels."""
    if config["model_type"] == "qwen3_vl":
        return {"image_grid_thw": np.array([1, SIDE, SIDE])}
    return {}


def penstock_engine(folder: Path, config: dict[str, Any], encoding: str) -> Run:
    """Return a function that runs a request with Penstock."""
    settings = {"model_path": str(folder), "quantization_encoding": encoding, "max_length": 4096}
    pipeline_config = PipelineConfig.from_flat(settings)
    record = PIPELINE_REGISTRY.retrieve_architecture(pipeline_config.model.huggingface_config, folder)
    pipeline = TextGenerationPipeline(pipeline_config, record.load_pipeline_model(), -1)
    arguments = grid_arguments(config)

    def run(request: Request, count: int) -> tuple[float, float]:
        tokens, pixels = request
        start = tokens.index(IMAGE)
        length = tokens.count(IMAGE)
        image = ImageMetadata(
            start_idx=start,
            end_idx=start + length,
            pixel_values=pixels,
            image_hash=image_digest(pixels, arguments),
            arguments=arguments,
        )
        context = TextAndVisionContext(
            prompt=tokens,
            max_length=len(tokens) + count,
            tokens=np.array(tokens),
            ignore_eos=True,
            sampling_params=SamplingParams(top_k=1),
            images=[image],
            vision_token_ids=[IMAGE],
        )
        begin, first = time.perf_counter(), 0.0
        while not context.is_done:
            pipeline.execute({"request": context}, 8 if first else 1)
            first = first or time.perf_counter() - begin
        pipeline.release(context)
        return first, time.perf_counter() - begin

    return run


def transformers_engine(folder: Path, config: dict[str, Any], encoding: str) -> Run:
    """Return a function that runs a request with transformers, in bfloat16 unless the encoding is float32."""
    from transformers import AutoModelForImageTextToText

    kind = torch.float32 if encoding == "float32" else torch.bfloat16
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=kind).eval()

    def run(request: Request, count: int) -> tuple[float, float]:
        tokens, pixels = request
        ids = torch.tensor([tokens])
        given: dict[str, Any] = {"pixel_values": torch.from_numpy(pixels).to(kind)}
        if config["model_type"] == "qwen3_vl":
            given["image_grid_thw"] = torch.tensor([[1, SIDE, SIDE]])
            given["mm_token_type_ids"] = (ids == IMAGE).long()
        else:
            given["pixel_values"] = given["pixel_values"][None]
        seconds = []
        for number in dict.fromkeys((1, count)):
            begin = time.perf_counter()
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=number,
                min_new_tokens=number,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **given,
            )
            seconds.append(time.perf_counter() - begin)
        return seconds[0], seconds[-1]

    return run


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Save a model of this shape with random weights in bfloat16."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-256m")
    parser.add_argument("--tiles", type=int, default=1, help="tiles of the image (SmolVLM)")
    parser.add_argument("--encoding", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, config)
        engines = {
            "penstock": penstock_engine(folder, config, options.encoding),
            "transformers": transformers_engine(folder, config, options.encoding),
        }
        figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
        for number in range(options.rounds + 1):
            request = request_of(config, options.tiles, number)
            for engine, run in engines.items():
                first, total = run(request, options.tokens)
                again, _ = run(request, 1) if engine == "penstock" else (first, total)
                if number:  # round 0 warms up
                    figures[engine].append((first, again, total))
    results = {}
    for engine, rounds in figures.items():
        first, again, total = (statistics.median(column) for column in zip(*rounds, strict=True))
        results[engine] = {"first_token_s": first, "repeated_first_token_s": again, "total_s": total}
        print(f"{engine:14} first token {first:.3f} s, same image {again:.3f} s, all tokens {total:.3f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
