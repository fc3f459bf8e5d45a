"""Measure the demo model `demo-vision` on pictures that it was not trained on, through Penstock.

    python tools/measure_demo_vision.py --pictures 300

The seed of the pictures differs from that of the training. Each picture gets one question of each kind that
it allows, as a chat with greedy decoding. An answer counts if its text is exactly the expected one.
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
_TRIES = 60
"""Random questions about a picture from which one of each kind is taken."""


def one_of_each_kind(questions: list[Question]) -> list[Question]:
    """Return the first question of each kind."""
    found: dict[str, Question] = {}
    for question in questions:
        found.setdefault(question.kind, question)
    return list(found.values())


def main() -> None:
    """Measure and print."""
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
        for question in one_of_each_kind([ask(scene, rng) for _ in range(_TRIES)]):
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question.text}]
            chats.append([{"role": "user", "content": parts}])
            expected.append((question, len(scene.things)))
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    with LLM(options.model, max_batch_size=16) as llm:
        outputs = llm.chat(chats, params)
    right: dict[str, list[bool]] = defaultdict(list)
    for output, (question, things) in zip(outputs, expected, strict=True):
        is_right = output.text.strip() == question.answer
        right[question.kind].append(is_right)
        if question.kind == "describe":
            right[f"describe, {things} shapes"].append(is_right)
    rates = {kind: (sum(one) / len(one), len(one)) for kind, one in sorted(right.items())}
    for kind, (rate, count) in rates.items():
        print(f"{kind:20} {rate:.3f}  of {count}")
    if options.json:
        options.json.write_text(json.dumps(rates, indent=2))


if __name__ == "__main__":
    main()
