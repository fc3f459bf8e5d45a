"""``penstock chat``: commands, images, interruption and errors, with a model in this process and a server."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.documents import ROOT
from support.in_process_server import THINKING
from support.live_server import live_server

from penstock.cli import chat, cli
from penstock.cli.chat_backends import AnswerPiece, ChatMessages, ServerBackend
from penstock.cli.chat_session import ChatSession
from penstock.errors import InputError
from penstock.testing import FakePipeline


def format_content(content: Any) -> str:
    """Return a message content as text, with the number of bytes of each image."""
    if isinstance(content, str):
        return content
    urls = [part["image_url"]["url"] for part in content[:-1]]
    sizes = [len(b64decode(url.removeprefix("data:image/png;base64,"), validate=True)) for url in urls]
    return f"{sizes}{content[-1]['text']}"


class EchoBackend:
    """A back end that repeats the conversation.

    A question with "refuse" raises InputError. A question with "stop here" raises KeyboardInterrupt.
    """

    name = "scripted"

    def __init__(self) -> None:
        self.settings: Mapping[str, Any] = {}
        self.num_closed = 0

    def answer(self, messages: ChatMessages, settings: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        self.settings = {**settings}
        try:
            yield AnswerPiece("Hm. ", is_reasoning=True)
            if "refuse" in format_content(messages[-1]["content"]):
                raise InputError("it is refused")
            yield AnswerPiece("|".join(format_content(message["content"]) for message in messages))
            if "stop here" in format_content(messages[-1]["content"]):
                raise KeyboardInterrupt
            yield AnswerPiece("!")
            yield AnswerPiece("", num_tokens=7)
        finally:
            self.num_closed += 1


def run_chat(monkeypatch: pytest.MonkeyPatch, *lines: str) -> tuple[Result, EchoBackend]:
    """Run the command with lines of input and an `EchoBackend`. Return the result and the back end."""
    backend = EchoBackend()
    monkeypatch.setattr(chat, "ServerBackend", lambda *_: backend)
    result = CliRunner().invoke(cli, ["chat", "--url", "http://x", "--seed", "3"], input="\n".join(lines))
    return result, backend


def test_commands_change_history_and_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    result, backend = run_chat(
        monkeypatch,
        "/system S",
        "one",
        "two\\",
        "more",
        "/undo",
        "/set temperature=0.5",
        '/set stop ["x"]',
        "/set seed",
        "three",
        "/retry",
        f"/save {path}",
        "/clear",
        '"""',
        "a",
        "b",
        '"""',
        "/system none",
        f"/load {path}",
        "four",
        "/exit",
        "never",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines() == [
        "Hm. S|one!",
        "Hm. S|one|S|one!|two",
        "more!",
        "Hm. S|one|S|one!|three!",
        "Hm. S|one|S|one!|three!",
        "Hm. S|a",
        "b!",
        "Hm. S|one|S|one!|three|S|one|S|one!|three!|four!",
    ]
    assert backend.settings == {"temperature": 0.5, "stop": ["x"], "max_tokens": 1024}
    assert backend.num_closed == 6
    saved_conversation = json.loads(path.read_text())
    assert (saved_conversation["system"], len(saved_conversation["messages"])) == ("S", 4)
    speeds = re.findall(r"7 tokens, [\d.]+ tokens/s, first token after \d+ ms", result.stderr)
    assert len(speeds) == 6


def test_a_failed_retry_keeps_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Iterator[AnswerPiece]:
        raise InputError("it is refused")

    backend = EchoBackend()
    session = ChatSession(backend, None, {})
    session.ask("one")
    messages = list(session.messages)
    monkeypatch.setattr(backend, "answer", refuse)
    with pytest.raises(InputError, match="it is refused"):
        session.handle("/retry")
    assert session.messages == messages
    assert len(messages) == 2


def test_images_are_sent_with_the_next_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image, text, saved_path = tmp_path / "a.png", tmp_path / "b.txt", tmp_path / "saved.json"
    image.write_bytes(b"12345")
    text.write_text("x")
    result, _ = run_chat(
        monkeypatch,
        f"/image {image}",
        f"/image {image}",
        "refuse",  # a refused question keeps the attached images
        "one",
        "/retry",
        f"/save {saved_path}",
        f"/image {image}",
        "/image none",
        f"/load {saved_path}",
        "two",
        f"/image {tmp_path}/none.png",
        f"/image {text}",
        "/image",
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
    assert lines[-3:] == ["Hm. Hm. [5, 5]one!", "Hm. [5, 5]one!", "Hm. [5, 5]one|[5, 5]one!|two!"]
    assert "the next question has 2 images" in result.stderr
    for words in ("none.png cannot be read: No such file", "its suffix means text/plain", "name a file"):
        assert words in result.stderr


def test_an_interrupt_stops_the_answer_and_keeps_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    result, backend = run_chat(monkeypatch, "stop here", "next")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].endswith("stop here")
    assert lines[1].endswith("stop here|stop here|next!")
    stopped_line, finished_line = (line for line in result.stderr.splitlines() if " ms" in line)
    # A stopped answer has no number of tokens.
    assert re.fullmatch(r"first token after \d+ ms, stopped", stopped_line)
    assert re.fullmatch(r"7 tokens, [\d.]+ tokens/s, first token after \d+ ms", finished_line)
    assert backend.num_closed == 2


def test_errors_do_not_end_the_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    malformed_file = tmp_path / "other.json"
    malformed_file.write_text("[]")
    result, _ = run_chat(
        monkeypatch,
        "/colour",
        "/set colour 1",
        "/set seed x",
        "/undo",
        "/save",
        f"/load {tmp_path}/none",
        f"/load {malformed_file}",
        "refuse",
        "fine",
    )
    assert result.exit_code == 0
    for expected_message in (
        "the command /colour is unknown",
        "'colour' is not a setting",
        "seed cannot be 'x'",
        "there is no question yet",
        "name a file",
        "cannot be read: No such file",
        "is not a conversation",
        "it is refused",
    ):
        assert expected_message in result.stderr
    assert result.stdout.splitlines()[-1].endswith("fine!")
    assert "refuse" not in result.stdout  # the refused question is not part of the history


def test_help_and_set_continue_the_session_and_quit_ends_it() -> None:
    session = ChatSession(EchoBackend(), None, {"seed": 1})
    assert session.handle("/help")
    assert session.handle("/set")
    assert not session.handle("/quit")


def test_a_chat_runs_with_a_model_in_this_process() -> None:
    lines = "What is the capital of Germany?\nWhat is Penstock?\n"
    result = CliRunner().invoke(
        cli, ["chat", "demo", "--temperature", "0", "--kv-cache-memory", "64MiB"], input=lines
    )
    assert result.exit_code == 0, result.output
    first_answer, second_answer = result.stdout.splitlines()
    assert first_answer == "The capital of Germany is Berlin."
    assert second_answer.startswith("Penstock is an LLM inference library")
    assert "tokens/s" in result.stderr


def test_a_chat_with_an_image_runs_in_this_process() -> None:
    lines = (
        f"/image {ROOT / 'examples' / 'shapes.png'}\nWhat is in the picture?\nHow many shapes are there?\n"
    )
    flags = ["--temperature", "0", "--kv-cache-memory", "8MiB"]
    result = CliRunner().invoke(cli, ["chat", "demo-vision", *flags], input=lines)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "There is a red circle and a blue square."


def test_a_chat_runs_with_a_server_and_reports_its_errors() -> None:
    pipeline = FakePipeline.answering(
        lambda prompt: "<think>Hm.</think>" + prompt.removesuffix("assistant: ")
    )
    with live_server(pipeline=pipeline, template=THINKING, api_key=("k",)) as server:

        def run_chat_command(*flags: str) -> Result:
            return CliRunner().invoke(cli, ["chat", "--url", server.url, *flags], input="Hello there\n")

        actual = run_chat_command("--api-key", "k")
        assert actual.exit_code == 0, actual.output
        assert actual.stdout == "Hm.user: Hello there\n"
        assert "the API key is wrong" in run_chat_command("--api-key", "x").stderr
        assert "model_x" in run_chat_command("model_x", "--api-key", "k", "--system", "S").stderr
        refused_result = run_chat_command("--api-key", "k", "--max-length", "5")
        assert "--max-length is for a model in this process" in refused_result.output
    unreachable_result = CliRunner().invoke(cli, ["chat", "--url", "http://127.0.0.1:9"], input="")
    assert unreachable_result.exit_code == 2
    assert "no server answers at http://127.0.0.1:9" in unreachable_result.stderr


CONTENT_EVENT = b'data: {"choices": [{"delta": {"content": "Hel"}, "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    ("events", "last_chunk", "message"),
    [
        (CONTENT_EVENT, b"", "the server at {url} ended the stream before the end of the answer"),
        (CONTENT_EVENT, b"0\r\n\r\n", "the server at {url} ended the stream before the end of the answer"),
        (CONTENT_EVENT + b"data: {\n\n", b"0\r\n\r\n", "the server sent an event that is not JSON"),
        (CONTENT_EVENT.replace(b"null", b'"stop"'), b"0\r\n\r\n", None),
        (CONTENT_EVENT.replace(b"null", b'"stop"') + b"data: [DONE]\n\n", b"0\r\n\r\n", None),
    ],
    ids=["broken connection", "no finish reason", "no JSON", "no [DONE]", "complete"],
)
def test_a_chat_reports_an_incomplete_answer_of_a_server(
    events: bytes, last_chunk: bytes, message: str | None
) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(events), events) + last_chunk)
            self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = CliRunner().invoke(cli, ["chat", "m", "--url", url], input="Hello\n")
        server.shutdown()
    assert result.exit_code == 0
    assert result.stdout.startswith("Hel")
    if message is None:
        assert "penstock:" not in result.stderr
    else:
        assert f"penstock: {message.format(url=url)}" in result.stderr


def test_a_chat_reports_a_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingResponse:
        def __iter__(self) -> Iterator[bytes]:
            yield CONTENT_EVENT
            raise TimeoutError("timed out")

        def close(self) -> None:
            pass

    monkeypatch.setattr(ServerBackend, "_open", lambda *_: FailingResponse())
    result = CliRunner().invoke(cli, ["chat", "m", "--url", "http://x"], input="Hello\n")
    assert result.exit_code == 0
    assert result.stdout.startswith("Hel")
    assert "penstock: the connection to http://x failed during the answer: timed out" in result.stderr
