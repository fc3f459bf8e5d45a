"""The Responses API with the official OpenAI client: a stream, the next turn, and a structured output.

penstock serve &
python examples/responses_client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse

from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """The schema of the structured output."""

    name: str
    age: int


def converse(client: OpenAI, model: str) -> None:
    """Stream a response, then continue the stored conversation."""
    print("answer: ", end="")
    with client.responses.stream(model=model, input="What is Penstock?", temperature=0) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        first = stream.get_final_response()
    print(f"\nresponse: {first.status}")
    second = client.responses.create(
        model=model, input="What is the capital of Germany?", previous_response_id=first.id, temperature=0
    )
    print("next answer:", second.output_text)
    print("input items:", len(client.responses.input_items.list(second.id).data))


def parse(client: OpenAI, model: str) -> None:
    """Request an output with the schema of `Person` and print the parsed object."""
    parsed = client.responses.parse(
        model=model, input="Tom is 31 years old.", text_format=Person, temperature=0, max_output_tokens=64
    )
    print("parsed:", parsed.output_parsed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        converse(client, model)
        parse(client, model)
