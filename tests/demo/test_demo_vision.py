"""The demo model `demo-vision`: questions about shapes, with and without a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "examples" / "shapes.png"
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0)
ANSWERS = {
    "What is in the picture?": "There is a red circle and a blue square.",
    "How many shapes are there?": "There are two shapes.",
    "How many circles are there?": "There is one circle.",
    "Is there a green circle?": "No, there is no green circle.",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-vision", kv_cache_memory="8MiB") as llm:
        yield llm


def answer_questions(llm: LLM, questions: list[tuple[object, str]]) -> list[str]:
    """Return the answers to questions about pictures."""
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        for image, text in questions
    ]
    return [output.text for output in llm.chat(chats, GREEDY, use_tqdm=False)]


def test_questions_about_the_example_picture_are_answered(llm: LLM) -> None:
    assert answer_questions(llm, [(PICTURE, question) for question in ANSWERS]) == list(ANSWERS.values())


def test_some_random_pictures_are_described_correctly(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import random

    from demo_vision.pictures import draw, random_scene
    from demo_vision.questions import describe

    rng = random.Random(77)
    scenes = [random_scene(rng) for _ in range(12)]
    images = [draw(scene, (200, 200), rng) for scene in scenes]
    answers = answer_questions(llm, [(image, "What is in the picture?") for image in images])
    num_correct = sum(answer == describe(scene).answer for answer, scene in zip(answers, scenes, strict=True))
    assert num_correct >= 4
    shifted_answers = answer_questions(
        llm, [(image, "What is in the picture?") for image in [*images[1:], images[0]]]
    )
    assert (
        sum(answer == describe(scene).answer for answer, scene in zip(shifted_answers, scenes, strict=True))
        <= 2
    )


def test_a_question_without_a_picture_gets_an_explanation(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "What is in the picture?"}], GREEDY, use_tqdm=False)
    assert output.text == "I see no picture. Send me one with coloured shapes."


@pytest.mark.parametrize(
    "prompt",
    ["How many shapes are there?", "<|user|><image>How many shapes are there?<|end|><|assistant|>"],
    ids=["message", "placeholder"],
)
def test_the_command_generate_accepts_images(prompt: str) -> None:
    """The images precede the text of a message, unless the prompt has a placeholder."""
    from click.testing import CliRunner

    from penstock.cli.generate import command

    arguments = ["--model", "demo-vision", "--image", str(PICTURE), "--prompt", prompt, "--temperature", "0"]
    result = CliRunner().invoke(command, [*arguments, "--kv-cache-memory", "8MiB"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith("There are two shapes.")
