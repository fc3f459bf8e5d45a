"""Roles of a model's own, such as ``ipython``: served where the chat template shows their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from penstock.serve.http.problems import RequestProblem
from penstock.text.tokenizer import TextTokenizer

STANDARD = frozenset({"system", "developer", "user", "assistant", "tool"})


def check_roles(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: TextTokenizer,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> None:
    """Refuse messages of roles that the chat template would leave out of the prompt.

    Some templates raise on a role that they do not know. Others skip such a message, so that the model would
    never see it: a mark in place of its content shows which.

    Args:
        messages: as they go to the template.
        tokenizer: has the template.
        tools: as they go to the template.
        options: variables for the template.

    Raises:
        RequestProblem: 400 that names the role.
        InputError: the template refuses the messages, in its own words.
    """
    marks = {
        index: f"mark{index}x{uuid4().hex}"
        for index, message in enumerate(messages)
        if message["role"] not in STANDARD
    }
    if not marks or not tokenizer.has_chat_template:
        return
    for index in marks:
        _check_name(messages[index]["role"], index, tokenizer)
    marked = [
        {**message, "content": marks.get(index, _as_text(message.get("content")))}
        for index, message in enumerate(messages)
    ]
    text = tokenizer.render_chat(marked, tools, options)
    for index, mark in marks.items():
        if mark not in text:
            role = messages[index]["role"]
            raise RequestProblem(
                400,
                f"the model's chat template shows no messages of role {role!r}: "
                f"send one of {', '.join(sorted(STANDARD))}",
                param=f"messages[{index}].role",
            )


def _check_name(role: str, index: int, tokenizer: TextTokenizer) -> None:
    special = next((text for text in tokenizer.special_token_texts if text and text in role), None)
    if special is not None:
        raise RequestProblem(
            400,
            f"the role {role!r} has the special token {special!r} in it",
            param=f"messages[{index}].role",
        )


def _as_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content)
    return content or ""
