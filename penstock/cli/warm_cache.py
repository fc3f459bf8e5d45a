"""``penstock warm-cache``: download and check a model in advance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NotRequired, TypedDict

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.options import config_from_flags, config_options, print_settings

if TYPE_CHECKING:
    from penstock.config import PipelineConfig


@click.command("warm-cache", cls=GroupedCommand)
@click.option(
    "--checksums",
    is_flag=True,
    help="Read the large files of a hub model, such as weights, and compare their checksums.",
)
@click.option(
    "--pack",
    is_flag=True,
    help="Write the packed CPU weights to a file, which later starts map into memory. The file is as large "
    "as the packed weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
def command(checksums: bool, pack: bool, as_json: bool, print_config: bool, **flags: object) -> None:
    """Download and check a model in advance, with its draft model.

    Checks that the architecture is known and supports the encoding, that the files are complete and contain
    exactly the expected tensors and shapes, and that the tokenizer loads. Of LoRA adapters, only
    adapter_config.json is checked. Only --pack loads the weights. The file that --pack writes is used until
    the checkpoint changes.
    """
    config = config_from_flags(flags)
    if print_config:
        print_settings(config.describe())
        return
    models = [_check_model(config, checksums, pack)]
    if config.speculative.method == "draft_model":
        from penstock.pipelines.speculative.draft_model import draft_config

        models.append(_check_model(draft_config(config), checksums, pack))
    adapters = _check_adapters(config)
    if as_json:
        click.echo(json.dumps({"models": models, "adapters": adapters}, ensure_ascii=False))
        return
    for model in models:
        click.echo(f"{model['model']}: {model['checkpoint']}")
        click.echo(f"  architecture  {model['architecture']}, {model['encoding']}")
        click.echo(f"  weights       {model['num_tensors']:,} tensors, {model['num_bytes'] / 2**20:,.1f} MiB")
        template = "with" if model["has_chat_template"] else "without"
        click.echo(f"  tokenizer     {model['vocab_size']:,} tokens, {template} a chat template")
        if "num_checksums" in model:
            click.echo(f"  checksums     {model['num_checksums']} files match the hub")
        if "packed" in model:
            size = model["num_packed_bytes"] / 2**20
            click.echo(f"  packed        {size:,.1f} MiB in {model['packed']}")
    for name, path in adapters.items():
        click.echo(f"adapter {name}: {path}")


class CheckedModel(TypedDict):
    """A model whose checkpoint was checked."""

    model: str
    checkpoint: str
    architecture: str
    encoding: str
    num_tensors: int
    num_bytes: int
    vocab_size: int
    has_chat_template: bool
    num_checksums: NotRequired[int]
    packed: NotRequired[str]
    num_packed_bytes: NotRequired[int]


def _check_model(config: PipelineConfig, checksums: bool, pack: bool) -> CheckedModel:
    from penstock.assembly import check_checkpoint, pack_checkpoint
    from penstock.weights.checksums import check_checksums

    model = config.model
    num_checksums = check_checksums(model.checkpoint) if checksums else None
    tokenizer = check_checkpoint(config)
    packed = pack_checkpoint(config) if pack else None
    headers = model.tensor_headers
    report: CheckedModel = {
        "model": model.model_path,
        "checkpoint": str(model.checkpoint),
        "architecture": str(model.huggingface_config.model_type),
        "encoding": model.encoding,
        "num_tensors": len(headers),
        "num_bytes": sum(header.num_bytes for header in headers.values()),
        "vocab_size": tokenizer.vocab_size,
        "has_chat_template": tokenizer.has_chat_template,
    }
    if num_checksums is not None:
        report["num_checksums"] = num_checksums
    if packed is not None:
        report["packed"], report["num_packed_bytes"] = str(packed), packed.stat().st_size
    return report


def _check_adapters(config: PipelineConfig) -> dict[str, str]:
    from pathlib import Path

    from penstock.lora.adapter_config import AdapterConfig

    for _, path in config.lora.adapters:
        AdapterConfig.read(Path(path).expanduser())
    return dict(config.lora.adapters)
