"""Run mixed requests against `penstock serve` for minutes, and print its memory.

    python benchmarks/server_memory.py --minutes 8                  # on the CPU
    python benchmarks/server_memory.py --minutes 8 --devices gpu    # on a GPU; also prints the GPU memory

Twenty clients send chat and text completions to the demo model: streamed and whole, greedy and sampled,
with several choices, stop strings, penalties, log probabilities, tools, new and repeated JSON schemas, and
five LoRA adapters for two slots. Clients abandon up to a fifth of the requests before the end. The KV
cache is small, so that requests are preempted. A line per interval has the seconds, the anonymous resident
MiB of server and worker, the MiB in use on the GPU, and the number of requests. The last line is JSON. The
exit status is 1 if a request failed or did not end, a block was not released, the worker was replaced, or the
memory of server or worker grew by more than 5 % in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

import penstock

NUM_CLIENTS, NUM_ADAPTERS, NUM_LORA_SLOTS, LORA_RANK = 20, 5, 2, 8
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ACTIVITY_METRICS = ("requests_in_progress", "requests_running", "requests_waiting", "kv_blocks_used")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--interval", type=float, default=60, help="seconds between two lines")
    parser.add_argument("--devices", default="cpu")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        return asyncio.run(measure(arguments, folder))


async def measure(arguments: argparse.Namespace, folder: Path) -> int:
    """Start the server, run the clients and print the memory. Returns the exit status."""
    flags = [
        "--devices",
        arguments.devices,
        "--max-length",
        "700",
        "--max-queue-size",
        "40",
        "--max-batch-size",
        "16",
    ]
    flags += [
        "--kv-cache-memory",
        str(6 << 20),
        "--max-loras",
        str(NUM_LORA_SLOTS),
        "--max-lora-rank",
        str(LORA_RANK),
    ]
    flags += ["--grammar-cache-size", str(8 << 20)]  # small, so that grammars are evicted within a minute
    for number in range(NUM_ADAPTERS):
        flags += ["--lora", f"a{number}={write_adapter(folder / f'a{number}', number)}"]
    command = [sys.executable, "-m", "penstock", "serve", "--model", "demo", "--port", "0", *flags]
    log = folder / "log"
    with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            url = await wait_for_url(process, log)
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                return await run_load(client, process.pid, arguments)
        finally:
            process.kill()
            if "Traceback" in (text := log.read_text()):
                print(text[text.index("Traceback") :][:4000], file=sys.stderr)


async def run_load(client: httpx.AsyncClient, server_pid: int, arguments: argparse.Namespace) -> int:
    """Run the clients for some minutes and print the memory at each interval. Returns the exit status."""
    worker = find_worker(server_pid)
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes
    outcomes: Counter[str] = Counter()
    rows: list[tuple[int, int, int, int, int]] = []

    async def run_client(client_index: int) -> None:
        rng = Random(client_index)
        while time.monotonic() < end:
            outcomes[await send(client, rng)] += 1

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(max(min(arguments.interval, end - time.monotonic()), 0.1))
            seconds = round(time.monotonic() - begin)
            rows.append(
                (
                    seconds,
                    anonymous_mib(server_pid),
                    anonymous_mib(worker),
                    gpu_mib_in_use(),
                    outcomes.total(),
                )
            )
            print("seconds, server, worker, GPU, requests:", *rows[-1], flush=True)

    await asyncio.gather(watch(), *map(run_client, range(NUM_CLIENTS)))
    final_activity = await wait_until_idle(client, 60)
    middle_row = rows[len(rows) // 2]
    growth = {
        "server_mib": rows[-1][1] - middle_row[1],
        "worker_mib": rows[-1][2] - middle_row[2],
        "gpu_mib": rows[-1][3] - middle_row[3],
    }
    memory_is_stable = all(rows[-1][i] <= 1.05 * middle_row[i] for i in (1, 2))
    failed = {name: count for name, count in outcomes.items() if name.startswith("failed")}
    passed = (
        memory_is_stable
        and not failed
        and not any(final_activity.values())
        and find_worker(server_pid) == worker
    )
    report = {
        "rows": rows,
        "growth_in_second_half": growth,
        "outcomes": dict(outcomes),
        "remaining": final_activity,
        "passed": passed,
    }
    print(json.dumps(report))
    return 0 if passed else 1


async def send(client: httpx.AsyncClient, rng: Random) -> str:
    """Send a random request and return its outcome, such as ``streamed`` or ``failed: 500``."""
    path, body = random_request(rng)
    max_lines = rng.choice([0, 3, 12]) if rng.random() < 0.2 else None
    try:
        async with client.stream("POST", path, json=body) as response:
            lines = []
            async for line in response.aiter_lines():
                lines += [line] if line else []
                if max_lines is not None and len(lines) >= max_lines and response.status_code == 200:
                    return "abandoned"
    except httpx.HTTPError as error:
        return f"failed: {type(error).__name__}"
    if response.status_code == 429:
        return "refused"
    if response.status_code != 200:
        return f"failed: {response.status_code} {' '.join(lines)[:150]}"
    if body["stream"]:
        return "streamed" if lines[-1] == "data: [DONE]" else f"failed: {lines[-1][:150]}"
    count = len(json.loads("".join(lines))["choices"])
    return "complete" if count == body.get("n", 1) else f"failed: {count} choices"


def random_request(rng: Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a random request."""
    text = " ".join(
        rng.choices(["river", "stone", "Once", "upon", "a", "time", "7"], k=rng.choice([1, 5, 60, 200]))
    )
    body: dict[str, Any] = {
        "model": rng.choice(["demo", "demo", *(f"a{number}" for number in range(NUM_ADAPTERS))]),
        "max_tokens": rng.choice([1, 5, 40, 120, 300]),
        "temperature": rng.choice([0, 1]),
        "stream": rng.random() < 0.6,
        "ignore_eos": rng.random() < 0.5,
    }
    for chance, extra_fields in (
        (0.15, {"n": 3}),
        (0.1, {"stop": ["e", "th"]}),
        (0.1, {"presence_penalty": 1, "seed": 5}),
        (0.05, {"logit_bias": {"5": 3}}),
        (0.1, {"top_p": 0.8, "top_k": 40}),
    ):
        if rng.random() < chance:
            body |= extra_fields
    if rng.random() < 0.2:
        body["ignore_eos"] = False
        schema = rng.choice(SCHEMAS)
        if rng.random() < 0.5:  # a schema that the server has not compiled yet
            schema = {"type": "object", "properties": {f"k{rng.randrange(10**6)}": {"type": "integer"}}}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    elif rng.random() < 0.2:
        body["tools"] = [TOOL]
    if rng.random() < 0.5 and "tools" not in body:
        return "/v1/completions", body | {"prompt": text} | ({"logprobs": 2} if rng.random() < 0.15 else {})
    extra_fields = {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.15 else {}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]} | extra_fields


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a PEFT adapter of small random matrices for the query and value projections of the demo model."""
    torch.manual_seed(seed)
    config = json.loads((Path(penstock.__file__).parent / "demo" / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": dim * config["num_attention_heads"], "v_proj": dim * config["num_key_value_heads"]}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = 0.01 * torch.randn(LORA_RANK, hidden)
            tensors[f"{path}.lora_B.weight"] = 0.01 * torch.randn(size, LORA_RANK)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "target_modules": list(outputs)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


async def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server is ready and return its URL.

    Raises:
        RuntimeError: the server ended, or is not ready after five minutes.
    """
    deadline = time.monotonic() + 300
    while (match := re.search(r"serving \S+ at (http://\S+) ", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the server did not become ready")
        await asyncio.sleep(0.1)
    return match[1]


async def wait_until_idle(client: httpx.AsyncClient, seconds: float) -> dict[str, float]:
    """Wait at most ``seconds`` until all `ACTIVITY_METRICS` are 0. Returns their last values by name."""
    deadline = time.monotonic() + seconds
    while True:
        text = (await client.get("/metrics")).text
        values = {
            name: float(re.findall(rf"^penstock_{name}(?:{{.*}})? (\S+)$", text, re.M)[0])
            for name in ACTIVITY_METRICS
        }
        if not any(values.values()) or time.monotonic() > deadline:
            return values
        await asyncio.sleep(0.2)


def find_worker(server_pid: int) -> int:
    """Return the process id of the server's worker; 0 if there is none."""
    for child in Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split():
        if "penstock.worker" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    return 0


def anonymous_mib(pid: int) -> int:
    """Return the anonymous resident MiB of a process; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) >> 10


def gpu_mib_in_use() -> int:
    """Return the MiB in use on the first GPU by all processes; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


if __name__ == "__main__":
    sys.exit(main())
