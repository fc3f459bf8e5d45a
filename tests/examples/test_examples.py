"""Examples run unchanged and print the expected output."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.codecs import CODEC_REFERENCES
from support.documents import EXAMPLES, ROOT, running_server
from support.tiny_embedder import write_tiny_embedder
from support.tiny_speech import write_tiny_speech

from penstock import LLM, SamplingParams

CLIENTS = ("anthropic_client", "openai_client", "responses_client", "structured_output")
STANDALONE_EXAMPLES = ("async_llm", "lora", "score_batch", "semantic_search", "speculation", "speech")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_every_example_is_listed_as_tested_or_as_an_exception() -> None:
    # test_own_model.py tests own_model. The example images needs a server of a vision model. The example
    # ray_dataset needs Ray and is tested in tests/ray.
    other_examples = {"own_model", "images", "ray_dataset"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *CLIENTS,
        *STANDALONE_EXAMPLES,
        *other_examples,
    }


def test_openai_client_prints_the_expected_output(url: str) -> None:
    output = run_example("openai_client", "--url", url)
    assert "answer: Penstock is an LLM inference library" in output
    assert "story: Once upon a time" in output
    assert "60 completion" in output
    assert "call: get_weather {'city': 'Paris'}" in output
    assert "sunny in Paris" in output


def test_anthropic_client_prints_the_expected_output(url: str) -> None:
    pytest.importorskip("anthropic", reason="needs the package anthropic")
    output = run_example("anthropic_client", "--url", url)
    assert output.count("Penstock is an LLM inference library") == 2
    assert "stop reason: end_turn" in output
    assert "call: get_weather {'city': 'Paris'}" in output
    assert "sunny in Paris" in output


def test_responses_client_prints_the_expected_output(url: str) -> None:
    output = run_example("responses_client", "--url", url)
    assert "answer: Penstock is an LLM inference library" in output
    assert "response: completed" in output
    assert "Berlin" in output
    assert "input items: 3" in output
    assert "parsed: name='Tom' age=31" in output


def test_async_llm_prints_the_expected_output() -> None:
    *answers, last_line = run_example("async_llm").splitlines()
    assert answers[0] == "What is the capital of Germany? -> The capital of Germany is Berlin."
    assert "Penstock is an LLM inference library" in answers[1]
    assert last_line == "the long answer was cancelled"


def test_structured_output_prints_parsed_answers_and_a_choice(url: str) -> None:
    output = run_example("structured_output", "--url", url)
    assert "Person(name='Tom', age=31, city='Oslo')" in output
    assert "Verdict(mood=" in output
    assert output.splitlines()[-1].endswith(("-> yes", "-> no", "-> perhaps"))


def test_lora_prints_adapted_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that docs/features.md names is an adapter that the example writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lora.py"])
    *lines, last_line = run_in_process("lora", capsys).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["no adapter", "tone", "accent"]
    assert len({line.partition(":")[2] for line in lines}) == 3
    assert last_line == "adapters: adapters/tone, adapters/accent"
    folders = set(re.findall(r"adapters/\w+", (ROOT / "docs" / "features.md").read_text()))
    assert folders == {"adapters/tone"}
    with LLM("demo", lora=["tone=adapters/tone"]) as llm:
        plain_output, adapted_output = llm.generate(
            ["Once upon a time"] * 2, SamplingParams(max_new_tokens=25), adapter=[None, "tone"]
        )
    assert plain_output.text != adapted_output.text


def test_score_batch_finds_the_best_answers(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_in_process("score_batch", capsys).splitlines()
    best_answers = {
        question: lines[number + 1].split()[-1]
        for number, question in enumerate(lines)
        if question[-1] == "?"
    }
    assert best_answers == {
        "What is the capital of Germany?": "Berlin",
        "What is the capital of France?": "Paris",
    }


def test_speculation_accepts_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    output = run_in_process("speculation", capsys)
    assert "the same text: True" in output
    num_accepted = int(output.splitlines()[-1].split()[0])
    assert num_accepted > 5


def test_speech_writes_an_audio_file_and_prints_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_speech(tmp_path / "model", codec=str(CODEC_REFERENCES / "neucodec"))
    output = tmp_path / "a.wav"
    monkeypatch.setattr(sys, "argv", ["speech.py", str(model), "Hello.", "--output", str(output)])
    first_line, last_line = run_in_process("speech", capsys).splitlines()
    assert re.fullmatch(r"first audio after \d+\.\d\d s", first_line)
    assert re.fullmatch(r"\d+\.\d\d s of audio in \d+ chunks, real-time factor \d+\.\d\d", last_line)
    assert output.read_bytes()[:4] == b"RIFF"


def test_semantic_search_ranks_the_matching_text_first_and_refuses_unusable_models(
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
    best_line, second_line = run_in_process("semantic_search", capsys).splitlines()
    assert best_line == "1.000  b.md: Greetings"
    assert re.fullmatch(r"0\.\d{3}  a\.md: Ca(ts|rs)", second_line)
    monkeypatch.setattr(sys, "argv", ["semantic_search.py", "demo", "cats"])
    with pytest.raises(SystemExit, match="demo is not an embeddings model"):
        run_in_process("semantic_search", capsys)
    monkeypatch.setattr(sys, "argv", ["semantic_search.py", str(tmp_path / "absent"), "cats"])
    with pytest.raises(SystemExit, match="absent cannot be used for search"):
        run_in_process("semantic_search", capsys)


def run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(Path(EXAMPLES, f"{name}.py")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_in_process(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example in this process, so that torch is imported only once. Return its output."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out
