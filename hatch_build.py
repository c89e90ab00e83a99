"""Compile the C functions of the `native` folders where the machine has a C compiler for them.

Without one the package installs as it is, and takes the ways of PyTorch's own ops and of numpy.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = Path("hf_trainweights")
_PRODUCTS = _PACKAGE / "kernels" / "native"
_CODECS = _PACKAGE / "checkpoint" / "codecs" / "native"
_PLANES = _PACKAGE / "files" / "native"
_FLAGS = ["-O3", "-std=gnu11", "-fPIC"]
# -fno-tree-pre: without it GCC keeps the sums of a product in memory instead of in registers.
_AVX2 = ["-fopenmp", "-fno-tree-pre", "-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
# Each operation is rounded once, as numpy does. Loops that set errno or may trap do not become vectors.
_ROUNDED = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


class Library(NamedTuple):  # hatchling loads this file in a way in which `dataclass` raises an AttributeError
    """A library: where it goes, what it is made of, and how."""

    path: Path
    sources: tuple[str, ...]
    flags: list[str]


_OF_ALL = ("interface.c", "float8.c", "words/uint.c")
LIBRARIES = (
    Library(_PRODUCTS / "avx2.so", (*_OF_ALL, "words/integers.c"), _AVX2),
    Library(_PRODUCTS / "avx_vnni.so", (*_OF_ALL, "bytes/*.c"), [*_AVX2, "-mavxvnni"]),
    Library(_PRODUCTS / "avx512.so", (*_OF_ALL, "bytes/*.c"), _AVX512),
    Library(_CODECS / "levels.so", ("*.c",), _ROUNDED),
    Library(_PLANES / "planes.so", ("*.c",), _ROUNDED),
)


class CustomBuildHook(BuildHookInterface):
    """Adds the compiled libraries to a wheel, or to the source tree of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one of this platform if that succeeds.

        Args:
            version: "standard" or "editable".
            build_data: What the wheel is built from; changed in place.
        """
        del version
        libraries = _compile(Path(self.root)) if self.target_name == "wheel" else []
        if not libraries:
            return
        build_data["artifacts"] += [f"/{path.as_posix()}" for path in libraries]
        build_data["pure_python"] = False
        # The libraries call nothing of Python, so they fit every version of it.
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def _compile(root: Path) -> list[Path]:
    """Compile what the machine can, and return which libraries of the package there are."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or platform.machine() != "x86_64" or compiler is None:
        return []
    return [library.path for library in LIBRARIES if _compile_one(root, compiler, library)]


def _compile_one(root: Path, compiler: str, library: Library) -> bool:
    folder = root / library.path.parent
    sources = sorted(str(source) for pattern in library.sources for source in folder.glob(pattern))
    with tempfile.TemporaryDirectory() as temporary:
        objects = [str(Path(temporary) / f"{number}.o") for number in range(len(sources))]
        for source, compiled in zip(sources, objects, strict=True):
            command = [compiler, *_FLAGS, *library.flags, "-c", source, "-o", compiled]
            if subprocess.run(command, capture_output=True).returncode:
                return False
        # Linked without OpenMP: its symbols come from the library that PyTorch has loaded, so that there is one pool of
        # threads in the process.
        linked = Path(temporary) / library.path.name
        if subprocess.run([compiler, "-shared", *objects, "-o", str(linked)], capture_output=True).returncode:
            return False
        # A process may have the old library mapped: it is replaced, not written to.
        aside = folder / f"{library.path.name}.new"
        shutil.copyfile(linked, aside)
        aside.replace(folder / library.path.name)
    return True
