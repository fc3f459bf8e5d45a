"""Speculative decoding: one forward verifies several drafted tokens; the text equals plain decoding.

The conversation holds a text that the answer repeats, as in editing or summarising. The drafts come from the
conversation itself (``ngram``); with ``draft_model_path`` a small model generates them.

    python examples/speculation.py
"""

from __future__ import annotations

from typing import Any

from penstock import LLM, SamplingParams

QUESTION = {"role": "user", "content": "What is Penstock?"}
ANSWER = "Penstock is an LLM inference library and server in Python. It carries tokens to a model and back."
CHAT: Any = [QUESTION, {"role": "assistant", "content": ANSWER}, QUESTION]
PARAMS = SamplingParams(temperature=0.7, top_k=0, top_p=0.9, seed=3)


def answer(**config: Any) -> tuple[str, LLM]:
    """Open the model, answer a question that the conversation already answers, and return answer and
    model."""
    llm = LLM("demo", quantization_encoding="float32", **config)
    (output,) = llm.chat(CHAT, PARAMS)
    return output.text, llm


def main() -> None:
    """Generate the same text without and with speculation, and compare."""
    plain, llm = answer()
    llm.close()
    drafted, llm = answer(speculative_method="ngram", adaptive_speculation=False)
    stats = llm.pipeline.speculation_stats
    llm.close()
    print(drafted)
    print(f"the same text: {plain == drafted}")
    print(
        f"{stats.num_accepted} of {stats.num_proposed} drafted tokens accepted, "
        f"{stats.num_verified_steps} forwards with drafts"
    )


if __name__ == "__main__":
    main()
