"""Every example runs unchanged and prints the expected output."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.codecs import FOLDER
from support.documents import EXAMPLES, ROOT, running_server
from support.tiny_embedder import write_tiny_embedder
from support.tiny_speech import write_tiny_speech

from penstock import LLM, SamplingParams

CLIENTS = ("anthropic_client", "openai_client", "responses_client", "structured_output")
ALONE = ("async_llm", "lora", "score_batch", "semantic_search", "speculation", "speech")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_all_are_run() -> None:
    # test_own_model; images needs a server of a model that reads images, ray_dataset a Ray (tests/ray)
    others = {"own_model", "images", "ray_dataset"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CLIENTS, *ALONE, *others}


def test_openai_client(url: str) -> None:
    said = run("openai_client", "--url", url)
    assert "answer: Penstock is an LLM inference library" in said
    assert "story: Once upon a time" in said
    assert "60 written" in said
    assert "call: get_weather {'city': 'Paris'}" in said
    assert "sunny in Paris" in said


def test_anthropic_client(url: str) -> None:
    pytest.importorskip("anthropic", reason="needs the package anthropic")
    said = run("anthropic_client", "--url", url)
    assert said.count("Penstock is an LLM inference library") == 2
    assert "stop reason: end_turn" in said
    assert "call: get_weather {'city': 'Paris'}" in said
    assert "sunny in Paris" in said


def test_responses_client(url: str) -> None:
    said = run("responses_client", "--url", url)
    assert "answer: Penstock is an LLM inference library" in said
    assert "response: completed" in said
    assert "Berlin" in said
    assert "input items: 3" in said
    assert "parsed: name='Tom' age=31" in said


def test_async_llm() -> None:
    *answers, last = run("async_llm").splitlines()
    assert answers[0] == "What is the capital of Germany? -> The capital of Germany is Berlin."
    assert "Penstock is an LLM inference library" in answers[1]
    assert last == "the long answer was cancelled"


def test_structured_output(url: str) -> None:
    said = run("structured_output", "--url", url)
    assert "Person(name='Tom', age=31, city='Oslo')" in said
    assert "Verdict(mood=" in said
    assert said.splitlines()[-1].endswith(("-> yes", "-> no", "-> perhaps"))


def test_lora(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example writes its adapters to the folder that docs/features.md names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lora.py"])
    *lines, last = run_here("lora", capsys).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["the model itself", "tone", "accent"]
    assert len({line.partition(":")[2] for line in lines}) == 3
    assert last == "adapters: adapters/tone, adapters/accent"
    named = set(re.findall(r"adapters/\w+", (ROOT / "docs" / "features.md").read_text()))
    assert named == {"adapters/tone"}
    with LLM("demo", lora=["tone=adapters/tone"]) as llm:
        plain, toned = llm.generate(
            ["Once upon a time"] * 2, SamplingParams(max_new_tokens=25), adapter=[None, "tone"]
        )
    assert plain.text != toned.text


def test_score_batch(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_here("score_batch", capsys).splitlines()
    best = {
        question: lines[place + 1].split()[-1] for place, question in enumerate(lines) if question[-1] == "?"
    }
    assert best == {"What is the capital of Germany?": "Berlin", "What is the capital of France?": "Paris"}


def test_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    said = run_here("speculation", capsys)
    assert "the same text: True" in said
    num_accepted = int(said.splitlines()[-1].split()[0])
    assert num_accepted > 5


def test_speech(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_speech(tmp_path / "model", codec=str(FOLDER / "neucodec"))
    output = tmp_path / "a.wav"
    monkeypatch.setattr(sys, "argv", ["speech.py", str(model), "Hello.", "--output", str(output)])
    first, last = run_here("speech", capsys).splitlines()
    assert re.fullmatch(r"first audio after \d+\.\d\d s", first)
    assert re.fullmatch(r"\d+\.\d\d s of audio in \d+ chunks, real-time factor \d+\.\d\d", last)
    assert output.read_bytes()[:4] == b"RIFF"


def test_semantic_search(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_embedder(tmp_path / "model")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.md").write_text(
        "# Cats\n\nThe cat sat on the mat.\n\n## Cars\n\nA big red car ran on the road.\n"
    )
    (docs / "b.md").write_text("# Greetings\n\nHello world.\n")
    query = "Greetings\nHello world."
    arguments = ["semantic_search.py", str(model), query, "--folder", str(docs), "--top-n", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    best, second = run_here("semantic_search", capsys).splitlines()
    assert best == "1.000  b.md: Greetings"
    assert re.fullmatch(r"0\.\d{3}  a\.md: Ca(ts|rs)", second)
    monkeypatch.setattr(sys, "argv", ["semantic_search.py", "demo", "cats"])
    with pytest.raises(SystemExit, match="demo is no embeddings model"):
        run_here("semantic_search", capsys)
    monkeypatch.setattr(sys, "argv", ["semantic_search.py", str(tmp_path / "absent"), "cats"])
    with pytest.raises(SystemExit, match="absent cannot be used for search"):
        run_here("semantic_search", capsys)


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(Path(EXAMPLES, f"{name}.py")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_here(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example in this process, so that torch is imported only once."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out
