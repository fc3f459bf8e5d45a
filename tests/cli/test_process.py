"""The command as a process: imports, shell completion, error messages, signals and output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_llm import write_tiny_llm

PENSTOCK = [sys.executable, "-m", "penstock"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=20_000)


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_and_version_load_few_modules(arguments: list[str]) -> None:
    code = (
        "import sys; before = len(sys.modules); from penstock.cli import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally:\n"
        "    assert len(sys.modules) - before < 250, len(sys.modules)\n"
        "    assert not sys.modules.keys() & {'torch', 'numpy', 'transformers', 'rich', 'fastapi'}"
    )
    completed = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize(
    ("words", "suggestions"),
    [
        (["pen", "warm"], ["warm-cache"]),
        (["penstock", "bench", ""], ["run", "serve"]),
        (["penstock", "bench", "run", "--sh"], ["--shape"]),
        (["penstock", "bench", "run", "--work", "de"], ["decode"]),
        (["penstock", "serve", "--shutdown"], ["--shutdown-grace"]),
    ],
)
def test_shell_completion_suggests_words(words: list[str], suggestions: list[str]) -> None:
    variables = {
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    code = (
        "import sys; from penstock.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line.partition(",")[2] for line in completed.stdout.splitlines()] == suggestions, completed.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "./nothing", "--prompt", "Hello"], "no such folder"),
        (["generate", "--max-new-tokens", "-1"], "-1 is not in the range"),
        (["generate", "--no-such-flag"], "No such option"),
    ],
)
def test_invalid_arguments_give_one_line(arguments: list[str], words: str) -> None:
    completed = subprocess.run([*PENSTOCK, *arguments], capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert completed.stderr.startswith("penstock: error: ")
    assert completed.stderr.count("\n") == 1
    assert words in completed.stderr


def test_a_closed_output_pipe_prints_no_error(model: Path) -> None:
    with _start(model) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.stdout.close()
        assert _errors_without_kernel_warning(process.stderr.read()) == b""
        assert process.wait() == 1


def test_ctrl_c_leaves_no_traceback(model: Path) -> None:
    with _start(model) as process:
        assert process.stdout is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        # A newline ends the partial line on the terminal.
        assert _errors_without_kernel_warning(errors).strip() == b""
        assert process.returncode == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_gives_one_line(model: Path) -> None:
    with open("/dev/full", "wb") as full_device:
        completed = subprocess.run(
            _command(model, 5), stdout=full_device, stderr=subprocess.PIPE, check=False
        )
    assert (
        _errors_without_kernel_warning(completed.stderr)
        == b"penstock: error: standard output: No space left on device\n"
    )
    assert completed.returncode == 2


def test_text_that_the_terminal_cannot_show_is_replaced(model: Path) -> None:
    completed = subprocess.run(
        _command(model, 60),
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert b"?" in completed.stdout


def _start(model: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(_command(model, 19_000), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _command(model: Path, num_tokens: int) -> list[str]:
    request = ["--prompt", "Hello", "--max-new-tokens", str(num_tokens), "--ignore-eos", "--seed", "1"]
    sizes = ["--max-batch-size", "1"]
    return [*PENSTOCK, "generate", "--model", str(model), *request, *sizes]


def _errors_without_kernel_warning(errors: bytes) -> bytes:
    """Return standard error without the warning about missing compiled kernels."""
    lines = errors.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"the C++ kernels are not built"))
