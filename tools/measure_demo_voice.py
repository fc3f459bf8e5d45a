"""Measure the demo voice: word error rates and mel distances of sentences that it was not trained on.

    pip install espeakng-loader pocketsphinx
    python tools/measure_demo_voice.py demo-voice --spectrogram spectrogram.png

Each sentence is spoken by the model and by espeak-ng. A recogniser writes down both. The mel distance
compares the model's speech of a sentence with espeak-ng's of the same sentence, and with espeak-ng's of
another one (the control).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from demo_voice.codec import log_mel
from demo_voice.espeak import Espeak
from demo_voice.measure import Recogniser, edit_distance, mel_distance, words_of
from demo_voice.phrases import JUDGED, pairs, variants
from demo_voice.sentences import sentence, training_texts
from torch import Tensor

from penstock import LLM


def held_out_sentences(count: int, seed: int) -> list[str]:
    """Return distinct sentences that are not in the texts of both trainings."""
    rng = random.Random(seed)
    known, in_pairs = set(training_texts(7, 14_000, 4_500)), " ".join(pairs(12, 700))
    texts: list[str] = []
    while len(texts) < count:
        if (text := sentence(rng)) not in known and text not in in_pairs:
            known.add(text)
            texts.append(text)
    return texts


def word_error_rate(texts: list[str], speech: list[Tensor], recogniser: Recogniser) -> float:
    """Return the errors of all texts divided by their words."""
    wanted = [words_of(text) for text in texts]
    heard = [recogniser(one) for one in speech]
    errors = sum(edit_distance(*pair) for pair in zip(wanted, heard, strict=True))
    return errors / sum(map(len, wanted))


def save_spectrogram(path: Path, rows: dict[str, Tensor]) -> None:
    """Draw the log mel spectra of waveforms below each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 1, figsize=(9, 2.6 * len(rows)), squeeze=False)
    for axis, (title, samples) in zip(axes[:, 0], rows.items(), strict=True):
        axis.imshow(log_mel(samples[None])[0], origin="lower", aspect="auto")
        axis.set_title(title)
        axis.set_xlabel("frames of 10 ms")
        axis.set_ylabel("mel band")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo-voice")
    parser.add_argument("--sentences", type=int, default=50)
    parser.add_argument("--seed", type=int, default=4242)
    parser.add_argument("--spectrogram", type=Path, help="draw the first sentence, by model and by espeak-ng")
    options = parser.parse_args()
    texts = held_out_sentences(options.sentences, options.seed)
    greetings = [one for phrase in JUDGED for text in variants(phrase) for one in (text, text.capitalize())]
    with LLM(options.model, task="audio-generation") as llm:
        spoken = [torch.from_numpy(one.audio) for one in llm.speak([*texts, *greetings], use_tqdm=False)]
    made, greeted = spoken[: len(texts)], spoken[len(texts) :]
    for name, recogniser in (
        ("grammar", Recogniser(with_grammar=True, more=JUDGED)),
        ("general model", Recogniser(with_grammar=False)),
    ):
        for phrase in JUDGED:
            heard = [
                recogniser(audio) == words_of(text)
                for text, audio in zip(greetings, greeted, strict=True)
                if words_of(text) == words_of(phrase)
            ]
            print(f"{phrase!r}, recogniser with {name}: {sum(heard)} of {len(heard)} spellings understood")
    speak = Espeak()
    wanted = [speak(text) for text in texts]
    for name, with_grammar in (("grammar", True), ("general model", False)):
        rates = [
            word_error_rate(texts, speech, Recogniser(with_grammar=with_grammar)) for speech in (made, wanted)
        ]
        print(f"word error rate, recogniser with {name}: demo voice {rates[0]:.3f}, espeak-ng {rates[1]:.3f}")
    same = [mel_distance(*pair) for pair in zip(made, wanted, strict=True)]
    control = [mel_distance(one, other) for one, other in zip(made, wanted[1:] + wanted[:1], strict=True)]
    print(
        f"mel distance: same sentence {sum(same) / len(same):.3f}, another sentence "
        f"{sum(control) / len(control):.3f}; nearer to the same sentence in "
        f"{sum(a < b for a, b in zip(same, control, strict=True))} of {len(same)}"
    )
    if options.spectrogram:
        save_spectrogram(options.spectrogram, {f"demo voice: {texts[0]}": made[0], "espeak-ng": wanted[0]})


if __name__ == "__main__":
    main()
