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
_LIBRARY = _SOURCES / "products.so"
# -fno-tree-pre: with it, GCC keeps the sums of a product in memory instead of in registers.
_FLAGS = ["-O3", "-fno-tree-pre", "-std=gnu11", "-fPIC", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
_FLAGS += ["-mavx512vnni", "-mavx2", "-mfma", "-mf16c"]


class CustomBuildHook(BuildHookInterface):
    """Adds the compiled library to a wheel, or to the source tree of an editable install."""

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
        build_data["artifacts"].append(f"/{_LIBRARY.as_posix()}")
        build_data["pure_python"] = False
        # The library calls nothing of Python, so it fits every version of it.
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def _compile(root: Path) -> bool:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or platform.machine() != "x86_64" or compiler is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in sorted((root / _SOURCES).glob("*.c")):
            objects.append(str(Path(folder, source.stem + ".o")))
            command = [compiler, *_FLAGS, "-fopenmp", "-c", str(source), "-o", objects[-1]]
            if subprocess.run(command, capture_output=True).returncode:
                return False
        # Linked without OpenMP: its symbols come from the library that PyTorch has loaded, so that there is one pool
        # of threads in the process.
        built = Path(folder, _LIBRARY.name)
        if subprocess.run([compiler, "-shared", *objects, "-o", str(built)], capture_output=True).returncode:
            return False
        # A process may have the old library mapped: it is replaced, not written to.
        aside = root / (str(_LIBRARY) + ".new")
        shutil.copyfile(built, aside)
        aside.replace(root / _LIBRARY)
    return True
