"""Concurrent streams in an asyncio program. The model runs in a separate process.

python examples/async_llm.py
"""

from __future__ import annotations

import asyncio

from penstock import AsyncLLM, SamplingParams

QUESTIONS = ["What is the capital of Germany?", "What is Penstock?"]


async def ask(llm: AsyncLLM, question: str) -> str:
    """Stream the answer to a question and return its text."""
    text = ""
    messages = [{"role": "user", "content": question}]
    async for delta in llm.stream(messages=messages, sampling_params=SamplingParams(max_new_tokens=60)):
        text += delta.text
    return text


async def main() -> None:
    """Ask all questions at the same time, then cancel a long answer."""
    async with AsyncLLM("demo") as llm:
        answers = await asyncio.gather(*[ask(llm, question) for question in QUESTIONS])
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(question, "->", answer)
        params = SamplingParams(max_new_tokens=900, ignore_eos=True)
        stream = llm.stream("Once upon a time", params)
        await anext(stream)
        await stream.aclose()  # the worker computes no further tokens
        print("the long answer was cancelled")


if __name__ == "__main__":
    asyncio.run(main())
