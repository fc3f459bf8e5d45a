"""``penstock rerank``: orders documents by their score for a query."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.cli.texts import check_embeddings_model, read_texts


@click.command("rerank", cls=GroupedCommand)
@click.option("--query", metavar="TEXT", help="The query; required.")
@click.option("--document", "documents", multiple=True, metavar="TEXT", help="A document; may be repeated.")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Documents: one per line, or JSON lines in a .jsonl file; by default standard input.",
)
@click.option("--top-n", type=click.IntRange(min=1), help="Print this many documents; by default all.")
@click.option("--truncate", is_flag=True, help="Cut documents that exceed the maximum length.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
def command(
    query: str | None,
    documents: tuple[str, ...],
    file: Path | None,
    top_n: int | None,
    truncate: bool,
    as_json: bool,
    print_config: bool,
    **flags: object,
) -> None:
    """Print documents by descending score for a query.

    A cross-encoder scores each pair of query and document. For an embedder the score is the similarity of the
    two embeddings. The embeddings are computed with the checkpoint's prompts for queries and documents.
    """
    start = time.perf_counter()
    config = config_from_flags(flags)
    if print_config:
        print_settings(config.describe())
        return
    if not query:
        raise click.UsageError("there is no query: give --query TEXT")
    texts = read_texts(documents, file, "--document")
    check_embeddings_model(config, "rerank")
    from penstock import LLM  # loads torch

    with LLM.from_config(config) as llm:
        load_seconds = time.perf_counter() - start
        begin = time.perf_counter()
        results = llm.rerank(query, texts, top_n=top_n, truncate=truncate)
        seconds = max(time.perf_counter() - begin, 1e-9)
    if as_json:
        rows = [
            {"index": result.index, "relevance_score": result.score, "document": result.document}
            for result in results
        ]
        click.echo(json.dumps({"results": rows}, ensure_ascii=False))
        return
    for result in results:
        click.echo(f"{result.score:.4f}  [{result.index}]  {result.document}")
    click.echo(
        f"penstock: loaded in {load_seconds:.2f} s, {len(texts)} documents in {seconds:.2f} s: "
        f"{len(texts) / seconds:,.1f} documents/s",
        err=True,
    )
