"""`penstock.ray.generate`, `embed` and `penstock batch run --ray` on a local Ray cluster."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.ray_programs import ROOT, ray_program, wait_until

from penstock import LLM, SamplingParams

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
    pytest.mark.timeout(300),
]

NUM_PROMPTS = 160
PROMPTS = [f"There were {number} cats" for number in range(NUM_PROMPTS)]
GENERATE_SCRIPT = """
import ray.data
import penstock.ray
from penstock import SamplingParams

ray.init(address="local", num_cpus=3, include_dashboard=False)

dataset = ray.data.read_{format}("{path}")
params = SamplingParams(max_new_tokens=600, temperature=0, ignore_eos=True)
outputs = penstock.ray.generate(
    dataset, "demo", sampling_params=params, concurrency=2, batch_size=16, num_cpus=1, kv_cache_memory="64MiB"
)
outputs.write_parquet("answers")
print("all written")
"""
EMBED_SCRIPT = """
import ray.data
import penstock.ray

ray.init(address="local", num_cpus=3, include_dashboard=False)
dataset = ray.data.read_json("{path}", lines=True)
penstock.ray.embed(dataset, "{model}", batch_size=4, num_cpus=1, normalize=True).write_json("vectors")
"""


def generate_expected_texts(prompts: list[str], num_tokens: int) -> dict[str, str]:
    with LLM("demo", kv_cache_memory="64MiB") as llm:
        params = SamplingParams(max_new_tokens=num_tokens, temperature=0, ignore_eos=True)
        return {
            prompt: output.text
            for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True)
        }


def read_parquet_rows(folder: Path) -> list[dict[str, Any]]:
    from pyarrow.parquet import read_table

    return [row for file in sorted(folder.glob("*.parquet")) for row in read_table(file).to_pylist()]


def test_each_row_has_one_output_if_an_actor_is_killed(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    prompts: list[Any] = [*PROMPTS, "too long " * 2000]
    write_table(pyarrow.table({"id": list(range(len(prompts))), "prompt": prompts}), tmp_path / "in.parquet")
    program_text = GENERATE_SCRIPT.format(format="parquet", path=tmp_path / "in.parquet")
    with ray_program(["-c", program_text], tmp_path) as program:
        wait_until(lambda: len(program.pids("penstock.worker.main")) == 2, 100)
        wait_until(lambda: list((tmp_path / "answers").glob("*.parquet")), 100)
        actors = program.pids("ray::", "TextActor")
        assert actors, [Path(f"/proc/{pid}/cmdline").read_text() for pid in program.pids("ray::")]
        os.kill(actors[0], signal.SIGKILL)
        assert program.process.poll() is None
        assert program.wait(200) == 0
        assert "all written" in program.output
    rows = read_parquet_rows(tmp_path / "answers")
    assert sorted(row["id"] for row in rows) == list(range(len(prompts)))
    texts = generate_expected_texts(PROMPTS, 600)
    for row in rows:
        if row["prompt"].startswith("too long"):
            assert row["generated_text"] is None
            assert "1024" in row["error"]
        else:
            assert row["generated_text"] == texts[row["prompt"]]
            assert (row["finish_reason"], row["num_generated_tokens"], row["error"]) == ("length", 600, None)


def write_requests(path: Path, count: int) -> None:
    lines = []
    for number in range(count):
        body = {
            "model": "demo",
            "prompt": PROMPTS[number],
            "max_tokens": 600,
            "temperature": 0,
            "ignore_eos": True,
        }
        lines.append(json.dumps({"custom_id": f"n{number}", "url": "/v1/completions", "body": body}))
    lines.append('{"custom_id": "bad", "url": "/v1/completions", "body": {}}')
    path.write_text("\n".join(lines) + "\n")


def make_batch_command(input_path: Path, output: Path) -> list[str]:
    flags = [
        "--ray",
        "--ray-address",
        "local",
        "--ray-min-replicas",
        "2",
        "--ray-cpus",
        "1",
        "--ray-batch-size",
        "16",
    ]
    command = ["-m", "penstock", "batch", "run", str(input_path), "-o", str(output), "demo"]
    return [*command, *flags, "--kv-cache-memory", "64MiB"]


def test_a_batch_has_each_result_once_if_processes_are_killed(tmp_path: Path) -> None:
    input_path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(input_path, NUM_PROMPTS)
    output.write_text('{"custom_id": "n0", "response": {"previous": true}, "error": null}\n{"torn')

    def count_lines() -> int:
        return output.read_bytes().count(b"\n")

    with ray_program(make_batch_command(input_path, output), tmp_path) as program:
        wait_until(lambda: count_lines() > 10, 100)
        os.kill(program.pids("ray::", "LineActor")[0], signal.SIGKILL)
        wait_until(lambda: count_lines() > 50, 100)
        os.kill(program.pids("penstock.worker.main")[0], signal.SIGKILL)
        assert count_lines() < NUM_PROMPTS
        assert program.wait(200) == 1
        assert "1 requests have results, 160 are left" in program.output
        assert "1 failed" in program.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    results = {line["custom_id"]: line["response"] for line in lines}
    assert len(lines) == len(results) == NUM_PROMPTS + 1
    assert results.pop("n0") == {"previous": True}
    assert results.pop("bad")["status_code"] == 400
    texts = generate_expected_texts(PROMPTS, 600)
    for name, response in results.items():
        assert response["body"]["choices"][0]["text"] == texts[PROMPTS[int(name[1:])]]


def test_a_batch_reads_and_writes_parquet_files_and_is_resumed(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    body = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0.0}
    columns = {
        "custom_id": [f"n{number}" for number in range(40)],
        "url": ["/v1/completions"] * 40,
        "body": [json.dumps({**body, "seed": number}) for number in range(40)],
    }
    write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    output = tmp_path / "out.parquet"
    for _ in range(2):
        with ray_program(make_batch_command(tmp_path / "in.parquet", output), tmp_path) as program:
            assert program.wait(150) == 0
            log = program.output
    assert "40 requests have results, 0 are left" in log
    rows = read_parquet_rows(output)
    assert sorted(row["custom_id"] for row in rows) == sorted(columns["custom_id"])
    assert {row["status_code"] for row in rows} == {200}
    assert len({json.loads(row["body"])["choices"][0]["text"] for row in rows}) == 1


def test_vectors_of_a_dataset_equal_the_vectors_of_an_llm(tmp_path: Path) -> None:
    import numpy as np
    from support.tiny_embedder import write_tiny_embedder

    model = write_tiny_embedder(tmp_path / "model")
    texts = [f"a b c {number}" for number in range(10)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with ray_program(
        ["-c", EMBED_SCRIPT.format(path=tmp_path / "in.jsonl", model=model)], tmp_path
    ) as program:
        assert program.wait(150) == 0
    lines = [line for file in (tmp_path / "vectors").glob("*.json") for line in file.read_text().splitlines()]
    rows = {row["text"]: row for row in map(json.loads, lines)}
    assert sorted(rows) == sorted(texts)
    with LLM(model) as llm:
        vectors = llm.embed(texts, normalize=True)
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(rows[text]["embedding"], vector, atol=1e-5)


def test_the_example_of_a_dataset_runs(tmp_path: Path) -> None:
    with ray_program([str(ROOT / "examples" / "ray_dataset.py")], tmp_path) as program:
        assert program.wait(150) == 0
        assert "The capital of Japan is Tokyo." in program.output
        assert "6 answers in answers" in program.output
    assert len(read_parquet_rows(tmp_path / "answers")) == 6
