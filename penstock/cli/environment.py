"""A report on this installation and machine: versions, processor, devices, kernels and threads."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from penstock import __version__
from penstock.distributed.placement import rank_processors
from penstock.driver import CPU, load_devices, scan_available_devices
from penstock.engine import InferenceSession, default_threads_per_rank
from penstock.host.processors import divide_processors, format_processors, numa_nodes

PACKAGES = (
    "torch",
    "numpy",
    "msgspec",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "jinja2",
    "transformers",
)
"""The packages whose versions are reported; transformers is optional."""

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The memory and the kernels of one device; sizes in bytes."""

    device: str
    total_memory: int
    free_memory: int
    kernels: dict[str, str]
    """Operation -> the back end that computes it on this device."""
    compiled_steps: str
    """The steps that are compiled on this device, for example ``of up to 128 rows`` (tokens), or ``none``."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A kernel back end of this installation."""

    name: str
    device_types: list[str]
    is_usable: bool
    """Whether its kernels can be loaded on this machine."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A report on this machine, this installation and this process."""

    versions: dict[str, str]
    python: str
    system: str
    processor: str
    cores: int
    """The number of processors that this process may use."""
    cpu_features: list[str]
    """The CPU features that the C++ kernels can use; empty if the kernels are not built."""
    isa: str
    """The instruction set of the C++ kernels; ``none`` if they are not built."""
    torch_cpu_capability: str
    backends: list[BackendInfo]
    """All kernel back ends, the preferred one first."""
    devices: list[DeviceReport]
    threads: int
    numa_nodes: dict[str, str]
    """NUMA node -> its processors."""
    workers: list[str]
    """The processors and the threads of each worker; empty for one worker."""
    ranks: list[str]
    """The processors and the threads of each rank of a divided model; empty for one rank."""
    openmp: list[str]
    """OpenMP libraries in this process. With more than one, their threads compete for the cores."""

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def describe_environment(num_workers: int = 1, num_ranks: int = 1) -> Environment:
    """Return the report; loads torch and the kernels.

    Args:
        num_workers: ``--data-parallel-size``: the number of workers that divide the processors.
        num_ranks: ``--tensor-parallel-size``: the number of ranks that divide a model.
    """
    import torch

    from penstock.kernels import BACKENDS, cpu

    host = CPU()
    all_devices = [host, *(device for device in load_devices(scan_available_devices()) if not device.is_host)]
    devices = []
    for device in all_devices:
        session = InferenceSession([device])
        kernels, compiled = session.ops.implementations(), session.compiled_steps
        devices.append(DeviceReport(str(device), **device.stats, kernels=kernels, compiled_steps=compiled))
    return Environment(
        versions=_versions(),
        python=platform.python_version(),
        system=platform.platform(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        cpu_features=cpu.cpu_features(),
        isa=cpu.isa(),
        torch_cpu_capability=torch.backends.cpu.get_cpu_capability(),
        backends=[
            BackendInfo(backend.name, sorted(backend.default_sizes), bool(backend.variants()))
            for backend in BACKENDS.backends
        ],
        devices=devices,
        threads=torch.get_num_threads(),
        numa_nodes={str(node): format_processors(numbers) for node, numbers in numa_nodes().items()},
        workers=[str(share) for share in divide_processors(num_workers)] if num_workers > 1 else [],
        ranks=_ranks(num_ranks) if num_ranks > 1 else [],
        openmp=_openmp_runtimes(),
    )


def _versions() -> dict[str, str]:
    versions = {"penstock": __version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _openmp_runtimes() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if _OPENMP.search(path))


def _ranks(num_ranks: int) -> list[str]:
    """Return the processors and the threads of each rank."""
    shares, threads = rank_processors(num_ranks), default_threads_per_rank(num_ranks)
    if shares:
        return [
            f"{threads} threads on the processors {format_processors(share.processors)}" for share in shares
        ]
    return [f"{threads} threads on any processor"] * num_ranks
