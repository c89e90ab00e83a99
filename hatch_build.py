"""Compile the C functions of the `native` folders if the machine has a C compiler.

If it has none, the package still installs, and computes with PyTorch's own ops and numpy.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = Path("hf_trainweights")
_PRODUCTS = _PACKAGE / "kernels" / "native"
_FORMATS = _PACKAGE / "formats" / "native"
_CODECS = _PACKAGE / "checkpoint" / "codecs" / "native"
_PLANES = _PACKAGE / "files" / "native"
# A function without a declaration would be found missing only when the library is loaded.
_FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-Werror=implicit-function-declaration"]
# This flag lets GCC keep the sums of a product in registers instead of in memory. clang refuses it.
_NO_PRE = "-fno-tree-pre"
_THREADS = "-fopenmp"
_ONE_THREAD = "on one thread, because this compiler does not take its threads from PyTorch's OpenMP library"
_AVX2 = [_THREADS, _NO_PRE, "-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
_AVX512_BF16 = [*_AVX512, "-mavx512bf16"]
_AMX = [*_AVX512_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mprfchw"]
_NEON = [_THREADS, _NO_PRE, "-march=armv8.2-a+dotprod"]
# Each operation is rounded once, as numpy does. Loops that set errno or may trap do not become vectors.
_ROUNDED = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


class Library(NamedTuple):  # hatchling loads this file in a way in which `dataclass` raises an AttributeError
    """A library to compile: its path, the patterns of its sources in the same folder, and the compiler's flags."""

    path: Path
    sources: tuple[str, ...]
    flags: list[str]


_OF_ALL = ("interface.c", "attention.c", "dequantize.c", "float8.c", "imported.c", "words/uint*.c")
_PANELS = ("tiles/imported.c", "tiles/numbers.c", "tiles/panel.c", "tiles/products.c", "tiles/ways.c")
_OF_ANY_CPU = (
    Library(_PRODUCTS / "op.so", ("ops/*.c",), []),
    Library(_FORMATS / "search.so", ("*.c",), [_THREADS, *_ROUNDED]),
    Library(_CODECS / "levels.so", ("*.c",), _ROUNDED),
    Library(_PLANES / "planes.so", ("*.c",), _ROUNDED),
)
_X86 = (
    Library(_PRODUCTS / "avx2.so", (*_OF_ALL, "floats.c", "words/integers.c"), _AVX2),
    Library(_PRODUCTS / "avx_vnni.so", (*_OF_ALL, "floats.c", "bytes/*.c"), [*_AVX2, "-mavxvnni"]),
    Library(_PRODUCTS / "avx512.so", (*_OF_ALL, "bytes/*.c", *_PANELS), _AVX512),
    Library(_PRODUCTS / "avx512_bf16.so", (*_OF_ALL, "bytes/*.c", *_PANELS, "tiles/bfloat16.c"), _AVX512_BF16),
    Library(_PRODUCTS / "amx.so", (*_OF_ALL, "bytes/*.c", "tiles/*.c"), _AMX),
    *_OF_ANY_CPU,
)
_ARM = (Library(_PRODUCTS / "neon.so", (*_OF_ALL, "bytes/*.c"), _NEON), *_OF_ANY_CPU)
# The libraries for each operating system and CPU.
LIBRARIES = {("linux", "x86_64"): _X86, ("linux", "aarch64"): _ARM, ("darwin", "arm64"): _ARM}


# The constants by which kernels choose between their ways, and the header that C includes for them.
_THRESHOLDS, _HEADER = _PACKAGE / "kernels" / "thresholds.json", _PRODUCTS / "thresholds.h"


class CustomBuildHook(BuildHookInterface):
    """Adds the compiled libraries to a wheel, or to the source tree of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries; if that succeeds, add them to the wheel and mark it as one of this platform.

        Args:
            version: "standard" or "editable".
            build_data: Hatchling's settings of the wheel, which this changes.
        """
        del version
        (Path(self.root) / _HEADER).write_text(_thresholds_header(Path(self.root)), encoding="utf-8")
        libraries = _compile(Path(self.root)) if self.target_name == "wheel" else []
        if not libraries:
            return
        build_data["artifacts"] += [f"/{path.as_posix()}" for path in libraries]
        build_data["pure_python"] = False
        # The libraries call no function of Python, so they fit every version of it.
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _thresholds_header(root: Path) -> str:
    """Return the C header with the constants of the section `native`."""
    constants = json.loads((root / _THRESHOLDS).read_text(encoding="utf-8"))["native"]
    lines = [f"// {constant['meaning']}\n#define {name} {constant['value']}" for name, constant in constants.items()]
    return "\n".join(["// hatch_build.py makes this file from ../thresholds.json.", "#pragma once", *lines, ""])


def _compile(root: Path) -> list[Path]:
    """Compile the libraries for this machine, print one line about the outcome, and return the compiled ones."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    libraries = LIBRARIES.get((sys.platform, platform.machine()))
    if libraries is None:
        return _say([], ["this is neither Linux on x86-64 or ARM nor macOS on ARM"])
    if shutil.which(command[0]) is None:
        return _say([], [f"there is no C compiler {command[0]}"])
    nothing = ["-x", "c", "-c", os.devnull, "-o", os.devnull]
    refused = {flag for flag in (_NO_PRE, _THREADS) if _run([*command, flag, *nothing])}
    compile_one = partial(_compile_one, root, command, refused=refused)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = dict(zip([library.path for library in libraries], pool.map(compile_one, libraries), strict=True))
    done = [path for path, outcome in outcomes.items() if outcome in ("", _ONE_THREAD)]
    remarks = [f"{_names(outcomes, text)}: {text}" for text in dict.fromkeys(outcomes.values()) if text]
    return _say(done, remarks)


def _names(outcomes: dict[Path, str], outcome: str) -> str:
    return ", ".join(path.name for path, text in outcomes.items() if text == outcome)


def _say(done: list[Path], remarks: list[str]) -> list[Path]:
    names = ", ".join(path.name for path in done) or "nothing"
    print(f"{_PACKAGE}: compiled {names}" + f" ({'; '.join(remarks)})" * bool(remarks), file=sys.stderr)
    return done


def _run(command: list[str]) -> str:
    """Run a compiler and return the first line of its error, or an empty text if it succeeded."""
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
    return (lines or [f"exit status {result.returncode}"])[0] if result.returncode else ""


def _compile_one(root: Path, command: list[str], library: Library, refused: set[str]) -> str:
    """Compile one library to its path, without the refused flags, and return a remark or an error, or an empty text."""
    with tempfile.TemporaryDirectory() as temporary:
        linked = Path(temporary) / library.path.name
        remark = _ONE_THREAD if _THREADS in library.flags and _THREADS in refused else ""
        if failure := _link(root, command, library, refused, linked):
            return failure
        # clang needs its own OpenMP library for threads. PyTorch does not bring that, and it would be a second pool of
        # threads beside PyTorch's. So the library is linked again without threads.
        if b"__kmpc_" in linked.read_bytes():
            remark = _ONE_THREAD
            if failure := _link(root, command, library, refused | {_THREADS}, linked):
                return failure
        # A process may have the old library mapped, so a new file replaces it instead of overwriting it.
        aside = (root / library.path).with_name(f"{library.path.name}.new")
        shutil.copyfile(linked, aside)
        aside.replace(root / library.path)
    return remark


def _link(root: Path, command: list[str], library: Library, without: set[str], linked: Path) -> str:
    """Compile and link a library without some of its flags; return the compiler's error, or an empty text."""
    folder = root / library.path.parent
    sources = sorted(str(source) for pattern in library.sources for source in folder.glob(pattern))
    objects = [str(linked.with_name(f"{number}.o")) for number in range(len(sources))]
    flags = [*_FLAGS, *(flag for flag in library.flags if flag not in without)]
    for source, compiled in zip(sources, objects, strict=True):
        if failure := _run([*command, *flags, "-c", source, "-o", compiled]):
            return failure
    # Not linked with OpenMP: its symbols come from the library that PyTorch has loaded, so that the process has one
    # pool of threads.
    return _run([*command, "-shared", *objects, "-o", str(linked)])
