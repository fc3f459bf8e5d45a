"""``penstock serve --model A --model B``: the flags, and a server with memory for one of two models."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from penstock.cli import cli
from penstock.cli.models import ModelFlag, estimate_memory, model_configs, parse_model
from penstock.config import PipelineConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("demo", ModelFlag("demo", {})),
        ("./a,b", ModelFlag("./a,b", {})),
        ("a,max-length=5", ModelFlag("a", {"max_length": "5"})),
        ("a,devices=gpu:0,1,max_length=5", ModelFlag("a", {"devices": "gpu:0,1", "max_length": "5"})),
        ("a,memory=2GiB", ModelFlag("a", {}, 2 << 30)),
        ("a,memory=1000,served-model-name=x", ModelFlag("a", {"served_model_name": "x"}, 1000)),
    ],
)
def test_model_flags_are_parsed(text: str, expected: ModelFlag) -> None:
    assert parse_model(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,memory=much", "memory must be a number of bytes"),
        ("a,memory=0", "memory must be a number of bytes"),
        ("a,max-length=5,max_length=6", "max_length is given twice"),
    ],
)
def test_malformed_model_flags_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model(text)
    assert message in str(caught.value).replace(": ", " ", 1)


def test_settings_of_a_model_override_the_common_settings() -> None:
    flags = [parse_model("demo,max-length=5"), parse_model("demo,num-threads=3")]
    (first_config, _), (second_config, _) = model_configs(flags, {"max_length": "9"})
    assert (first_config.model.max_length, first_config.num_threads) == (5, None)
    assert (second_config.model.max_length, second_config.num_threads) == (9, 3)
    with pytest.raises(ConfigError, match="did you mean max_length"):
        model_configs([parse_model("demo,max-lenght=5")], {})


def test_the_memory_estimate_is_proportional_to_the_number_of_workers() -> None:
    single_estimate = estimate_memory(PipelineConfig())
    assert single_estimate > 512 << 20
    assert estimate_memory(PipelineConfig(data_parallel_size=3)) == 3 * single_estimate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--model", "other"], "the model is given twice"),
        (["--model", "demo", "--model", "demo"], "two models have the same name"),
        (
            ["--model", "demo", "--model", "demo,served-model-name=b", "--model-memory", "1MiB"],
            "may use 0.0 GiB",
        ),
    ],
)
def test_invalid_combinations_of_models_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "--port", "0", *arguments])
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


@pytest.mark.slow
def test_two_models_are_swapped_in_the_memory_of_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--max-length", "64"]
    command += [
        "--model",
        "demo,memory=600MiB",
        "--model",
        "demo,served-model-name=b,max-length=32,memory=600MiB",
    ]
    with (
        log.open("wb") as errors,
        subprocess.Popen([*command, "--model-memory", "1GiB"], stderr=errors) as process,
    ):
        try:
            while (match := re.search(r"serving \S+ at (http://\S+) ", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            with httpx.Client(base_url=match[1], timeout=100) as client:
                for name, length in (("demo", 64), ("b", 32), ("demo", 64)):
                    body = {"model": name, "prompt": "Once", "ignore_eos": True, "max_tokens": 5}
                    answer = client.post("/v1/completions", json=body).json()
                    assert answer["usage"]["completion_tokens"] == 5
                    assert answer["model"] == name
                    loaded_models = client.get("/api/ps").json()["models"]
                    assert [entry["name"] for entry in loaded_models] == [name]
                    max_lengths = {
                        entry["id"]: entry["max_model_len"]
                        for entry in client.get("/v1/models").json()["data"]
                    }
                    assert max_lengths[name] == length
                assert client.post("/v1/completions", json={"model": "c", "prompt": "Hi"}).status_code == 404
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()
