"""Scoring without generation: find the most probable of several answers.

Each prompt of the batch is the question followed by one of the answers. The score is the sum of the log
probabilities of the answer's tokens, as in multiple-choice benchmarks. No token is generated.

    python examples/score_batch.py
"""

from __future__ import annotations

from math import fsum

from penstock import LLM, GenerationOutput, SamplingParams

QUESTIONS = {
    "What is the capital of Germany?": ["Berlin", "Paris", "Oslo"],
    "What is the capital of France?": ["Berlin", "Paris", "Oslo"],
}


def log_probability(output: GenerationOutput, num_question_tokens: int) -> float:
    """Return the log probability of the prompt tokens after the first ``num_question_tokens`` tokens."""
    assert output.prompt_log_probabilities is not None
    return fsum(output.prompt_log_probabilities.token_log_probabilities[num_question_tokens - 1 :])


def main() -> None:
    """Print the answers to each question, the most probable first."""
    with LLM("demo") as llm:
        for question, answers in QUESTIONS.items():
            messages = [{"role": "user", "content": question}]
            (question_output,) = llm.chat(messages, SamplingParams(max_new_tokens=0))
            country = question.removeprefix("What is the capital of ").rstrip("?")
            prompts = [
                question_output.prompt_token_ids
                + llm.tokenizer.encode_text(f"The capital of {country} is {city}.").tolist()
                for city in answers
            ]
            outputs = llm.generate(prompts, SamplingParams(max_new_tokens=0), prompt_logprobs=0)
            scores = [log_probability(output, len(question_output.prompt_token_ids)) for output in outputs]
            print(question)
            for score, city in sorted(zip(scores, answers, strict=True), reverse=True):
                print(f"{score:9.2f}  {city}")


if __name__ == "__main__":
    main()
