"""The tokenizer and the chat template of `demo-vision`, and the rows of its training."""

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
    ask,
    vary_typing,
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
"""The chat template. The images of a message come before its text."""
_MEAN, _STD = 0.5, 0.5
_CONVERSATIONS_PER_ROW = 5
"""Number of conversations about a picture in one row of the training."""


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE whose merges are learned from questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_training_texts(4000), *all_words()], trainer)
    return tokenizer


def _training_texts(count: int) -> Iterator[str]:
    """Yield random questions and answers."""
    rng = random.Random(11)
    for _ in range(count):
        question = ask(random_scene(rng), rng)
        yield vary_typing(question.text, rng)
        yield question.answer


@dataclass(frozen=True, slots=True)
class Batch:
    """N pictures, and one row of conversations per picture."""

    pixels: np.ndarray  # [N, 3, S, S]
    classes: np.ndarray  # [N, P, 4]
    ids: np.ndarray  # [N, T]
    positions: np.ndarray  # [N, T]
    segments: np.ndarray  # [N, T]: 0 for the image, then the number of the conversation; -1 for padding
    targets: np.ndarray  # [N, T]: the next token of answers, -100 elsewhere


class Examples:
    """An endless stream of training examples.

    A row is ``<|user|>``, the tokens of the picture, and some conversations. By the positions and
    the attention mask, each conversation directly follows the picture, and cannot attend to the other
    conversations of the row.

    Args:
        tokenizer: the tokenizer.
        seed: the seed of scenes and questions.
        num_image_tokens: number of image tokens of a picture.
        grid: number of patches per row and per column of a picture.
        image_size: width and height of a preprocessed picture in pixels.
    """

    def __init__(
        self, tokenizer: Tokenizer, seed: int, num_image_tokens: int, grid: int, image_size: int
    ) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._grid, self._image_size = grid, image_size
        self._end = tokenizer.token_to_id(END)
        self._assistant = tokenizer.token_to_id(ASSISTANT)
        self._user = tokenizer.token_to_id(USER)
        border, whole, image = (tokenizer.token_to_id(token) for token in (BORDER, WHOLE, IMAGE))
        self._prefix = [self._user, border, whole, *[image] * num_image_tokens, border]
        self.image_token_indices = [i for i, token in enumerate(self._prefix) if token == image]
        self._cached_tokens: dict[str, list[int]] = {}

    def batch(self, count: int) -> Batch:
        """Return the next pictures and conversations."""
        rng, pixels, classes, rows = self._rng, [], [], []
        for _ in range(count):
            scene = random_scene(rng)
            image = draw(scene, _random_size(rng), rng)
            pixels.append(preprocess_image(image, self._image_size))
            classes.append(class_maps(scene, self._grid).reshape(-1, 4))
            conversations = []
            for _ in range(_CONVERSATIONS_PER_ROW):
                turns = [ask(scene, rng) for _ in range(2 if rng.random() < 0.1 else 1)]
                conversations.append([(vary_typing(turn.text, rng), turn.answer) for turn in turns])
            rows.append(self._row(conversations))
        return Batch(np.stack(pixels), np.stack(classes), *_pad_rows(rows))

    def without_picture(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return ids and targets of conversations without a picture."""
        rng, conversations = self._rng, []
        for _ in range(count):
            text, answer = rng.choice(("Hello", "Hello!", "Hi", "Hi!", "Who are you?", "Help")), GREETING
            if rng.random() < 0.7:
                text, answer = vary_typing(ask(random_scene(rng), rng).text, rng), WITHOUT_PICTURE
            ids, targets = self._encode_conversation([(text, answer)])
            conversations.append(([self._user, *ids], [-100, *targets]))
        return conversations

    def _row(self, conversations: Sequence[list[tuple[str, str]]]) -> list[list[int]]:
        """Return ids, positions, segments and targets of a row."""
        start = len(self._prefix)
        ids, positions = list(self._prefix), list(range(start))
        segments, targets = [0] * start, [-100] * start
        for number, conversation in enumerate(conversations, 1):
            new_ids, new_targets = self._encode_conversation(conversation)
            ids += new_ids
            targets += new_targets
            positions += range(start, start + len(new_ids))
            segments += [number] * len(new_ids)
        return [ids, positions, segments, targets]

    def _encode_conversation(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation after ``<|user|>`` and the picture, and their targets."""
        ids: list[int] = []
        targets: list[int] = []
        for number, (question, answer) in enumerate(turns):
            prompt = [*([self._user] if number else []), *self._encode(question), self._end, self._assistant]
            reply = [*self._encode(answer), self._end]
            ids += prompt + reply
            targets += [-100] * (len(prompt) - 1) + reply + [-100]
        return ids, targets

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Up to 50,000 texts are cached, because answers recur."""
        tokens = self._cached_tokens.get(text)
        if tokens is None:
            tokens = self._tokenizer.encode(text).ids
            if len(self._cached_tokens) < 50_000:
                self._cached_tokens[text] = tokens
        return tokens


def preprocess_image(image: Image.Image, size: int) -> np.ndarray:
    """Return the pixels ``[3, size, size]``, as the image processor of SmolVLM computes them for one tile."""
    resized = np.asarray(image.resize((size, size), Image.Resampling.LANCZOS), np.float32)
    return ((resized / 255 - _MEAN) / _STD).transpose(2, 0, 1)


def _random_size(rng: random.Random) -> tuple[int, int]:
    """Return a random width and height. Seven of ten pictures are square."""
    width = rng.randint(96, 320)
    if rng.random() < 0.7:
        return width, width
    return width, max(96, int(width * rng.uniform(0.75, 1.34)))


def _pad_rows(rows: Sequence[list[list[int]]]) -> tuple[np.ndarray, ...]:
    """Return ids, positions, segments and targets of all rows, padded to the longest row."""
    length = max(len(row[0]) for row in rows)
    fill = (0, 0, -1, -100)
    return tuple(
        np.array([row[i] + [fill[i]] * (length - len(row[i])) for row in rows], np.int64) for i in range(4)
    )
