"""Measure how many questions about new pictures the model `demo-vision` answers correctly.

    python tools/measure_demo_vision.py --pictures 300

The seed of the pictures differs from the seed of the training. For each picture, the model answers the
first question of each kind among 60 random questions, in a chat with greedy decoding. An answer is correct
if it equals the expected text, except for white space at its ends.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

from demo_vision.pictures import draw, random_scene
from demo_vision.questions import Question, ask

from penstock import LLM, SamplingParams

SEED = 987_654_321
_NUM_QUESTIONS = 60
"""Number of random questions about a picture; the model answers the first question of each kind."""


def first_of_each_kind(questions: list[Question]) -> list[Question]:
    """Return the first question of each kind."""
    by_kind: dict[str, Question] = {}
    for question in questions:
        by_kind.setdefault(question.kind, question)
    return list(by_kind.values())


def main() -> None:
    """Measure the model and print the share of correct answers for each kind of question."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo-vision")
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    chats, expected = [], []
    for _ in range(options.pictures):
        scene, side = random_scene(rng), rng.randint(120, 400)
        image = draw(scene, (side, side), rng)
        for question in first_of_each_kind([ask(scene, rng) for _ in range(_NUM_QUESTIONS)]):
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question.text}]
            chats.append([{"role": "user", "content": parts}])
            expected.append((question, len(scene.things)))
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    with LLM(options.model, max_batch_size=16) as llm:
        outputs = llm.chat(chats, params)
    results: dict[str, list[bool]] = defaultdict(list)
    for output, (question, num_shapes) in zip(outputs, expected, strict=True):
        is_correct = output.text.strip() == question.answer
        results[question.kind].append(is_correct)
        if question.kind == "describe":
            results[f"describe, {num_shapes} shapes"].append(is_correct)
    rates = {kind: (sum(values) / len(values), len(values)) for kind, values in sorted(results.items())}
    for kind, (rate, count) in rates.items():
        print(f"{kind:20} {rate:.3f}  of {count}")
    if options.json:
        options.json.write_text(json.dumps(rates, indent=2))


if __name__ == "__main__":
    main()
