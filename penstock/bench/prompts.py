"""Prompts of random tokens or from a file, and the request bodies that contain them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.bench.http_client import HttpClient
from penstock.errors import ConfigError, InputError

EndpointName: TypeAlias = Literal["chat", "completions"]
BenchPrompt: TypeAlias = str | list[int] | list[dict[str, object]]
"""A text, token ids, or messages."""

PATHS: dict[EndpointName, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_WORDS = (
    "river stone water mill wheel turn morning valley bridge engine quiet letter north garden seven window"
    " paper winter copper light harbor simple number yellow forest measure story under market wagon silver"
    " machine gentle answer table cloud farmer little signal corner music island travel second bottle"
).split()


@dataclass(frozen=True, kw_only=True)
class RequestTemplate:
    """Builds request bodies from prompts."""

    endpoint: EndpointName
    model: str
    output_length: int
    stream: bool = True
    ignore_eos: bool = True
    temperature: float | None = 0.0
    seed: int = 0
    extra_fields: Mapping[str, object] = field(default_factory=dict)
    """Additional fields of the body. They replace fields of the same name."""

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return PATHS[self.endpoint]

    def body(self, index: int, prompt: BenchPrompt) -> dict[str, object]:
        """Return the body of request number ``index``, with the seed ``seed + index``.

        Raises:
            InputError: the endpoint does not accept this type of prompt.
        """
        body: dict[str, object] = {"model": self.model, "max_tokens": self.output_length}
        if self.endpoint == "completions":
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
                raise InputError(f"prompt {index + 1} is a list of messages: use --endpoint chat")
            body["prompt"] = prompt
        else:
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
                raise InputError(f"prompt {index + 1} is token ids: use --endpoint completions")
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | {"seed": self.seed + index} | dict(self.extra_fields)


async def random_prompts(
    client: HttpClient, model: str, endpoint: EndpointName, count: int, length: int, seed: int
) -> list[BenchPrompt]:
    """Return independent prompts of random tokens, so that a prefix cache has almost no hits.

    The tokens are those of a list of English words.

    For completions, each prompt has exactly ``length`` tokens. For chats, the text has about ``length``
    tokens, and the chat template adds further tokens. The exact number is in the ``usage`` of a response.

    Raises:
        InputError: ``length`` is less than 1, or the server cannot tokenize text.
    """
    if length < 1:
        raise InputError(f"prompts have at least 1 token, not {length}")
    generator = random.Random(seed)
    text = " ".join(generator.choices(_WORDS, k=2000))
    tokens: list[int] = (await _request_json(client, "/tokenize", {"model": model, "prompt": text}))["tokens"]
    tokens = tokens[len(tokens) // 10 :]  # drops the first tokens, which can include BOS
    prompts = [generator.choices(tokens, k=length) for _ in range(count)]
    if endpoint == "completions":
        return list(prompts)
    texts = []
    for prompt in prompts:
        texts.append(
            (await _request_json(client, "/detokenize", {"model": model, "tokens": prompt}))["prompt"]
        )
    return texts


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Return the prompts in a file, one per line that is not blank.

    A line of a ``.jsonl`` file is an object with ``prompt`` or ``messages``, or the prompt itself.

    Raises:
        InputError: the file has no prompts, or a line is not a prompt.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered_lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered_lines:
        raise InputError(f"{path} has no prompts")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered_lines]
    return [_parse_prompt(path, number, line) for number, line in numbered_lines]


def repeat_prompts(prompts: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """Return the first ``count`` prompts. If there are fewer, they are repeated from the beginning."""
    return [prompts[index % len(prompts)] for index in range(count)]


async def served_model(client: HttpClient) -> str:
    """Return the first model that the server lists.

    Raises:
        InputError: the server lists no model, or answers with an error.
    """
    answer = await _request_json(client, "/v1/models")
    models = answer.get("data") if isinstance(answer, dict) else None
    if not models:
        raise InputError("the server lists no model at /v1/models: name one with --model")
    return str(models[0]["id"])


async def _request_json(client: HttpClient, path: str, body: object = None) -> Any:
    answer = await (client.get(path) if body is None else client.post(path, body))
    if answer.status == 404 and path in ("/tokenize", "/detokenize"):
        raise InputError(f"the server has no {path}, which random prompts need: pass a file with --prompts")
    if answer.status != 200:
        text = answer.body.decode(errors="replace")[:500]
        raise InputError(f"{path} returned status {answer.status}: {text}")
    return msgspec.json.decode(answer.body)


def _parse_prompt(path: Path, line_number: int, line: str) -> BenchPrompt:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}, line {line_number}: {error}") from None
    prompt = value.get("messages", value.get("prompt")) if isinstance(value, dict) else value
    if not isinstance(prompt, str | list) or not prompt:
        raise InputError(f"{path}, line {line_number} has neither a prompt nor messages")
    return prompt


def parse_fields(text: str) -> dict[str, object]:
    """Return the request fields in the text of a JSON object.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError("extra_body", f"is not a JSON object: {error}") from None
    return fields
