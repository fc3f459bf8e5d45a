"""The driver of MAX with a fake package ``max``: arguments that it passes, and answers that it returns."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.engines import ROOT, Engine, EngineError
from benchmarks.peers.peers import PEERS

FAKE_MAX = '''
import json, sys, types
from types import SimpleNamespace

class Pipeline:
    """The answer to a prompt counts up from its last token, one token per step."""

    async def generate_async(self, requests):
        log_call(requests=[[request.prompt, request.sampling_params] for request in requests])
        for step in range(requests[0].sampling_params["max_new_tokens"]):
            yield [SimpleNamespace(tokens=[request.prompt[-1] + 1 + step]) for request in requests]

class Request:
    def __init__(self, request_id, model_name, prompt, sampling_params):
        self.prompt, self.sampling_params = prompt, sampling_params

def log_call(**fields):
    print("called", json.dumps(fields, default=str), flush=True)

class Registry:
    def retrieve(self, config):
        log_call(**config)
        return None, Pipeline()

def add_module(name, **members):
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(members)

add_module(
    "max.pipelines",
    supported_encoding_supported_devices=lambda name: ("gpu",) if name == "bfloat16" else ("cpu", "gpu"),
    PipelineArgs=dict,
    KVCacheConfig=dict,
    PipelineRuntimeConfig=dict,
    PipelineConfig=SimpleNamespace(from_args=lambda arguments: arguments),
    PIPELINE_REGISTRY=Registry(),
)
add_module("max.driver", DeviceSpec=SimpleNamespace(cpu=lambda: "the CPU"))
add_module("max.pipelines.context", SamplingParams=dict)
add_module("max.pipelines.modeling", __path__=[])
add_module("max.pipelines.modeling.types", RequestID=object, TextGenerationRequest=Request)
'''


def start_engine(folder: Path, model: str, encoding: str) -> Engine:
    (folder / "max").mkdir()
    (folder / "max" / "__init__.py").write_text(FAKE_MAX)
    load = {"model": model, "encoding": encoding, "num_threads": 1, "max_length": 192, "num_prompts": 2}
    command = [sys.executable, "-m", f"benchmarks.peers.drivers.{PEERS['max'].driver}"]
    return Engine(command, load, {"PYTHONPATH": f"{ROOT}:{folder}"}, folder / "log")


def logged_calls(folder: Path) -> list[dict[str, Any]]:
    """Return the calls that the fake package has logged."""
    lines = (folder / "log").read_text().splitlines()
    return [json.loads(line.removeprefix("called ")) for line in lines if line.startswith("called ")]


def test_driver_passes_prompts_and_returns_token_ids(tmp_path: Path) -> None:
    with start_engine(tmp_path, "somewhere/model", "float32") as driver:
        answer = driver.generate([[3, 4], [7]], 3)
        assert answer["tokens"] == [[5, 6, 7], [8, 9, 10]]
        assert 0 < answer["first_output_seconds"] < answer["total_seconds"]
        assert answer["num_first_tokens"] == 1
        # The driver has one thread, which runs on one CPU.
        assert os.sched_getaffinity(driver.process_id) == {min(os.sched_getaffinity(0))}
    load_call, generate_call = logged_calls(tmp_path)
    assert load_call == {
        "model_path": "somewhere/model",
        "weight_path": [],
        "quantization_encoding": "float32",
        "device_specs": ["the CPU"],
        "max_length": 192,
        "kv_cache": {"enable_prefix_caching": False},
        "runtime": {"max_batch_size": 2},
    }
    params = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0, "top_k": 1}
    assert generate_call == {"requests": [[[3, 4], params], [[7], params]]}


def test_gguf_file_is_loaded_with_its_folder_as_model_path(tmp_path: Path) -> None:
    start_engine(tmp_path, "somewhere/Q4_K_M.gguf", "q4_k").close()
    (load_call,) = logged_calls(tmp_path)
    assert (load_call["model_path"], load_call["weight_path"]) == ("somewhere", ["somewhere/Q4_K_M.gguf"])


def test_encoding_without_cpu_support_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"MAX supports bfloat16 only on gpu, not on a CPU; use float32, q4_k"
    ):
        start_engine(tmp_path, "somewhere/model", "bfloat16")
    assert logged_calls(tmp_path) == []
