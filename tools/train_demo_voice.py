"""Train the demo voice of the package from random weights, on one CPU thread, in about two hours.

    pip install espeakng-loader pocketsphinx
    python tools/train_demo_voice.py --out penstock/demo/voice

`tools/tune_demo_voice.py` then trains the result further on common phrases and numbers.

The training has stages. Each stage writes its result to ``--work``, so that ``--from STAGE`` repeats this
stage and the later ones:

1. ``speech``: espeak-ng speaks 1,250 texts for the codec and 14,000 for the language model.
2. ``codec``: a small NeuCodec decoder, an encoder and a quantizer learn to reproduce the speech.
3. ``decoder``: the decoder is trained further, with a learning rate that ends at 2 % of its peak. Encoder and
   quantizer do not change.
4. ``codes``: the encoder converts the speech to codes.
5. ``model``: a small Llama learns to generate the codes of a text.
6. ``export``: the voice is written to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from demo_voice.codec import Codec, codec_config, train_codec
from demo_voice.espeak import Espeak
from demo_voice.language_model import (
    SPEECH_END,
    make_rows,
    make_sizes,
    make_tokenizer,
    train_language_model,
)
from demo_voice.sentences import further_words, sentence, training_texts
from safetensors.torch import save_file
from torch import Tensor
from train_demo_model import Model

STAGES = ("speech", "codec", "decoder", "codes", "model", "export")


def codec_texts() -> list[str]:
    """Return the training texts of the codec: sentences, and sequences of words."""
    rng = random.Random(0)
    texts = [sentence(rng) for _ in range(1000)]
    words = further_words()
    return texts + [" ".join(rng.choice(words) for _ in range(5)) for _ in range(250)]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n")


class Training:
    """The stages of one run.

    Args:
        options: the options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._work: Path = options.work
        self._work.mkdir(parents=True, exist_ok=True)

    def speech(self) -> None:
        """Generate the speech of all texts with espeak-ng, and store it as int16."""
        speak = Espeak()
        texts_by_model = {"codec": codec_texts(), "model": training_texts(7, 14_000, 4_500)}
        for name, texts in texts_by_model.items():
            audio = [(speak(text) * 32767).clamp(-32768, 32767).to(torch.int16) for text in texts]
            torch.save(
                (texts, torch.cat(audio), [len(samples) for samples in audio]),
                self._work / f"{name}_speech.pt",
            )
            print(f"speech: {len(texts)} texts, {sum(map(len, audio)) / 16000 / 60:.0f} minutes", flush=True)

    def codec(self) -> None:
        """Train encoder, quantizer and decoder."""
        torch.manual_seed(self._options.seed)
        codec = Codec()
        train_codec(codec, self._speech("codec")[1], self._options.codec_steps, decoder_only=False, seed=1)
        torch.save(codec.state_dict(), self._work / "codec.pt")

    def decoder(self) -> None:
        """Train the decoder further, with fixed codes."""
        codec = self._codec("codec.pt")
        train_codec(codec, self._speech("codec")[1], self._options.decoder_steps, decoder_only=True, seed=2)
        torch.save(codec.state_dict(), self._work / "decoder.pt")

    @torch.no_grad()
    def codes(self) -> None:
        """Encode the speech of the language model's texts."""
        codec = self._codec("codec.pt").eval()
        texts, audio = self._speech("model")
        codes = [codec.encode(samples).to(torch.int16) for samples in audio]
        torch.save((texts, codes), self._work / "codes.pt")

    def model(self) -> None:
        """Train the language model."""
        texts, codes = torch.load(self._work / "codes.pt", weights_only=True)
        torch.manual_seed(self._options.seed)
        tokenizer = make_tokenizer()
        model = Model(make_sizes(tokenizer))
        loss = train_language_model(model, make_rows(tokenizer, texts, codes), self._options.minutes, seed=3)
        print(f"model: loss of held-out texts {loss:.4f}", flush=True)
        torch.save(model.state_dict(), self._work / "model.pt")

    def export(self) -> None:
        """Write the voice: a Llama checkpoint with a subfolder for the codec."""
        out: Path = self._options.out
        tokenizer = make_tokenizer()
        sizes = make_sizes(tokenizer)
        model = Model(sizes)
        model.load_state_dict(torch.load(self._work / "model.pt", weights_only=True))
        out.mkdir(parents=True, exist_ok=True)
        save_file(model.llama_state(), out / "model.safetensors", metadata={"format": "pt"})
        end_id = tokenizer.token_to_id(SPEECH_END)
        config = sizes.to_llama_config() | {"eos_token_id": end_id, "pad_token_id": end_id}
        write_json(out / "config.json", config)
        write_json(out / "generation_config.json", {"do_sample": False, "eos_token_id": end_id})
        speech = {
            "format": "neutts",
            "codec": "codec",
            "codebook_size": 4096,
            "phonemes": False,
            "numbers": "en",
            "max_characters": 120,
            "splits_sentences": True,
            "sampling": {"temperature": 0.0},
        }
        write_json(out / "speech_config.json", speech)
        tokenizer.save(str(out / "tokenizer.json"), pretty=False)
        write_json(
            out / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": False,
                "bos_token": None,
                "eos_token": SPEECH_END,
                "pad_token": SPEECH_END,
                "unk_token": "<unk>",
                "clean_up_tokenization_spaces": False,
                "model_max_length": sizes.max_positions,
            },
        )
        codec_folder = out / "codec"
        codec_folder.mkdir(exist_ok=True)
        save_file(
            self._codec("decoder.pt").neucodec_state(),
            codec_folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        config_text = json.dumps(codec_config().to_dict(), indent=2, sort_keys=True)
        (codec_folder / "config.json").write_text(config_text + "\n")

    def _speech(self, name: str) -> tuple[list[str], list[Tensor]]:
        texts, audio, lengths = torch.load(self._work / f"{name}_speech.pt", weights_only=True)
        return texts, [samples.float() / 32767 for samples in audio.split(lengths)]

    def _codec(self, name: str) -> Codec:
        codec = Codec()
        codec.load_state_dict(torch.load(self._work / name, weights_only=True))
        return codec


def main() -> None:
    """Run the stages from ``--from`` to ``--to``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the voice")
    parser.add_argument("--work", type=Path, default=Path("build/demo_voice"), help="intermediate results")
    parser.add_argument("--from", dest="first", choices=STAGES, default=STAGES[0])
    parser.add_argument("--to", dest="last", choices=STAGES, default=STAGES[-1])
    parser.add_argument("--codec-steps", type=int, default=3000)
    parser.add_argument("--decoder-steps", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=62, help="time for the language model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training = Training(options)
    for stage in STAGES[STAGES.index(options.first) : STAGES.index(options.last) + 1]:
        getattr(training, stage)()


if __name__ == "__main__":
    main()
