"""Invalid arguments, files and checkpoints: one error line and exit status 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.tiny_llm import MAX_LENGTH, write_tiny_llm

from penstock.cli import cli

PROMPT = ["--prompt", "Hello"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("models") / "tiny")


FLAGS = {
    # the command line itself
    "misspelt command": (["generat"], "No such command 'generat'. Did you mean 'generate'?"),
    "misspelt command with flags": (["warmcache", "--json"], "Did you mean 'warm-cache'?"),
    "unknown command": (
        ["turbine"],
        "Use one of generate, chat, speak, encode, rerank, serve, batch, bench, list, pull, rm, warm-cache, "
        "quantize, env.",
    ),
    "unknown flag": (["generate", "--promt", "Hello"], "No such option '--promt'. Did you mean '--prompt'?"),
    "misspelt setting": (["generate", *PROMPT, "--maxlength", "9"], "Did you mean '--max-length'?"),
    "unknown group flag": (["--verbos"], "No such option '--verbos'"),
    "flag without its value": (["generate", "--prompt"], "'--prompt' requires an argument"),
    "unexpected argument": (["generate", "demo", "Hello"], "unexpected extra argument (Hello)"),
    "prompt as the model": (["generate", "Hello there"], "names the model: give the prompt as --prompt TEXT"),
    "two models": (
        ["generate", "demo", *PROMPT, "--model", "b"],
        "given twice, as 'demo' and as --model 'b'",
    ),
    "unexpected argument of env": (["env", "more"], "unexpected extra argument (more)"),
    "unknown flag of env": (["env", "--yaml"], "No such option '--yaml'"),
    "system without chat": (["generate", *PROMPT, "--system", "Be brief"], "--system needs --chat"),
    # sampling
    "negative count": (["generate", *PROMPT, "--max-new-tokens", "-1"], "-1 is not in the range x>=1"),
    "no new tokens": (["generate", *PROMPT, "--max-new-tokens", "0"], "0 is not in the range x>=1"),
    "count not a number": (
        ["generate", *PROMPT, "--max-new-tokens", "many"],
        "'many' is not a valid integer",
    ),
    "fractional count": (["generate", *PROMPT, "--max-new-tokens", "1.5"], "'1.5' is not a valid integer"),
    "negative temperature": (
        ["generate", *PROMPT, "--temperature", "-0.5"],
        "temperature must be in [0.0, 2.0]",
    ),
    "high temperature": (["generate", *PROMPT, "--temperature", "2.5"], "was 2.5"),
    "temperature not a number": (["generate", *PROMPT, "--temperature", "nan"], "temperature must be"),
    "infinite temperature": (["generate", *PROMPT, "--temperature", "inf"], "temperature must be"),
    "temperature not numeric": (["generate", *PROMPT, "--temperature", "hot"], "'hot' is not a valid float"),
    "top_p above 1": (["generate", *PROMPT, "--top-p", "1.5"], "top_p must be in [0.0, 1.0], was 1.5"),
    "negative top_p": (["generate", *PROMPT, "--top-p", "-0.1"], "top_p must be"),
    "top_p not a number": (["generate", *PROMPT, "--top-p", "nan"], "top_p must be"),
    "top_k below -1": (["generate", *PROMPT, "--top-k", "-2"], "top_k must be"),
    "fractional top_k": (["generate", *PROMPT, "--top-k", "1.5"], "'1.5' is not a valid integer"),
    "min_p above 1": (["generate", *PROMPT, "--min-p", "2"], "min_p must be in [0.0, 1.0], was 2.0"),
    "negative min_p": (["generate", *PROMPT, "--min-p", "-1"], "min_p must be"),
    "seed not a number": (["generate", *PROMPT, "--seed", "lucky"], "'lucky' is not a valid integer"),
    "seed of 65 bits": (["generate", *PROMPT, "--seed", str(2**64)], "seed must be a 64-bit integer"),
    # configuration
    "no length": (["generate", *PROMPT, "--max-length", "0"], "max_length: must be a whole number"),
    "negative length": (["generate", *PROMPT, "--max-length", "-1"], "was '-1'"),
    "fractional length": (["generate", *PROMPT, "--max-length", "1.5"], "max_length: must be"),
    "length not a number": (["generate", *PROMPT, "--max-length", "long"], "was 'long'"),
    "length above the model's": (["generate", *PROMPT, "--max-length", str(MAX_LENGTH + 1)], str(MAX_LENGTH)),
    "unknown device": (["generate", *PROMPT, "--devices", "tpu"], "devices: must be cpu, gpu"),
    "no such gpu": (["generate", *PROMPT, "--devices", "gpu:99"], "gpu:99 does not exist"),
    "device twice": (["generate", *PROMPT, "--devices", "gpu:0,0"], "names a device twice"),
    "gpu without a number": (["generate", *PROMPT, "--devices", "gpu:"], "devices: must be"),
    "no device": (["generate", *PROMPT, "--devices", ""], "devices: must be"),
    "unknown encoding": (
        ["generate", *PROMPT, "--quantization-encoding", "q9_z"],
        "unknown encoding 'q9_z': use one of float32, bfloat16, float16, int8, int4\n",
    ),
    "empty encoding": (["generate", *PROMPT, "--quantization-encoding", ""], "quantization_encoding: "),
    "odd block size": (["generate", *PROMPT, "--kv-cache-block-size", "17"], "a power of two from 16 to 128"),
    "negative block size": (["generate", *PROMPT, "--kv-cache-block-size", "-16"], "kv_cache_block_size"),
    "unknown cache type": (["generate", *PROMPT, "--kv-cache-dtype", "float8"], "kv_cache_dtype: must be"),
    "no cache memory": (["generate", *PROMPT, "--kv-cache-memory", "0"], "kv_cache_memory: must be"),
    "too little cache memory": (["generate", *PROMPT, "--kv-cache-memory", "10"], "--kv-cache-memory"),
    "share above 1": (["generate", *PROMPT, "--device-memory-utilization", "1.5"], "at most 1"),
    "share of 0": (["generate", *PROMPT, "--device-memory-utilization", "0"], "above 0"),
    "share not a number": (["generate", *PROMPT, "--device-memory-utilization", "nan"], "was 'nan'"),
    "empty batch": (["generate", *PROMPT, "--max-batch-size", "0"], "max_batch_size: must be"),
    "negative batch": (["generate", *PROMPT, "--max-batch-size", "-4"], "max_batch_size: must be"),
    "no step tokens": (
        ["generate", *PROMPT, "--max-batch-input-tokens", "0"],
        "max_batch_input_tokens: must",
    ),
    "no steps": (["generate", *PROMPT, "--max-num-steps", "0"], "max_num_steps: must be"),
    "no threads": (["generate", *PROMPT, "--num-threads", "0"], "num_threads: must be"),
    "too many threads": (["generate", *PROMPT, "--num-threads", "100000"], "num_threads: must be"),
    "negative threads": (["generate", *PROMPT, "--num-threads", "-1"], "num_threads: must be"),
    "deterministic in float16": (
        ["generate", *PROMPT, "--deterministic", "--quantization-encoding", "float16", "--devices", "gpu"],
        "deterministic: needs quantization_encoding to be one of float32, bfloat16",
    ),
    "unknown task": (["generate", *PROMPT, "--task", "chat"], "task: must be one of auto, text-generation"),
    "speech with a text model": (
        ["generate", *PROMPT, "--task", "speech-token-generation"],
        "is not recognized as a speech model: its vocabulary has no speech tokens",
    ),
    "missing configuration": (["generate", *PROMPT, "--config-file", "none.json"], "none.json"),
    "configuration file with an unknown suffix": (
        ["generate", *PROMPT, "--config-file", "a.ini"],
        ".json or .toml",
    ),
    "missing chat template": (["generate", *PROMPT, "--chat-template", "none.jinja"], "none.jinja"),
    # the prompt
    "empty prompt": (["generate", "--prompt", ""], "the prompt is empty"),
    "prompt too long": (
        ["generate", "--prompt", "a" * 500],
        f"500 tokens, but the maximum length is {MAX_LENGTH}",
    ),
    "prompt not UTF-8": (["generate", "--prompt", "caf\udce9"], "the prompt is not valid UTF-8"),
    "prompt above --max-length": (["generate", "--prompt", "a" * 20, "--max-length", "10"], "length is 10"),
}


@pytest.mark.parametrize(("arguments", "expected_message"), FLAGS.values(), ids=FLAGS.keys())
def test_invalid_flags_give_one_line(arguments: list[str], expected_message: str, model: Path) -> None:
    if arguments[0] == "generate":
        arguments = ["generate", "--model", str(model), *arguments[1:]]
    assert_refused(run_command(arguments), expected_message)


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        (b"", "the prompt is empty"),
        (b"\n", "the prompt is empty"),
        (b"caf\xe9", "not valid UTF-8, at byte 3"),
        (b"\xff\xfe\x00", "not valid UTF-8, at byte 0"),
        (b"a" * 500, "the prompt has 500 tokens"),
    ],
)
def test_invalid_standard_input_gives_one_line(text: bytes, expected_message: str, model: Path) -> None:
    assert_refused(run_command(["generate", "--model", str(model)], text), expected_message)


def _remove_files(*names: str) -> Callable[[Path], None]:
    def damage_checkpoint(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage_checkpoint


def _write_text(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text) and None
    )


def _change_config(**values: object) -> Callable[[Path], None]:
    def damage_checkpoint(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return damage_checkpoint


def _truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _replace_with_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing folder": (shutil.rmtree, "no such folder"),
    "file instead of a folder": (lambda folder: (shutil.rmtree(folder), folder.touch()), "is a file"),
    "empty folder": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "is empty"),
    "no config.json": (_remove_files("config.json"), "config.json"),
    "no weights": (_remove_files("model.safetensors"), "safetensors"),
    "pickled weights": (_replace_with_pickle, "pytorch_model.bin"),
    "config.json not JSON": (_write_text("config.json", "{"), "config.json"),
    "config.json a list": (_write_text("config.json", "[]"), "config.json"),
    "config.json not text": (_write_text("config.json", b"\xff\xfe"), "config.json"),
    "no model_type": (_change_config(model_type=None), "architecture"),
    "unknown architecture": (_change_config(model_type="lama"), "did you mean llama?"),
    "vocab_size not a number": (_change_config(vocab_size="many"), "vocab_size must be a whole number"),
    "list of activations": (_change_config(hidden_act=["silu"]), "hidden_act"),
    "no text configuration": (_change_config(text_config="none", dtype=None), "text_config must be"),
    "rope scaling not an object": (_change_config(rope_scaling=2.0), "rope_scaling must be a JSON object"),
    "a million layers": (_change_config(num_hidden_layers=10**6), "num_hidden_layers must be at most"),
    "thousands of layers": (_change_config(num_hidden_layers=9000), "1001 missing"),
    "hidden_size of another model": (_change_config(hidden_size=2**20), "misshapen"),
    "list of added tokens": (
        _write_text("tokenizer_config.json", '{"added_tokens_decoder": []}'),
        "tokenizer_config.json: its added or special tokens do not have the form of tokens",
    ),
    "numbers as special tokens": (
        _write_text("tokenizer_config.json", '{"additional_special_tokens": [1]}'),
        "tokenizer_config.json: its added or special tokens",
    ),
    "chat template not text": (_write_text("chat_template.jinja", b"\xff"), "chat_template.jinja: cannot be"),
    "num_attention_heads not a number": (_change_config(num_attention_heads="four"), "num_attention_heads"),
    "more layers than weights": (_change_config(num_hidden_layers=3), "model.layers.2."),
    "fewer layers than weights": (_change_config(num_hidden_layers=1), "model.layers.1."),
    "intermediate_size of another model": (_change_config(intermediate_size=56), "56"),
    "unknown rope": (_change_config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
    "truncated weights": (_truncate_weights, "model.safetensors"),
    "random bytes as weights": (_write_text("model.safetensors", b"\x01\x02\x03" * 9), "model.safetensors"),
    "empty weights": (_write_text("model.safetensors", b""), "model.safetensors"),
    "no tokenizer": (_remove_files("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "tokenizer not JSON": (_write_text("tokenizer.json", "{"), "tokenizer.json"),
    "generation defaults out of range": (_write_text("generation_config.json", '{"top_p": 7}'), "top_p"),
    "generation defaults not JSON": (_write_text("generation_config.json", "?"), "generation_config.json"),
}


@pytest.mark.parametrize(
    ("damage_checkpoint", "expected_message"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys()
)
def test_malformed_checkpoints_give_one_line(
    damage_checkpoint: Callable[[Path], object], expected_message: str, model: Path, tmp_path: Path
) -> None:
    damaged_folder = Path(shutil.copytree(model, tmp_path / "damaged"))
    damage_checkpoint(damaged_folder)
    assert_refused(run_command(["generate", "--model", str(damaged_folder), *PROMPT]), expected_message)


@pytest.mark.parametrize(
    ("name", "expected_message"),
    [
        ("nobody/nothing", "cannot be reached"),
        ("not a name", "neither a folder nor a hub id"),
        ("", "model_path"),
    ],
)
def test_model_names_that_are_not_folders_give_one_line(name: str, expected_message: str) -> None:
    assert_refused(run_command(["generate", "--model", name, *PROMPT]), expected_message)


def test_quoted_values_in_messages_are_short_and_printable() -> None:
    result = run_command(["generate", "--model", "./" + "a" * 9999 + "\x1b[2J", *PROMPT])
    assert_refused(result, "aaa\\x1b[2J: no such folder")
    assert len(result.stderr) < 2100


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    model = write_tiny_llm(tmp_path / "plain", chat=False)
    assert_refused(
        run_command(["generate", "--model", str(model), "--chat", *PROMPT]), "has no chat template"
    )


def test_a_failing_chat_template_gives_one_line(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("{{ messages | nonsense }}")
    arguments = ["generate", "--model", str(model), "--chat-template", str(template), "--chat", *PROMPT]
    assert_refused(run_command(arguments), "nonsense")


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [('{"max_lenght": 64}', "did you mean max_length?"), ("{", "config.json"), ("[1]", "config")],
)
def test_malformed_configuration_files_give_one_line(
    text: str, expected_message: str, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert_refused(
        run_command(["generate", "--model", str(model), "--config-file", str(file), *PROMPT]),
        expected_message,
    )


@pytest.mark.parametrize(
    ("variable", "value", "expected_message"),
    [
        ("PENSTOCK_MAX_LENGTH", "long", "environment PENSTOCK_MAX_LENGTH"),
        ("PENSTOCK_MAX_LENGHT", "64", "did you mean max_length?"),
        ("PENSTOCK_MODEL", "demo", "did you mean model_path?"),
        ("PENSTOCK_ISA", "sse9", "unknown instruction set 'sse9'"),
    ],
)
def test_invalid_environment_variables_give_one_line(
    variable: str, value: str, expected_message: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert_refused(run_command(["generate", "--model", str(model), *PROMPT]), expected_message)


def test_insufficient_memory_gives_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.driver._host_memory", lambda: (2**20, 50_000))
    assert_refused(run_command(["generate", "--model", str(model), *PROMPT]), "of 48.8 KiB free memory")


@pytest.mark.parametrize("flag", ["--stop", "--system", "--prompt"])
def test_arguments_that_are_not_utf8_give_one_line(flag: str, model: Path) -> None:
    arguments = ["generate", "--model", str(model), "--chat", *PROMPT, flag, "\udcff"]
    assert_refused(run_command(arguments), "is not valid UTF-8")


def run_command(arguments: list[str], text: bytes = b"") -> Result:
    return CliRunner().invoke(cli, arguments, input=text)


def assert_refused(result: Result, expected_message: str) -> None:
    """Check for exit status 2 and exactly one line on standard error that contains ``expected_message``."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert result.stderr.startswith("penstock: error: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    assert expected_message in result.stderr
    assert result.exit_code == 2
