"""The Anthropic client with a Penstock server: a message, a stream, and a tool call.

pip install anthropic
penstock serve &
python examples/anthropic_client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from anthropic import Anthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
GREEDY = {"temperature": 0}
"""Sent as ``extra_body``, because the newest versions of the client have no sampling arguments."""


def converse(client: Anthropic, model: str) -> None:
    """Print an answer, then stream another answer to the same question."""
    question: Any = [{"role": "user", "content": "What is Penstock?"}]
    message: Any = client.messages.create(model=model, max_tokens=100, messages=question, extra_body=GREEDY)
    print("answer:", message.content[0].text)
    print("stream: ", end="")
    with client.messages.stream(model=model, max_tokens=100, messages=question, extra_body=GREEDY) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print("\nstop reason:", stream.get_final_message().stop_reason)


def use_tool(client: Anthropic, model: str) -> None:
    """Let the model call a function, send it the result, and print the answer."""
    messages: list[Any] = [{"role": "user", "content": "What's the weather like in Paris today?"}]
    arguments: Any = {"model": model, "max_tokens": 100, "tools": [WEATHER], "extra_body": GREEDY}
    message: Any = client.messages.create(messages=messages, **arguments)
    messages.append({"role": "assistant", "content": message.content})
    result = json.dumps({"temperature": 18, "weather": "sunny"})
    for block in message.content:
        if block.type == "tool_use":
            print("call:", block.name, block.input)
            answer = {"type": "tool_result", "tool_use_id": block.id, "content": result}
            messages.append({"role": "user", "content": [answer]})
    final: Any = client.messages.create(messages=messages, **arguments)
    print("answer:", final.content[0].text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    with Anthropic(base_url=options.url, api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        converse(client, model)
        use_tool(client, model)
