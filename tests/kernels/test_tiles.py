"""Products by panels, in vectors and in AMX tiles, which plain C emulates: few machines that run tests have them."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from cpus import loaded
from fences import product
from weights import random_weight, stored_tensors

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.formats.uint import UInt3, UInt6
from hf_trainweights.kernels import compiled
from hf_trainweights.native_library import load_library
from hf_trainweights.testing.values import assert_close_products

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)

FORMATS = [Int8(), Int8(64), Int8(128), Int4(32), Int4(64), Int4(128)]
INTEGERS = [*FORMATS, Codebook4(), UInt3(16), UInt6(32)]
# Codes that are looked up in one, two and four tables at a time, and those that become numbers for themselves.
IMPORTED = [
    *(Affine(4, 32, "k4", "none"), Affine(4, 128), Affine(4, 192), Affine(4, 16), Affine(4, 48), Affine(4, None)),
    *(Affine(4, 64, offset="bias", rounding="each"), Affine(3, 64, offset="float_zero_point", rounding="each")),
    *(Affine(2, 16, "k2", "none"), Affine(5, 32, "plain", "bias"), Affine(6, 16, "k6", "none"), Affine(8, 96)),
    *(Table4(64, "nested"), Table4(16, "e4m3"), Table4(48), Float8E4M3(128), Float8E4M3(32, "e8m0")),
]
# On both sides of every threshold, of a tile of tokens and of two; the last of more than one panel of tiles.
ROWS = (5, 16, 17, 33, 65, 130)
# Panels of so few bytes that 300 columns of 17 tokens do not fit.
SMALL = ("-DHELD_BYTES=8192", "-DROW_BYTES=128", "-DROW_BYTES_OF_BFLOAT16=256")
_INSTRUCTIONS = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vnni avx512bf16"
_IS_AVX512 = all(map(compiled.capabilities().get, (*compiled._LIBRARIES["avx512"], "avx512_bf16")))
FLAGS = (
    ("-std=gnu11", "-fPIC", "-fopenmp", "-DEMULATED_TILES", *(f"-m{each}" for each in _INSTRUCTIONS.split()))
    if _IS_AVX512
    else emulated.FLAGS["amx"]
)
# Of what these tests do not run, the compiler makes what takes it the least time.
UNUSED = ("dequantize", "float8", "uint", "few_rows")


def compile_sources(sources: Iterable[Path], to: Path) -> None:
    """Compile C sources with emulated tiles and small panels."""
    for is_used in (True, False):
        chosen = [source for source in sources if (source.stem not in UNUSED) == is_used]
        emulated.compile_sources(chosen, to, (*FLAGS, *SMALL, "-O1" if is_used else "-O0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library, with emulated tiles and small panels."""
    emulated.skip_where_nothing_is_emulated()
    folder = tmp_path_factory.mktemp("tiles")
    compile_sources([path for each in emulated.SOURCES["amx"] for path in compiled._NATIVE.glob(each)], folder)
    return emulated.link(folder, "amx.so").parent


@pytest.fixture(scope="module", params=["amx", "avx512_bf16", "avx512"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if request.param == "amx":
        return emulated.load(request.getfixturevalue("folder") / "amx.so")
    return usual(request.param)


def usual(name: str) -> ctypes.CDLL:
    """Return a library as it is installed, emulated where this machine does not run it."""
    return loaded(name) or emulated.library(name)


@pytest.mark.slow
@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("form", [*INTEGERS, Float8E4M3()], ids=str)
@pytest.mark.parametrize(("N", "K"), [(1, 128), (50, 384)])
def test_products_are_as_exact_as_dequantizing(
    library: ctypes.CDLL, form: Format, N: int, K: int, dtype: torch.dtype
) -> None:
    form = form.fallback((N, K))
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    weight = form.dequantize(tensors, (N, K), torch.float32)
    assert_close_products(lambda x, bias: product(library, form, tensors, x, bias), weight, dtype, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "K"),
    [
        *((form, K) for form in (Int8(), Float8E4M3()) for K in (1, 3, 70, 130, 800)),
        *((form, K) for form in (Int4(32), Codebook4(), UInt3(16)) for K in (32, 96, 416)),
    ],
    ids=str,
)
def test_columns_that_fill_no_tile_are_multiplied_and_nothing_around_them(
    library: ctypes.CDLL, form: Format, K: int
) -> None:
    for N, dtype in ((30, torch.float32), (34, torch.bfloat16)):
        tensors = form.quantize(random_weight(N, K, dtype=dtype))
        weight = form.dequantize(tensors, (N, K), torch.float32)
        multiply = functools.partial(product, library, form, tensors, at_end=False)
        assert_close_products(multiply, weight, dtype, (17, 130) if K < 500 else (17,))


@pytest.mark.slow
@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("form", IMPORTED, ids=str)
@pytest.mark.parametrize(("N", "K"), [(34, 768), (3, 2304)])
def test_formats_of_other_programs_are_multiplied(
    library: ctypes.CDLL, form: Format, N: int, K: int, dtype: torch.dtype
) -> None:
    tensors = stored_tensors(form, (N, K), dtype)
    weight = form.dequantize(tensors, (N, K), torch.float32)
    multiply = functools.partial(product, library, form, tensors, at_end=N > 3)
    assert_close_products(multiply, weight, dtype, (9, 17, 130) if N > 3 else (17,))


@pytest.mark.slow
@pytest.mark.parametrize("form", [Int8(), Int4(32), UInt3(16), Float8E4M3()], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(17, 3, 2112), (530, 33, 64)])
def test_long_rows_and_many_tokens_are_multiplied(library: ctypes.CDLL, form: Format, M: int, N: int, K: int) -> None:
    tensors = form.quantize(random_weight(N, K, dtype=torch.bfloat16))
    weight = form.dequantize(tensors, (N, K), torch.float32)
    assert_close_products(functools.partial(product, library, form, tensors), weight, torch.bfloat16, (M,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amx", "avx512"])
@pytest.mark.parametrize("form", [UInt3(16), UInt6(32), Float8E4M3()], ids=str)
def test_each_row_of_float32_is_as_exact_as_its_own_magnitude(name: str, form: Format) -> None:
    # More columns than are summed at once, and numbers of a row that lie 80 octaves apart.
    N, K = 34, 2112
    tensors = form.quantize(random_weight(N, K))
    x = random_weight(17, K)
    x[3], x[4], x[5] = x[3] * 1e30, x[4] * 1e-30, x[5] * torch.logspace(-20, 4, K)
    exact = x.double() @ form.dequantize(tensors, (N, K), torch.float64).t()
    errors = (product(usual(name), form, tensors, x).double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.max() <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amx", "avx512"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_float8_gives_what_is_not_finite_as_float_weights_do(name: str, value: float) -> None:
    tensors = Float8E4M3().quantize(random_weight(20, 128))
    x = random_weight(17, 128)
    x[1, 3] = value
    expected = x[1] @ Float8E4M3().dequantize(tensors, (20, 128), torch.float32).t()
    actual = product(usual(name), Float8E4M3(), tensors, x)
    assert torch.equal(actual[1].nan_to_num(), expected.nan_to_num())
    assert actual.isfinite().all(1).tolist() == [m != 1 for m in range(17)]


@every_dtype
def test_8_bit_activations_are_rounded_to_127_steps_of_each_row(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    form, N, K = Int8(activations="int8"), 40, 200
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    weight = form.dequantize(tensors, (N, K), torch.float64)
    for M in (5, 33, 130):
        x = random_weight(M, K, dtype=dtype, seed=M)
        worth = x.double().abs().amax(1, keepdim=True) / 127
        expected = ((x.double() / worth).round() * worth) @ weight.t()
        # A number in the middle between two steps may fall to either of them. The rounding itself is 7e-3 of the norm.
        error = (product(library, form, tensors, x).double() - expected).norm() / expected.norm()
        assert error <= 1e-3 + torch.finfo(dtype).eps


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("form", [*INTEGERS, Float8E4M3()], ids=str)
def test_threads_change_no_bit(library: ctypes.CDLL, form: Format, dtype: torch.dtype) -> None:
    tensors = form.quantize(random_weight(100, 384, dtype=dtype))
    for M in (17, 65):
        x = random_weight(M, 384, dtype=dtype, seed=M)
        one, two, three = (product(library, form, tensors, x, threads=count) for count in (1, 2, 3))
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("form", [*INTEGERS, Int8(activations="int8")], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_magnitude_becomes_nan_and_no_other(
    library: ctypes.CDLL, form: Format, value: float, dtype: torch.dtype
) -> None:
    tensors = form.quantize(random_weight(20, 128, dtype=dtype))
    for M in (5, 17, 130):
        x = random_weight(M, 128, dtype=dtype)
        x[1, 3] = value
        rows = product(library, form, tensors, x).isnan().float().mean(1)
        assert rows.tolist() == [float(m == 1) for m in range(M)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top", [0.0, 1e-44, 1e-38, 1e32, 3e38])
@pytest.mark.parametrize("form", [*INTEGERS, Int8(activations="int8")], ids=str)
def test_the_smallest_and_the_largest_rows_are_multiplied(
    library: ctypes.CDLL, form: Format, top: float, dtype: torch.dtype
) -> None:
    # Weights small enough for the sums of the largest rows.
    tensors = form.quantize((random_weight(20, 128) * 1e-3).to(dtype))
    for M in (5, 130):
        x = (random_weight(M, 128).clamp_(-1, 1) * top).to(dtype)
        exact = x.double() @ form.dequantize(tensors, (20, 128), torch.float64).t()
        outputs = product(library, form, tensors, x).double()
        # One digit counts steps of 1e-33 at least.
        torch.testing.assert_close(outputs, exact, rtol=0.1, atol=max(1e-33, 0.01 * top))


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this CPU have all instructions, and the installation the libraries of a folder."""
    names = {name for needed in compiled._LIBRARIES.values() for name in needed}
    monkeypatch.setattr(compiled, "capabilities", lambda: dict.fromkeys(names, True))
    monkeypatch.setattr(compiled, "_NATIVE", folder)
    monkeypatch.setattr(compiled, "instructions", compiled.instructions.__wrapped__)
    monkeypatch.setattr(compiled, "_open", compiled._open.__wrapped__)


def test_tiles_serve_where_they_are_granted_and_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, folder)
    assert compiled.instructions() == "amx"
    assert compiled.loaded_library.__wrapped__() is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong", "says"),
    [
        ("emulated.h", "ask_for_tiles(void) { return 0; }", "ask_for_tiles(void) { return 28; }", ""),
        ("emulated.h", "sums[m][n] += emulated", "sums[m][n] -= emulated", "Products by AMX differ"),
        ("emulated.h", "right[k][i][n], parts", "right[15 - k][i][n], parts", "Products by AMX differ"),
        ("numbers.c", "FLOAT32, 3);", "FLOAT32, 1);", "Products by AMX differ"),
    ],
    ids=["refused", "wrong with bytes", "wrong with bfloat16", "wrong with pieces"],
)
def test_elsewhere_the_library_for_avx512_serves(
    file: str,
    right: str,
    wrong: str,
    says: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    sources = shutil.copytree(compiled._NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("*.so"))
    tiles = sources / "tiles" / file
    assert right in tiles.read_text()
    tiles.write_text(tiles.read_text().replace(right, wrong))
    for built in folder.glob("*.o"):
        shutil.copy(built, tmp_path)
    compile_sources([sources / "tiles" / name for name in ("prepare.c", "products.c", "numbers.c")], tmp_path)
    emulated.link(tmp_path, "amx.so").with_name("avx512.so").touch()
    use(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert compiled.instructions() == "avx512"
    assert bool(caplog.text) == bool(says)
    assert says in caplog.text


def test_without_permission_no_instruction_for_tiles_is_used(folder: Path, tmp_path: Path) -> None:
    # Emulated tiles need none; what their library has not asked for, it does not use.
    shutil.copy(folder / "amx.so", tmp_path)
    form, x = Int8(), random_weight(17, 384)
    tensors = form.quantize(random_weight(20, 384))
    library = load_library(tmp_path / "amx.so", compiled._FUNCTIONS | {"prepare": "i"}, compiled.ABI)
    assert library is not None
    before = product(library, form, tensors, x)
    assert library.prepare() == 0
    assert not torch.equal(product(library, form, tensors, x), before)
    assert torch.equal(before, product(usual("avx512"), form, tensors, x))
