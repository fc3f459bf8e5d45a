"""Imports the modules or subpackages of a package or folder, to find implementations of extension points."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType


def modules_in(package: str, folders: Iterable[Path] = ()) -> Iterator[ModuleType]:
    """Import and yield the modules and subpackages of a package and of further folders.

    Modules whose names begin with an underscore are left out.

    Args:
        package: name of the package.
        folders: folders outside the package. Their own ``__init__.py`` is not run.
    """
    for parent in (package, *map(_as_package, folders)):
        for module in iter_modules(import_module(parent).__path__):
            if not module.name.startswith("_"):
                yield import_module(f"{parent}.{module.name}")


def packages_in(package: str, folders: Iterable[Path] = ()) -> Iterator[ModuleType]:
    """Import and yield the subpackages of a package and of further folders. Plain modules are left out.

    Args:
        package: name of the package.
        folders: folders outside the package. Their own ``__init__.py`` is not run.
    """
    for parent in (package, *map(_as_package, folders)):
        for module in iter_modules(import_module(parent).__path__):
            if module.ispkg:
                yield import_module(f"{parent}.{module.name}")


def _as_package(folder: Path) -> str:
    """Return the name of a package whose modules are the files of a folder. The first call creates it."""
    folder = folder.resolve()
    name = f"penstock_found_{blake2b(str(folder).encode(), digest_size=6).hexdigest()}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name
