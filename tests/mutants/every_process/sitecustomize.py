"""Lets a process import one module with a fault: Python runs this file when it starts, if its folder is on the path."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

VARIABLE = "TRAINWEIGHTS_FAULT"  # the file that has the module's name and source


class FromMemory(MetaPathFinder):
    """Finds one module, and gives it other source than lies on the disk."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == self._name else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._source)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def spread(name: str, source: str, file: Path) -> None:
    """Give a module other source, in this process and in those that it starts."""
    file.write_text(json.dumps([name, source]), encoding="utf-8")
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {VARIABLE: str(file), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sys.meta_path.insert(0, FromMemory(name, source))


if VARIABLE in os.environ:
    sys.meta_path.insert(0, FromMemory(*json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))))
