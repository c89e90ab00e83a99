"""Triton kernels without a GPU: their results by Triton's interpreter, and compiled for the GPUs they are meant for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_trainweights.kernels import cuda

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, on Linux x86-64")

CODES = {8: "*i8", 4: "*i32"}
# (bits, group size); 0 is one scale a row.
KINDS = [(8, 0), (8, 64), (4, 0), (4, 32)]
# What a program may use on the smallest GPU of compute capability 8.x: 99 kB.
MAX_SHARED_BYTES = 99 << 10


def test_every_kernel_is_right_in_the_interpreter() -> None:
    # Triton reads the variable when it is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    file = Path(__file__).with_name("interpreted_products.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


def compiled(name: str, capability: int, types: dict[str, str], constants: dict[str, int], **options: int) -> Any:
    """Return a kernel compiled as for sizes that are multiples of 16."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_trainweights.kernels import triton_products

    kernel = getattr(triton_products, name)
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    signature = {argument: types.get(argument, "constexpr" if argument in constants else "i32") for argument in places}
    values = {(places[argument],): value for argument, value in constants.items()}
    multiples = [argument for argument, kind in signature.items() if kind != "constexpr"]
    aligned = {(places[argument],): [["tt.divisibility", 16]] for argument in multiples}
    source = ASTSource(kernel, signature, values, aligned)
    return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assert_no_spills(kernel: Any, folder: Path) -> None:
    from triton import knobs

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    used = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    # Registers that do not fit are kept on the stack.
    assert re.findall(r"STACK:(\d+)", used) == ["0"], used
    assert kernel.metadata.shared <= MAX_SHARED_BYTES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_for_one_row_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    for bits, group in KINDS:
        types = dict.fromkeys(("x", "scale", "bias", "out"), f"*{dtype}") | {"qdata": CODES[bits]}
        options = dict(cuda._ROW_BLOCK)
        constants = {"BITS": bits, "GROUP": group} | {name: options.pop(name) for name in ("BLOCK_N", "BLOCK_K")}
        assert_no_spills(compiled("multiply_row", capability, types, constants, **options), tmp_path)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "tile"),
    [*(("bf16", tile) for tile in cuda._TILES), ("fp16", cuda._TILES[0]), ("fp32", cuda._FLOAT32_TILE)],
    ids=str,
)
def test_the_kernel_for_several_rows_compiles(capability: int, dtype: str, tile: cuda.Tile, tmp_path: Path) -> None:
    for bits, group in KINDS:
        types = dict.fromkeys(("x", "scale", "bias", "out"), f"*{dtype}") | {"qdata": CODES[bits]}
        constants = {"BITS": bits, "GROUP": group, "BLOCK_M": tile.M, "BLOCK_N": tile.N, "BLOCK_K": tile.K}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        kernel = compiled("multiply_tiles", capability, types, constants, **options)
        assert_no_spills(kernel, tmp_path)
        uses_tensor_cores = re.search(r"mma\.sync|wgmma\.mma_async", kernel.asm["ptx"]) is not None
        assert uses_tensor_cores == (dtype != "fp32")
