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
    help="Also show the threads and the processors of N workers.",
)
@click.option(
    "--tensor-parallel-size",
    "num_ranks",
    type=click.IntRange(1, 64),
    default=1,
    metavar="N",
    help="Also show the threads and the processors of N ranks that divide a model.",
)
def command(as_json: bool, num_workers: int, num_ranks: int) -> None:
    """Show versions, processor, devices, kernels, OpenMP and threads."""
    from penstock.cli.environment import describe_environment  # imports torch

    environment = describe_environment(num_workers, num_ranks)
    if as_json:
        click.echo(json.dumps(environment.as_dict()))
    else:
        _print_report(environment)


def _print_report(environment: Environment) -> None:
    _section("versions", {"python": environment.python, **environment.versions})
    _section(
        "processor",
        {
            "system": environment.system,
            "model": environment.processor,
            "cores": str(environment.cores),
            "features": " ".join(environment.cpu_features) or "unknown",
            "kernels' ISA": environment.isa,
            "torch's ISA": environment.torch_cpu_capability,
            "threads": str(environment.threads),
            **{f"NUMA node {node}": f"processors {text}" for node, text in environment.numa_nodes.items()},
            "OpenMP": ", ".join(environment.openmp) or "none",
        },
    )
    if environment.workers:
        _section("workers", {f"worker {index}": text for index, text in enumerate(environment.workers)})
    if environment.ranks:
        _section("ranks", {f"rank {index}": text for index, text in enumerate(environment.ranks)})
    _section(
        "kernels",
        {
            backend.name: f"for {', '.join(backend.device_types)}"
            + ("" if backend.is_usable else ": cannot run here")
            for backend in environment.backends
        },
    )
    for device in environment.devices:
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
