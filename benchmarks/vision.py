"""One image and 64 tokens by Penstock, transformers and OpenVINO in turn: time to first token, total time.

    python benchmarks/vision.py --shape smolvlm-256m --encoding bfloat16 --json out.json
    python benchmarks/vision.py --shape qwen3-vl-2b --encoding int8 --quick
    python benchmarks/vision.py --shape smolvlm-256m --openvino VENV/bin/python

The checkpoint has random weights of the given shape. All engines get the same pixels and tokens, so the time
of the image processor is not part of the result. A round runs each engine once; the result is the median of
the rounds. The first request of a round has a new image. The second request has the same image and another
question; Penstock then has the image in its prefix cache. Sampling is greedy and the end is ignored.

``--quick`` runs two rounds of 16 tokens. ``--seconds`` ends after the round in which the time is over.
``--openvino`` names the Python of an environment with ``openvino-genai`` and ``optimum-intel``; it runs
``vision_openvino.py`` as a process that is stopped while another engine runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vision_shapes import IMAGE, SHAPES, SIDE, Request, is_qwen, request_of, write_checkpoint

from penstock.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import ImageMetadata, SamplingParams, TextAndVisionContext, image_digest

Run = Callable[[Request, int], tuple[float, float]]
"""Runs a request with this number of new tokens. Returns the seconds to the first token and in total."""


def penstock_engine(folder: Path, config: Mapping[str, Any], encoding: str) -> Run:
    """Return a function that runs a request with Penstock."""
    settings = {"model_path": str(folder), "quantization_encoding": encoding, "max_length": 4096}
    pipeline_config = PipelineConfig.from_flat(settings)
    record = PIPELINE_REGISTRY.retrieve_architecture(pipeline_config.model.huggingface_config, folder)
    pipeline = TextGenerationPipeline(pipeline_config, record.load_pipeline_model(), -1)
    arguments = {"image_grid_thw": np.array([1, SIDE, SIDE])} if is_qwen(config) else {}

    def run(request: Request, count: int) -> tuple[float, float]:
        tokens, pixels = request.tokens, request.pixels
        start, length = tokens.index(IMAGE), tokens.count(IMAGE)
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


def transformers_engine(folder: Path, config: Mapping[str, Any], encoding: str) -> Run:
    """Return a function that runs a request with transformers, in bfloat16 unless the encoding is float32."""
    from transformers import AutoModelForImageTextToText

    kind = torch.float32 if encoding == "float32" else torch.bfloat16
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=kind).eval()

    def run(request: Request, count: int) -> tuple[float, float]:
        ids = torch.tensor([request.tokens])
        given: dict[str, Any] = {"pixel_values": torch.from_numpy(request.pixels).to(kind)}
        if is_qwen(config):
            given["image_grid_thw"] = torch.tensor([[1, SIDE, SIDE]])
            given["mm_token_type_ids"] = (ids == IMAGE).long()
        else:
            given["pixel_values"] = given["pixel_values"][None]
        times: list[float] = []

        def note_time(ids: torch.Tensor, _: object) -> torch.Tensor:
            times.append(time.perf_counter() - begin)
            return torch.zeros(len(ids), dtype=torch.bool)

        begin = time.perf_counter()
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note_time],
            **given,
        )
        total = time.perf_counter() - begin
        assert found.shape[1] - ids.shape[1] == count == len(times)
        return times[0], total

    return run


@contextmanager
def openvino_engine(python: str, folder: Path, encoding: str) -> Iterator[tuple[str, Run]]:
    """Yield the name of the pipeline and a function that runs a request with OpenVINO in another process."""
    script = Path(__file__).with_name("vision_openvino.py")
    command = [python, str(script), str(folder), encoding, str(torch.get_num_threads())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def receive() -> Any:
            line = answers.readline()
            if not line:
                raise SystemExit(f"{script.name} ended with code {process.wait()}; its output has the reason")
            os.kill(process.pid, signal.SIGSTOP)  # its threads must not take time from the other engines
            return json.loads(line)

        def run(request: Request, count: int) -> tuple[float, float]:
            os.kill(process.pid, signal.SIGCONT)
            file = folder / "pixels.npy"
            np.save(file, request.pixels)
            json.dump({"tokens": request.tokens, "pixels": str(file), "count": count}, requests)
            requests.write("\n")
            requests.flush()
            answer = receive()
            return answer["first"], answer["total"]

        try:
            yield receive()["name"], run
        finally:
            process.kill()


def measure(
    engines: Mapping[str, Run], config: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Run all rounds. Return the medians of each engine."""
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    ends = time.monotonic() + options.seconds
    for number in range(options.rounds + 1):
        request = request_of(config, options.tiles, number)
        other = request.with_other_words(number)
        for engine, run in engines.items():
            if not number:  # warms up; twice, because the second step of a shape is captured
                run(request, 3)
                run(request_of(config, options.tiles, -1 - number + 10_000), 3)
                continue
            first, total = run(request, options.tokens)
            again, _ = run(other, 1)
            figures[engine].append((first, again, total))
            print(f"round {number}, {engine}: first {first:.3f} s, again {again:.3f} s, all {total:.3f} s")
        if number and time.monotonic() > ends:
            print(f"{options.seconds:.0f} s are over: {number} of {options.rounds} rounds")
            break
    results = {}
    for engine, rounds in figures.items():
        first, again, total = (statistics.median(column) for column in zip(*rounds, strict=True))
        results[engine] = {
            "first_token_s": first,
            "repeated_first_token_s": again,
            "total_s": total,
            "rounds": len(rounds),
        }
    return results


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
    parser.add_argument("--quick", action="store_true", help="two rounds of 16 tokens")
    parser.add_argument("--seconds", type=float, default=600, help="begin no round after this time")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--openvino", metavar="PYTHON", help="the Python of an environment with OpenVINO")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint in this folder for the next run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = 16, 2
    config = SHAPES[options.shape]
    with ExitStack() as stack:
        parent = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = parent / options.shape
        write_checkpoint(folder, config)
        engines = {"penstock": penstock_engine(folder, config, options.encoding)}
        if not options.no_transformers:
            engines["transformers"] = transformers_engine(folder, config, options.encoding)
        if options.openvino:
            name, run = stack.enter_context(openvino_engine(options.openvino, folder, options.encoding))
            engines[name] = run
        results = measure(engines, config, options)
    ours = results["penstock"]
    for engine, one in results.items():
        ratio = ours["first_token_s"] / one["first_token_s"]
        print(
            f"{engine:24} first token {one['first_token_s']:.3f} s (Penstock: {ratio:.2f} of it), "
            f"same image {one['repeated_first_token_s']:.3f} s, all tokens {one['total_s']:.3f} s"
        )
    again = ours["repeated_first_token_s"] / ours["first_token_s"]
    print(f"Penstock: the second request with an image takes {again:.2f} of the first")
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "engines": results}, indent=2))


if __name__ == "__main__":
    main()
