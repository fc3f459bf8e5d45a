"""``penstock rm``: delete a model from the cache of the hub."""

from __future__ import annotations

import click

from penstock.cli.formatting import file_size


@click.command("rm")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--revision", metavar="TEXT", help="Delete only this branch, tag or commit.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def command(models: tuple[str, ...], revision: str | None, yes: bool) -> None:
    """Delete each MODEL from the cache of the Hugging Face hub.

    Without --revision, all revisions and partly downloaded files are deleted.
    """
    from penstock.weights.hub_cache import delete_model, find_cached_models

    cached_models = {name: find_cached_models(name, revision) for name in dict.fromkeys(models)}
    for name, cached in cached_models.items():
        revisions = ", ".join(
            model.revision[:12] if model.revision else "a partial download" for model in cached
        )
        if not yes and not click.confirm(f"Delete {name} ({revisions})?", err=True):
            continue
        click.echo(f"{name}: {file_size(delete_model(name, revision))} freed")
