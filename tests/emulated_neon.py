"""The library for ARM's NEON with vectors that plain C emulates, so that machines without it hold its arithmetic."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from cpus import HASWELL, runs_here

from hf_trainweights.kernels import compiled
from hf_trainweights.native_library import load_library

# What hatch_build.py makes the library of.
SOURCES = ("interface.c", "dequantize.c", "float8.c", "words/uint*.c", "bytes/*.c")
_FLAGS = ("-std=gnu11", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w", "-mavx2", "-mfma", "-mf16c", "-D__ARM_NEON")


@functools.cache
def library() -> ctypes.CDLL:
    """Compile and load it; where that is not possible, skip the test that wants it."""
    if shutil.which("cc") is None or not runs_here(HASWELL):
        pytest.skip("needs a C compiler and instructions of AVX2")
    sources = [path for pattern in SOURCES for path in sorted(compiled._NATIVE.glob(pattern))]
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{number}.o" for number in range(len(sources))]
        for source, to in zip(sources, objects, strict=True):
            header = Path(__file__).parent / "kernels" / "emulated"
            # The compiler takes longer to make it fast than tests take with it.
            subprocess.run(["cc", *_FLAGS, "-O0", f"-I{header}", "-c", source, "-o", to], check=True)
        linked = Path(folder) / "neon.so"
        subprocess.run(["cc", "-shared", *objects, "-o", linked, "-lm"], check=True)
        if b"__kmpc_" in linked.read_bytes():
            pytest.skip("needs a compiler that takes its threads from PyTorch's OpenMP library")
        found = load_library(linked, compiled._FUNCTIONS, compiled.ABI)
    assert found is not None
    return found
