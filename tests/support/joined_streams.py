"""Functions that join the chunks of a stream into the response to a request without ``stream``."""

from __future__ import annotations

from typing import Any

_VARIABLE_FIELDS = ("id", "created")  # fields that differ in each response


def drop_variable_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a response without the fields that differ in each response.

    Empty token ids are also removed, and empty log probabilities of a chat are replaced by None.
    """
    plain_answer = {key: value for key, value in answer.items() if key not in _VARIABLE_FIELDS}
    for choice in plain_answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", []):
            call.pop("id")
        _drop_empty(choice)
    return plain_answer


def join_chat(events: list[Any]) -> dict[str, Any]:
    """Join the chunks of a chat. The result has the fields that `drop_variable_fields` keeps."""
    *chunks, end_event = events
    assert end_event == "[DONE]"
    answer = _join_common_fields(chunks, "chat.completion")
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for chunk_choice in chunk["choices"]:
            _add_to_chat(choices, chunk_choice)
    answer["choices"] = [_finish_chat(choices[index]) for index in sorted(choices)]
    return answer


def join_completion(events: list[Any]) -> dict[str, Any]:
    """Join the chunks of a completion. The result has the fields that `drop_variable_fields` keeps."""
    *chunks, end_event = events
    assert end_event == "[DONE]"
    answer = _join_common_fields(chunks, "text_completion")
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for chunk_choice in chunk["choices"]:
            choice = choices.setdefault(
                chunk_choice["index"], {"index": chunk_choice["index"], "text": "", "logprobs": None}
            )
            assert "finish_reason" not in choice, "a chunk follows the last chunk"
            choice["text"] += chunk_choice["text"]
            if chunk_choice["logprobs"] is not None:
                rows = choice["logprobs"] or {key: [] for key in chunk_choice["logprobs"]}
                choice["logprobs"] = {key: rows[key] + chunk_choice["logprobs"][key] for key in rows}
            if "prompt_token_ids" in chunk_choice:
                choice["prompt_token_ids"] = chunk_choice["prompt_token_ids"]
            if "token_ids" in chunk_choice:
                choice["token_ids"] = choice.get("token_ids", []) + chunk_choice["token_ids"]
            if chunk_choice["finish_reason"] is not None:
                choice["finish_reason"] = chunk_choice["finish_reason"]
    answer["choices"] = [choices[index] for index in sorted(choices)]
    for choice in choices.values():
        _drop_empty(choice)
    return answer


def _drop_empty(choice: dict[str, Any]) -> None:
    """Remove empty token ids, and replace empty log probabilities of a chat by None.

    A stream may have no chunk with these fields.
    """
    if not choice.get("token_ids", True):
        del choice["token_ids"]
    if choice["logprobs"] and not choice["logprobs"].get("content", True):
        choice["logprobs"] = None


def _join_common_fields(chunks: list[Any], object_name: str) -> dict[str, Any]:
    first_chunk, last_chunk = chunks[0], chunks[-1]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert last_chunk["choices"] == []
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks[:-1])
    answer = {
        "object": object_name,
        "model": first_chunk["model"],
        "system_fingerprint": first_chunk["system_fingerprint"],
    }
    if "prompt_token_ids" in first_chunk:
        answer["prompt_token_ids"] = first_chunk["prompt_token_ids"]
    return {**answer, "usage": last_chunk["usage"]}


def _add_to_chat(choices: dict[int, dict[str, Any]], chunk_choice: dict[str, Any]) -> None:
    index, delta = chunk_choice["index"], chunk_choice["delta"]
    assert None not in delta.values(), "strict clients refuse nulls in a delta"
    if index not in choices:
        assert delta == {"role": "assistant", "content": ""}
        message = {"role": "assistant", "content": "", "refusal": None}
        choices[index] = {"index": index, "message": message, "logprobs": None}
    else:
        assert "role" not in delta
    choice = choices[index]
    message = choice["message"]
    assert "finish_reason" not in choice, "a chunk follows the last chunk"
    for key in ("content", "reasoning", "reasoning_content"):
        if key in delta:
            message[key] = message.get(key, "") + delta[key]
    for call in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert call["id"]
            calls.append(
                {"type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}}
            )
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if chunk_choice["logprobs"] is not None:
        rows = choice["logprobs"] or {"content": [], "refusal": None}
        choice["logprobs"] = {
            "content": rows["content"] + chunk_choice["logprobs"]["content"],
            "refusal": None,
        }
    if "token_ids" in chunk_choice:
        choice["token_ids"] = choice.get("token_ids", []) + chunk_choice["token_ids"]
    if chunk_choice["finish_reason"] is not None:
        choice["finish_reason"] = chunk_choice["finish_reason"]


def _finish_chat(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    return choice
