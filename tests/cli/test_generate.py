"""``penstock generate``, ``penstock env``, ``--version`` and the help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.tiny_llm import write_tiny_llm

import penstock
from penstock.cli import cli
from penstock.cli.generate_output import Timings
from penstock.config import config_fields
from penstock.host.processors import divide_processors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("models") / "tiny")


def test_text_is_on_standard_output_and_the_summary_on_standard_error(model: Path) -> None:
    result = generate(model, "--prompt", "Hello", "--temperature", "0", "--max-new-tokens", "12")
    assert result.stdout == generate_answer(model, "--prompt", "Hello")["text"] + "\n"
    summary = r"penstock: loaded in \d+\.\d\d s, first token after \d+ ms, 12 tokens at \d+\.\d tokens/s\n"
    assert re.fullmatch(summary, result.stderr)


def test_json_is_one_object(model: Path) -> None:
    answer = generate_answer(model, "--prompt", "Hello")
    assert sorted(answer) == ["finish_reason", "text", "timings", "token_ids", "usage"]
    assert len(answer["token_ids"]) == 12
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert all(value > 0 for value in answer["timings"].values())


def test_the_prompt_may_come_from_standard_input(model: Path) -> None:
    piped_result = generate(model, "--json", "--temperature", "0", text="Héllo\n")
    flag_result = generate(model, "--json", "--temperature", "0", "--prompt", "Héllo")
    assert json.loads(piped_result.stdout)["token_ids"] == json.loads(flag_result.stdout)["token_ids"]


def test_stop_strings_end_the_text(model: Path) -> None:
    full_output = generate_answer(model, "--prompt", "Hello")["text"]
    stop_string = full_output[4:6]
    answer = generate_answer(model, "--prompt", "Hello", "--stop", "never", "--stop", stop_string)
    assert answer["text"] == full_output[: full_output.index(stop_string)]
    assert answer["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_text(model: Path) -> None:
    def sample(*arguments: str) -> list[int]:
        result = generate(model, "--json", "--prompt", "Hello", "--max-new-tokens", "40", *arguments)
        tokens: list[int] = json.loads(result.stdout)["token_ids"]
        return tokens

    assert sample("--seed", "5") == sample("--seed", "5")
    assert sample("--seed", "5") != sample("--seed", "6")
    assert sample() != sample()


def test_sampling_flags_reach_the_model(model: Path) -> None:
    greedy_tokens = generate_answer(model, "--prompt", "Hello")["token_ids"]
    for flags in (["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"]):
        result = generate(model, "--json", "--prompt", "Hello", "--max-new-tokens", "12", *flags)
        assert json.loads(result.stdout)["token_ids"] == greedy_tokens


def test_several_answers_are_printed_with_their_index(model: Path) -> None:
    arguments = ("--prompt", "Hello", "--seed", "3", "--max-new-tokens", "12", "--n", "3")
    result = generate(model, *arguments)
    report = json.loads(generate(model, *arguments, "--json", "--logprobs", "1").stdout)
    assert [output["index"] for output in report["outputs"]] == [0, 1, 2]
    assert len({output["text"] for output in report["outputs"]}) == 3
    assert result.stdout == "".join(f"[{output['index']}] {output['text']}\n" for output in report["outputs"])
    num_tokens = report["usage"]["completion_tokens"]
    assert report["usage"]["prompt_tokens"] == 5, "the tokens of the prompt are counted once for all outputs"
    assert re.search(rf"3 outputs with {num_tokens} tokens in total at \d+\.\d tokens/s\n$", result.stderr)
    for output in report["outputs"]:
        assert len(output["top_log_probabilities"]) == len(output["token_ids"])
    single_result = generate(model, *arguments[:-2], "--json", "--logprobs", "1")
    assert report["outputs"][0] == {
        "index": 0,
        **without_members(json.loads(single_result.stdout), "usage", "timings"),
    }


def test_a_chat_prompt_can_have_several_answers(model: Path) -> None:
    arguments = ("--prompt", "Hello", "--seed", "3", "--chat", "--system", "Be brief.", "--json")
    two_answers_report = json.loads(generate(model, *arguments, "--n", "2").stdout)
    single_report = json.loads(generate(model, *arguments).stdout)
    assert two_answers_report["outputs"][0]["text"] == single_report["text"]
    assert two_answers_report["usage"]["prompt_tokens"] == single_report["usage"]["prompt_tokens"]


def test_beam_search_prints_the_best_beams(model: Path) -> None:
    arguments = ("--prompt", "Hello", "--num-beams", "4", "--n", "2", "--max-new-tokens", "9")
    report = json.loads(generate(model, *arguments, "--json").stdout)
    best_output, second_output = report["outputs"]
    assert best_output["score"] >= second_output["score"]
    assert generate(model, *arguments).stdout == f"[0] {best_output['text']}\n[1] {second_output['text']}\n"


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        (["--logprobs", "1"], "--logprobs needs --json"),
        (["--num-beams", "2", "--temperature", "0"], "--num-beams can only be combined with"),
        (["--num-beams", "2", "--chat"], "--num-beams can only be combined with"),
        (["--n", "0"], "'--n'"),
        (["--json-schema", "nowhere.json"], "'--json-schema'"),
    ],
)
def test_invalid_combinations_and_values_of_flags_are_refused(
    arguments: list[str], expected_message: str, model: Path
) -> None:
    result = CliRunner().invoke(cli, ["generate", "--model", str(model), "--prompt", "Hello", *arguments])
    assert result.exit_code == 2
    assert expected_message in result.stderr


def test_the_output_follows_the_json_schema(model: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    answer = generate_answer(model, "--prompt", "Well?", "--json-schema", str(schema))
    assert answer["text"] in ('"yes"', '"no"')
    schema.write_text("{")
    arguments = ["generate", "--model", str(model), "--prompt", "Well?", "--json-schema", str(schema)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code != 0
    assert f"{schema} is not a JSON schema" in str(result.exception) + result.stderr


def test_chat_uses_the_template(model: Path) -> None:
    def count_prompt_tokens(*arguments: str) -> int:
        num_tokens: int = generate_answer(model, "--prompt", "Hi", *arguments)["usage"]["prompt_tokens"]
        return num_tokens

    assert count_prompt_tokens() == len("Hi")
    # The underscores stand for special tokens.
    assert count_prompt_tokens("--chat") == len("_user: Hi__assistant: ")
    assert count_prompt_tokens("--chat", "--system", "Sing") == len("_system: Sing__user: Hi__assistant: ")


def test_the_default_is_256_new_tokens(tmp_path: Path) -> None:
    model = write_tiny_llm(tmp_path, max_position_embeddings=512)
    result = generate(model, "--json", "--prompt", "Hello", "--ignore-eos")
    assert len(json.loads(result.stdout)["token_ids"]) == 256


def test_ignore_eos_generates_up_to_the_limit(tmp_path: Path) -> None:
    model = write_tiny_llm(tmp_path, eos_token_id=list(range(128)))
    assert generate_answer(model, "--prompt", "Hello")["finish_reason"] == "stop"
    assert generate_answer(model, "--prompt", "Hello", "--ignore-eos")["finish_reason"] == "length"


def test_verbose_prints_the_memory_plan(model: Path) -> None:
    result = generate(model, "--prompt", "Hello", "--verbose", "--max-length", "64")
    assert re.search(r"max length.*64", result.stderr)


def test_print_config_shows_the_sources_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max_batch_size = 4\nmax_length = 5\n")
    monkeypatch.setenv("PENSTOCK_DEVICES", "cpu")
    arguments = ["generate", "--print-config", "--config-file", str(file), "--max-length", "9"]
    result = CliRunner().invoke(cli, arguments)
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in result.stdout.splitlines()}
    assert list(rows) == [field.name for field in config_fields()]
    assert rows["max_length"] == ["9", "flag"]
    assert rows["max_batch_size"] == ["4", f"file {file}"]
    assert rows["devices"] == ["cpu", "environment PENSTOCK_DEVICES"]
    assert rows["quantization_encoding"] == ["-", "default"]
    assert rows["enable_prefix_caching"] == ["true", "default"]


def test_every_setting_is_a_flag() -> None:
    help = CliRunner().invoke(cli, ["generate", "--help"]).stdout
    for field in config_fields():
        for name in (field.name, *field.aliases):
            assert f"--{name.replace('_', '-')}" in help
    result = CliRunner().invoke(cli, ["generate", "--print-config", "--gpu-memory-utilization", "0.25"])
    assert re.search(r"^device_memory_utilization +0.25 +flag$", result.stdout, re.MULTILINE)


def test_without_a_command_help_is_printed() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0
    assert "generate" in result.stdout


def test_version_prints_the_version() -> None:
    assert CliRunner().invoke(cli, ["--version"]).stdout == f"penstock {penstock.__version__}\n"


def test_env_names_kernels_devices_and_openmp() -> None:
    # In a new process: earlier tests may have loaded packages with another OpenMP library.
    report = json.loads(subprocess.check_output([sys.executable, "-m", "penstock", "env", "--json"]))
    assert report["versions"]["penstock"] == penstock.__version__
    cpu = report["devices"][0]
    assert cpu["device"] == "cpu"
    assert 0 < cpu["free_memory"] <= cpu["total_memory"]
    assert {"linear", "attention", "sample"} <= set(cpu["kernels"])
    assert cpu["compiled_steps"] == "none" or cpu["compiled_steps"].startswith("of up to 128 rows")
    assert len(report["openmp"]) == 1
    assert report["threads"] >= 1


def test_env_as_text_names_versions_devices_kernels_and_processors() -> None:
    text = CliRunner().invoke(cli, ["env", "--data-parallel-size", "2"]).stdout
    for word in (
        "torch",
        "features",
        "OpenMP",
        "NUMA node 0",
        "device cpu",
        "attention",
        "GiB free of",
    ):
        assert word in text
    for share in divide_processors(2):
        assert str(share) in text


def test_the_speed_is_measured_after_the_first_piece_of_text_or_in_total_for_a_single_piece() -> None:
    assert Timings(load_seconds=1, first_token_seconds=2, remaining_seconds=5).tokens_per_second(11) == 2
    assert (
        Timings(
            load_seconds=1, first_token_seconds=2, remaining_seconds=5, num_first_tokens=6
        ).tokens_per_second(11)
        == 1
    )
    assert (
        Timings(
            load_seconds=1, first_token_seconds=2, remaining_seconds=0.01, num_first_tokens=6
        ).tokens_per_second(6)
        == 3
    )
    assert Timings(load_seconds=1, first_token_seconds=2, remaining_seconds=0).tokens_per_second(1) == 0.5


def generate(model: Path, *arguments: str, text: str = "") -> Result:
    result = CliRunner().invoke(cli, ["generate", "--model", str(model), *arguments], input=text)
    assert result.exit_code == 0, result.output
    return result


def generate_answer(model: Path, *arguments: str) -> dict[str, Any]:
    """Return the answer to a greedy request for 12 tokens."""
    result = generate(model, "--json", "--temperature", "0", "--max-new-tokens", "12", *arguments)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def without_members(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in names}
