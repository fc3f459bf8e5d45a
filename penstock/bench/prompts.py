"""What is asked: prompts of random tokens, or those of a file, as bodies of requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.bench.http_client import HttpClient
from penstock.errors import ConfigError, InputError

Endpoint: TypeAlias = Literal["chat", "completions"]
Prompt: TypeAlias = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or messages."""

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_WORDS = (
    "river stone water mill wheel turn morning valley bridge engine quiet letter north garden seven window"
    " paper winter copper light harbor simple number yellow forest measure story under market wagon silver"
    " machine gentle answer table cloud farmer little signal corner music island travel second bottle"
).split()


@dataclass(frozen=True, kw_only=True)
class RequestTemplate:
    """How the bodies of requests are made from prompts."""

    endpoint: Endpoint
    model: str
    output_length: int
    stream: bool = True
    ignore_eos: bool = True
    temperature: float | None = 0.0
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, as they are."""

    @property
    def path(self) -> str:
        """Where the requests go."""
        return PATHS[self.endpoint]

    def body(self, index: int, prompt: Prompt) -> dict[str, Any]:
        """The body of a request; each has a seed of its own.

        Raises:
            InputError: the endpoint takes no such prompt.
        """
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.output_length}
        if self.endpoint == "completions":
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
                raise InputError(f"prompt {index + 1} is a list of messages: measure the endpoint chat")
            body["prompt"] = prompt
        else:
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
                raise InputError(f"prompt {index + 1} is token ids: measure the endpoint completions")
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | {"seed": self.seed + index} | dict(self.more)


async def random_prompts(
    client: HttpClient, model: str, endpoint: Endpoint, count: int, length: int, seed: int
) -> list[Prompt]:
    """Prompts of random words that share no beginning: a prefix cache finds nothing.

    For completions each has exactly ``length`` tokens. For chats its text has about so many, and the chat
    template adds its own; ``usage`` tells.

    Raises:
        InputError: the server does not tell the tokens of a text.
    """
    if length < 1:
        raise InputError(f"prompts have at least 1 token, not {length}")
    draw = random.Random(seed)
    text = " ".join(draw.choices(_WORDS, k=2000))
    tokens: list[int] = (await _ask(client, "/tokenize", {"model": model, "prompt": text}))["tokens"]
    tokens = tokens[len(tokens) // 10 :]  # no mark of the beginning among them
    rows = [draw.choices(tokens, k=length) for _ in range(count)]
    if endpoint == "completions":
        return list(rows)
    texts = []
    for row in rows:
        texts.append((await _ask(client, "/detokenize", {"model": model, "tokens": row}))["prompt"])
    return texts


def prompts_of_file(path: Path) -> list[Prompt]:
    """The prompts of a file: a line each, as it is, or of ``.jsonl`` the ``prompt`` or ``messages`` of each.

    Raises:
        InputError: there is none, or a line is none.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{path} has no prompts")
    if path.suffix != ".jsonl":
        return list(lines)
    return [_prompt_of_line(path, number, line) for number, line in enumerate(lines, 1)]


def chosen(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of them, from the beginning again where there are fewer."""
    return [prompts[index % len(prompts)] for index in range(count)]


async def served_model(client: HttpClient) -> str:
    """The first model that the server names.

    Raises:
        InputError: it names none.
    """
    answer = await _ask(client, "/v1/models")
    models = answer.get("data") if isinstance(answer, dict) else None
    if not models:
        raise InputError("the server names no model at /v1/models: say which with --model")
    return str(models[0]["id"])


async def _ask(client: HttpClient, path: str, body: Any = None) -> Any:
    answer = await (client.get(path) if body is None else client.post(path, body))
    if answer.status == 404 and path in ("/tokenize", "/detokenize"):
        raise InputError(f"the server has no {path}, which random prompts need: give prompts with --prompts")
    if answer.status != 200:
        said = answer.body.decode(errors="replace")[:500]
        raise InputError(f"{path} was answered with {answer.status}: {said}")
    return msgspec.json.decode(answer.body)


def _prompt_of_line(path: Path, number: int, line: str) -> Prompt:
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}, line {number}: {error}") from None
    prompt = entry.get("messages", entry.get("prompt")) if isinstance(entry, dict) else entry
    if not isinstance(prompt, str | list) or not prompt:
        raise InputError(f"{path}, line {number} has neither a prompt nor messages")
    return prompt


def fields_of(text: str) -> dict[str, Any]:
    """Further fields of requests, from a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("extra_body", f"is not a JSON object: {error}") from None
    return fields
