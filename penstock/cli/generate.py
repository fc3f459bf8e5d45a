"""``penstock generate``: prints generated text or JSON on standard output, and timings."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.formatting import GroupedCommand, GroupedOption
from penstock.cli.generate_output import (
    print_memory_plan,
    print_outputs,
    print_speculation,
    print_stream,
    speculation_counts,
    timed,
)
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.llm.llm import LLM
    from penstock.llm.outputs import GenerationOutput, TextStream
    from penstock.pipelines.core import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 256

sampling_option = partial(click.option, cls=GroupedOption, group="Sampling")


@click.command("generate", cls=GroupedCommand)
@click.option("--prompt", metavar="TEXT", help="The text to continue; by default standard input.")
@click.option(
    "--chat", is_flag=True, help="Format the prompt as a user message with the model's chat template."
)
@click.option(
    "--image",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="An image for a model that reads images; may be repeated. If the prompt has no placeholder of the "
    "model, such as <image>, the prompt is formatted as with --chat, with the images before the text.",
)
@click.option("--system", metavar="TEXT", help="A system message before the prompt; needs --chat.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_NEW_TOKENS,
    show_default=True,
    help="Generate at most this many tokens.",
)
@sampling_option("--temperature", type=float, help="Randomness: values above 1 increase it, 0 is greedy.")
@sampling_option("--top-k", type=int, help="Sample from the K most probable tokens; -1 is all, 1 is greedy.")
@sampling_option(
    "--top-p", type=float, help="Sample from the most probable tokens whose total probability reaches P."
)
@sampling_option(
    "--min-p", type=float, help="Sample from tokens with at least this share of the highest probability."
)
@sampling_option("--seed", type=int, help="The seed of sampling; the same seed gives the same text.")
@sampling_option(
    "--stop", multiple=True, metavar="TEXT", help="End the output before this text; may be repeated."
)
@sampling_option("--ignore-eos", is_flag=True, help="Continue after end-of-sequence tokens.")
@click.option(
    "--n",
    type=click.IntRange(min=1),
    default=1,
    help="The number of outputs. Several outputs are printed together at the end.",
)
@click.option(
    "--num-beams",
    type=click.IntRange(min=1),
    help="Use beam search with this many beams instead of sampling.",
)
@click.option(
    "--json-schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the JSON schema of the output.",
)
@click.option(
    "--logprobs",
    type=click.IntRange(min=0),
    metavar="N",
    help="Report log probabilities: of each output token, and of the N most probable tokens at its position. "
    "Needs --json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option(
    "--verbose",
    is_flag=True,
    help="Print the memory plan, and the counts of speculation, on standard error.",
)
@config_options
def command(
    prompt: str | None,
    chat: bool,
    image: tuple[Path, ...],
    system: str | None,
    max_new_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    n: int,
    num_beams: int | None,
    json_schema: Path | None,
    logprobs: int | None,
    as_json: bool,
    verbose: bool,
    print_config: bool,
    **flags: object,
) -> None:
    """Generate text from a prompt and stream it.

    Sampling parameters that are not given come from the model's generation_config.json, then from OpenAI's
    defaults: temperature 1, all tokens, a new seed.
    """
    start = time.perf_counter()
    _check_model(flags["model"])
    config = config_from_flags(flags)
    if print_config:
        print_settings(config.describe())
        return
    _check_task(config)
    text = _checked_prompt(prompt)
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: text output cannot show them")
    options_excluded_by_beams = (
        *(temperature, top_k, top_p, min_p, seed, stop or None, chat or None, image or None),
        *(json_schema, logprobs),
    )
    if num_beams is not None and any(value is not None for value in options_excluded_by_beams):
        raise click.UsageError("--num-beams can only be combined with --n, --max-new-tokens and --ignore-eos")
    _check_utf8("--system", system or "")
    _check_utf8("--stop", "".join(stop))
    params = config.default_sampling_params(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=list(stop) or None,
        ignore_eos=ignore_eos,
    )
    from penstock import LLM  # loads torch

    with LLM.from_config(config) as llm:
        load_seconds = time.perf_counter() - start
        if verbose:
            print_memory_plan(llm)
        if num_beams is not None:
            beams = partial(llm.beam_search, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
            search = partial(beams, [text], num_beams=num_beams, num_return_sequences=n)
            print_outputs(*timed(search), load_seconds, as_json=as_json)
            return  # beam search uses no drafts, so there are no speculation counts to print
        if image and not chat:
            chat = not llm.tokenizer.reads_images or llm.tokenizer.image_placeholder not in text
        messages = _messages(text, system, image) if chat else None
        request = _Request(text, messages, list(image), params, _response_format(json_schema), logprobs)
        if n > 1:
            outputs, seconds = timed(partial(request.outputs, llm, n))
            print_outputs(
                outputs, seconds, load_seconds, as_json=as_json, more_members=speculation_counts(llm)
            )
        else:
            print_stream(llm, request.stream(llm), load_seconds, as_json=as_json)
        if verbose:
            print_speculation(llm)


@dataclass(frozen=True)
class _Request:
    """A prompt to continue or a conversation to answer, and the options of the output."""

    prompt: str
    messages: list[Mapping[str, object]] | None
    """The conversation; None to continue the prompt."""
    images: list[Path]
    """The images of the prompt; the images of a conversation are in its messages."""
    params: SamplingParams
    response_format: Mapping[str, object] | None
    logprobs: int | None

    def outputs(self, llm: LLM, n: int) -> list[GenerationOutput]:
        """Generate ``n`` outputs and return them."""
        response_format, logprobs = self.response_format, self.logprobs
        if self.messages is not None:
            return llm.chat(
                [self.messages], self.params, n=n, logprobs=logprobs, response_format=response_format
            )
        images = self.images or None
        return llm.generate(
            self.prompt, self.params, n=n, logprobs=logprobs, response_format=response_format, images=images
        )

    def stream(self, llm: LLM) -> TextStream:
        """Start to generate one output and return its stream."""
        return llm.stream(
            None if self.messages else self.prompt,
            self.params,
            messages=self.messages,
            logprobs=self.logprobs,
            response_format=self.response_format,
            images=None if self.messages else self.images or None,
        )


def _messages(text: str, system: str | None, images: Sequence[Path]) -> list[Mapping[str, object]]:
    parts = [*({"type": "image", "image": path} for path in images), {"type": "text", "text": text}]
    system_messages = [{"role": "system", "content": system}] if system is not None else []
    return [*system_messages, {"role": "user", "content": parts if images else text}]


def _response_format(path: Path | None) -> dict[str, object] | None:
    if path is None:
        return None
    try:
        return {"type": "json_schema", "json_schema": json.loads(path.read_text("utf-8"))}
    except ValueError as error:
        raise InputError(f"{path} is not a JSON schema: {error}") from error


def _check_model(name: object) -> None:
    """Raise a usage error if the argument MODEL looks like a prompt: it has white space and is not a path."""
    if isinstance(name, str) and any(map(str.isspace, name)) and not Path(name).expanduser().exists():
        raise click.UsageError(f"the argument {name!r} names the model: give the prompt as --prompt TEXT")


def _check_task(config: PipelineConfig) -> None:
    """Check before the load that an automatically chosen task is not embeddings generation.

    Raises:
        InputError: the setting ``task`` is ``auto``, and the model is an embeddings model.
    """
    from penstock.pipelines.core import PipelineTask

    task = config.model.pipeline_task
    if config.model.task == "auto" and task is PipelineTask.EMBEDDINGS_GENERATION:
        raise InputError(
            f"this model is loaded for {task.option} and generates no text: use penstock encode or "
            "penstock rerank, or load it with --task text-generation if its architecture supports that"
        )


def _checked_prompt(prompt_flag: str | None) -> str:
    """Return the prompt of ``--prompt``, or the text of standard input without its last line end.

    Raises:
        InputError: the prompt is empty or is not valid UTF-8, or there is no standard input.
    """
    text = _standard_input() if prompt_flag is None else prompt_flag
    _check_utf8("the prompt", text)
    if not text:
        raise InputError("the prompt is empty: give --prompt TEXT, or text on standard input")
    return text


def _check_utf8(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # Python decodes invalid UTF-8 on the command line to lone surrogates
        raise InputError(f"{name} is not valid UTF-8") from None


def _standard_input() -> str:
    if sys.stdin is None:
        raise InputError("there is no prompt: give --prompt TEXT, or text on standard input")
    if sys.stdin.isatty():
        click.echo("penstock: reading the prompt from the terminal; end it with Ctrl-D", err=True)
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not valid UTF-8, at byte {error.start}") from None
