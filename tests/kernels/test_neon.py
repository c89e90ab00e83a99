"""Products by ARM's NEON: emulated by QEMU, they have each bit of those with which other tests hold the arithmetic."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cpus import GRAVITON
from emulated import HEADERS, SOURCES
from kernels.test_contract import OF_OTHER_PROGRAMS, OWN
from kernels.test_imported import columns_of
from torch import Tensor
from weights import random_weight, stored_tensors

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import compiled

_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
# Without fused operations that the sources do not ask for, as where the other tests compile them; that takes a third of
# the time of -O3.
_FLAGS = ("-O1", "-std=gnu11", "-fopenmp", "-march=armv8.2-a+dotprod", "-ffp-contract=off", "-static")

FORMATS = [*OWN, Int8(activations="int8"), *OF_OTHER_PROGRAMS]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a program that calls the library once."""
    if not (shutil.which(_COMPILER) and shutil.which(_EMULATOR)):
        pytest.skip(f"needs {_COMPILER} and {_EMULATOR}")
    native, program = compiled._NATIVE, tmp_path_factory.mktemp("neon") / "run"
    sources = [path for pattern in SOURCES["neon"] for path in sorted(native.glob(pattern))]
    main = HEADERS / "run.c"
    subprocess.run([_COMPILER, *_FLAGS, f"-I{native}", *sources, main, "-o", program], check=True)
    return program


def run(program: Path, weight: compiled.Weight, M: int, out: Tensor, tensors: list[Tensor | None]) -> Tensor:
    """Return what the program gives in place of `out`, by two threads."""
    given = bytes(weight) + b"".join(number.to_bytes(8, "little") for number in (M, 2, out.nbytes))
    for tensor in [*tensors, *[None] * (4 + compiled.OTHERS - len(tensors))]:
        data = b"" if tensor is None else tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        given += len(data).to_bytes(8, "little") + data
    result = subprocess.run([_EMULATOR, program], input=given, capture_output=True, check=True)
    return torch.frombuffer(bytearray(result.stdout), dtype=out.dtype).view(out.shape)


def test_every_format_that_the_libraries_read_is_tried() -> None:
    assert [kind for kind in compiled.FORMATS if not any(isinstance(form, kind) for form in FORMATS)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", [GRAVITON], ids=["neon"], indirect=True)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("M", [0, 1, 4, 5, 17])
def test_qemu_gives_each_bit_of_the_emulated_vectors(
    M: int, form: Format, dtype: torch.dtype, library: None, program: Path
) -> None:
    N, K = 22, columns_of(form, 2)
    tensors = stored_tensors(form, (N, K), dtype)
    qdata, scale, *groups = (tensors[name] for name in form.tensor_names)
    product = compiled.find(form, N, K, dtype, scale.dtype)
    assert product is not None
    x, bias = random_weight(M, K, dtype=dtype, seed=1), random_weight(1, N, dtype=dtype)[0]
    if M:
        expected = product(qdata, scale, tuple(groups), x, bias)
    else:
        expected = product.dequantize(qdata, scale, tuple(groups), slice(0, N))
    actual = run(program, product._weight, M, expected, [x, qdata, scale, bias, *groups])
    assert torch.equal(actual, expected)
