"""``penstock env``: a report on this installation and machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from penstock.cli.environment import Environment


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--data-parallel-size",
    "num_workers",
    type=click.IntRange(1, 256),
    default=1,
    metavar="N",
    help="Also show how N workers divide the processors.",
)
@click.option(
    "--tensor-parallel-size",
    "num_ranks",
    type=click.IntRange(1, 64),
    default=1,
    metavar="N",
    help="Also show threads and processors of N ranks that divide a model.",
)
def command(as_json: bool, num_workers: int, num_ranks: int) -> None:
    """Show versions, processor, devices, kernels, OpenMP and threads."""
    from penstock.cli.environment import describe_environment  # loads torch

    found = describe_environment(num_workers, num_ranks)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        _print(found)


def _print(found: Environment) -> None:
    _section("versions", {"python": found.python, **found.versions})
    _section(
        "processor",
        {
            "system": found.system,
            "model": found.processor,
            "cores": str(found.cores),
            "features": " ".join(found.cpu_features) or "unknown",
            "kernels' ISA": found.isa,
            "torch's ISA": found.torch_cpu_capability,
            "threads": str(found.threads),
            **{f"NUMA node {node}": f"processors {text}" for node, text in found.numa_nodes.items()},
            "OpenMP": ", ".join(found.openmp) or "none",
        },
    )
    if found.workers:
        _section("workers", {f"worker {index}": text for index, text in enumerate(found.workers)})
    if found.ranks:
        _section("ranks", {f"rank {index}": text for index, text in enumerate(found.ranks)})
    _section(
        "kernels",
        {
            backend.name: f"for {', '.join(backend.device_types)}"
            + ("" if backend.is_usable else ": cannot run here")
            for backend in found.backends
        },
    )
    for device in found.devices:
        memory = f"{_gib(device.free_memory)} free of {_gib(device.total_memory)}"
        _section(
            f"device {device.device}",
            {"memory": memory, "compiled steps": device.compiled_steps, **device.kernels},
        )


def _section(title: str, rows: dict[str, str]) -> None:
    click.echo(title)
    for name, value in rows.items():
        click.echo(f"  {name:16}  {value}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
