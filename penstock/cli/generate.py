"""``penstock generate``: streams text to standard output, and prints timings to standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.formatting import GroupedCommand, GroupedOption
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.llm.llm import LLM
    from penstock.llm.outputs import GenerationOutput, TextStream

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
    help="An image for a model that reads images; may be repeated. Images come before the text of a message, "
    "unless the prompt has the model's placeholder, such as <image>, for each.",
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
    help="The number of outputs; they are printed when all are done.",
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
    help="Report log probabilities of the tokens and of this many top tokens; needs --json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("--verbose", is_flag=True, help="Print the memory plan on standard error.")
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
    sampling = (
        *(temperature, top_k, top_p, min_p, seed, stop or None, chat or None, image or None),
        *(json_schema, logprobs),
    )
    if num_beams is not None and any(value is not None for value in sampling):
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
        loaded = time.perf_counter() - start
        if verbose:
            _print_memory_plan(llm)
        what: dict[str, Any] = {"response_format": _response_format(json_schema), "logprobs": logprobs}
        if num_beams is not None:
            beams = partial(llm.beam_search, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
            search = partial(beams, [text], num_beams=num_beams, num_return_sequences=n)
            _print_several(*_timed(search), loaded, as_json=as_json)
            return  # beam search uses no drafts, so there are no counts to print
        if image and not chat:
            chat = not llm.tokenizer.reads_images or llm.tokenizer.image_placeholder not in text
        messages = _messages(text, system, image) if chat else None
        given = list(image) or None
        if n > 1:
            answers = partial(llm.chat, [messages]) if messages else partial(llm.generate, text, images=given)
            outputs, seconds = _timed(partial(answers, params, n=n, **what))
            _print_several(outputs, seconds, loaded, as_json=as_json, more=_speculation(llm))
            if verbose:
                _print_speculation(llm)
            return
        prompt = None if messages else text
        if prompt is not None:
            what["images"] = given
        with closing(llm.stream(prompt, params, messages=messages, **what)) as stream:
            timings = _run(stream, loaded, silent=as_json)
            output = stream.output
        if as_json:
            click.echo(json.dumps(_as_json(output, timings) | _speculation(llm), ensure_ascii=False))
        else:
            click.echo(f"penstock: {timings.summary(output.num_generated_tokens)}", err=True)
        if verbose:
            _print_speculation(llm)


@dataclass(frozen=True, slots=True)
class Timings:
    """The duration of a generation, in seconds."""

    load: float
    """From the start of the command until the model is loaded, including the import of torch."""
    first_token: float
    """From the end of the load to the first text."""
    others: float
    """From the first text to the end."""
    num_first: int = 1
    """The number of tokens in the first text."""

    def tokens_per_second(self, num_tokens: int) -> float:
        """Return the speed after the first text; if nothing followed, the speed including it."""
        if num_tokens > self.num_first and self.others > 0:
            return (num_tokens - self.num_first) / self.others
        return num_tokens / max(self.first_token, 1e-9)

    def summary(self, num_tokens: int) -> str:
        """Return the last line that ``penstock generate`` prints."""
        return (
            f"loaded in {self.load:.2f} s, first token after {self.first_token * 1000:.0f} ms, "
            f"{num_tokens} tokens at {self.tokens_per_second(num_tokens):.1f} tokens/s"
        )


def _messages(text: str, system: str | None, images: Sequence[Path]) -> list[Any]:
    content: Any = text
    if images:
        content = [{"type": "image", "image": path} for path in images] + [{"type": "text", "text": text}]
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": content}]


def _response_format(path: Path | None) -> dict[str, object] | None:
    if path is None:
        return None
    try:
        return {"type": "json_schema", "json_schema": json.loads(path.read_text("utf-8"))}
    except ValueError as error:
        raise InputError(f"{path} is not a JSON schema: {error}") from error


def _timed(generate: Callable[[], list[GenerationOutput]]) -> tuple[list[GenerationOutput], float]:
    """Return the outputs, and the seconds that they took together."""
    start = time.perf_counter()
    return generate(), time.perf_counter() - start


def _print_several(
    outputs: list[GenerationOutput],
    seconds: float,
    loaded: float,
    *,
    as_json: bool,
    more: dict[str, object] | None = None,
) -> None:
    num_generated = sum(output.num_generated_tokens for output in outputs)
    speed = num_generated / max(seconds, 1e-9)
    if as_json:
        several = {
            "outputs": [{"index": output.index, **_output_as_json(output)} for output in outputs],
            "usage": _usage(outputs),
            "timings": {"load_s": round(loaded, 4), "tokens_per_s": round(speed, 2)},
            **(more or {}),
        }
        click.echo(json.dumps(several, ensure_ascii=False))
        return
    for output in outputs:
        click.echo(f"[{output.index}] {output.text}")
    click.echo(
        f"penstock: loaded in {loaded:.2f} s, {len(outputs)} outputs with {num_generated} tokens in total "
        f"at {speed:.1f} tokens/s",
        err=True,
    )


def _run(stream: TextStream, loaded: float, *, silent: bool) -> Timings:
    """Print the text as it is generated, unless ``silent``, and return the timings."""
    start = time.perf_counter()
    first, num_first = None, 1
    for piece in stream:
        if first is None:
            first, num_first = time.perf_counter(), stream.num_tokens
        if not silent:
            click.echo(piece, nl=False)
    end = time.perf_counter()
    if not silent:
        click.echo()
    first = first or end
    return Timings(loaded, first - start, end - first, num_first)


def _as_json(output: GenerationOutput, timings: Timings) -> dict[str, object]:
    num_generated = output.num_generated_tokens
    return {
        **_output_as_json(output),
        "usage": _usage([output]),
        "timings": {
            "load_s": round(timings.load, 4),
            "time_to_first_token_s": round(timings.first_token, 4),
            "tokens_per_s": round(timings.tokens_per_second(num_generated), 2),
        },
    }


def _output_as_json(output: GenerationOutput) -> dict[str, object]:
    shown: dict[str, object] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    if output.score is not None:
        shown["score"] = output.score
    rows = output.log_probabilities
    if rows is not None:
        shown["token_log_probabilities"] = rows.token_log_probabilities
        shown["top_log_probabilities"] = rows.top_log_probabilities
    return shown


def _usage(outputs: list[GenerationOutput]) -> dict[str, int]:
    """Return the token counts of one prompt and of all its outputs; the prompt counts once."""
    num_prompt = len(outputs[0].prompt_token_ids)
    num_generated = sum(output.num_generated_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def _check_model(name: object) -> None:
    """Refuse a prompt that was given as the argument MODEL."""
    if isinstance(name, str) and any(map(str.isspace, name)) and not Path(name).expanduser().exists():
        raise click.UsageError(f"the argument {name!r} names the model: give the prompt as --prompt TEXT")


def _check_task(config: PipelineConfig) -> None:
    """Refuse an embeddings model before it is loaded."""
    from penstock.pipelines.core import PipelineTask

    served = config.model.pipeline_task
    if config.model.task == "auto" and served is PipelineTask.EMBEDDINGS_GENERATION:
        raise InputError(
            f"this model is loaded for {served.option} and generates no text: use penstock encode or "
            "penstock rerank, or load it with --task text-generation if its architecture supports that"
        )


def _checked_prompt(given: str | None) -> str:
    """Return the prompt from the flag, or from standard input without its last line end."""
    text = _standard_input() if given is None else given
    _check_utf8("the prompt", text)
    if not text:
        raise InputError("the prompt is empty: give --prompt TEXT, or text on standard input")
    return text


def _check_utf8(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # Python decodes other bytes of the command line as lone surrogates
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


def _print_memory_plan(llm: LLM) -> None:
    from rich.console import Console

    Console(stderr=True).print(llm.pipeline.memory_plan.table())


def _speculation(llm: LLM) -> dict[str, object]:
    """Return the speculation counts for the JSON object; empty without speculation."""
    stats = llm.pipeline.speculation_stats
    is_used = llm.config.speculative.method is not None or stats.num_forced > 0
    return {"speculation": stats.summary()} if is_used else {}


def _print_speculation(llm: LLM) -> None:
    stats = llm.pipeline.speculation_stats
    if _speculation(llm):
        click.echo(
            f"penstock: {stats.num_accepted} of {stats.num_proposed} drafted tokens accepted "
            f"({stats.acceptance_rate:.0%}), {stats.mean_tokens:.2f} tokens per verified step, "
            f"{stats.num_forced} tokens forced by a grammar",
            err=True,
        )
