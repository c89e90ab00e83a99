"""A GPU on a CPU, for CUDA C of the package: NVRTC becomes g++, and a launch runs every thread in plain C++.

Tensors of the CPU stand for those of the GPU. All that Python does before and after is that of a GPU: options, cache,
loading, the addresses of arguments, grids.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_trainweights.kernels import cuda_driver, few_rows

HEADERS = Path(__file__).parent / "kernels" / "emulated" / "gpu"
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{HEADERS}")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which stands for NVRTC")


class EmulatedNvrtc:
    """In place of NVRTC's library: its machine code is a library for this CPU."""

    def __init__(self) -> None:
        self.compiled: list[list[str]] = []
        self._results: dict[int, tuple[bytes, str]] = {}

    def nvrtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802  (NVIDIA's name)
        major._obj.value, minor._obj.value = 0, 0
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, name: bytes, *_: Any) -> int:  # noqa: N802
        program._obj.value = len(self._results) + 1
        self._results[program._obj.value] = b"", name.decode().removesuffix(".cu")
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        texts = [options[i].decode() for i in range(count)]
        self.compiled.append(texts)
        name = self._results[program.value][1]
        flags = [text for text in texts if not text.startswith("--")]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "kernel.so"
            command = ["g++", *FLAGS, *flags, str(HEADERS / f"{name}.cpp"), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self._results[program.value] = (out.read_bytes() if out.exists() else b"", done.stderr)
        return done.returncode

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:  # noqa: N802
        size._obj.value = len(self._results[program.value][0])
        return 0

    def nvrtcGetCUBIN(self, program: Any, result: Any) -> int:  # noqa: N802
        result.raw = self._results[program.value][0]
        return 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:  # noqa: N802
        size._obj.value = len(self._results[program.value][1].encode()) + 1
        return 0

    def nvrtcGetProgramLog(self, program: Any, result: Any) -> int:  # noqa: N802
        result.value = self._results[program.value][1].encode()
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        return 0


class EmulatedDriver:
    """In place of the driver's library. `launched` has the grid, the threads and the stream of each launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, int], int, int]] = []
        self.failure, self.loads = 0, 0
        self._libraries: dict[int, ctypes.CDLL] = {}

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = None
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> int:  # noqa: N802
        context._obj.value = index + 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        self.loads += 1
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(code)
            file.flush()
            library = ctypes.CDLL(file.name)
        module._obj.value = len(self._libraries) + 1
        self._libraries[module._obj.value] = library
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = module.value
        return 0

    def cuLaunchKernel(self, function: int, x: int, y: int, z: int, threads: int, *others: Any) -> int:  # noqa: N802
        *sizes, stream, addresses, extra = others
        assert (z, sizes, extra) == (1, [1, 1, 0], None)
        self.launched.append(((x, y), threads, stream))
        if self.failure:
            return self.failure
        weight, *pointers, rows, experts = addresses
        numbers = [ctypes.c_int.from_address(address) for address in (rows, experts)]
        values = [ctypes.c_void_p.from_address(address) for address in pointers]
        misaligned = self._libraries[function].run(x, y, ctypes.c_void_p(weight), *values, *numbers)
        assert misaligned == 0, "a GPU would refuse a load"
        return 0


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def emulated_gpu(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let CUDA C run on CPU tensors; the compiled kernels stay for all tests of a session."""
    gpu = SimpleNamespace(nvrtc=EmulatedNvrtc(), driver=EmulatedDriver(), stream=7, capturing=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setattr(cuda_driver, "nvrtc", lambda: gpu.nvrtc)
    monkeypatch.setattr(cuda_driver, "driver", lambda: gpu.driver)
    monkeypatch.setattr(cuda_driver, "_LOADED", {})
    few_rows._plan.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    # A build of PyTorch without CUDA lacks this name.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: gpu.stream, raising=False)
    return gpu
