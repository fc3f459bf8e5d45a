"""The output of ``penstock generate``: text or JSON, timings, memory plan and speculation counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from penstock.llm.llm import LLM
    from penstock.llm.outputs import GenerationOutput, TextStream


@dataclass(frozen=True, slots=True)
class Timings:
    """The durations of the load and of a generation."""

    load_seconds: float
    """From the start of the command until the model is loaded, including the import of torch."""
    first_token_seconds: float
    """From the end of the load to the first piece of text, or to the end if there is no text."""
    remaining_seconds: float
    """From the first piece of text to the end."""
    num_first_tokens: int = 1
    """The number of tokens in the first piece of text."""

    def tokens_per_second(self, num_tokens: int) -> float:
        """Return the tokens per second after the first piece of text, or in total for a single piece."""
        if num_tokens > self.num_first_tokens and self.remaining_seconds > 0:
            return (num_tokens - self.num_first_tokens) / self.remaining_seconds
        return num_tokens / max(self.first_token_seconds, 1e-9)

    def summary(self, num_tokens: int) -> str:
        """Return the line about a stream that ``penstock generate`` prints on standard error."""
        return (
            f"loaded in {self.load_seconds:.2f} s, "
            f"first token after {self.first_token_seconds * 1000:.0f} ms, "
            f"{num_tokens} tokens at {self.tokens_per_second(num_tokens):.1f} tokens/s"
        )


def timed(generate: Callable[[], list[GenerationOutput]]) -> tuple[list[GenerationOutput], float]:
    """Return the outputs, and the seconds that ``generate`` took."""
    start = time.perf_counter()
    return generate(), time.perf_counter() - start


def print_outputs(
    outputs: list[GenerationOutput],
    seconds: float,
    load_seconds: float,
    *,
    as_json: bool,
    more_members: dict[str, object] | None = None,
) -> None:
    """Print the outputs of one prompt and their timings.

    ``more_members`` are additional members of the JSON object.
    """
    num_generated = sum(output.num_generated_tokens for output in outputs)
    speed = num_generated / max(seconds, 1e-9)
    if as_json:
        report = {
            "outputs": [{"index": output.index, **_output_as_json(output)} for output in outputs],
            "usage": _usage(outputs),
            "timings": {"load_s": round(load_seconds, 4), "tokens_per_s": round(speed, 2)},
            **(more_members or {}),
        }
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    for output in outputs:
        click.echo(f"[{output.index}] {output.text}")
    click.echo(
        f"penstock: loaded in {load_seconds:.2f} s, {len(outputs)} outputs with {num_generated} tokens in "
        f"total at {speed:.1f} tokens/s",
        err=True,
    )


def print_stream(llm: LLM, stream: TextStream, load_seconds: float, *, as_json: bool) -> None:
    """Print the output of a stream: text as it is generated, or one JSON object at the end."""
    with closing(stream):
        timings = _print_pieces(stream, load_seconds, is_silent=as_json)
        output = stream.output
    if as_json:
        click.echo(json.dumps(_stream_report(output, timings) | speculation_counts(llm), ensure_ascii=False))
    else:
        click.echo(f"penstock: {timings.summary(output.num_generated_tokens)}", err=True)


def _print_pieces(stream: TextStream, load_seconds: float, *, is_silent: bool) -> Timings:
    """Print the text as it is generated, unless ``is_silent``, and return the timings."""
    start = time.perf_counter()
    first_piece_at, num_first_tokens = None, 1
    for piece in stream:
        if first_piece_at is None:
            first_piece_at, num_first_tokens = time.perf_counter(), stream.num_tokens
        if not is_silent:
            click.echo(piece, nl=False)
    end = time.perf_counter()
    if not is_silent:
        click.echo()
    first_piece_at = first_piece_at or end
    return Timings(load_seconds, first_piece_at - start, end - first_piece_at, num_first_tokens)


def _stream_report(output: GenerationOutput, timings: Timings) -> dict[str, object]:
    num_generated = output.num_generated_tokens
    return {
        **_output_as_json(output),
        "usage": _usage([output]),
        "timings": {
            "load_s": round(timings.load_seconds, 4),
            "time_to_first_token_s": round(timings.first_token_seconds, 4),
            "tokens_per_s": round(timings.tokens_per_second(num_generated), 2),
        },
    }


def _output_as_json(output: GenerationOutput) -> dict[str, object]:
    members: dict[str, object] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    if output.score is not None:
        members["score"] = output.score
    rows = output.log_probabilities
    if rows is not None:
        members["token_log_probabilities"] = rows.token_log_probabilities
        members["top_log_probabilities"] = rows.top_log_probabilities
    return members


def _usage(outputs: list[GenerationOutput]) -> dict[str, int]:
    """Return the token counts of one prompt and of all its outputs; the prompt counts once."""
    num_prompt = len(outputs[0].prompt_token_ids)
    num_generated = sum(output.num_generated_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def print_memory_plan(llm: LLM) -> None:
    """Print the memory plan on standard error."""
    from rich.console import Console

    Console(stderr=True).print(llm.pipeline.memory_plan.table())


def speculation_counts(llm: LLM) -> dict[str, object]:
    """Return the speculation counts for the JSON object.

    The result is empty if speculation is disabled and no grammar has forced tokens.
    """
    stats = llm.pipeline.speculation_stats
    is_used = llm.config.speculative.method is not None or stats.num_forced > 0
    return {"speculation": stats.summary()} if is_used else {}


def print_speculation(llm: LLM) -> None:
    """Print the speculation counts on standard error. Prints nothing if `speculation_counts` is empty."""
    stats = llm.pipeline.speculation_stats
    if speculation_counts(llm):
        click.echo(
            f"penstock: {stats.num_accepted} of {stats.num_proposed} drafted tokens accepted "
            f"({stats.acceptance_rate:.0%}), {stats.mean_tokens:.2f} tokens per verified step, "
            f"{stats.num_forced} tokens forced by a grammar",
            err=True,
        )
