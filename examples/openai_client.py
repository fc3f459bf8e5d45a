"""The OpenAI client with a Penstock server: a response, a stream, and a tool call.

penstock serve &
python examples/openai_client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def answer(client: OpenAI, model: str) -> None:
    """Ask a question and print the answer."""
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is Penstock?"}], temperature=0
    )
    print("answer:", reply.choices[0].message.content)


def stream(client: OpenAI, model: str) -> None:
    """Stream a story, then print the numbers of prompt tokens and completion tokens."""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a short story"}],
        max_tokens=60,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    print("story: ", end="")
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\ntokens: {chunk.usage.prompt_tokens} prompt, {chunk.usage.completion_tokens} completion")


def use_tool(client: OpenAI, model: str) -> None:
    """Let the model call a function, send it the result, and print the answer."""
    messages: list[Any] = [{"role": "user", "content": "What's the weather like in Paris today?"}]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="required", temperature=0
    )
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        assert call.type == "function"
        print("call:", call.function.name, json.loads(call.function.arguments))
        result = json.dumps({"temperature": 18, "weather": "sunny"})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    reply = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], temperature=0)
    print("answer:", reply.choices[0].message.content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        answer(client, model)
        stream(client, model)
        use_tool(client, model)
