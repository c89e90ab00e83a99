"""What a CPU multiplies fast: read from PyTorch, limited as oneDNN is, and used by every product that dequantizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cpus import AMX, COOPER_LAKE, GENOA, GRAVITON, ICE_LAKE, library_of, use_cpu
from weights import random_weight, weight_of

from hf_trainweights.formats import FORMATS
from hf_trainweights.kernels import cpu_features as instructions
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.testing.values import assert_close_product

half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (None, ["amx_bf16", "amx_int8", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx_vnni"]),
        ("all", ["amx_bf16", "amx_int8", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx_vnni"]),
        ("AVX512_CORE_AMX", ["amx_bf16", "amx_int8", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx_vnni"]),
        ("AVX512_CORE_FP16", ["avx512_fp16", "avx512_bf16", "avx512_vnni", "avx_vnni"]),
        ("AVX512_CORE_BF16", ["avx512_bf16", "avx512_vnni", "avx_vnni"]),
        ("AVX512_CORE_VNNI", ["avx512_vnni", "avx_vnni"]),
        ("AVX2_VNNI", ["avx_vnni"]),
        ("AVX512_CORE", []),
        ("AVX2", []),
    ],
)
def test_what_onednn_is_told_not_to_use_does_not_count(
    limit: str | None, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict(AMX))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    found = instructions.capabilities.__wrapped__()
    assert {name for name in instructions._ALLOWED if found.get(name)} == set(left)


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu fma f16c avx2 avx_vnni", "avx_vnni"),
        (
            "model name\t: Intel Xeon\nflags\t: fma avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16",
            "avx512",
        ),
        ("model name\t: AMD EPYC\nflags\t: avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16", "avx512_bf16"),
        ("Features\t: fp asimd asimddp\nCPU implementer\t: 0x41\n", "neon"),
        ("no such lines", None),
        (None, None),
    ],
    ids=str,
)
def test_an_older_pytorch_that_tells_nothing_of_the_cpu_leaves_it_to_linux(
    text: str | None, library: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(instructions, "_CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert library_of(instructions.capabilities.__wrapped__()) == library


@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="this release of PyTorch tells nothing")
@pytest.mark.skipif(not instructions._CPUINFO.exists(), reason="not Linux")
def test_linux_tells_of_this_cpu_what_pytorch_does() -> None:
    told, read = torch.cpu.get_capabilities(), instructions._read_cpuinfo()
    assert library_of(read) == library_of(told)
    assert read["architecture"] == told["architecture"]


@pytest.mark.parametrize(
    ("cpu", "bf16", "fp16"),
    [
        (AMX, [False] * 4, [False] * 4),
        (GENOA, [False] * 4, [False, True, True, True]),
        (COOPER_LAKE, [False, False, False, True], [False, True, True, True]),
        (ICE_LAKE, [False, True, True, True], [False, True, True, True]),
        (GRAVITON, [False] * 4, [False] * 4),
        ({}, [False] * 4, [False] * 4),
    ],
)
def test_rows_are_widened_where_their_dtype_is_slow(
    cpu: dict[str, object], bf16: list[bool], fp16: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(cpu, monkeypatch)
    for dtype, expected in ((torch.bfloat16, bf16), (torch.float16, fp16), (torch.float32, [False] * 4)):
        assert [product_dtype(dtype, M) != dtype for M in (1, 2, 48, 49)] == expected


@pytest.mark.slow
@pytest.mark.covering(2)
@half_dtypes
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 70])
@pytest.mark.parametrize("N", [128, 1100])
def test_products_of_every_format_keep_the_bound_where_their_dtype_is_slow(
    N: int, rows: int, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(ICE_LAKE, monkeypatch)
    weight = weight_of(FORMATS[name](), (N, 1024), dtype)
    x, bias = random_weight(rows, 1024, dtype=dtype, seed=1), random_weight(N, dtype=dtype, seed=2)
    with torch.no_grad():
        for shift in (None, bias):
            wide = None if shift is None else shift.double()
            exact = F.linear(x.double(), weight.dequantize(torch.float64), wide)
            result = F.linear(x, weight, shift)
            assert result.dtype == dtype
            assert_close_product(result, F.linear(x, weight.dequantize(), shift), exact)
