"""Libraries of products for other CPUs, with vectors that plain C emulates: each machine holds their arithmetic."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpus import HASWELL, runs_here

from hf_trainweights.kernels import compiled
from hf_trainweights.native_library import load_library

HEADERS = Path(__file__).parent / "kernels" / "emulated"
_OF_ALL = ("interface.c", "attention.c", "dequantize.c", "float8.c", "imported.c", "words/uint*.c")
_PANELS = ("tiles/imported.c", "tiles/numbers.c", "tiles/panel.c", "tiles/products.c", "tiles/ways.c")
# What hatch_build.py makes each library of.
SOURCES = {
    "neon": (*_OF_ALL, "bytes/*.c"),
    "avx_vnni": (*_OF_ALL, "bytes/*.c", "floats.c"),
    "avx512": (*_OF_ALL, "bytes/*.c", *_PANELS),
    "avx512_bf16": (*_OF_ALL, "bytes/*.c", *_PANELS, "tiles/bfloat16.c"),
    "amx": (*_OF_ALL, "bytes/*.c", "tiles/*.c"),
}
_AVX512 = tuple(f"-D__AVX512{part}__" for part in ("F", "BW", "VL", "DQ", "VNNI"))
_X86 = f"-I{HEADERS / 'x86'}"
_FLAGS = ("-std=gnu11", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w", "-mavx2", "-mfma", "-mf16c")
# The flags that stand for those of hatch_build.py.
FLAGS = {
    "neon": (*_FLAGS, "-D__ARM_NEON", f"-I{HEADERS}"),
    "avx_vnni": (*_FLAGS, "-D__AVXVNNI__", _X86),
    "avx512": (*_FLAGS, *_AVX512, _X86),
    "avx512_bf16": (*_FLAGS, *_AVX512, "-D__AVX512BF16__", _X86),
    "amx": (*_FLAGS, *_AVX512, "-D__AVX512BF16__", "-DEMULATED_TILES", _X86),
}


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Compile a library and load it; where that is not possible, skip the test that wants it."""
    skip_where_nothing_is_emulated()
    with tempfile.TemporaryDirectory() as folder:
        sources = [path for pattern in SOURCES[name] for path in sorted(compiled._NATIVE.glob(pattern))]
        # The compiler takes longer to make it fast than tests take with it.
        compile_sources(sources, Path(folder), (*FLAGS[name], "-O0"))
        return load(link(Path(folder), f"{name}.so"))


def skip_where_nothing_is_emulated() -> None:
    if shutil.which("cc") is None or not runs_here(HASWELL):
        pytest.skip("needs a C compiler and instructions of AVX2")


def compile_sources(sources: Iterable[Path], to: Path, flags: Iterable[str]) -> None:
    """Compile C sources, each to an object in a folder, with what they include from where they are."""

    def compile_one(source: Path) -> None:
        made = to / f"{source.stem}_{source.parent.stem}.o"
        subprocess.run(["cc", *flags, "-c", source, "-o", made], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))


def link(folder: Path, name: str) -> Path:
    """Link the objects of a folder as the installation does: without OpenMP, which PyTorch brings."""
    subprocess.run(["cc", "-shared", *folder.glob("*.o"), "-o", folder / name, "-lm"], check=True)
    if b"__kmpc_" in (folder / name).read_bytes():
        pytest.skip("needs a compiler that takes its threads from PyTorch's OpenMP library")
    return folder / name


def load(path: Path) -> ctypes.CDLL:
    """Return a library that may be used; that for AMX once it has found its tiles right."""
    is_amx = path.stem == "amx"
    found = load_library(path, compiled._FUNCTIONS | ({"prepare": "i"} if is_amx else {}), compiled.ABI)
    assert found is not None
    assert not is_amx or found.prepare() == 0
    return found
