"""Measures speech: words recognized by the package `pocketsphinx`, edit distance, mel distance."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .codec import log_mel
from .sentences import recognizer_grammar

_PADDING = 4000  # samples of silence that are added at both ends


class Recognizer:
    """Recognizes English speech with a general language model, or with a grammar.

    Args:
        with_grammar: whether the recognizer accepts only sentences of the grammar of `demo_voice.sentences`.
        further_sentences: sentences that are added to the grammar.
    """

    def __init__(self, *, with_grammar: bool, further_sentences: Sequence[str] = ()) -> None:
        from pocketsphinx import Decoder

        if not with_grammar:
            self._decoder = Decoder(loglevel="FATAL")
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "sentences.gram")
            path.write_text(recognizer_grammar(further_sentences))
            self._decoder = Decoder(loglevel="FATAL", jsgf=str(path), lm=None)

    def __call__(self, samples: Tensor) -> list[str]:
        """Return the words in a waveform ``[S]`` at 16 kHz."""
        padded = nn.functional.pad(samples, (_PADDING, _PADDING))
        data = (padded * 0.8 * 32767).clamp(-32767, 32767).to(torch.int16).numpy().tobytes()
        self._decoder.start_utt()
        self._decoder.process_raw(data, full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr.split() if hypothesis else []


def split_words(text: str) -> list[str]:
    """Return the words of a text as the recognizer writes them."""
    return re.sub(r"[^a-z' ]", "", text.lower()).split()


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the smallest number of insertions, deletions and substitutions between two lists of words."""
    row = list(range(len(second) + 1))
    for index, word in enumerate(first, 1):
        above, row = row, [index]
        for column, other in enumerate(second, 1):
            row.append(min(above[column] + 1, row[-1] + 1, above[column - 1] + (word != other)))
    return row[-1]


def mel_distance(first: Tensor, second: Tensor) -> float:
    """Return the mean absolute difference of log mel spectra along the best alignment in time.

    Dynamic time warping with the steps (1, 0), (0, 1) and (1, 1) computes the alignment.
    """
    a, b = log_mel(first[None])[0].T[::2], log_mel(second[None])[0].T[::2]  # 50 frames per second
    costs = (a[:, None] - b[None]).abs().mean(-1)
    rows, columns = costs.shape
    values = costs.tolist()
    total_costs = [[float("inf")] * (columns + 1) for _ in range(rows + 1)]
    steps = [[0] * (columns + 1) for _ in range(rows + 1)]
    total_costs[0][0] = 0.0
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            predecessor = min(
                (total_costs[row - 1][column - 1], steps[row - 1][column - 1]),
                (total_costs[row - 1][column], steps[row - 1][column]),
                (total_costs[row][column - 1], steps[row][column - 1]),
            )
            total_costs[row][column] = predecessor[0] + values[row - 1][column - 1]
            steps[row][column] = predecessor[1] + 1
    return total_costs[rows][columns] / steps[rows][columns]
