"""Compare Penstock with another engine on the same workloads. The engines run alternately.

    python -m benchmarks.peers setup llama_cpp
    python -m benchmarks.peers run llama_cpp --shape l1b --encoding int4 --works decode --works prefill
    python -m benchmarks.peers run llama_cpp --shape l1b --encoding gguf --peer-encoding Q4_K_M --works decode
    python -m benchmarks.peers table *.json
    python -m benchmarks.peers plot *.json --out peers.png

A peer is the other engine of a comparison. Sampling is greedy, end of sequence is ignored, and every run has
new random prompts. The prefix cache and speculation are off. Each engine runs as a separate process in its
own virtual environment. SIGSTOP stops the process while the other engine runs. The machine should be idle.
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

from benchmarks.peers.checkpoints import checkpoint, converted_model, pack_weights, read_vocab_size
from benchmarks.peers.comparing import Comparison, compare
from benchmarks.peers.engines import ROOT, Engine
from benchmarks.peers.peers import DEFAULT_FOLDER, PEERS, interpreter_path, peer_environment, set_up
from benchmarks.peers.probe import probe
from benchmarks.peers.reporting import markdown_table, plot
from benchmarks.peers.workloads import WORKLOADS, Opener, largest_max_length, with_sizes


def _venvs_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option ``--venvs`` to a command."""
    return click.option(
        "--venvs",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT_FOLDER,
        show_default=True,
        help="Folder for the virtual environments and the converted models.",
    )(command)


@click.group(help=__doc__, context_settings={"max_content_width": 120})
def main() -> None:
    """Define the command group."""


@main.command()
@click.argument("names", metavar="PEER...", nargs=-1, required=True, type=click.Choice(list(PEERS)))
@_venvs_option
def setup(names: tuple[str, ...], venvs: Path) -> None:
    """Create the virtual environments of peers.

    Installs packages and may build them, which can take minutes.
    """
    venvs.mkdir(parents=True, exist_ok=True)
    for name in names:
        set_up(PEERS[name], venvs)


@main.command()
@click.argument("name", metavar="PEER", type=click.Choice(list(PEERS)))
@click.option(
    "--shape", default="l110m", show_default=True, help="l110m, l1b, q800m, or the path of a config.json."
)
@click.option(
    "--encoding",
    default="bfloat16",
    show_default=True,
    help="Weight encoding of Penstock. With gguf, Penstock loads the same GGUF file as llama.cpp.",
)
@click.option(
    "--peer-encoding",
    help="Weight encoding of the peer, by the peer's name. Default: the encoding closest to --encoding.",
)
@click.option("--works", type=click.Choice(list(WORKLOADS)), multiple=True, default=("decode", "prefill"))
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Number of prompts of the workload batch.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Prompt tokens of the workload long.",
)
@click.option("--pairs", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=os.cpu_count(), show_default="all cores")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False))
@_venvs_option
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
    """Run workloads alternately on Penstock and on a peer, and print medians and ratios."""
    peer = PEERS[name]
    chosen_peer_encoding = peer_encoding or peer.encodings.get(encoding)
    is_same_file = encoding == "gguf"
    if is_same_file and (name != "llama_cpp" or peer_encoding is None or "cold" in works):
        raise click.UsageError(
            "--encoding gguf needs the peer llama_cpp and --peer-encoding, and cannot run the workload cold"
        )
    if chosen_peer_encoding is None:
        encoding_pairs = ", ".join(f"{ours} ({theirs})" for ours, theirs in peer.encodings.items())
        raise click.UsageError(
            f"{name} has no encoding to compare with {encoding}; choose one of {encoding_pairs}"
        )
    if not interpreter_path(venvs / name).exists():
        raise click.UsageError(f"{name} is not installed; run `python -m benchmarks.peers setup {name}`")
    workloads = [with_sizes(WORKLOADS[workload], batch=batch, context=context) for workload in works]
    source = checkpoint(shape, venvs / "checkpoints")
    model = converted_model(peer, chosen_peer_encoding, source, venvs)
    penstock_environment = {"OMP_NUM_THREADS": str(threads)}
    if "cold" in works:
        # Penstock's weights are packed before the measurement, as the peer's model is converted before it.
        penstock_environment["XDG_CACHE_HOME"] = str(venvs / "penstock")
        pack_weights(source, encoding, penstock_environment)
    load_request = {
        "num_threads": threads,
        "max_length": largest_max_length(workloads),
        "num_prompts": max(workload.num_prompts for workload in workloads),
    }
    logs = venvs / "logs"
    logs.mkdir(exist_ok=True)

    def make_opener(
        python: str | Path, driver: str, model: dict[str, str], environment: dict[str, str]
    ) -> Opener:
        command = [str(python), "-m", f"benchmarks.peers.drivers.{driver}"]
        return partial(Engine, command, {**load_request, **model}, environment, logs / f"{driver}.log")

    comparison = Comparison(
        ours=make_opener(
            sys.executable,
            "penstock",
            {"model": str(_link_without_tokenizer(model) if is_same_file else source), "encoding": encoding},
            penstock_environment,
        ),
        theirs=make_opener(
            interpreter_path(venvs / name),
            peer.driver,
            {"model": str(model), "encoding": chosen_peer_encoding},
            peer_environment(peer, venvs, threads),
        ),
        vocab_size=read_vocab_size(source),
        num_pairs=pairs,
        probe=probe,
        log=lambda text: click.echo(text, err=True),
    )
    result = compare(workloads, comparison)
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": _machine(threads),
        "shape": shape,
        "encoding": encoding,
        "peer": name,
        "peer_encoding": chosen_peer_encoding,
        "peer_version": result["versions"]["peer"][peer.package],
        "pairs": pairs,
        **result,
    }
    click.echo(markdown_table([report]), nl=False)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1))
    if plot_path is not None:
        plot([report], plot_path)


def _link_without_tokenizer(model: Path) -> Path:
    """Return a link to a GGUF file in a folder that has no tokenizer files.

    Penstock then loads the tokenizer in the GGUF file, as llama.cpp does.
    """
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
    """Print one Markdown table from files that ``run --json`` wrote."""
    click.echo(markdown_table(_read(files)), nl=False)


@main.command("plot")
@_JSON_FILES
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def plot_files(files: tuple[Path, ...], out: Path) -> None:
    """Draw the ratios in files that ``run --json`` wrote as one PNG file."""
    plot(_read(files), out)


def _read(files: tuple[Path, ...]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files]


def _commit() -> str:
    """Return the git commit of the source tree."""
    completed = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return completed.stdout.strip() or "not a git checkout"


def _machine(threads: int) -> str:
    """Return the model of the processor, its number of cores and the number of threads, as a text."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(models or [platform.machine()])[0]}, {os.cpu_count()} cores, {threads} threads"


if __name__ == "__main__":
    main()
