"""Which way a product takes, by the CPU, and what users are told of slow ones: the same on every machine."""

from __future__ import annotations

import pytest
import torch
from cpus import (
    ALDER_LAKE,
    AMX,
    AMX_WITHOUT_TILES,
    COOPER_LAKE,
    CPUS,
    GENOA,
    GRAVITON,
    HASWELL,
    ICE_LAKE,
    OLD,
    OLD_ARM,
    use_cpu,
)
from weights import random_weight

from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.uint import UInt3, UInt4
from hf_trainweights.kernels import compiled, linear, prepare_few_rows, product_op, slowness, stored
from hf_trainweights.kernels.cpu_features import ALL

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
ROUNDED = Int8(activations="int8")
KINDS: dict[str, Format] = {
    "int8": Int8(),
    "groups": Int8(128),
    "rounded": ROUNDED,
    "int4": Int4(),
    "float8": Float8E4M3(),
    "uint3": UInt3(),
}


def most_rows(form: Format, dtype: torch.dtype) -> int:
    product = compiled.find(form, 1024, 1024, dtype, dtype)
    return 0 if product is None else product.most_rows


@pytest.mark.parametrize(
    ("cpu", "dtype", "expected"),
    [
        (AMX, FLOAT32, [ALL] * 6),
        (AMX, BFLOAT16, [ALL] * 6),
        (AMX, FLOAT16, [ALL, ALL, ALL, ALL, 8, 16]),
        (AMX_WITHOUT_TILES, FLOAT32, [ALL] * 6),
        (AMX_WITHOUT_TILES, BFLOAT16, [256, 256, ALL, 256, 8, 16]),
        (AMX_WITHOUT_TILES, FLOAT16, [256, 256, ALL, 256, 8, 16]),
        (GENOA, FLOAT32, [ALL] * 6),
        (GENOA, BFLOAT16, [ALL] * 6),
        (GENOA, FLOAT16, [ALL] * 6),
        (COOPER_LAKE, BFLOAT16, [ALL] * 6),
        (ICE_LAKE, FLOAT32, [ALL] * 6),
        (ICE_LAKE, BFLOAT16, [ALL] * 6),
        (ALDER_LAKE, FLOAT32, [ALL] * 6),
        (ALDER_LAKE, BFLOAT16, [ALL] * 6),
        (HASWELL, FLOAT32, [ALL] * 6),
        (HASWELL, BFLOAT16, [ALL] * 6),
        (OLD, FLOAT32, [0] * 6),
        (GRAVITON, FLOAT32, [16, 16, ALL, 16, 8, 16]),
        (GRAVITON, BFLOAT16, [16, 16, 16, 16, 8, 16]),
        (OLD_ARM, BFLOAT16, [0] * 6),
    ],
)
def test_compiled_products_serve_as_many_rows_as_they_are_fast_for(
    cpu: dict[str, object], dtype: torch.dtype, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(cpu, monkeypatch)
    assert [most_rows(form, dtype) for form in KINDS.values()] == expected


def test_groups_that_tiles_do_not_take_are_multiplied_as_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(AMX, monkeypatch)
    assert [most_rows(Int8(size), BFLOAT16) for size in (8, 32, 64, 128)] == [256, ALL, ALL, ALL]
    assert [most_rows(Int4(32), dtype) for dtype in (BFLOAT16, FLOAT16, FLOAT32)] == [ALL, 256, ALL]


def test_an_installation_without_a_compiler_has_no_compiled_products(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(GENOA, monkeypatch, is_compiled=False)
    assert [most_rows(form, FLOAT32) for form in KINDS.values()] == [0] * 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cpu", CPUS)
def test_both_ways_to_a_product_change_at_the_same_row(cpu: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(CPUS[cpu], monkeypatch)
    form, taken = KINDS[kind], []
    tensors = form.quantize(random_weight(64, 128).bfloat16())
    limit = most_rows(form, BFLOAT16)
    monkeypatch.setattr(product_op, "serves", lambda product: False)
    monkeypatch.setattr(compiled.Product, "__call__", lambda *args: taken.append(len(args[4])) or args[4])
    monkeypatch.setattr(stored, "multiply_dequantized", lambda x, *_: x)
    rows = (1, 2, 16, 17, 48, 49, 64, 65, 128, 129, 256, 257)
    at_once = prepare_few_rows(tensors, form, BFLOAT16)
    assert at_once is not None
    for multiply in (lambda x: at_once(x, None), lambda x: linear(x, tensors, form)):
        taken.clear()
        for M in rows:
            multiply(torch.ones(M, 128, dtype=BFLOAT16))
        assert taken == [M for M in rows if limit >= M]


@pytest.mark.parametrize(
    ("form", "dtype", "rows", "expected"),
    [
        (Int8(), BFLOAT16, 1, True),
        (Int8(), FLOAT16, 4, True),
        (ROUNDED, BFLOAT16, 4, True),
        (Int8(), BFLOAT16, 5, False),
        (Int8(), FLOAT32, 1, False),
        (Int8(32), BFLOAT16, 1, False),
        (Int4(), BFLOAT16, 1, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_pytorchs_op_for_int8_serves_few_rows_of_16_bits_where_nothing_is_compiled(
    form: Format, dtype: torch.dtype, rows: int, expected: bool, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(ICE_LAKE, monkeypatch, is_compiled)
    taken: list[bool] = []
    monkeypatch.setattr(stored, "_multiply_packed", lambda x, *_: taken.append(True) or x)
    monkeypatch.setattr(product_op, "serves", lambda product: False)
    monkeypatch.setattr(compiled.Product, "__call__", lambda *args: args[4])
    linear(torch.ones(rows, 128, dtype=dtype), form.quantize(random_weight(64, 128).to(dtype)), form, None)
    assert bool(taken) == (expected and not is_compiled)


# What is said

MANY, DEQUANTIZED = "longer than one with float weights. int8", "each product dequantizes"


@pytest.mark.parametrize(
    ("cpu", "dtype", "expected"),
    [
        (AMX, FLOAT32, [None] * 6),
        (AMX, BFLOAT16, [None] * 6),
        (GENOA, BFLOAT16, [None] * 6),
        (ICE_LAKE, FLOAT32, [None] * 6),
        (ALDER_LAKE, FLOAT32, [None] * 6),
        (ICE_LAKE, BFLOAT16, [None] * 6),
        (ALDER_LAKE, FLOAT16, [None] * 6),
        (HASWELL, FLOAT32, [None] * 6),
        (HASWELL, BFLOAT16, [None] * 6),
        (GRAVITON, BFLOAT16, [MANY, MANY, None, MANY, MANY, MANY]),
        (OLD, FLOAT32, [DEQUANTIZED] * 6),
        (OLD, BFLOAT16, [None, DEQUANTIZED, None, DEQUANTIZED, DEQUANTIZED, DEQUANTIZED]),
        (OLD, FLOAT16, [None, DEQUANTIZED, None, DEQUANTIZED, DEQUANTIZED, DEQUANTIZED]),
    ],
)
def test_what_is_slow_on_a_cpu_is_said(
    cpu: dict[str, object], dtype: torch.dtype, expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(cpu, monkeypatch)
    for form, text in zip(KINDS.values(), expected, strict=True):
        said = slowness(form, dtype)
        assert said is None if text is None else text in (said or ""), form


def test_of_other_formats_what_their_codes_are_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(GRAVITON, monkeypatch)
    scaled = get_format({"format": "uint3", "column_scale": True})
    assert isinstance(scaled, ColumnScaled)
    assert slowness(scaled, FLOAT32) == slowness(UInt3(), FLOAT32)
    assert MANY in (slowness(UInt4(32), BFLOAT16) or "")
    assert MANY in (slowness(Codebook4(), FLOAT32) or "")
    int8, coded = slowness(Int8(), FLOAT32), slowness(Coded(), FLOAT32)
    assert int8 is not None
    assert coded == int8.replace("int8", "coded", 1)


@pytest.mark.parametrize("cpu", [GENOA, HASWELL, OLD])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_format_that_no_compiled_product_reads_is_said_to_be_slow(
    cpu: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(cpu, monkeypatch)
    monkeypatch.setattr(compiled, "FORMATS", ())
    said = slowness(Codebook4(), dtype)
    assert said is not None
    assert said.startswith("codebook4 weights: no compiled product reads this format, so each product dequantizes")
    assert said.endswith("is fast.")
