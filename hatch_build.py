"""Compile the CPU products of `hf_trainweights/kernels/native` where the machine has a C compiler for them.

Without one the package installs as it is, and products take the ways of PyTorch's own ops.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCES = Path("hf_trainweights/kernels/native")
# -fno-tree-pre: without it GCC keeps the sums of a product in memory instead of in registers.
_FLAGS = ["-O3", "-fno-tree-pre", "-std=gnu11", "-fPIC", "-mavx2", "-mfma", "-mf16c"]
# Each folder of sources becomes a library, for CPUs that have these instructions too.
_INSTRUCTIONS = {"avx2": [], "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]}


class CustomBuildHook(BuildHookInterface):
    """Adds the compiled libraries to a wheel, or to the source tree of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one of this platform if that succeeds.

        Args:
            version: "standard" or "editable".
            build_data: What the wheel is built from; changed in place.
        """
        del version
        root = Path(self.root)
        if self.target_name != "wheel" or not _compile(root):
            return
        build_data["artifacts"] += [f"/{_SOURCES.as_posix()}/{name}.so" for name in _INSTRUCTIONS]
        build_data["pure_python"] = False
        # The libraries call nothing of Python, so they fit every version of it.
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def _compile(root: Path) -> bool:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or platform.machine() != "x86_64" or compiler is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        built = [_compile_one(root, compiler, name, Path(folder)) for name in _INSTRUCTIONS]
        if None in built:
            return False
        for library in filter(None, built):
            # A process may have the old library mapped: it is replaced, not written to.
            aside = root / _SOURCES / f"{library.name}.new"
            shutil.copyfile(library, aside)
            aside.replace(aside.with_suffix(""))
    return True


def _compile_one(root: Path, compiler: str, name: str, folder: Path) -> Path | None:
    objects = []
    shared = [root / _SOURCES / "interface.c", root / _SOURCES / "avx2" / "uint.c"]
    for source in sorted({*shared, *(root / _SOURCES / name).glob("*.c")}):
        objects.append(str(folder / f"{name}-{source.stem}.o"))
        command = [compiler, *_FLAGS, *_INSTRUCTIONS[name], "-fopenmp", "-c", str(source), "-o", objects[-1]]
        if subprocess.run(command, capture_output=True).returncode:
            return None
    # Linked without OpenMP: its symbols come from the library that PyTorch has loaded, so that there is one pool of
    # threads in the process.
    built = folder / f"{name}.so"
    linked = subprocess.run([compiler, "-shared", *objects, "-o", str(built)], capture_output=True)
    return None if linked.returncode else built
