"""CUDA C of this package: compiled by NVRTC at its first use, loaded and launched by the functions of CUDA's driver.

NVRTC, a library with NVIDIA's compiler, comes with PyTorch's builds for CUDA, and the driver with the GPU. Both are
called by their public functions, so the package needs no compiler where it is installed, and no headers of PyTorch.
Machine code is kept in the user's cache, by GPU, sources and compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import site
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.files.atomic import make_directories, replace_file

_SOURCES = Path(__file__).parent / "cuda_native"
# Longer texts of a compiler do not help a reader of the warning.
_LOG_CHARACTERS = 500
_TRITON = "Triton or PyTorch's operations serve instead, which are slower."

# The types of the arguments of each function, a letter each: `p` for an address, `u` for an unsigned int, `s` for text.
_LETTERS = {"p": ctypes.c_void_p, "u": ctypes.c_uint, "i": ctypes.c_int, "s": ctypes.c_char_p}
_NVRTC = {
    "nvrtcVersion": "pp",
    "nvrtcCreateProgram": "pssipp",
    "nvrtcCompileProgram": "pip",
    "nvrtcGetProgramLogSize": "pp",
    "nvrtcGetProgramLog": "pp",
    "nvrtcGetCUBINSize": "pp",
    "nvrtcGetCUBIN": "pp",
    "nvrtcDestroyProgram": "p",
}
_DRIVER = {
    "cuCtxGetCurrent": "p",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxSetCurrent": "p",
    "cuModuleLoadData": "ps",
    "cuModuleGetFunction": "pps",
    "cuLaunchKernel": "puuuuuuuppp",
}

# By device, kernel and macros, the address of a kernel that is loaded there.
_LOADED: dict[tuple[object, ...], int] = {}
_LOCK = threading.Lock()


def is_available() -> bool:
    """Return whether this PyTorch is for NVIDIA GPUs, and NVRTC and the driver are there."""
    if torch.version.cuda is None:
        return False
    try:
        nvrtc()
        driver()
    except UnsupportedError:
        return False
    return True


def load(name: str, macros: Mapping[str, int], index: int) -> int:
    """Return the address of a kernel, which has the name of its source, on a device; its context is made current.

    UnsupportedError: NVRTC or the driver is missing or refuses, or a CUDA graph is captured and the kernel has not been
    loaded before.
    """
    key = index, name, tuple(sorted(macros.items()))
    if key not in _LOADED:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(name, "a kernel that was loaded before", "a CUDA graph that is captured", _TRITON)
        with _LOCK:
            _LOADED[key] = _load(name, macros, index)
    return _LOADED[key]


def _load(name: str, macros: Mapping[str, int], index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    code, module, function = compiled(name, macros, 10 * major + minor), ctypes.c_void_p(), ctypes.c_void_p()
    make_current(index)
    _check(driver().cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
    _check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    return function.value or 0


def make_current(index: int) -> None:
    """Let this thread call the driver: it takes PyTorch's context of a device unless it has one."""
    context = ctypes.c_void_p()
    _check(driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        _check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index), "cuDevicePrimaryCtxRetain")
        _check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


def launch(
    function: int, grid: tuple[int, int], threads: int, stream: int, arguments: ctypes.Array[ctypes.c_void_p]
) -> None:
    """Launch a kernel with arguments at these addresses on a stream; UnsupportedError: the driver refuses."""
    failed = driver().cuLaunchKernel(function, *grid, 1, threads, 1, 1, 0, stream, arguments, None)
    if failed:
        _check(failed, "cuLaunchKernel")


def _check(failed: int, function: str) -> None:
    if failed:
        raise UnsupportedError(function, "success", f"error {failed} of CUDA's driver", _TRITON)


def compiled(name: str, macros: Mapping[str, int], architecture: int) -> bytes:
    """Return the machine code of a source, which `name` names without `.cu`; no GPU is needed.

    `architecture` is the compute capability without its point, as 90. UnsupportedError: NVRTC is missing, or does not
    compile the source for such a GPU.
    """
    options = [f"--gpu-architecture=sm_{architecture}", "--std=c++17"]
    options += [f"-D{macro}={value}" for macro, value in sorted(macros.items())]
    digest = hashlib.sha256(repr((name, options, nvrtc_version())).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    path = _cache() / f"{digest.hexdigest()}.cubin"
    try:
        return _intact(path.read_bytes())
    except (OSError, ValueError):
        code = _compile(name, [*options, f"-I{_SOURCES}"])
        _keep(path, code)
        return code


def _intact(kept: bytes) -> bytes:
    """Return the code of a file that begins with its digest; ValueError if it has another."""
    digest, code = kept[: hashlib.sha256().digest_size], kept[hashlib.sha256().digest_size :]
    if hashlib.sha256(code).digest() != digest:
        raise ValueError("damaged")
    return code


def _keep(path: Path, code: bytes) -> None:
    # Where nothing can be written, each process compiles again.
    with contextlib.suppress(OSError):
        make_directories(path.parent)
        with replace_file(path) as file:
            file.write(hashlib.sha256(code).digest() + code)


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "hf_trainweights" / "kernels"


def _compile(name: str, options: Sequence[str]) -> bytes:
    """Compile a source by NVRTC."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    source = (_SOURCES / f"{name}.cu").read_bytes()
    if library.nvrtcCreateProgram(ctypes.byref(program), source, f"{name}.cu".encode(), 0, None, None):
        raise UnsupportedError(f"{name}.cu", "a program of NVRTC", "an error of nvrtcCreateProgram", _TRITON)
    try:
        failed = library.nvrtcCompileProgram(program, len(options), texts)
        of_what = ("ProgramLog", "ProgramLogSize") if failed else ("CUBIN", "CUBINSize")
        get, get_size = (getattr(library, f"nvrtcGet{suffix}") for suffix in of_what)
        get_size(program, ctypes.byref(size))
        result = ctypes.create_string_buffer(size.value)
        get(program, result)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        text = result.value.decode(errors="replace")[:_LOG_CHARACTERS]
        raise UnsupportedError(f"{name}.cu", "a source that NVRTC compiles", f"error {failed}: {text}", _TRITON)
    return result.raw


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version; UnsupportedError: it is not there."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Return NVRTC's library; UnsupportedError: it is not there."""
    return _open(ctypes.CDLL, _nvrtc_names(), _NVRTC, "NVRTC")


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the driver's library; UnsupportedError: it is not there."""
    # PyDLL keeps Python's lock during a call. The driver's functions return at once, and a thread that gives the lock
    # away may have to wait for another thread until it gets it back.
    return _open(ctypes.PyDLL, ["nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"], _DRIVER, "CUDA's driver")


def _nvrtc_names() -> Iterator[str]:
    """Return names and paths of NVRTC, those that belong to this PyTorch first."""
    major = (torch.version.cuda or "").partition(".")[0]
    if sys.platform != "win32":
        yield f"libnvrtc.so.{major}"
    pattern = f"nvrtc64_{major}*.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}*"
    for folder in dict.fromkeys([str(Path(torch.__file__).parents[1]), *site.getsitepackages()]):
        for below in ("torch/lib", "nvidia/*/lib", "nvidia/*/bin"):
            yield from (str(path) for path in sorted(Path(folder).glob(f"{below}/{pattern}")))
    yield from (str(path) for path in sorted(Path("/usr/local").glob(f"cuda*/lib64/{pattern}")))


def _open(
    kind: type[ctypes.CDLL], names: Iterator[str] | list[str], functions: Mapping[str, str], what: str
) -> ctypes.CDLL:
    """Open the first library of these names that is there, and declare its functions."""
    for name in names:
        try:
            library = kind(name)
            for function, letters in functions.items():
                declared = getattr(library, function)
                declared.argtypes, declared.restype = [_LETTERS[letter] for letter in letters], ctypes.c_int
        except (OSError, AttributeError):
            continue
        return library
    raise UnsupportedError("a product on a GPU", f"{what}'s library", "none", _TRITON)
