"""The tokenizer, the chat template and the rows of the training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_vision.pictures import class_maps, draw, random_scene
from demo_vision.questions import (
    GREETING,
    WITHOUT_PICTURE,
    all_words,
    as_users_write,
    ask,
)

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
IMAGE, BORDER, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, IMAGE, BORDER, WHOLE)
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ('user', 'assistant') -%}
{{ raise_exception('demo-vision knows the roles user and assistant only, not ' + message.role) }}
{%- endif -%}
{{ '<|' + message.role + '|>' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content if part.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
"""The chat template: images before the text of a message."""
_MEAN, _STD = 0.5, 0.5
_QUESTIONS = 5
"""Conversations about a picture in a row."""


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE whose merges are learned from questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=[AddedToken(one, special=True, normalized=False) for one in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_texts(4000), *all_words()], trainer)
    return tokenizer


def _texts(count: int) -> Iterator[str]:
    rng = random.Random(11)
    for _ in range(count):
        question = ask(random_scene(rng), rng)
        yield as_users_write(question.text, rng)
        yield question.answer


@dataclass(frozen=True, slots=True)
class Batch:
    """Pictures, and a row of conversations about each."""

    pixels: np.ndarray  # [N, 3, S, S]
    classes: np.ndarray  # [N, P, 4]
    ids: np.ndarray  # [N, T]
    positions: np.ndarray  # [N, T]
    segments: np.ndarray  # [N, T]: 0 for the image, then the number of the conversation; -1 for padding
    targets: np.ndarray  # [N, T]: the next token of answers, -100 elsewhere


class Examples:
    """An endless stream of examples.

    A row is ``<|user|>``, the tokens of the picture, and some conversations. Each conversation follows the
    picture directly: it does not see other patches.

    Args:
        tokenizer: the tokenizer.
        seed: of scenes and questions.
        rows: rows of a picture.
        grid: patches of a picture in each direction.
        size: side of the pixels.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, rows: int, grid: int, size: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._grid, self._size = grid, size
        self._end = tokenizer.token_to_id(END)
        self._assistant = tokenizer.token_to_id(ASSISTANT)
        self._user = tokenizer.token_to_id(USER)
        border, whole, image = (tokenizer.token_to_id(one) for one in (BORDER, WHOLE, IMAGE))
        self._prefix = [self._user, border, whole, *[image] * rows, border]
        self.image_at = [i for i, one in enumerate(self._prefix) if one == image]
        self._answers: dict[str, list[int]] = {}

    def batch(self, count: int) -> Batch:
        """Return the next pictures and conversations."""
        rng, pixels, classes, rows = self._rng, [], [], []
        for _ in range(count):
            scene = random_scene(rng)
            image = draw(scene, _random_size(rng), rng)
            pixels.append(prepared(image, self._size))
            classes.append(class_maps(scene, self._grid).reshape(-1, 4))
            talks = []
            for _ in range(_QUESTIONS):
                turns = [ask(scene, rng) for _ in range(2 if rng.random() < 0.1 else 1)]
                talks.append([(as_users_write(one.text, rng), one.answer) for one in turns])
            rows.append(self._row(talks))
        return Batch(np.stack(pixels), np.stack(classes), *_padded(rows))

    def without_picture(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return ids and targets of conversations without a picture."""
        rng, found = self._rng, []
        for _ in range(count):
            text, answer = rng.choice(("Hello", "Hello!", "Hi", "Hi!", "Who are you?", "Help")), GREETING
            if rng.random() < 0.7:
                text, answer = as_users_write(ask(random_scene(rng), rng).text, rng), WITHOUT_PICTURE
            ids, targets = self._talk([(text, answer)])
            found.append(([self._user, *ids], [-100, *targets]))
        return found

    def _row(self, talks: Sequence[list[tuple[str, str]]]) -> list[list[int]]:
        start = len(self._prefix)
        ids, positions = list(self._prefix), list(range(start))
        segments, targets = [0] * start, [-100] * start
        for number, talk in enumerate(talks, 1):
            own, goals = self._talk(talk)
            ids += own
            targets += goals
            positions += range(start, start + len(own))
            segments += [number] * len(own)
        return [ids, positions, segments, targets]

    def _talk(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
        """Return the ids after ``<|user|>`` and the picture, and their targets."""
        ids: list[int] = []
        targets: list[int] = []
        for number, (question, answer) in enumerate(turns):
            asked = [*([self._user] if number else []), *self._encoded(question), self._end, self._assistant]
            told = [*self._encoded(answer), self._end]
            ids += asked + told
            targets += [-100] * (len(asked) - 1) + told + [-100]
        return ids, targets

    def _encoded(self, text: str) -> list[int]:
        found = self._answers.get(text)
        if found is None:
            found = self._tokenizer.encode(text).ids
            if len(self._answers) < 50_000:
                self._answers[text] = found
        return found


def prepared(image: Image.Image, size: int) -> np.ndarray:
    """Return the pixels ``[3, size, size]`` that the image processor of SmolVLM makes of a square image."""
    small = np.asarray(image.resize((size, size), Image.Resampling.LANCZOS), np.float32)
    return ((small / 255 - _MEAN) / _STD).transpose(2, 0, 1)


def _random_size(rng: random.Random) -> tuple[int, int]:
    width = rng.randint(96, 320)
    if rng.random() < 0.7:
        return width, width
    return width, max(96, int(width * rng.uniform(0.75, 1.34)))


def _padded(rows: Sequence[list[list[int]]]) -> tuple[np.ndarray, ...]:
    length = max(len(row[0]) for row in rows)
    fill = (0, 0, -1, -100)
    return tuple(
        np.array([row[i] + [fill[i]] * (length - len(row[i])) for row in rows], np.int64) for i in range(4)
    )
