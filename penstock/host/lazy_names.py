"""Names that a package imports from its modules on first use, so that importing the package is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, modules_by_name: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package, which imports the module that defines the requested name.

    Args:
        package: name of the package, for error messages.
        modules_by_name: name -> the module that defines it.
    """

    def __getattr__(name: str) -> object:
        if name not in modules_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules_by_name[name]), name)

    return __getattr__
