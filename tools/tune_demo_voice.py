"""Train the demo voice of the package further, on one CPU thread, in about an hour.

    pip install espeakng-loader pocketsphinx
    python tools/tune_demo_voice.py --voice penstock/demo/voice --out penstock/demo/voice

The training repeats the texts of the first training. Its new texts are common phrases with all punctuation
marks, pairs of sentences, and numbers in words. The codec does not change. The exported voice has no encoder,
so the script trains one first.

The training has stages. Each stage writes its result to ``--work``, so that ``--from STAGE`` repeats this
stage and the later ones:

1. ``speech``: espeak-ng speaks the texts, except the common phrases.
2. ``samples``: the voice speaks texts of its first training. The codes and the decoded speech are stored.
3. ``encoder``: an encoder learns to predict the codes of the decoded speech, and to encode espeak-ng's
   speech.
4. ``codes``: the encoder converts the speech to codes.
5. ``phrases``: common phrases are spoken and encoded. For the phrases of `SELECTED_PHRASES`, speech
   recognizers select the best of several candidates: samples of the voice, and espeak-ng at several speeds.
6. ``model``: the language model is trained further.
7. ``export``: writes the weights of the language model.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from demo_voice.codec import Codec, train_encoder
from demo_voice.espeak import Espeak
from demo_voice.language_model import (
    make_rows,
    make_sizes,
    make_tokenizer,
    prompt_text,
    train_language_model,
)
from demo_voice.measure import Recognizer, edit_distance, mel_distance, split_words
from demo_voice.phrases import COMMON_PHRASES, SELECTED_PHRASES, number_texts, sentence_pairs, variants
from demo_voice.sentences import training_texts
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_demo_model import Model

STAGES = ("speech", "samples", "encoder", "codes", "phrases", "model", "export")
_SPEEDS = (130, 140, 150, 160)
_NUM_SAMPLES = 8
"""Samples of the voice for each phrase of `SELECTED_PHRASES`."""
_REPEATS = 10
"""Repetitions of each variant (`variants`) of `SELECTED_PHRASES` per epoch. The first phrase is repeated
three times as often."""


def tuning_texts() -> list[str]:
    """Return all training texts except the common phrases."""
    return [*training_texts(7, 14_000, 4_500), *number_texts(11, 1_500), *sentence_pairs(12, 700)]


def generate_codes(voice: Path, texts: list[str], temperature: float, seed: int) -> list[Tensor]:
    """Return the codes that a voice generates for each text.

    The codes of a text are empty if the speech does not end within 400 tokens.
    """
    from penstock import LLM, SamplingParams

    first_code_id = make_tokenizer().token_to_id("<|speech_0|>")
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=400, seed=seed + index)
        for index in range(len(texts))
    ]
    with LLM(str(voice), task="text-generation") as llm:
        outputs = llm.generate([prompt_text(text) for text in texts], params, use_tqdm=False)
    codes = []
    for output in outputs:
        offsets = [token - first_code_id for token in output.token_ids]
        is_complete = len(offsets) < 400
        codes.append(
            torch.tensor([offset for offset in offsets if 0 <= offset < 4096] if is_complete else []).long()
        )
    return codes


class Tuning:
    """The stages of one run.

    Args:
        options: the options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._work: Path = options.work
        self._work.mkdir(parents=True, exist_ok=True)

    def speech(self) -> None:
        """Generate the speech of `tuning_texts` with espeak-ng, and store it as int16."""
        speak, texts = Espeak(), tuning_texts()
        audio = [(speak(text) * 32767).clamp(-32768, 32767).to(torch.int16) for text in texts]
        torch.save((texts, torch.cat(audio), [len(samples) for samples in audio]), self._work / "speech.pt")
        print(f"speech: {len(texts)} texts, {sum(map(len, audio)) / 16000 / 60:.0f} minutes", flush=True)

    @torch.no_grad()
    def samples(self) -> None:
        """Generate the codes of 1000 texts of the first training with the voice, and decode them."""
        texts = random.Random(1).sample(training_texts(7, 14_000, 4_500), 1000)
        codec = self._codec().eval()
        codes = [row for row in generate_codes(self._options.voice, texts, 0.7, 0) if len(row)]
        audio = torch.cat([codec.decode(row) for row in codes])
        torch.save((audio, torch.cat(codes)), self._work / "samples.pt")
        print(f"samples: {len(codes)} texts, {len(audio) / 16000 / 60:.0f} minutes", flush=True)

    def encoder(self) -> None:
        """Train the encoder."""
        torch.manual_seed(self._options.seed)
        codec = self._codec()
        training_pairs = torch.load(self._work / "samples.pt", weights_only=True)
        train_encoder(codec, self._speech()[1], [training_pairs], self._options.encoder_steps, seed=1)
        torch.save(codec.encoder.state_dict(), self._work / "encoder.pt")

    @torch.no_grad()
    def codes(self) -> None:
        """Encode the speech."""
        codec = self._codec("encoder.pt").eval()
        texts, audio = self._speech()
        torch.save(
            (texts, [codec.encode(samples).to(torch.int16) for samples in audio]), self._work / "codes.pt"
        )

    @torch.no_grad()
    def phrases(self) -> None:
        """Encode the speech of the common phrases, and select the speech of `SELECTED_PHRASES`."""
        codec, speak = self._codec("encoder.pt").eval(), Espeak()
        recognizers = [
            Recognizer(with_grammar=False),
            Recognizer(with_grammar=True, further_sentences=SELECTED_PHRASES),
        ]
        codes_of_phrases = {phrase: codec.encode(speak(phrase)).to(torch.int16) for phrase in COMMON_PHRASES}
        for phrase in SELECTED_PHRASES:
            phrase_variants = [variants(phrase)[index % 4] for index in range(_NUM_SAMPLES)]
            generated = generate_codes(self._options.voice, phrase_variants, 0.8, 100)
            candidates = [codes for codes in generated if len(codes) > 5]
            for speed in _SPEEDS:
                speak.set_speed(speed)
                candidates.append(codec.encode(speak(phrase)))
            speak.set_speed(150)
            ratings = self._rate_candidates(
                codec, speak(phrase), split_words(phrase), candidates, recognizers
            )
            general_errors, grammar_errors, distance, index = min(ratings)
            codes_of_phrases[phrase] = candidates[index].to(torch.int16)
            source = "voice" if index < len(candidates) - len(_SPEEDS) else "espeak-ng"
            num_correct = sum(not rating[1] for rating in ratings)
            print(
                f"phrase {phrase!r}: general model {general_errors} errors, grammar {grammar_errors}, "
                f"distance {distance:.2f}, from {source}; the recognizer with the grammar understands "
                f"{num_correct} of {len(ratings)} candidates",
                flush=True,
            )
        torch.save(codes_of_phrases, self._work / "phrases.pt")

    @staticmethod
    def _rate_candidates(
        codec: Codec,
        reference_speech: Tensor,
        words: list[str],
        candidates: list[Tensor],
        recognizers: list[Recognizer],
    ) -> list[tuple[int, int, float, int]]:
        """Return a rating of each candidate.

        A rating has the word errors of the recognizer without the grammar, those of the recognizer with the
        grammar, the mel distance to ``reference_speech``, and the index of the candidate.
        """
        ratings = []
        for index, codes in enumerate(candidates):
            audio = codec.decode(codes)
            errors = [edit_distance(words, recognizer(audio)) for recognizer in recognizers]
            ratings.append((errors[0], errors[1], mel_distance(audio, reference_speech), index))
        return ratings

    def model(self) -> None:
        """Train the language model further."""
        tokenizer = make_tokenizer()
        texts, codes = torch.load(self._work / "codes.pt", weights_only=True)
        phrase_codes = torch.load(self._work / "phrases.pt", weights_only=True)
        rows = make_rows(tokenizer, texts, codes)
        repeated_rows = []
        for phrase in (*SELECTED_PHRASES, *COMMON_PHRASES):
            phrase_variants = variants(phrase)
            phrase_rows = make_rows(tokenizer, phrase_variants, [phrase_codes[phrase]] * len(phrase_variants))
            count = (
                3 * _REPEATS
                if phrase == SELECTED_PHRASES[0]
                else _REPEATS
                if phrase in SELECTED_PHRASES
                else 2
            )
            repeated_rows += phrase_rows * count
        torch.manual_seed(self._options.seed)
        model = Model(make_sizes(tokenizer))
        model.load_llama_state(load_file(self._options.voice / "model.safetensors"))
        loss = train_language_model(
            model,
            rows,
            self._options.minutes,
            seed=3,
            peak_learning_rate=self._options.learning_rate,
            further_rows=repeated_rows,
        )
        print(f"model: loss of held-out texts {loss:.4f}", flush=True)
        torch.save(model.state_dict(), self._work / "model.pt")

    def export(self) -> None:
        """Write the weights of the language model."""
        model = Model(make_sizes(make_tokenizer()))
        model.load_state_dict(torch.load(self._work / "model.pt", weights_only=True))
        save_file(model.llama_state(), self._options.out / "model.safetensors", metadata={"format": "pt"})

    def _speech(self) -> tuple[list[str], list[Tensor]]:
        texts, audio, lengths = torch.load(self._work / "speech.pt", weights_only=True)
        return texts, [samples.float() / 32767 for samples in audio.split(lengths)]

    def _codec(self, encoder: str | None = None) -> Codec:
        codec = Codec()
        codec.load_neucodec_state(load_file(self._options.voice / "codec" / "model.safetensors"))
        if encoder is not None:
            codec.encoder.load_state_dict(torch.load(self._work / encoder, weights_only=True))
        return codec


def main() -> None:
    """Run the stages from ``--from`` to ``--to``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--voice", type=Path, required=True, help="folder of the voice that is trained further"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the new weights")
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo_voice_tuning"), help="intermediate results"
    )
    parser.add_argument("--from", dest="first", choices=STAGES, default=STAGES[0])
    parser.add_argument("--to", dest="last", choices=STAGES, default=STAGES[-1])
    parser.add_argument("--encoder-steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=35, help="time for the language model")
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tuning = Tuning(options)
    for stage in STAGES[STAGES.index(options.first) : STAGES.index(options.last) + 1]:
        getattr(tuning, stage)()


if __name__ == "__main__":
    main()
