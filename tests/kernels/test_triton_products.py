"""Triton kernels without a GPU: their results by Triton's interpreter, and compiled for the GPUs they are meant for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import by_default, exhaustive

from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda, cuda_attention, gpu_tables, triton_launch
from hf_trainweights.kernels.tokens import StoredTokens, TokenFormat

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, on Linux x86-64")

# What a program may use on the smallest GPU of compute capability 8.x: 99 kB.
MAX_SHARED_BYTES = 99 << 10


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["not exhaustive", *exhaustive("exhaustive")])
def test_every_kernel_is_right_in_the_interpreter(cases: str) -> None:
    # Triton reads the variable when it is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    files = [str(path) for path in Path(__file__).parent.glob("interpreted_*.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", cases, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


class AbsentGpu:
    """In place of Triton's driver: kernels are compiled as for a GPU, and launched nowhere."""

    def __init__(self, capability: int) -> None:
        self.capability, self.utils, self.kernels, self.launched = capability, self, [], []

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps kernels by device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES}

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: self.launched.append(arguments)

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[object, ...]:
        self.kernels.append(binary)
        registers, spills, threads = 0, 0, 1024
        return name, name, registers, spills, threads


@pytest.fixture(params=[80, *exhaustive(90)])
def gpu(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AbsentGpu:
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    absent = AbsentGpu(request.param)
    monkeypatch.setattr(driver, "_active", absent)
    return absent


def stack_bytes(kernel: bytes, folder: Path) -> list[int]:
    """Return what a kernel keeps on the stack, as it does with registers that do not fit."""
    from triton import knobs

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    used = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [int(size) for size in re.findall(r"STACK:(\d+)", used)]


# By each tile, and in each dtype by the first one; int8 with groups takes the most registers.
FORMS = [Int8(), Int8(64), Int4(32)]
TILES = [rule.tile for rule in gpu_tables.DEFAULT if rule.way == "tiles"]
ROWS = [tile["BLOCK_M"] for tile in TILES]
COMPILED = [
    (64, torch.bfloat16, Int8(64)),
    *exhaustive(
        (1, torch.bfloat16, Int8()),
        (16, torch.float16, Int4(32)),
        (16, torch.float16, Int8()),
        *((1, torch.bfloat16, form) for form in FORMS[1:]),
        *((M, torch.bfloat16, form) for M in ROWS for form in FORMS if (M, form) != (64, Int8(64))),
        *((1, torch.float32, form) for form in FORMS),
    ),
]


def made(way: str, form: Int8 | Int4, shape: tuple[int, int], M: int, dtype: torch.dtype) -> Any:
    """Return what a way makes of a weight of zeros."""
    specs = form.tensor_specs(shape, dtype).items()
    tensors = {name: torch.zeros(stored, dtype=stored_dtype) for name, (stored, stored_dtype) in specs}
    bits, groups = 4 if isinstance(form, Int4) else 8, form.group_size is not None
    rules = gpu_tables.rules_for((0, 0), bits, groups, M, shape[0])
    tile = next(rule.tile for rule in rules if rule.way == way)
    return cuda._MAKE[way](triton_launch.Stored(tensors, form, shape[1]), M, dtype, tile)


@pytest.mark.slow
@pytest.mark.parametrize(("M", "dtype", "form"), COMPILED, ids=str)
def test_every_product_compiles(M: int, dtype: torch.dtype, form: Int8 | Int4, gpu: AbsentGpu, tmp_path: Path) -> None:
    # Sizes that Triton knows to be multiples of 16, in one part; then others, in several parts that a kernel adds up.
    K = (1153 if M == 1 else 1156) if form == Int8() else 1152
    for shape, bias in (((16384, 512), torch.zeros(16384, dtype=dtype)), ((70, K), None)):
        run = made("row" if M == 1 else "tiles", form, shape, M, dtype)
        run(torch.zeros(M, shape[1], dtype=dtype), bias)
    # What adds up has been compiled already where another case has needed it.
    assert len(gpu.kernels) >= 2
    for kernel in gpu.kernels:
        # Rows that do not begin at multiples of 16 bytes are read in smaller pieces, which takes more registers.
        assert stack_bytes(kernel, tmp_path) == [0] or (K % 16 and kernel is not gpu.kernels[0])


@pytest.mark.slow
@pytest.mark.parametrize("form", by_default([Int4(32)], FORMS), ids=str)
def test_what_dequantizes_and_rounds_compiles(form: Int8 | Int4, gpu: AbsentGpu, tmp_path: Path) -> None:
    made("dequantize", form, (80, 1152), 0, torch.bfloat16)()
    if form == Int8():
        for M in (20, 100):
            made("integers", form, (80, 1152), M, torch.bfloat16)(torch.zeros(M, 1152, dtype=torch.bfloat16), None)
    assert len(gpu.kernels) == (4 if form == Int8() else 1)
    assert all(stack_bytes(kernel, tmp_path) == [0] for kernel in gpu.kernels)


# Bits of keys and values, their columns, rows of a head, dtypes of the query and of the mask. A program of as many rows
# as fit may keep a few registers on the stack.
ATTENTIONS = [
    ((8, 8), (128, 128), 4, torch.bfloat16, torch.bool),
    *exhaustive(
        ((8, 8), (64, 64), 7, torch.bfloat16, None),
        ((8, 4), (128, 128), 4, torch.float16, torch.float32),
        ((4, 4), (64, 64), 7, torch.bfloat16, None),
        ((8, 8), (192, 128), 16, torch.bfloat16, None),
        ((8, 8), (40, 96), 4, torch.float32, torch.bfloat16),
        ((4, 4), (512, 512), 16, torch.bfloat16, None),
        ((4, 4), (128, 128), 64, torch.float32, torch.bool),
        ((8, 8), (128, 128), 64, torch.bfloat16, torch.bool),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "columns", "rows", "dtype", "mask"), ATTENTIONS, ids=str)
def test_attention_to_stored_tokens_compiles(
    bits: tuple[int, int],
    columns: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    mask: torch.dtype | None,
    gpu: AbsentGpu,
    tmp_path: Path,
) -> None:
    keys, values = (
        StoredTokens.empty(TokenFormat(bits[side], side == 0, columns[side]), 1, 2, 20) for side in range(2)
    )
    keys.channels = torch.ones(1, 2, 2, columns[0])
    query = torch.zeros(1, 2 * rows, 1, columns[0], dtype=dtype)
    mask_of_tokens = None if mask is None else torch.ones(1, 1, 1, 300, dtype=mask)
    cuda_attention._launch(query, keys, values, slice(0, 300), 1.0, mask_of_tokens)
    # What adds sections up has been compiled already where another case has needed it.
    assert len(gpu.kernels) >= 1
    assert all(size <= (1024 if rows == 64 else 0) for kernel in gpu.kernels for size in stack_bytes(kernel, tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [89, 90])
def test_rounding_to_float8_compiles_where_gpus_multiply_float8(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", AbsentGpu(capability))
    codes = torch.empty(20, 96, dtype=torch.float8_e4m3fn)
    x, row_factors = torch.zeros(20, 96, dtype=torch.bfloat16), torch.empty(20)
    triton_launch.kernels("triton_products").round_rows[(20,)](x, codes, row_factors, 96, 2.0**-119, 448, BLOCK=1024)
    assert len(driver._active.kernels) == 1


@pytest.mark.slow
@pytest.mark.parametrize("M", [1, 5, 0])
def test_a_kernel_that_is_launched_again_gets_what_it_got_at_first(M: int, gpu: AbsentGpu) -> None:
    way = {0: "dequantize", 1: "row", 5: "tiles"}[M]
    run = made(way, Int8(), (80, 2304), M, torch.bfloat16)
    memory = torch.zeros(2304 * (M + 1), dtype=torch.bfloat16)
    # At multiples of 16 bytes, and between them: for each Triton compiles another program.
    for x in (memory[: M * 2304], memory[1 : M * 2304 + 1]):
        arguments = (x.view(M, 2304), None) if M else ()
        calls = []
        for _ in range(3):
            gpu.launched.clear()
            run(*arguments)
            calls.append([[comparable(value) for value in launch] for launch in gpu.launched])
        assert calls[0]
        assert calls[1] == calls[2] == calls[0]


def comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    # Triton's own objects are made anew for each launch.
    return value if isinstance(value, int | str | tuple | None) else type(value)
