"""Speculative decoding: one forward verifies several draft tokens. The generated text does not change.

The answer repeats a text of the conversation, as in editing or summarizing. The method ``ngram`` takes the
draft tokens from the conversation. With ``draft_model_path``, a draft model generates the draft tokens.

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
    """Load the model with a configuration and answer `CHAT`. Returns the answer and the model."""
    llm = LLM("demo", quantization_encoding="float32", **config)
    (output,) = llm.chat(CHAT, PARAMS)
    return output.text, llm


def main() -> None:
    """Generate an answer without and with speculation, and compare both."""
    text_without_drafts, llm = answer()
    llm.close()
    text_with_drafts, llm = answer(speculative_method="ngram", adaptive_speculation=False)
    stats = llm.pipeline.speculation_stats
    llm.close()
    print(text_with_drafts)
    print(f"the same text: {text_without_drafts == text_with_drafts}")
    print(
        f"{stats.num_accepted} of {stats.num_proposed} draft tokens accepted, "
        f"{stats.num_verified_steps} forwards with drafts"
    )


if __name__ == "__main__":
    main()
