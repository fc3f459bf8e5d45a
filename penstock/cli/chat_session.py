"""The conversation of `penstock chat`: messages, settings and commands."""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import click

from penstock.cli.chat_backends import ChatBackend, ChatMessages
from penstock.errors import InputError, PenstockError

SETTINGS: dict[str, Callable[[str], object]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "min_tokens": int,
    "seed": int,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "stop": json.loads,
}
"""Setting -> function that parses its text. ``stop`` is a JSON string or a JSON list of strings."""

HELP = """\
/system [TEXT]       set the system message; without a text, show it; /system none removes it
/set [NAME [VALUE]]  set a sampling parameter, also as NAME=VALUE; without a value, remove it; without
                     a name, list all
/image FILE          add an image to the next question; /image none removes the images
/clear               remove the conversation and the images of the next question; the system message
                     and the settings remain
/undo                remove the last question and its answer
/retry               answer the last question again
/save FILE           write the conversation and the settings to a JSON file
/load FILE           read a saved conversation and its settings
/help                show this list
/exit                end the chat; Ctrl-D does the same
Ctrl-C stops an answer. A line that ends with \\ continues on the next line, and a text between
lines with \"\"\" may have several lines."""


class ChatSession:
    """One conversation with a model.

    Args:
        backend: answers the questions.
        system: the system message, or None.
        settings: the sampling parameters by their names in the OpenAI API.
    """

    def __init__(self, backend: ChatBackend, system: str | None, settings: dict[str, object]) -> None:
        self.messages: list[Mapping[str, object]] = []
        """The conversation without the system message."""
        self.images: list[str] = []
        """The images of the next question, as ``data:`` URLs."""
        self.system = system
        self.settings = settings
        self._backend = backend

    def handle(self, line: str) -> bool:
        """Run a command or answer a question. Return False if the command is /exit or /quit.

        Raises:
            InputError: the command is unknown, has wrong arguments or fails.
            PenstockError: the question cannot be answered. The question is removed from the conversation.
        """
        if not line.startswith("/"):
            self.ask(line)
            return True
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        match name:
            case "exit" | "quit":
                return False
            case "help":
                click.echo(HELP)
            case "system":
                self._set_system(argument)
            case "set":
                self._change_setting(argument)
            case "image":
                self._add_image(argument)
            case "clear":
                self.messages.clear()
                self.images.clear()
            case "undo":
                self._undo()
            case "retry":
                self._retry()
            case "save":
                self.save(_file_path(argument))
            case "load":
                self.load(_file_path(argument))
            case _:
                raise InputError(f"the command /{name} is unknown: /help lists the commands")
        return True

    def ask(self, question: str) -> None:
        """Print the answer to a question. After Ctrl-C, the conversation has the printed part."""
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        text = {"type": "text", "text": question}
        self._ask({"role": "user", "content": [*parts, text] if parts else question})
        self.images.clear()

    def _ask(self, question: Mapping[str, object]) -> None:
        self.messages.append(question)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            answer = self._print([*system, *self.messages])
        except PenstockError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def save(self, path: Path) -> None:
        """Write the conversation to a file.

        Raises:
            InputError: the file cannot be written.
        """
        state = {"system": self.system, "settings": self.settings, "messages": self.messages}
        try:
            path.write_text(json.dumps(state, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        click.echo(f"saved {len(self.messages)} messages to {path}", err=True)

    def load(self, path: Path) -> None:
        """Read a conversation from a file.

        Raises:
            InputError: the file cannot be read, or is not a saved conversation. The session does not change.
        """
        try:
            state = json.loads(path.read_text())
            messages, settings = state["messages"], state["settings"]
            for message in messages:
                _check_message(message)
            for name in settings:
                _setting_parser(name)
            self.messages, self.settings, self.system = messages, settings, state["system"]
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{path} is not a conversation that /save has written") from None
        click.echo(f"loaded {len(self.messages)} messages from {path}", err=True)

    def _print(self, messages: ChatMessages) -> str:
        """Print an answer while it is generated, then its token rate. Return the text of the answer."""
        begin, first_piece_at = time.perf_counter(), None
        num_tokens: int | None = None
        texts: list[str] = []
        stop_note = ""
        with closing(self._backend.answer(messages, self.settings)) as pieces:  # type: ignore[type-var]
            try:
                for piece in pieces:
                    num_tokens = num_tokens if piece.num_tokens is None else piece.num_tokens
                    if first_piece_at is None:
                        first_piece_at = time.perf_counter()
                    if piece.is_reasoning:
                        click.echo(click.style(piece.text, dim=True), nl=False)
                        continue
                    texts.append(piece.text)
                    click.echo(piece.text, nl=False)
            except KeyboardInterrupt:
                stop_note = ", stopped"
        click.echo()
        end = time.perf_counter()
        first_piece_at = end if first_piece_at is None else first_piece_at
        line = f"first token after {(first_piece_at - begin) * 1000:.0f} ms{stop_note}"
        if num_tokens is not None:  # a server reports num_tokens only at the end of a complete answer
            speed = num_tokens / max(end - begin, 1e-9)
            line = f"{num_tokens} tokens, {speed:.1f} tokens/s, {line}"
        click.echo(click.style(line, dim=True), err=True)
        return "".join(texts)

    def _set_system(self, text: str) -> None:
        if text:
            self.system = None if text == "none" else text
        else:
            click.echo("no system message" if self.system is None else self.system)

    def _change_setting(self, text: str) -> None:
        name, _, value = text.replace("=", " ", 1).partition(" ")
        if not name:
            for setting in SETTINGS:
                click.echo(
                    f"{setting:20}{json.dumps(self.settings[setting]) if setting in self.settings else '-'}"
                )
            return
        parse = _setting_parser(name)
        if not value.strip():
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = parse(value.strip())
        except ValueError:
            raise InputError(f"{name} cannot be {value.strip()!r}") from None

    def _add_image(self, text: str) -> None:
        if text == "none":
            self.images.clear()
            return
        path = _file_path(text)
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        media_type = mimetypes.guess_type(path.name)[0] or "image/png"  # decoders ignore this type
        if not media_type.startswith("image/"):
            raise InputError(f"{path} is not an image: its suffix means {media_type}")
        self.images.append(f"data:{media_type};base64,{data}")
        click.echo(f"the next question has {len(self.images)} images", err=True)

    def _retry(self) -> None:
        """Replace the last answer. If the request fails, the old answer stays."""
        messages = list(self.messages)
        try:
            self._ask(self._undo())
        except PenstockError:
            self.messages[:] = messages
            raise

    def _undo(self) -> Mapping[str, object]:
        """Remove the last question and its answer. Return the question."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message
        raise InputError("there is no question yet")


def _setting_parser(name: str) -> Callable[[str], object]:
    if name not in SETTINGS:
        raise InputError(f"{name!r} is not a setting: use one of {', '.join(SETTINGS)}")
    return SETTINGS[name]


def _check_message(message: Mapping[str, object]) -> None:
    if not isinstance(message["role"], str) or not isinstance(message["content"], str | list):
        raise ValueError("not a message")


def _file_path(text: str) -> Path:
    if not text:
        raise InputError("name a file")
    return Path(text).expanduser()
