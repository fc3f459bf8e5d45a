"""Checks model-specific roles, such as ``ipython``, which the chat template must support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import uuid4

from penstock.serve.http.problems import RequestProblem
from penstock.text.chat_template import Message
from penstock.text.tokenizer import TextTokenizer

STANDARD_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def check_roles(
    messages: Sequence[Message],
    tokenizer: TextTokenizer,
    tools: Sequence[Mapping[str, object]] | None,
    options: Mapping[str, object],
) -> None:
    """Raise if the chat template omits messages of a role, or if the name of a role contains a special token.

    Checks only roles outside `STANDARD_ROLES`. Some templates raise an error for an unknown role. Other
    templates silently skip the message. To detect skipped messages, this function renders the template with a
    unique marker as the content of each checked message. Does nothing without a chat template.

    Args:
        messages: the messages for the template.
        tokenizer: the tokenizer with the template.
        tools: the tools for the template.
        options: the variables of the template.

    Raises:
        RequestProblem: 400; the message names the role.
        InputError: the template raises an error, for example for an unknown role.
    """
    markers = {
        index: f"marker{index}x{uuid4().hex}"
        for index, message in enumerate(messages)
        if message["role"] not in STANDARD_ROLES
    }
    if not markers or not tokenizer.has_chat_template:
        return
    for index in markers:
        _check_role_name(str(messages[index]["role"]), index, tokenizer)
    marked_messages: list[Message] = [
        {**message, "content": markers.get(index, _as_text(message.get("content")))}
        for index, message in enumerate(messages)
    ]
    text = tokenizer.render_chat(marked_messages, tools, options)
    for index, marker in markers.items():
        if marker not in text:
            role = messages[index]["role"]
            raise RequestProblem(
                400,
                f"the model's chat template omits messages of role {role!r}: "
                f"send one of {', '.join(sorted(STANDARD_ROLES))}",
                param=f"messages[{index}].role",
            )


def _check_role_name(role: str, index: int, tokenizer: TextTokenizer) -> None:
    special_token = next((text for text in tokenizer.special_token_texts if text and text in role), None)
    if special_token is not None:
        raise RequestProblem(
            400,
            f"the role {role!r} contains the special token {special_token!r}",
            param=f"messages[{index}].role",
        )


def _as_text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content)
    return str(content or "")
