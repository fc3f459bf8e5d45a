"""Compare Penstock with another engine on the same workloads. The engines run alternately.

    python -m benchmarks.peers setup llama_cpp
    python -m benchmarks.peers run llama_cpp --shape l1b --encoding int4 --works decode --works prefill
    python -m benchmarks.peers run llama_cpp --shape l1b --encoding gguf --peer-encoding Q4_K_M --works decode
    python -m benchmarks.peers table *.json
    python -m benchmarks.peers plot *.json --out peers.png

Sampling is greedy, end of sequence is ignored, prompts are random and new in every run, prefix cache and
speculation are off. Each engine is a separate process, started by the Python of its virtual environment. It
is stopped (SIGSTOP) while the other engine runs. The machine should be idle.
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
    """Define the command group."""


@main.command()
@click.argument("names", metavar="PEER...", nargs=-1, required=True, type=click.Choice(list(PEERS)))
@_venvs
def setup(names: tuple[str, ...], venvs: Path) -> None:
    """Create the virtual environments of peers from the package index. Some take many minutes."""
    venvs.mkdir(parents=True, exist_ok=True)
    for name in names:
        set_up(PEERS[name], venvs)


@main.command()
@click.argument("name", metavar="PEER", type=click.Choice(list(PEERS)))
@click.option("--shape", default="l110m", show_default=True, help="l110m, l1b, or the path of a config.json.")
@click.option(
    "--encoding",
    default="bfloat16",
    show_default=True,
    help="Penstock's encoding. With gguf, it loads the file of llama.cpp.",
)
@click.option(
    "--peer-encoding", help="The peer's own name of its encoding. Default: the closest to --encoding."
)
@click.option("--works", type=click.Choice(list(WORKLOADS)), multiple=True, default=("decode", "prefill"))
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Prompts of the workload batch.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Prompt tokens of long.",
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
    """Run workloads on Penstock and on a peer alternately, and print medians and ratios."""
    peer = PEERS[name]
    theirs = peer_encoding or peer.encodings.get(encoding)
    is_same_file = encoding == "gguf"
    if is_same_file and (name != "llama_cpp" or peer_encoding is None or "cold" in works):
        raise click.UsageError("--encoding gguf needs the peer llama_cpp, --peer-encoding, and no work cold")
    if theirs is None:
        known = ", ".join(f"{ours} ({word})" for ours, word in peer.encodings.items())
        raise click.UsageError(f"{name} has no encoding to compare with {encoding}; it has {known}")
    if not python_of(venvs / name).exists():
        raise click.UsageError(f"{name} is not installed; run `python -m benchmarks.peers setup {name}`")
    chosen = [sized(WORKLOADS[work], batch=batch, context=context) for work in works]
    source = checkpoint(shape, venvs / "checkpoints")
    model = converted(peer, theirs, source, venvs)
    ours = {"OMP_NUM_THREADS": str(threads)}
    if "cold" in works:  # the peers' models are converted beforehand too
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
            {"model": str(_link_without_tokenizer(model) if is_same_file else source), "encoding": encoding},
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
        log=lambda text: click.echo(text, err=True),
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


def _link_without_tokenizer(model: Path) -> Path:
    """Return a link to a GGUF file in a folder without tokenizer files: the tokenizer of the file is
    loaded."""
    link = model.parent / "gguf" / model.name
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(model.resolve())
    return link


_JSON_FILES = click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)


@main.command()
@_JSON_FILES
def table(files: tuple[Path, ...]) -> None:
    """Print one Markdown table of the reports that runs wrote with --json."""
    click.echo(table_of(_read(files)), nl=False)


@main.command("plot")
@_JSON_FILES
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def plot_files(files: tuple[Path, ...], out: Path) -> None:
    """Draw the ratios of several runs into one PNG file."""
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
