"""``penstock pull``: download a model or a codec to the Hugging Face hub's cache."""

from __future__ import annotations

import json
import os

import click

from penstock.cli.formatting import file_size


@click.command("pull")
@click.argument("model")
@click.option("--revision", default="main", metavar="TEXT", help="Branch, tag or commit.  [default: main]")
@click.option("--gguf-file", metavar="TEXT", help="GGUF file to download: its name or a part of it.")
@click.option("--codec", is_flag=True, help="MODEL is an audio codec.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, revision: str, gguf_file: str | None, codec: bool, as_json: bool) -> None:
    """Download MODEL from the Hugging Face hub, so that it loads without the network.

    Only the files that loading needs are downloaded, with a progress bar on standard error. A download that
    was interrupted continues where it stopped.
    """
    from penstock.errors import CheckpointNotFoundError, ConfigError
    from penstock.weights.hub import is_hub_id, resolve_checkpoint, resolve_codec
    from penstock.weights.hub_cache import cached_revision

    if codec and gguf_file is not None:
        raise ConfigError("gguf_file", "names a file of a model, but --codec downloads a codec")
    if not is_hub_id(model):
        raise CheckpointNotFoundError(repr(model), "is not a model of the hub: write name or namespace/name")
    if codec:
        path = resolve_codec(model, revision, resumes=True)
    else:
        path = resolve_checkpoint(model, revision, gguf_file, resumes=True)
    folder = path if path.is_dir() else path.parent
    files = [file for file in folder.rglob("*") if file.is_file()]
    num_bytes = sum(os.stat(file).st_size for file in files)
    if as_json:
        report = {
            "model": model,
            "path": str(path),
            "revision": cached_revision(path),
            "num_files": len(files),
            "num_bytes": num_bytes,
        }
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    click.echo(f"{model}: {file_size(num_bytes)} in {len(files)} files, {path}")
