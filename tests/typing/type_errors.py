"""Code with type errors that a type checker must find, next to similar valid code."""

from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.pipelines.core import Grammar


def construct_models(settings: dict[str, Any]) -> list[LLM]:
    LLM("demo", bogus=1)  # type: ignore[call-arg]
    LLM("demo", max_length="2048")  # type: ignore[arg-type]
    LLM("demo", model_path="other")  # type: ignore[call-arg]
    LLM("demo", lora=[1])  # type: ignore[list-item]
    SamplingParams(max_tokens=3)  # type: ignore[call-arg]
    return [
        LLM(Path("model"), max_length=2048, devices="cpu", lora=["tone=adapters/tone"]),
        LLM("demo", config_file=Path("settings.toml"), chat_template=None),
        LLM("demo", kv_cache_memory="4GiB"),
        LLM("demo", **settings),
    ]


def send_messages(llm: LLM) -> None:
    llm.chat([{"role": "user", "content": "What is Penstock?"}])
    llm.chat([[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]])
    conversation = [{"role": "user", "content": "Hello"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    llm.chat(conversation, SamplingParams(max_new_tokens=3), tools=[tool], grammar=Grammar("json_object"))
    llm.chat([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    llm.generate("x", response_format={"type": "json_object"})
    for chunk in llm.stream(messages=conversation):
        print(chunk)
    llm.chat("Hello")  # type: ignore[arg-type]
    llm.chat([1])  # type: ignore[arg-type]
    llm.generate("x", max_tokens=3)  # type: ignore[call-arg]
