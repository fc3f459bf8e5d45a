"""``penstock encode`` and ``penstock rerank``, run in this process."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.tiny_embedder import HIDDEN, write_tiny_embedder
from support.tiny_llm import write_tiny_llm

from penstock import LLM
from penstock.cli import cli
from penstock.llm.embeddings import RerankResult

TEXTS = ["the cat sat", "hello world", "a big red car"]
PROMPTS = {"prompts": {"query": "query: "}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    return write_tiny_embedder(folder, settings=PROMPTS, matryoshka_dimensions=[8])


@pytest.fixture(scope="module")
def expected_vectors(model: Path) -> np.ndarray:
    with LLM(str(model)) as llm:
        vectors: np.ndarray = llm.embed(TEXTS)
    return vectors


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("texts.txt", "strings.jsonl", "objects.jsonl")}
    paths["texts.txt"].write_text("\ufeff" + "\r\n".join(TEXTS) + "\n\n", "utf-8")
    paths["strings.jsonl"].write_text("\n".join(map(json.dumps, TEXTS)) + "\n")
    objects = [{"id": 1, key: text} for key, text in zip(("text", "input", "document"), TEXTS, strict=True)]
    paths["objects.jsonl"].write_text("\n".join(map(json.dumps, objects)))
    return paths


def run_command(*arguments: Any, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=text)


def encode_rows(*arguments: Any, text: str | None = None) -> list[dict[str, Any]]:
    result = run_command("encode", *arguments, text=text)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def read_vectors(*arguments: Any, text: str | None = None) -> np.ndarray:
    rows = encode_rows(*arguments, text=text)
    assert [row["index"] for row in rows] == [*range(len(rows))]
    return np.array([row["embedding"] for row in rows], np.float32)


def test_texts_are_read_from_flags_files_and_standard_input(
    model: Path, expected_vectors: np.ndarray, files: dict[str, Path]
) -> None:
    flags = [argument for text in TEXTS for argument in ("--text", text)]
    assert np.array_equal(read_vectors(model, *flags), expected_vectors)
    assert np.array_equal(read_vectors(model, text="\n".join(TEXTS)), expected_vectors)
    assert np.array_equal(read_vectors(model, "--file", "-", text="\n".join(TEXTS)), expected_vectors)
    for path in files.values():
        assert np.array_equal(read_vectors(model, "--file", path), expected_vectors), path


def test_the_throughput_is_printed(model: Path) -> None:
    result = run_command("encode", model, "--text", "the cat sat", "--text", "cat")
    line = (
        r"penstock: loaded in \d+\.\d\d s, 2 texts with 8 tokens in \d+\.\d\d s: "
        r"[\d,]+\.\d texts/s, [\d,]+ tokens/s\n"
    )
    assert re.fullmatch(line, result.stderr)


def test_npy_output_equals_the_vectors(
    model: Path, expected_vectors: np.ndarray, files: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "vectors.npy"
    assert encode_rows(model, "--file", files["texts.txt"], "--output", output) == []
    vectors = np.load(output)
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, expected_vectors)
    result = run_command("encode", model, "--file", files["texts.txt"], "--format", "npy")
    assert np.array_equal(np.load(io.BytesIO(result.stdout_bytes)), expected_vectors)


def test_parquet_output_equals_the_vectors(
    model: Path, expected_vectors: np.ndarray, files: dict[str, Path], tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "vectors.parquet"
    encode_rows(model, "--file", files["texts.txt"], "--output", output)
    table = parquet.read_table(output).to_pydict()
    assert table["text"] == TEXTS
    assert np.array_equal(np.array(table["embedding"], np.float32), expected_vectors)
    encode_rows(model, "--text", "cat", "--output-kind", "multi_vector", "--output", output)
    [rows] = parquet.read_table(output).to_pydict()["multi_vector"]
    assert np.shape(rows) == (3, HIDDEN)


def test_parquet_without_pyarrow_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    output = tmp_path / "vectors.parquet"
    result = run_command("encode", model, "--text", "cat", "--output", output)
    assert result.exit_code == 2
    assert "the format parquet needs pyarrow: pip install 'penstock-llm[parquet]'" in result.stderr
    assert not output.exists()


def test_flags_have_the_effect_of_the_options_of_llm(model: Path) -> None:
    with LLM(str(model)) as llm:
        for flags, options in (
            (["--prompt-name", "query"], {"prompt_name": "query"}),
            (["--prompt", "the "], {"prompt": "the "}),
            (["--pooling", "cls"], {"pooling": "cls"}),
            (["--dimensions", "8"], {"dimensions": 8}),
            (["--no-normalize"], {"normalize": False}),
        ):
            assert np.array_equal(
                read_vectors(model, "--text", "cat", *flags)[0], llm.embed("cat", **options)
            )
        long_text = "cat " * 100
        [truncated_vector] = read_vectors(model, "--text", long_text, "--truncate")
        assert np.array_equal(truncated_vector, llm.embed(long_text, truncate=True))


def test_output_kinds_are_written(model: Path, tmp_path: Path) -> None:
    [row] = encode_rows(model, "--text", "cat", "--output-kind", "multi_vector")
    assert np.shape(row["multi_vector"]) == (3, HIDDEN)
    classifier = write_tiny_embedder(tmp_path, labels=3)
    [row] = encode_rows(classifier, "--text", "cat")
    assert sum(row["scores"]) == pytest.approx(1)


def test_rerank_prints_the_ranked_documents(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    reranker = write_tiny_embedder(tmp_path, labels=1)
    for folder in (model, reranker):
        with LLM(str(folder)) as llm:
            results: list[RerankResult] = llm.rerank("cat", TEXTS)
        table_result = run_command("rerank", folder, "--query", "cat", "--file", files["texts.txt"])
        assert table_result.stdout.splitlines() == [
            f"{result.score:.4f}  [{result.index}]  {result.document}" for result in results
        ]
        assert re.search(r"3 documents in \d+\.\d\d s: [\d,.]+ documents/s\n$", table_result.stderr)
        flags = [argument for text in TEXTS for argument in ("--document", text)]
        top_result = run_command("rerank", folder, "--query", "cat", "--top-n", "1", "--json", *flags)
        [row] = json.loads(top_result.stdout)["results"]
        assert (row["index"], row["document"]) == (results[0].index, results[0].document)
        assert row["relevance_score"] == pytest.approx(results[0].score)


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    {
        "no texts": (["encode"], "standard input has no texts: give --text TEXT"),
        "two sources of texts": (
            ["encode", "--text", "a", "--file", "b"],
            "--text and --file are both given",
        ),
        "no file": (["encode", "--file", "none.txt"], "none.txt: No such file or directory"),
        "not UTF-8": (["encode", "--text", "caf\udce9"], "--text is not valid UTF-8"),
        "empty text": (
            ["encode", "--text", "cat", "--text", ""],
            "the input is empty: it needs at least one",
        ),
        "too long": (["encode", "--text", "cat " * 99], "101 tokens, but the maximum length is 64"),
        "too long second input": (["encode", "--text", "cat", "--text", "cat " * 99], "in input 2 of 2"),
        "unknown prompt": (
            ["encode", "--text", "cat", "--prompt-name", "q"],
            "prompt_name 'q' is unknown: the checkpoint has query",
        ),
        "two prompts": (
            ["encode", "--text", "cat", "--prompt-name", "query", "--prompt", "a"],
            "prompt and prompt_name are both given",
        ),
        "dimensions": (["encode", "--text", "cat", "--dimensions", "9"], "must be one of 8, 32, was 9"),
        "no dimensions": (["encode", "--text", "cat", "--dimensions", "0"], "0 is not in the range x>=1"),
        "unknown kind": (["encode", "--text", "cat", "--output-kind", "thick"], "'thick' is not one of"),
        "output that the model lacks": (
            ["encode", "--text", "cat", "--output-kind", "scores"],
            "computes dense, multi_vector",
        ),
        "npy of vectors of different lengths": (
            ["encode", "--text", "cat", "--output-kind", "multi_vector", "--format", "npy"],
            "npy stores one array, but multi_vector outputs differ in length",
        ),
        "unknown suffix": (["encode", "--text", "cat", "--output", "a.csv"], "give --format"),
        "no folder": (["encode", "--text", "cat", "--output", "none/a.npy"], "none/a.npy: No such file"),
        "no query": (["rerank", "--document", "cat"], "there is no query: give --query TEXT"),
        "no documents": (["rerank", "--query", "cat"], "standard input has no texts: give --document TEXT"),
        "top_n": (["rerank", "--query", "a", "--document", "b", "--top-n", "0"], "0 is not in the range"),
    }.values(),
)
def test_invalid_arguments_give_one_error_line(
    arguments: list[str], expected_message: str, model: Path
) -> None:
    result = run_command(arguments[0], "--model", model, *arguments[1:])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("penstock: error: ")
    assert result.stderr.count("\n") == 1
    assert expected_message in result.stderr


@pytest.mark.parametrize(
    ("line", "expected_message"),
    [
        ("{", "texts.jsonl, line 2: is not JSON"),
        ('{"body": "a"}', "line 2: must be a JSON string, or an object with one of text, input, document"),
        ("7", "line 2: must be a JSON string"),
        ('{"text": 7}', "line 2: must be a JSON string"),
    ],
)
def test_the_error_of_a_malformed_input_line_has_its_number(
    model: Path, tmp_path: Path, line: str, expected_message: str
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'"cat"\n{line}\n')
    result = run_command("encode", model, "--file", path)
    assert result.exit_code == 2
    assert expected_message in result.stderr


def test_models_of_another_task_are_refused(model: Path, tmp_path: Path) -> None:
    decoder = write_tiny_llm(tmp_path)
    for command in (["encode", "--text", "cat"], ["rerank", "--query", "cat", "--document", "dog"]):
        result = run_command(command[0], decoder, *command[1:])
        assert result.exit_code == 2
        assert f"penstock {command[0]} needs a model of the task embeddings-generation" in result.stderr
    result = run_command("generate", model, "--prompt", "cat")
    assert result.exit_code == 2
    assert "generates no text: use penstock encode or penstock rerank" in result.stderr
