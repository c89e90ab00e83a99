"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's `__getattr__` for names that it has in other modules.

    Args:
        package: Its dotted name.
        modules: Each name to the module that has it, as a path that begins in the package.
    """

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
