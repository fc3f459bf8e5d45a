"""``penstock speak``: converts a text to an audio file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.generate import sampling_option
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.errors import InputError, TaskMismatchError

if TYPE_CHECKING:
    from penstock.llm.speech import Speech

TASK = "audio-generation"
FORMATS = ("wav", "pcm", "flac", "mp3", "opus")


@click.command("speak", cls=GroupedCommand)
@click.argument("text", required=False)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    default=Path("speech.wav"),
    show_default=True,
    help="The file to write; - is standard output.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="The format of the file; by default the format of its suffix, else wav.",
)
@click.option("--voice-name", metavar="NAME", help="A voice of the model, or one that --voice adds.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Generate at most this many tokens.")
@sampling_option("--temperature", type=float, help="Randomness: values above 1 increase it, 0 is greedy.")
@sampling_option("--top-k", type=int, help="Sample from the K most probable tokens; -1 is all, 1 is greedy.")
@sampling_option(
    "--top-p", type=float, help="Sample from the most probable tokens whose total probability reaches P."
)
@sampling_option("--repetition-penalty", type=float, help="Values above 1 make repetitions less probable.")
@sampling_option("--seed", type=int, help="The seed of sampling; the same seed gives the same audio.")
@config_options
def command(
    text: str | None,
    output: Path,
    file_format: str | None,
    voice_name: str | None,
    print_config: bool,
    **flags: object,
) -> None:
    """Convert TEXT to speech; by default the text of standard input.

    The model is demo-voice if none is given. Long texts are split into parts, at sentence ends if possible.
    Prints the duration and the real-time factor on standard error.
    """
    start = time.perf_counter()
    sampling_names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    sampling = {name: flags.pop(name) for name in sampling_names}
    from penstock.weights.hub import DEMO_VOICE

    config = config_from_flags(flags, default_model=DEMO_VOICE)
    if print_config:
        print_settings(config.describe())
        return
    output_format = chosen_format(output, file_format)
    from penstock.media.audio_files import audio_format, encode_audio

    audio_format(output_format)  # raises before the model is loaded if a library for the format is missing
    text = sys.stdin.read() if text is None else text
    if not text.strip():
        raise InputError("there is no text to speak: give it as an argument or on standard input")
    task = config.model.pipeline_task.option
    if task != TASK:
        raise TaskMismatchError("penstock speak", TASK, task)
    from penstock import LLM  # loads torch

    with LLM.from_config(config) as llm:
        load_seconds = time.perf_counter() - start
        defaults = llm.tokenizer.speech_format.sampling_defaults
        params = config.default_sampling_params(defaults=defaults, **sampling)
        begin = time.perf_counter()
        speech = llm.speak(text, params, voice=voice_name)
        seconds = time.perf_counter() - begin
    data = encode_audio(speech.audio, speech.sample_rate, output_format)
    if str(output) == "-":
        sys.stdout.buffer.write(data)
    else:
        output.write_bytes(data)
    click.echo(f"penstock: {summary(speech, load_seconds, seconds)}", err=True)


def chosen_format(output: Path, file_format: str | None) -> str:
    """Return ``file_format``, else the format of the file's suffix, else wav.

    Raises:
        InputError: the suffix of the file is not a known format, and no format is given.
    """
    suffix = output.suffix.lower().removeprefix(".")
    if file_format is not None:
        return file_format
    if not suffix or str(output) == "-":
        return "wav"
    if suffix not in FORMATS:
        raise InputError(f"{output}: the suffix must be one of {', '.join(FORMATS)}, or give --format")
    return suffix


def summary(speech: Speech, load_seconds: float, seconds: float) -> str:
    """Return the last line of the command's output: load time, duration and real-time factor."""
    real_time_factor = seconds / max(speech.seconds, 1e-9)
    cut_note = "; cut at the maximum length" if speech.is_cut else ""
    return (
        f"loaded in {load_seconds:.2f} s, {speech.seconds:.2f} s of audio ({speech.num_tokens} tokens) in "
        f"{seconds:.2f} s: real-time factor {real_time_factor:.2f}{cut_note}"
    )
