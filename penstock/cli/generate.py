"""``penstock generate``: a prompt in, text out as it comes, and what it took on standard error."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import config_from_flags, config_options
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.answers import GenerationOutput, TextStream
    from penstock.llm import LLM
    from penstock.pipelines.config import PipelineConfig
    from penstock.pipelines.core import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 256


@click.command("generate")
@click.option("--prompt", metavar="TEXT", help="The text to go on from; standard input if not given.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message, for the model's chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it; needs --chat.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_NEW_TOKENS,
    show_default=True,
    help="Generate at most this many tokens.",
)
@click.option("--temperature", type=float, help="Above 1 more varied, below 1 less; 0 is greedy.")
@click.option("--top-k", type=int, help="Choose among the K most probable tokens; -1 is all, 1 greedy.")
@click.option("--top-p", type=float, help="Keep the most probable tokens that reach this probability.")
@click.option("--min-p", type=float, help="Keep tokens this probable, relative to the most probable one.")
@click.option("--seed", type=int, help="Makes a random choice repeatable.")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."
)
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end the text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when all is done.")
@click.option("--verbose", is_flag=True, help="Print how the memory was shared out, on standard error.")
@click.option("--print-config", is_flag=True, help="Print every setting and where it came from; do nothing.")
@config_options
def command(
    prompt: str | None,
    chat: bool,
    system: str | None,
    max_new_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    as_json: bool,
    verbose: bool,
    print_config: bool,
    **flags: Any,
) -> None:
    """Generate text from a prompt, as it comes.

    Sampling parameters that are not given come from the model's generation_config.json, else from OpenAI's
    defaults: temperature 1, all tokens, a fresh seed.
    """
    start = time.perf_counter()
    config = config_from_flags(flags)
    if print_config:
        _print_config(config)
        return
    text = _checked_prompt(prompt)
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
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
    from penstock.llm import LLM  # loads torch

    with LLM.from_config(config) as llm:
        loaded = time.perf_counter() - start
        if verbose:
            _print_memory_plan(llm)
        with closing(_stream(llm, text, params, chat=chat, system=system)) as stream:
            timings = _run(stream, loaded, silent=as_json)
            output = stream.output
    if as_json:
        click.echo(json.dumps(_as_json(output, timings), ensure_ascii=False))
    else:
        click.echo(f"penstock: {timings.summary(output.num_generated_tokens)}", err=True)


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a generation took, in seconds."""

    load: float
    """From the start of the command to a model that can run, with the import of torch."""
    first_token: float
    """From there to the first text."""
    others: float
    """From the first text to the end."""

    def tokens_per_second(self, num_tokens: int) -> float:
        """The speed after the first token; over all where there is only one."""
        if num_tokens > 1 and self.others > 0:
            return (num_tokens - 1) / self.others
        return num_tokens / max(self.first_token, 1e-9)

    def summary(self, num_tokens: int) -> str:
        """The line that ends ``penstock generate``."""
        return (
            f"loaded in {self.load:.2f} s, first token after {self.first_token * 1000:.0f} ms, "
            f"{num_tokens} tokens at {self.tokens_per_second(num_tokens):.1f} tokens/s"
        )


def _stream(llm: LLM, text: str, params: SamplingParams, *, chat: bool, system: str | None) -> TextStream:
    if not chat:
        return llm.stream(text, params)
    roles = [("system", system)] if system is not None else []
    messages: list[Any] = [{"role": role, "content": content} for role, content in [*roles, ("user", text)]]
    return llm.stream(messages=messages, sampling_params=params)


def _run(stream: TextStream, loaded: float, *, silent: bool) -> Timings:
    """Prints the text as it comes, unless ``silent``, and takes the time."""
    start = time.perf_counter()
    first = None
    for piece in stream:
        first = first or time.perf_counter()
        if not silent:
            click.echo(piece, nl=False)
    end = time.perf_counter()
    if not silent:
        click.echo()
    first = first or end
    return Timings(loaded, first - start, end - first)


def _as_json(output: GenerationOutput, timings: Timings) -> dict[str, Any]:
    num_prompt, num_generated = len(output.prompt_token_ids), output.num_generated_tokens
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        },
        "timings": {
            "load_s": round(timings.load, 4),
            "time_to_first_token_s": round(timings.first_token, 4),
            "tokens_per_s": round(timings.tokens_per_second(num_generated), 2),
        },
    }


def _checked_prompt(given: str | None) -> str:
    """The prompt of the flag, or of standard input without the line end that an editor or echo adds."""
    text = _standard_input() if given is None else given
    _check_utf8("the prompt", text)
    if not text:
        raise InputError("the prompt is empty: give --prompt TEXT, or text on standard input")
    return text


def _check_utf8(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # bytes of the command line that are no UTF-8 arrive as lone surrogates
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


def _print_config(config: PipelineConfig) -> None:
    rows = [(name, _shown(value), source) for name, value, source in config.describe()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, source in rows:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print_memory_plan(llm: LLM) -> None:
    from rich.console import Console

    Console(stderr=True).print(llm.pipeline.memory_plan.table())
