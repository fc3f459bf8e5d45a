"""Measure word error rates and mel distances of the demo voice on sentences that it was not trained on.

    pip install espeakng-loader pocketsphinx
    python tools/measure_demo_voice.py demo-voice --spectrogram spectrogram.png

The model and espeak-ng speak each sentence. Two speech recognizers transcribe the speech of the model and of
espeak-ng. The mel distance compares the model's speech of a sentence with espeak-ng's speech of the same
sentence, and of another sentence (the control). The tool also speaks each phrase of `SELECTED_PHRASES` with
several punctuation marks and capitalizations, and counts those that are transcribed without an error.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from demo_voice.codec import log_mel
from demo_voice.espeak import Espeak
from demo_voice.measure import Recognizer, edit_distance, mel_distance, split_words
from demo_voice.phrases import SELECTED_PHRASES, sentence_pairs, variants
from demo_voice.sentences import sentence, training_texts
from torch import Tensor

from penstock import LLM


def held_out_sentences(count: int, seed: int) -> list[str]:
    """Return distinct sentences that are not in the texts and pairs of the demo voice's training."""
    rng = random.Random(seed)
    used_texts, training_pairs_text = set(training_texts(7, 14_000, 4_500)), " ".join(sentence_pairs(12, 700))
    texts: list[str] = []
    while len(texts) < count:
        if (text := sentence(rng)) not in used_texts and text not in training_pairs_text:
            used_texts.add(text)
            texts.append(text)
    return texts


def word_error_rate(texts: list[str], speech: list[Tensor], recognizer: Recognizer) -> float:
    """Return the word errors of the transcripts of all texts, divided by the number of words."""
    expected = [split_words(text) for text in texts]
    transcripts = [recognizer(samples) for samples in speech]
    errors = sum(edit_distance(*pair) for pair in zip(expected, transcripts, strict=True))
    return errors / sum(map(len, expected))


def save_spectrogram(path: Path, waveforms: dict[str, Tensor]) -> None:
    """Write an image with the log mel spectra of waveforms, one below another."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(waveforms), 1, figsize=(9, 2.6 * len(waveforms)), squeeze=False)
    for axis, (title, samples) in zip(axes[:, 0], waveforms.items(), strict=True):
        axis.imshow(log_mel(samples[None])[0], origin="lower", aspect="auto")
        axis.set_title(title)
        axis.set_xlabel("frames of 10 ms")
        axis.set_ylabel("mel band")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure the voice and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo-voice")
    parser.add_argument("--sentences", type=int, default=50)
    parser.add_argument("--seed", type=int, default=4242)
    parser.add_argument(
        "--spectrogram", type=Path, help="write the log mel spectra of the first sentence to this image file"
    )
    options = parser.parse_args()
    texts = held_out_sentences(options.sentences, options.seed)
    greetings = [
        spelling
        for phrase in SELECTED_PHRASES
        for text in variants(phrase)
        for spelling in (text, text.capitalize())
    ]
    with LLM(options.model, task="audio-generation") as llm:
        outputs = llm.speak([*texts, *greetings], use_tqdm=False)
    speech = [torch.from_numpy(output.audio) for output in outputs]
    model_speech, greeting_speech = speech[: len(texts)], speech[len(texts) :]
    for name, recognizer in (
        ("grammar", Recognizer(with_grammar=True, further_sentences=SELECTED_PHRASES)),
        ("general model", Recognizer(with_grammar=False)),
    ):
        for phrase in SELECTED_PHRASES:
            is_understood = [
                recognizer(audio) == split_words(text)
                for text, audio in zip(greetings, greeting_speech, strict=True)
                if split_words(text) == split_words(phrase)
            ]
            count = f"{sum(is_understood)} of {len(is_understood)}"
            print(f"{phrase!r}, recognizer with {name}: {count} spellings understood")
    speak = Espeak()
    espeak_speech = [speak(text) for text in texts]
    for name, with_grammar in (("grammar", True), ("general model", False)):
        rates = [
            word_error_rate(texts, waveforms, Recognizer(with_grammar=with_grammar))
            for waveforms in (model_speech, espeak_speech)
        ]
        print(f"word error rate, recognizer with {name}: demo voice {rates[0]:.3f}, espeak-ng {rates[1]:.3f}")
    distances = [mel_distance(*pair) for pair in zip(model_speech, espeak_speech, strict=True)]
    other_sentences = espeak_speech[1:] + espeak_speech[:1]
    control_distances = [mel_distance(*pair) for pair in zip(model_speech, other_sentences, strict=True)]
    num_nearer = sum(a < b for a, b in zip(distances, control_distances, strict=True))
    print(
        f"mel distance: same sentence {sum(distances) / len(distances):.3f}, another sentence "
        f"{sum(control_distances) / len(control_distances):.3f}; the same sentence is nearer for "
        f"{num_nearer} of {len(distances)} sentences"
    )
    if options.spectrogram:
        first_speech = {f"demo voice: {texts[0]}": model_speech[0], "espeak-ng": espeak_speech[0]}
        save_spectrogram(options.spectrogram, first_speech)


if __name__ == "__main__":
    main()
