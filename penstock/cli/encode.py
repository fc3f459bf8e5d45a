"""``penstock encode``: writes embeddings of texts to a file or to standard output."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from penstock.cli.embeddings_files import FIELD_NAMES, FORMATS, check_format, chosen_format, write_outputs
from penstock.cli.formatting import GroupedCommand
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.cli.texts import check_embeddings_model, read_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipelines.core import EmbeddingsOutput, EmbeddingsResponse, PoolingType

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last_token")


@click.command("encode", cls=GroupedCommand)
@click.option("--text", "texts", multiple=True, metavar="TEXT", help="A text to encode; may be repeated.")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Texts to encode: one per line, or JSON lines in a .jsonl file; by default standard input.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; by default standard output.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="The format of the output; by default the suffix of --output, else jsonl.",
)
@click.option(
    "--output-kind",
    type=click.Choice([*FIELD_NAMES]),
    help="Output to compute; by default the model's default output.",
)
@click.option("--prompt-name", metavar="NAME", help="Place this prompt of the checkpoint before each text.")
@click.option("--prompt", metavar="TEXT", help="Place this text before each text; excludes --prompt-name.")
@click.option("--pooling", type=click.Choice(POOLINGS), help="Use this pooling instead of the checkpoint's.")
@click.option(
    "--dimensions",
    type=click.IntRange(min=1),
    help="Keep this many leading dimensions of the embeddings; needs a Matryoshka embeddings model.",
)
@click.option(
    "--normalize/--no-normalize",
    default=None,
    help="Whether to scale embeddings to length 1; by default as set by the checkpoint.",
)
@click.option("--truncate", is_flag=True, help="Cut texts that exceed the maximum length.")
@config_options
def command(
    texts: tuple[str, ...],
    file: Path | None,
    output: Path | None,
    file_format: str | None,
    output_kind: str | None,
    print_config: bool,
    prompt_name: str | None,
    prompt: str | None,
    pooling: PoolingType | None,
    dimensions: int | None,
    normalize: bool | None,
    truncate: bool,
    **flags: object,
) -> None:
    """Compute the embeddings of texts.

    Also computes sparse and multi-vector embeddings, and the scores of a classifier. Prints the throughput
    on standard error.
    """
    start = time.perf_counter()
    config = config_from_flags(flags)
    if print_config:
        print_settings(config.describe())
        return
    output_format = chosen_format(output, file_format)
    check_format(output_format, output_kind or "dense")
    inputs = read_texts(texts, file, "--text")
    check_embeddings_model(config, "encode")
    from penstock import LLM  # loads torch

    with LLM.from_config(config) as llm:
        load_seconds = time.perf_counter() - start
        computed_kind = cast("EmbeddingsOutput", output_kind or llm.pipeline.outputs[0])
        check_format(output_format, computed_kind)
        begin = time.perf_counter()
        responses = llm.encode(
            inputs,
            outputs=(computed_kind,),
            prompt_name=prompt_name,
            prompt=prompt,
            pooling=pooling,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )
        seconds = time.perf_counter() - begin
    write_outputs(output, output_format, computed_kind, inputs, responses)
    click.echo(f"penstock: {summary(responses, load_seconds, seconds)}", err=True)


def summary(responses: Sequence[EmbeddingsResponse], load_seconds: float, seconds: float) -> str:
    """Return the command's line on standard error: load time, number of tokens, throughput."""
    num_tokens = sum(response.num_tokens for response in responses)
    seconds = max(seconds, 1e-9)
    return (
        f"loaded in {load_seconds:.2f} s, {len(responses)} texts with {num_tokens} tokens in "
        f"{seconds:.2f} s: {len(responses) / seconds:,.1f} texts/s, {num_tokens / seconds:,.0f} tokens/s"
    )
