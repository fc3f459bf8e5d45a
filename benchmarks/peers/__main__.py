"""Penstock and another engine at the same work, in turn.

    python -m benchmarks.peers setup llama_cpp
    python -m benchmarks.peers run llama_cpp --shape l1b --encoding int4 --works decode --works prefill
    python -m benchmarks.peers table *.json
    python -m benchmarks.peers plot *.json --out peers.png

Greedy, end of sequence ignored, prompts fresh and random, prefix cache and speculation off. Each engine is a
process of its own, started by the Python of its virtual environment, and stopped while the other one runs.
The machine should do nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.peers.checkpoints import checkpoint, converted, pack, vocabulary_of
from benchmarks.peers.comparing import Contest, compare
from benchmarks.peers.engines import ROOT, Engine
from benchmarks.peers.peers import DEFAULT_FOLDER, PEERS, environment_of, python_of, set_up
from benchmarks.peers.probe import probe
from benchmarks.peers.reporting import plot, table_of
from benchmarks.peers.works import WORKLOADS, Opener, max_length_of, sized


def _venvs(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--venvs",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT_FOLDER,
        show_default=True,
        help="The folder of virtual environments and converted models.",
    )(command)


@click.group(help=__doc__, context_settings={"max_content_width": 120})
def main() -> None:
    """The command line."""


@main.command()
@click.argument("names", metavar="PEER...", nargs=-1, required=True, type=click.Choice(list(PEERS)))
@_venvs
def setup(names: tuple[str, ...], venvs: Path) -> None:
    """Makes the virtual environments of peers from the package index. Some take many minutes."""
    venvs.mkdir(parents=True, exist_ok=True)
    for name in names:
        set_up(PEERS[name], venvs)


@main.command()
@click.argument("name", metavar="PEER", type=click.Choice(list(PEERS)))
@click.option("--shape", default="l110m", show_default=True, help="l110m, l1b, or the path of a config.json.")
@click.option("--encoding", default="bfloat16", show_default=True, help="Penstock's.")
@click.option("--peer-encoding", help="In the peer's words, where it is to be another than Penstock's.")
@click.option("--works", type=click.Choice(list(WORKLOADS)), multiple=True, default=("decode", "prefill"))
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True, help="Prompts of batch.")
@click.option(
    "--context", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of a long prompt."
)
@click.option("--pairs", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=os.cpu_count(), show_default="all cores")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False))
@_venvs
def run(
    name: str,
    shape: str,
    encoding: str,
    peer_encoding: str | None,
    works: tuple[str, ...],
    batch: int,
    context: int,
    pairs: int,
    threads: int,
    json_path: Path | None,
    plot_path: Path | None,
    venvs: Path,
) -> None:
    """Runs works on Penstock and on a peer in turn, and prints medians and ratios."""
    peer = PEERS[name]
    theirs = peer_encoding or peer.encodings.get(encoding)
    if theirs is None:
        known = ", ".join(f"{ours} ({word})" for ours, word in peer.encodings.items())
        raise click.UsageError(f"{name} has nothing to set against {encoding}: it has {known}")
    if not python_of(venvs / name).exists():
        raise click.UsageError(f"{name} is not installed: `python -m benchmarks.peers setup {name}` does it")
    chosen = [sized(WORKLOADS[work], batch=batch, context=context) for work in works]
    source = checkpoint(shape, venvs / "checkpoints")
    model = converted(peer, theirs, source, venvs)
    ours = {"OMP_NUM_THREADS": str(threads)}
    if "cold" in works:  # as the peers' models are converted ahead
        ours["XDG_CACHE_HOME"] = str(venvs / "penstock")
        pack(source, encoding, ours)
    load = {
        "threads": threads,
        "max_length": max_length_of(chosen),
        "prompts": max(work.prompts for work in chosen),
    }
    logs = venvs / "logs"
    logs.mkdir(exist_ok=True)

    def opener(python: str | Path, driver: str, what: dict[str, str], environment: dict[str, str]) -> Opener:
        command = [str(python), "-m", f"benchmarks.peers.drivers.{driver}"]
        return partial(Engine, command, {**load, **what}, environment, logs / f"{driver}.log")

    contest = Contest(
        ours=opener(
            sys.executable,
            "penstock",
            {"model": str(source), "encoding": encoding},
            ours,
        ),
        theirs=opener(
            python_of(venvs / name),
            peer.driver,
            {"model": str(model), "encoding": theirs},
            environment_of(peer, venvs, threads),
        ),
        vocabulary=vocabulary_of(source),
        pairs=pairs,
        probe=probe,
        told=lambda text: click.echo(text, err=True),
    )
    found = compare(chosen, contest)
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": _machine(threads),
        "shape": shape,
        "encoding": encoding,
        "peer": name,
        "peer_encoding": theirs,
        "peer_version": found["versions"]["peer"][peer.package],
        "pairs": pairs,
        **found,
    }
    click.echo(table_of([report]), nl=False)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1))
    if plot_path is not None:
        plot([report], plot_path)


_JSON_FILES = click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)


@main.command()
@_JSON_FILES
def table(files: tuple[Path, ...]) -> None:
    """Prints one Markdown table of what several runs wrote with --json."""
    click.echo(table_of(_read(files)), nl=False)


@main.command("plot")
@_JSON_FILES
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def plot_files(files: tuple[Path, ...], out: Path) -> None:
    """Draws the ratios of several runs into one PNG file."""
    plot(_read(files), out)


def _read(files: tuple[Path, ...]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files]


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "not a checkout"


def _machine(threads: int) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(models or [platform.machine()])[0]}, {os.cpu_count()} cores, {threads} threads"


if __name__ == "__main__":
    main()
