"""Kernel back ends. A back end is a folder of this package whose ``__init__`` defines a `BACKEND` record.

Importing this module or a `BACKEND` record does not import torch. `Backend.load` imports the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from penstock.kernels.device_memory import DeviceMemory
    from penstock.kernels.device_queue import DeviceQueue
    from penstock.kernels.encodings import LinearEncoding
    from penstock.kernels.graph import GraphCompiler
    from penstock.kernels.ops import Ops

_BUILT_IN_PACKAGE = "penstock.kernels"


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultSizes:
    """Sizes used for a device when the configuration gives none."""

    max_batch_size: int
    """Maximum number of sequences in a batch, if the memory allows."""
    step_tokens: int
    """Maximum number of tokens of a step. Longer steps delay other requests."""
    block_size: int = 32
    """Tokens in a block of the KV cache."""


def _no_graphs(ops: Ops) -> GraphCompiler | None:
    return None


def _no_memory(ops: Ops, device: torch.device) -> DeviceMemory | None:
    return None


def _no_queue(ops: Ops) -> DeviceQueue | None:
    return None


def _default_row_bytes(bits: int, in_features: int) -> int:
    return in_features * -(-bits // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """The description of a kernel back end. Creating it does not import the kernels."""

    name: str
    """Value of the ``kernels`` setting that selects this back end."""
    default_sizes: Mapping[str, DefaultSizes]
    """Default sizes by device type (``cpu``, ``gpu``). The back end supports the device types listed here."""
    load: Callable[[], Ops | None]
    """Return the operations; None if this machine lacks the library, device or instruction set they need."""
    variants: Callable[[], Sequence[Ops]]
    """Return one `Ops` per variant, for example per instruction set, that this machine can run. For tests."""
    priority: int
    """Of the back ends that can run on the device, the one with the highest priority is the default.

    The reference back end has priority 0.
    """
    layout: str = "rows"
    """Name of the memory layout of packed weights; equals `Ops.layout` of its operations."""
    row_bytes: Callable[[int, int], int] = _default_row_bytes
    """Return the bytes of the weights of one output, without scales.

    The arguments are the bits per weight and the number of inputs. The default rounds each weight up to whole
    bytes.
    """
    graphs: Callable[[Ops], GraphCompiler | None] = _no_graphs
    """Return the compiler for steps of these operations; None if steps cannot be compiled."""
    queue: Callable[[Ops], DeviceQueue | None] = _no_queue
    """Return the queue of the device; None if operations run synchronously."""

    memory: Callable[[Ops, torch.device], DeviceMemory | None] = _no_memory
    """Return the memory counter of a device with separate memory; None for host memory."""

    @property
    def packs_weights(self) -> bool:
        """Whether this back end packs weights into a layout other than rows.

        Weights in such a layout can be cached in a file.
        """
        return self.layout != "rows"

    def num_bytes(self, encoding: LinearEncoding, out_features: int, in_features: int) -> int:
        """Return an upper bound for the bytes of a packed weight in this back end's layout."""
        extra_row_bytes = self.row_bytes(encoding.bits, in_features) - -(-in_features * encoding.bits // 8)
        return encoding.num_bytes(out_features, in_features) + out_features * max(extra_row_bytes, 0)


class BackendRegistry:
    """The back ends of this package, of further folders, and those added by `register`.

    Args:
        folders: folders to search besides Penstock's own; each holds one package per back end.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._more_folders = tuple(folders)
        self._registered: dict[str, Backend] = {}

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All back ends, highest priority first."""
        by_name = {record.name: record for record in self._discovered_backends} | self._registered
        return tuple(sorted(by_name.values(), key=lambda record: (-record.priority, record.name)))

    def register(self, backend: Backend) -> None:
        """Add a back end that is not in a folder of this registry.

        Raises:
            ConfigError: a back end of this name exists.
        """
        if any(record.name == backend.name for record in self.backends):
            raise ConfigError("kernels", f"{backend.name!r} exists already: use another name")
        self._registered[backend.name] = backend

    def candidates(self, device_type: str, name: str | None = None) -> tuple[Backend, ...]:
        """Return the back ends for a device type, highest priority first. With a name, return only that one.

        Raises:
            ConfigError: no back end supports the device type, or none that supports it has the given name.
        """
        usable = [backend for backend in self.backends if device_type in backend.default_sizes]
        named = [backend for backend in usable if name in (None, backend.name)]
        if not named:
            if not usable:
                raise ConfigError("kernels", f"there are no kernels for {device_type} devices")
            names = ", ".join(backend.name for backend in usable)
            raise ConfigError("kernels", f"no kernels {name!r} for {device_type} devices: use one of {names}")
        return tuple(named)

    def default_sizes(self, device_type: str, name: str | None = None) -> DefaultSizes:
        """Return the sizes of the first of `candidates`, without loading it.

        Raises:
            ConfigError: see `candidates`.
        """
        return self.candidates(device_type, name)[0].default_sizes[device_type]

    def open(self, device_type: str, name: str | None = None) -> tuple[Backend, Ops]:
        """Load the first of `candidates` that can run on this machine. Return its record and its operations.

        Raises:
            ConfigError: see `candidates`; or none of the candidates can run on this machine.
        """
        for backend in self.candidates(device_type, name):
            ops = backend.load()
            if ops is not None:
                return backend, ops
        if name is None:
            raise ConfigError("kernels", f"no kernels for {device_type} devices can run on this machine")
        raise ConfigError("kernels", f"the {name} kernels cannot run on this machine: remove this setting")

    @cached_property
    def _discovered_backends(self) -> tuple[Backend, ...]:
        """The records of the back ends in all folders."""
        records = []
        for package in [_BUILT_IN_PACKAGE, *map(_make_package, self._more_folders)]:
            for folder in iter_modules(import_module(package).__path__):
                if not folder.ispkg:
                    continue
                record = getattr(import_module(f"{package}.{folder.name}"), "BACKEND", None)
                if isinstance(record, Backend):
                    records.append(record)
        return tuple(records)


BACKENDS = BackendRegistry()
"""The registry of this process."""


def _make_package(folder: Path) -> str:
    """Add a package with the modules of a folder to `sys.modules`. Return the package name."""
    folder = folder.resolve()
    digest = blake2b(str(folder).encode(), digest_size=6).hexdigest()
    name = f"penstock_kernels_{digest}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name
