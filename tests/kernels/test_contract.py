"""Every way to a product keeps the contract of `hf_trainweights.testing`: by each library, and by PyTorch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from cpus import AMX, ICE_LAKE, use_cpu
from torch import Tensor
from weights import stored_tensors

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.formats.uint import UInt2, UInt3, UInt4, UInt5, UInt6
from hf_trainweights.testing import ProductContract

OWN: list[Format] = [
    *(Int8(size) for size in (None, 4, 16, 32, 64)),
    *(Int4(size) for size in (32, 64)),
    *(form(size) for form in (UInt2, UInt3, UInt4, UInt5, UInt6) for size in (16, 32)),
    *(Codebook4(), Float8E4M3()),
]
OF_OTHER_PROGRAMS: list[Format] = [
    *(Affine(4, 64), Affine(5, 32, "plain", "bias"), Affine(6, 16, "k6", "none"), Affine(8, None)),
    *(Table4(32, "e8m0"), Table4(64, "nested"), Table4(96), Float8E4M3(128)),
]


class Products(ProductContract):
    """The contract for all formats of this package, some of which hold the weights of other programs alone."""

    formats: ClassVar[Sequence[Format]] = (*OWN, *OF_OTHER_PROGRAMS)

    def stored(self, subject: Format, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        if subject in OF_OTHER_PROGRAMS:
            return stored_tensors(subject, shape, dtype)
        return super().stored(subject, shape, dtype)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.usefixtures("library", "threads")
class TestCompiled(Products):
    # On both sides of every threshold, of a vector of tokens and of a tile of three, and more than one panel of digits.
    rows = (1, 2, 3, 4, 5, 7, 11, 16, 17, 33, 49, 700)

    @pytest.mark.covering(2)
    @pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
    def test_products_are_as_exact_as_those_of_the_dequantized_weight(
        self, subject: Format, dtype: torch.dtype
    ) -> None:
        super().test_products_are_as_exact_as_those_of_the_dequantized_weight(subject, dtype)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.usefixtures("threads")
class TestNotCompiled(Products):
    @pytest.fixture(params=[AMX, ICE_LAKE], ids=["fast in bfloat16", "slow in it"], autouse=True)
    def _cpu(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        use_cpu(request.param, monkeypatch, is_compiled=False)
