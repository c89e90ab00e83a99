"""How CUDA C is compiled, kept, loaded and launched; and the machine code that NVRTC makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import by_default, exhaustive
from emulated_gpu import emulated_gpu, kernel_cache, needs_compiler

from benchmarks.gpu.machine_code import ARCHITECTURES, count
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.kernels import cuda_driver, few_rows

__all__ = ["emulated_gpu", "kernel_cache"]  # fixtures

TILE = {"ROW_TILES": 1, "COLUMN_TILES": 1, "WARPS": 8, "STAGES": 2, "BLOCKS": 3}
BFLOAT16 = torch.bfloat16


def macros_of(
    form: Format, tile: dict[str, int] = TILE, grouped: int = 0, dtype: torch.dtype = BFLOAT16
) -> dict[str, int]:
    macros = few_rows.macros_of(form, 4096, dtype, dtype)
    assert macros is not None
    return macros | tile | {"GROUPED": grouped}


@pytest.fixture
def cache(tmp_path: Path, emulated_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hf_trainweights" / "kernels"


SMALL = macros_of(Int8(), TILE | {"WARPS": 1, "STAGES": 1})


@needs_compiler
@pytest.mark.slow
def test_machine_code_is_compiled_once(cache: Path, emulated_gpu: SimpleNamespace) -> None:
    code = cuda_driver.compiled("few_rows", SMALL, 90)
    assert cuda_driver.compiled("few_rows", SMALL, 90) == code
    assert len(emulated_gpu.nvrtc.compiled) == 1
    assert len(list(cache.iterdir())) == 1
    # What is damaged is compiled again.
    next(cache.iterdir()).write_bytes(b"damaged")
    assert cuda_driver.compiled("few_rows", SMALL, 90)[:4] == code[:4]
    assert len(emulated_gpu.nvrtc.compiled) == 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("change", ["macros", "architecture", "sources"])
def test_other_machine_code_is_compiled_for_others(
    change: str, cache: Path, emulated_gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_driver.compiled("few_rows", SMALL, 90)
    if change == "sources":
        copied = tmp_path / "sources"
        shutil.copytree(cuda_driver._SOURCES, copied)
        (copied / "weights.cuh").write_text(
            (copied / "weights.cuh").read_text(encoding="utf-8") + "\n", encoding="utf-8"
        )
        monkeypatch.setattr(cuda_driver, "_SOURCES", copied)
    cuda_driver.compiled(
        "few_rows", SMALL | {"WARPS": 2} if change == "macros" else SMALL, 80 if change == "architecture" else 90
    )
    assert len(emulated_gpu.nvrtc.compiled) == 2
    options = [[option for option in each if "-I" not in option] for each in emulated_gpu.nvrtc.compiled]
    assert (options[0] == options[1]) == (change == "sources")
    assert "--gpu-architecture=sm_90" in options[0]


@needs_compiler
@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, emulated_gpu: SimpleNamespace) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be", encoding="utf-8")
    for _ in range(2):
        assert cuda_driver.compiled("few_rows", SMALL, 90)
    assert len(emulated_gpu.nvrtc.compiled) == 2


@needs_compiler
@pytest.mark.slow
def test_a_kernel_is_loaded_once_for_each_device(cache: Path, emulated_gpu: SimpleNamespace) -> None:
    first, second, third = (cuda_driver.load("few_rows", SMALL, index) for index in (0, 0, 1))
    assert first == second != third
    assert emulated_gpu.driver.loads == 2


@needs_compiler
@pytest.mark.slow
def test_nothing_is_loaded_while_a_graph_is_captured(cache: Path, emulated_gpu: SimpleNamespace) -> None:
    emulated_gpu.capturing = True
    with pytest.raises(
        UnsupportedError, match="few_rows: expected a kernel that was loaded before, found a CUDA graph"
    ):
        cuda_driver.load("few_rows", SMALL, 0)
    emulated_gpu.capturing = False
    loaded = cuda_driver.load("few_rows", SMALL, 0)
    emulated_gpu.capturing = True
    assert cuda_driver.load("few_rows", SMALL, 0) == loaded


@needs_compiler
@pytest.mark.slow
def test_an_error_of_the_compiler_says_why(cache: Path, emulated_gpu: SimpleNamespace) -> None:
    wrong = macros_of(Affine(4, 32, "k4", "none")) | {"GROUP": 24}
    with pytest.raises(
        UnsupportedError, match=r"(?s)few_rows\.cu: expected a source that NVRTC compiles, found error \d+: .*short"
    ):
        cuda_driver.compiled("few_rows", wrong, 90)
    assert not cache.exists()


def test_without_a_library_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_nvrtc_names", lambda: iter(["no such library"]))
    with pytest.raises(UnsupportedError, match="expected NVRTC's library, found none"):
        cuda_driver.nvrtc.__wrapped__()


def test_nothing_is_available_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not cuda_driver.is_available()


# This needs NVRTC and NVIDIA's disassembler, but no GPU.

TWO_TILES = TILE | {"COLUMN_TILES": 2, "BLOCKS": 2}
CODES = [
    (Int4(128), {}, 3.0),
    (Int8(), {}, 3.7),
    *exhaustive(
        (Int4(128), {"dtype": torch.float16}, 3.0),
        (Int4(128), {"grouped": 1}, 3.0),
        (Int4(64), {}, 3.6),
        (Int4(32), {}, 3.6),
        (Int8(128), {}, 4.2),
        (Int8(32), {}, 4.5),
        (Float8E4M3(), {}, 4.2),
        (Affine(4, 128), {}, 3.5),
        (Affine(4, 64, offset="bias"), {}, 4.2),
        (Table4(32, "e8m0"), {}, 5.6),
        (Table4(16, "e4m3"), {}, 6.4),
        (Int4(128), {"tile": TWO_TILES}, 4.0),
        (Int8(), {"tile": TWO_TILES}, 4.8),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", by_default([90], ARCHITECTURES))
@pytest.mark.parametrize(("form", "options", "most"), CODES, ids=str)
def test_a_loop_has_few_instructions_and_no_barrier(
    form: Format, options: dict[str, Any], most: float, architecture: int
) -> None:
    try:
        loop = count(form, architecture, **{"tile": TILE, **options})
    except FileNotFoundError as error:
        pytest.skip(f"needs {error}")
    except UnsupportedError as error:
        if "NVRTC's library" not in str(error):
            raise
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    # What does not fit into registers is read before the loop, if anything.
    assert loop.slow == 0
    assert loop.stack_bytes <= (8 if isinstance(form, Table4) else 0)
    assert loop.per_weight <= most
