"""Measure a model with random weights on a GPU: decode, prefill, many and mixed requests, cold start.

    python benchmarks/gpu.py decode --shape 0.6b        # batch 1, compared with the bandwidth limit
    python benchmarks/gpu.py prefill --shape 8b         # FLOP/s, divided by the FLOP/s of a large product
    python benchmarks/gpu.py load --shape 0.6b          # 256 requests: 512 prompt tokens, 128 new tokens
    python benchmarks/gpu.py load --shape 0.6b --no-overlap    # load without overlapped steps
    python benchmarks/gpu.py start --shape 0.6b         # seconds to the first token, with graph capture
    python benchmarks/gpu.py start decode load          # three workloads on one loaded model
    python benchmarks/gpu.py decode --encoding int4 --cache fp8    # int4 weights and an fp8 KV cache
    python benchmarks/gpu.py mixed --shape 0.6b --minutes 8    # growth of memory under mixed requests
    python benchmarks/gpu.py transformers --shape 0.6b  # transformers' ms per token at batch 1, to compare

Each workload prints one line of JSON. The workload mixed also prints one line per minute. A decode step must
read the weights of all layers and of the LM head, and the cached keys and values. The bandwidth limit is the
time to read these bytes at the copy bandwidth, which the script measures in the same run. Prefill is compared
with the FLOP/s of a product of two 8192 x 8192 matrices in bf16, also measured in the same run. If the
workload and the shape have a target, `target` is the figure to reach, and `reached` is whether the run
reached it. With --folder, the weights are written to this folder once, and later runs reuse them.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import penstock
from penstock import LLM, SamplingParams
from penstock.kernels import encoding_named
from penstock.kv_cache import KVCacheSpec

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
"""Sizes of Qwen3-0.6B (0.6b), Llama-3.2-1B (1b), Llama-3.1-8B (8b), and of a model for trial runs (tiny)."""


def main() -> None:
    """Run the workloads of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", nargs="+", choices=[*sorted(WORKLOADS), "mixed", "transformers"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--devices", default="gpu")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=8, help="duration of the workload mixed")
    parser.add_argument("--no-overlap", action="store_true", help="disable overlapped steps")
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs that the model is divided among")
    parser.add_argument("--encoding", default="bfloat16")
    parser.add_argument("--cache", help="data type of the KV cache")
    parser.add_argument(
        "--folder", type=Path, help="folder that keeps the weights for further runs of the same shape"
    )
    arguments = parser.parse_args()
    if "transformers" in arguments.work and len(arguments.work) > 1:
        parser.error("transformers must be the only workload: two loaded models would share the GPU memory")
    with TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model.safetensors").is_file():
            write_checkpoint(folder, SHAPES[arguments.shape])
        run = transformers_decode if arguments.work == ["transformers"] else run_workloads
        run(str(folder), arguments)


def print_report(arguments: argparse.Namespace, work: str, report: dict[str, Any]) -> None:
    """Print a report as one line of JSON.

    Adds the target of `TARGETS` if weights and KV cache are bfloat16 and steps are overlapped.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    header = {
        "work": work,
        "shape": arguments.shape,
        "encoding": arguments.encoding,
        "cache": arguments.cache,
    }
    name, target, is_minimum = TARGETS.get((work, arguments.shape), ("", 0.0, True))
    if name and arguments.encoding == "bfloat16" and arguments.cache is None and not arguments.no_overlap:
        is_reached = report[name] >= target if is_minimum else report[name] <= target
        report = {"target": {name: target}, "reached": is_reached} | report
    print(json.dumps(header | {"device": device, "torch": torch.__version__} | report), flush=True)


def run_workloads(folder: str, arguments: argparse.Namespace) -> None:
    """Load the model, run the workloads and print a report of each."""
    begin = time.perf_counter()
    with LLM(
        folder,
        max_batch_size=arguments.requests,
        devices=rank_devices(arguments),
        tensor_parallel_size=arguments.ranks,
        max_length=2048,
        quantization_encoding=arguments.encoding,
        kv_cache_dtype=arguments.cache,
        overlap_steps=not arguments.no_overlap,
    ) as llm:
        workloads = {**WORKLOADS, "mixed": partial(measure_mixed, arguments.minutes)}
        for name in arguments.work:
            report = workloads[name](llm, SHAPES[arguments.shape], arguments.requests, begin)
            state = {
                "kernels": llm.pipeline.session.kernels,
                "graph_status": llm.pipeline.session.graph_status,
                "overlap": llm.pipeline.overlapped_steps is not None,
                "memory_plan": dict(llm.pipeline.memory_plan.rows()),
            }
            print_report(arguments, name, report | state)


def rank_devices(arguments: argparse.Namespace) -> str:
    """Return the devices of all ranks."""
    if arguments.ranks == 1 or arguments.devices != "gpu":
        return str(arguments.devices)
    return "gpu:" + ",".join(map(str, range(arguments.ranks)))


def measure_decode(llm: LLM, shape: dict[str, int], _requests: int, _begin: float) -> dict[str, Any]:
    """Decode at batch 1.

    Returns the ms per token, the ms per token at the bandwidth limit (``limit_ms``), and ``limit_ms`` divided
    by the ms per token (``share``).
    """
    prompt, count = prompts(shape, 1, 128)[0], 256
    generate(llm, [prompt], 16)  # captures the graph
    one_token_seconds = min(measure_seconds(lambda: generate(llm, [prompt], 1)) for _ in range(5))
    seconds = (
        min(measure_seconds(lambda: generate(llm, [prompt], 1 + count)) for _ in range(5)) - one_token_seconds
    ) / count
    limit = bytes_per_step(llm, shape, 128 + count // 2) / copy_bandwidth()
    return {"ms_per_token": 1e3 * seconds, "limit_ms": 1e3 * limit, "share": limit / seconds}


def measure_prefill(llm: LLM, shape: dict[str, int], _requests: int, _begin: float) -> dict[str, Any]:
    """Run 4 prompts of 2000 tokens.

    Returns tokens/s, TFLOP/s, the TFLOP/s of a large product (``rate``), and TFLOP/s divided by ``rate``
    (``share``).
    """
    warm_up_prompt = prompts(shape, 1, 2000)
    generate(llm, warm_up_prompt, 1)
    rounds = [prompts(shape, 4, 2000, seed) for seed in (1, 2, 3)]  # new prompts: no hit in the prefix cache
    seconds = min(measure_seconds(partial(generate, llm, batch, 1)) for batch in rounds)
    flops = 2 * num_weights(shape) * 4 * 2000
    rate = product_rate()
    return {"tokens_per_s": 8000 / seconds, "tflops": flops / seconds / 1e12, "rate": rate / 1e12,
            "share": flops / seconds / rate}  # fmt: skip


def measure_load(llm: LLM, shape: dict[str, int], num_requests: int, _begin: float) -> dict[str, Any]:
    """Run many requests at once, with 512 input and 128 output tokens each. Returns output tokens/s."""
    for seed in (1, 2, 3):  # warm-up: compiles kernels and captures graphs of all batch sizes
        generate(llm, prompts(shape, num_requests, 512, seed), 128)
    seconds = min(
        measure_seconds(partial(generate, llm, prompts(shape, num_requests, 512, seed), 128))
        for seed in (4, 5)
    )
    return {"requests": num_requests, "output_tokens_per_s": num_requests * 128 / seconds}


def measure_start(llm: LLM, shape: dict[str, int], _requests: int, begin: float) -> dict[str, Any]:
    """Return the seconds from the start of loading to three moments.

    ``ready_s``: the model is loaded. ``first_token_s``: the first request has its token. ``with_graph_s``: a
    second request has 8 tokens, and the CUDA graph of decode steps is captured.
    """
    ready_seconds = time.perf_counter() - begin
    generate(llm, prompts(shape, 1, 64), 1)
    first_token_seconds = time.perf_counter() - begin
    generate(llm, prompts(shape, 1, 64, 1), 8)
    return {
        "ready_s": ready_seconds,
        "first_token_s": first_token_seconds,
        "with_graph_s": time.perf_counter() - begin,
    }


def measure_mixed(
    minutes: float, llm: LLM, shape: dict[str, int], num_requests: int, _begin: float
) -> dict[str, Any]:
    """Run rounds of mixed requests and return how much memory grew after the first quarter of the rounds.

    A round has prompts of several lengths with and without a shared prefix, greedy and sampled, penalties and
    stop strings, in some rounds log probabilities or 2 choices, and a stream closed early. A row of
    `each_minute` has the minute, the MiB of this process, the MiB that torch reserves on the device, the MiB
    in use on the device by all processes, and the number of graphs.
    """
    begin = time.perf_counter()
    random, end = Random(0), begin + 60 * minutes
    shared = prompts(shape, 1, 700)[0]
    memory: list[tuple[int, int]] = []
    each_minute: list[list[float]] = []
    num_tokens = 0
    while time.perf_counter() < end or len(memory) < 4:
        batch, params = [], []
        for _ in range(min(num_requests, 96)):
            tokens = [
                random.randrange(shape["vocab_size"]) for _ in range(random.choice([1, 7, 60, 400, 1200]))
            ]
            batch.append([*shared[: random.choice([0, 0, 33, 700])], *tokens])
            params.append(
                SamplingParams(
                    max_new_tokens=random.choice([1, 5, 40, 128]),
                    temperature=random.choice([0.0, 1.0]),
                    top_k=random.choice([-1, 40]),
                    seed=random.randrange(100),
                    frequency_penalty=random.choice([0.0, 0.0, 0.7]),
                    stop=random.choice([None, ["e"], ["the", " a"]]),
                )
            )
        options = {"logprobs": 2} if len(memory) % 4 == 1 else {"n": 2} if len(memory) % 4 == 2 else {}
        outputs = llm.generate(batch, params, use_tqdm=False, **options)
        num_tokens += sum(output.num_generated_tokens for output in outputs)
        stream = llm.stream(batch[0], SamplingParams(max_new_tokens=64, ignore_eos=True))
        next(iter(stream), None)
        stream.close()
        assert llm.pipeline.kv.num_free_blocks == llm.pipeline.kv.num_blocks, "blocks were not released"
        memory.append((host_bytes(), reserved_bytes()))
        elapsed_minutes = (time.perf_counter() - begin) / 60
        if elapsed_minutes >= len(each_minute) + 1 or time.perf_counter() >= end:
            graphs = llm.pipeline.session.graphs
            row = [round(elapsed_minutes, 2), *(size >> 20 for size in (*memory[-1], used_bytes()))]
            each_minute.append([*row, 0 if graphs is None else graphs.num_graphs])
            print("minute, host, reserved, used, graphs:", *each_minute[-1], flush=True)
    memory_at_quarter, memory_at_end = memory[len(memory) // 4], memory[-1]
    return {
        "rounds": len(memory),
        "tokens": num_tokens,
        "host_growth_mib": (memory_at_end[0] - memory_at_quarter[0]) / 2**20,
        "device_growth_mib": (memory_at_end[1] - memory_at_quarter[1]) / 2**20,
        "each_minute": each_minute,
    }


def reserved_bytes() -> int:
    """Return the bytes that torch reserves on the device."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def used_bytes() -> int:
    """Return the bytes of device memory that all processes use."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def host_bytes() -> int:
    """Return the resident set size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def transformers_decode(folder: str, arguments: argparse.Namespace) -> None:
    """Decode at batch 1 with transformers and print the milliseconds per token."""
    import transformers

    shape, device = SHAPES[arguments.shape], "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    prompt, count = torch.tensor(prompts(shape, 1, 128), device=device), 64

    def run(num_new_tokens: int) -> None:
        options = {"max_new_tokens": num_new_tokens, "min_new_tokens": num_new_tokens, "do_sample": False}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options)

    run(8)
    one_token_seconds = min(measure_seconds(lambda: run(1)) for _ in range(3))
    seconds = (min(measure_seconds(lambda: run(1 + count)) for _ in range(3)) - one_token_seconds) / count
    report = {"ms_per_token": 1e3 * seconds, "transformers": transformers.__version__}
    print_report(arguments, "transformers", report)


WORKLOADS: dict[str, Callable[[LLM, dict[str, int], int, float], dict[str, Any]]] = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "load": measure_load,
    "start": measure_start,
}


TARGETS = {
    ("decode", "0.6b"): ("share", 0.45, True),
    ("decode", "1b"): ("share", 0.6, True),
    ("decode", "8b"): ("share", 0.8, True),
    ("prefill", "8b"): ("share", 0.6, True),
    ("load", "0.6b"): ("output_tokens_per_s", 12000, True),
    ("start", "0.6b"): ("with_graph_s", 15, False),
}
"""(workload, shape) -> (name of a figure, its target on an H100 or H200, whether the target is a minimum)."""


def generate(llm: LLM, prompts_of_batch: list[list[int]], num_new_tokens: int) -> None:
    """Generate exactly ``num_new_tokens`` tokens for each prompt."""
    outputs = llm.generate(
        prompts_of_batch, SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True, temperature=0)
    )
    assert all(len(output.token_ids) == num_new_tokens for output in outputs)


def prompts(shape: dict[str, int], num_prompts: int, prompt_length: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, which share no prefix."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[list[int]] = torch.randint(
        0, shape["vocab_size"], (num_prompts, prompt_length), generator=generator
    ).tolist()
    return tokens


def bytes_per_step(llm: LLM, shape: dict[str, int], context_length: int) -> float:
    """Return the bytes that a decode step reads: weights, LM head, and ``context_length`` cached tokens."""
    head_size = (shape["vocab_size"], shape["hidden_size"])
    encoding = encoding_named(llm.config.model.encoding)
    head_bytes = encoding_named(encoding.for_layer("head", *head_size)).num_bytes(*head_size)
    spec = llm.pipeline.model.kv_cache_spec
    assert isinstance(spec, KVCacheSpec)
    cache_bytes = sum(spec.bytes_per_block(1)) * context_length
    return num_weights(shape) * encoding.bits_per_weight / 8 + head_bytes + cache_bytes


def num_weights(shape: dict[str, int]) -> int:
    """Return the number of weights in all layers, without the embedding table and the LM head."""
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = shape["hidden_size"] * shape["head_dim"] * (2 * heads + 2 * kv_heads)
    return shape["num_hidden_layers"] * (attention + 3 * shape["hidden_size"] * shape["intermediate_size"])


def write_checkpoint(folder: Path, shape: dict[str, int]) -> None:
    """Write a Llama checkpoint with random bfloat16 weights, and the demo model's tokenizer if it exists."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (file := Path(penstock.__file__).parent / "demo" / name).is_file():
            shutil.copy(file, folder / name)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
              "rope_theta": 500000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
              "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", **shape}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    hidden, dim, device = (
        shape["hidden_size"],
        shape["head_dim"],
        "cuda" if torch.cuda.is_available() else "cpu",
    )

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, dtype=torch.bfloat16, device=device) / size[-1] ** 0.5).cpu()

    tensors = {"model.embed_tokens.weight": random(shape["vocab_size"], hidden),
               "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}  # fmt: skip
    sizes = {
        "self_attn.q_proj": (shape["num_attention_heads"] * dim, hidden),
        "self_attn.k_proj": (shape["num_key_value_heads"] * dim, hidden),
        "self_attn.v_proj": (shape["num_key_value_heads"] * dim, hidden),
        "self_attn.o_proj": (hidden, shape["num_attention_heads"] * dim),
        "mlp.gate_proj": (shape["intermediate_size"], hidden),
        "mlp.up_proj": (shape["intermediate_size"], hidden),
        "mlp.down_proj": (hidden, shape["intermediate_size"]),
    }
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in sizes.items():
            tensors[f"{prefix}.{name}.weight"] = random(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def measure_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a call, including the time until the GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of copying 1 GiB on the GPU (64 MiB on a CPU)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.empty((1 << 30) if device == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / min(measure_seconds(lambda: target.copy_(source)) for _ in range(10))


def product_rate() -> float:
    """Return the FLOP/s of a bfloat16 product of two 8192 x 8192 matrices (512 x 512 on a CPU)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 512
    x = torch.randn(size, size, device=device).bfloat16()
    x @ x
    return 2 * size**3 / min(measure_seconds(lambda: x @ x) for _ in range(10))


if __name__ == "__main__":
    main()
