"""Compare the latency of image requests in Penstock, transformers and OpenVINO. The engines alternate.

    python benchmarks/vision.py --shape smolvlm-256m --encoding bfloat16 --json out.json
    python benchmarks/vision.py --shape qwen3-vl-2b --encoding int8 --quick
    python benchmarks/vision.py --shape smolvlm-256m --openvino VENV/bin/python

Prints the time to first token and the total time of a request with one image and 64 new tokens. The
checkpoint has random weights. All engines get the same pixels and tokens, so the times do not include an
image processor. Sampling is greedy and end of sequence is ignored. Figures are medians of the rounds.

In a round, each engine runs two requests. The first request has a new image. The second request has the same
image and another text after it, and generates one token. Penstock finds the image of the second request in
its prefix cache.

``--quick`` runs two rounds with 16 new tokens. After ``--seconds``, no further round starts; at least one
round runs. ``--openvino`` is the Python interpreter of an environment with ``openvino-genai`` and
``optimum-intel``. This interpreter runs ``vision_openvino.py`` in a process that is suspended (SIGSTOP) while
another engine runs.
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
from vision_shapes import GRID_SIZE, IMAGE_TOKEN, SHAPES, Request, is_qwen, random_request, write_checkpoint

from penstock.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import ImageMetadata, SamplingParams, TextAndVisionContext, image_digest

Run = Callable[[Request, int], tuple[float, float]]
"""Runs a request with a number of new tokens.

Returns the seconds to the first token and the total seconds.
"""


def penstock_engine(folder: Path, config: Mapping[str, Any], encoding: str) -> Run:
    """Return a function that runs a request with Penstock."""
    settings = {"model_path": str(folder), "quantization_encoding": encoding, "max_length": 4096}
    pipeline_config = PipelineConfig.from_flat(settings)
    architecture = PIPELINE_REGISTRY.retrieve_architecture(pipeline_config.model.huggingface_config, folder)
    pipeline = TextGenerationPipeline(pipeline_config, architecture.load_pipeline_model(), -1)
    arguments = {"image_grid_thw": np.array([1, GRID_SIZE, GRID_SIZE])} if is_qwen(config) else {}

    def prepare() -> None:
        """Run the preparation that a worker runs while it is idle."""
        while pipeline.prepare_next():
            pass

    def run(request: Request, num_new_tokens: int) -> tuple[float, float]:
        tokens, pixels = request.tokens, request.pixels
        start, length = tokens.index(IMAGE_TOKEN), tokens.count(IMAGE_TOKEN)
        image = ImageMetadata(
            start_idx=start,
            end_idx=start + length,
            pixel_values=pixels,
            image_hash=image_digest(pixels, arguments),
            arguments=arguments,
        )
        context = TextAndVisionContext(
            prompt=tokens,
            max_length=len(tokens) + num_new_tokens,
            tokens=np.array(tokens),
            ignore_eos=True,
            sampling_params=SamplingParams(top_k=1),
            images=[image],
            vision_token_ids=[IMAGE_TOKEN],
        )
        begin, first_token_seconds = time.perf_counter(), 0.0
        while not context.is_done:
            pipeline.execute({"request": context}, 8 if first_token_seconds else 1)
            first_token_seconds = first_token_seconds or time.perf_counter() - begin
        pipeline.release(context)
        total_seconds = time.perf_counter() - begin
        prepare()
        return first_token_seconds, total_seconds

    return run


def transformers_engine(folder: Path, config: Mapping[str, Any], encoding: str) -> Run:
    """Return a function that runs a request with transformers, in bfloat16 unless the encoding is float32."""
    from transformers import AutoModelForImageTextToText

    dtype = torch.float32 if encoding == "float32" else torch.bfloat16
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()

    def run(request: Request, num_new_tokens: int) -> tuple[float, float]:
        ids = torch.tensor([request.tokens])
        image_inputs: dict[str, Any] = {"pixel_values": torch.from_numpy(request.pixels).to(dtype)}
        if is_qwen(config):
            image_inputs["image_grid_thw"] = torch.tensor([[1, GRID_SIZE, GRID_SIZE]])
            image_inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        else:
            image_inputs["pixel_values"] = image_inputs["pixel_values"][None]
        times: list[float] = []

        def record_time(ids: torch.Tensor, _: object) -> torch.Tensor:
            times.append(time.perf_counter() - begin)
            return torch.zeros(len(ids), dtype=torch.bool)

        begin = time.perf_counter()
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[record_time],
            **image_inputs,
        )
        total = time.perf_counter() - begin
        assert output.shape[1] - ids.shape[1] == num_new_tokens == len(times)
        return times[0], total

    return run


@contextmanager
def openvino_engine(python: str, folder: Path, encoding: str) -> Iterator[tuple[str, Run]]:
    """Yield the engine's name and a function that runs a request with OpenVINO in another process."""
    script = Path(__file__).with_name("vision_openvino.py")
    command = [python, str(script), str(folder), encoding, str(torch.get_num_threads())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def receive() -> Any:
            line = answers.readline()
            if not line:
                raise SystemExit(
                    f"{script.name} ended with exit status {process.wait()}; see its output above"
                )
            # The threads of an idle engine must not take CPU time from the other engines.
            os.kill(process.pid, signal.SIGSTOP)
            return json.loads(line)

        def run(request: Request, num_new_tokens: int) -> tuple[float, float]:
            os.kill(process.pid, signal.SIGCONT)
            file = folder / "pixels.npy"
            np.save(file, request.pixels)
            json.dump(
                {"tokens": request.tokens, "pixels": str(file), "num_new_tokens": num_new_tokens}, requests
            )
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
    """Run a warm-up and then the rounds. After the time limit, no further round starts.

    Returns the medians of each engine in seconds, and its number of rounds.
    """
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    deadline = time.monotonic() + options.seconds
    for round_number in range(options.rounds + 1):
        request = random_request(config, options.tiles, round_number)
        second_request = request.with_other_text(round_number)
        for engine, run in engines.items():
            # Two warm-up requests: Penstock captures a graph when the shape of a step occurs the second time.
            if not round_number:
                run(request, 3)
                run(random_request(config, options.tiles, -1 - round_number + 10_000), 3)
                continue
            first_token_seconds, total_seconds = run(request, options.tokens)
            same_image_seconds, _ = run(second_request, 1)
            figures[engine].append((first_token_seconds, same_image_seconds, total_seconds))
            print(
                f"round {round_number}, {engine}: first token {first_token_seconds:.3f} s, "
                f"with the same image {same_image_seconds:.3f} s, all tokens {total_seconds:.3f} s"
            )
        if round_number and time.monotonic() > deadline:
            print(f"stopped after {options.seconds:.0f} s: {round_number} of {options.rounds} rounds")
            break
    results = {}
    for engine, rounds in figures.items():
        first_token_seconds, same_image_seconds, total_seconds = (
            statistics.median(column) for column in zip(*rounds, strict=True)
        )
        results[engine] = {
            "first_token_s": first_token_seconds,
            "repeated_first_token_s": same_image_seconds,
            "total_s": total_seconds,
            "rounds": len(rounds),
        }
    return results


def main() -> None:
    """Measure the engines that the command line selects, and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-256m")
    parser.add_argument("--tiles", type=int, default=1, help="number of image tiles; only for SmolVLM")
    parser.add_argument("--encoding", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two rounds of 16 tokens")
    parser.add_argument("--seconds", type=float, default=600, help="start no further round after this time")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--openvino", metavar="PYTHON", help="Python of an environment with OpenVINO")
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
    for engine, medians in results.items():
        ratio = ours["first_token_s"] / medians["first_token_s"]
        print(
            f"{engine:24} first token {medians['first_token_s']:.3f} s "
            f"(Penstock takes {ratio:.2f} times as long), "
            f"same image {medians['repeated_first_token_s']:.3f} s, all tokens {medians['total_s']:.3f} s"
        )
    ratio = ours["repeated_first_token_s"] / ours["first_token_s"]
    print(f"Penstock: with the same image, the first token takes {ratio:.2f} of the time with a new image")
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "engines": results}, indent=2))


if __name__ == "__main__":
    main()
