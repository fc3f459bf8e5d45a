"""``penstock quantize``: write a quantized checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.errors import ConfigError
from penstock.kernels.encodings import ENCODINGS

_ENCODING_NAMES = tuple(name for name in ENCODINGS.names if not ENCODINGS[name].is_float)


@click.command("quantize", cls=GroupedCommand)
@click.option(
    "--encoding",
    type=click.Choice(_ENCODING_NAMES),
    default=_ENCODING_NAMES[-1],
    show_default=True,
    help="Encoding of the linear layers.",
)
@click.option("--out", metavar="DIR", help="New folder for the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
def command(encoding: str, out: str | None, as_json: bool, print_config: bool, **flags: object) -> None:
    """Write a quantized checkpoint in the format of compressed-tensors.

    Penstock and transformers load it. All linear layers except routers and the output head have the
    encoding. int4 means 4-bit integers with a scale for each group of 32 inputs, calibrated as when
    Penstock loads a model in int4. int8 means 8-bit integers with a scale for each output. Embeddings,
    norms, routers and the output head are copied.
    """
    if flags.get("quantization_encoding"):
        raise ConfigError(
            "quantization_encoding",
            f"is set by --encoding, which is {encoding}: omit quantization_encoding",
        )
    config = config_from_flags(flags | {"quantization_encoding": encoding})
    if print_config:
        print_settings(config.describe())
        return
    if out is None:
        raise ConfigError("out", "is missing: name a new folder with --out")
    from penstock.assembly import load_packed_layers
    from penstock.weights.export import write_compressed

    layers, weights = load_packed_layers(config, is_uniform=True)
    folder = Path(out).expanduser()
    names = write_compressed(config.model.checkpoint, weights, layers, encoding, folder)
    sizes = {
        "before": sum(header.num_bytes for header in config.model.tensor_headers.values()),
        "after": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    }
    if as_json:
        report = {"out": str(folder), "encoding": encoding, "num_layers": len(names), "bytes": sizes}
        click.echo(json.dumps(report))
        return
    click.echo(f"{folder}: {len(names)} layers in {encoding}")
    click.echo(f"  {sizes['before'] / 2**20:,.1f} MiB became {sizes['after'] / 2**20:,.1f} MiB")
