"""What the searches in C find is what PyTorch's ops find, to the last bit, and without a compiler these serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_trainweights.formats import codebook4, compiled_search, uint_search
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.uint import UInt2, UInt3, UInt4, UInt5, UInt6

FORMS: list[Format] = [UInt2(), UInt3(32), UInt4(), UInt5(32), UInt6(), Codebook4()]

pytestmark = pytest.mark.skipif(
    compiled_search._load() is None, reason="there was no C compiler at installation, or this CPU has no AVX2"
)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def mixed_weight(rows: int, columns: int) -> Tensor:
    """Return rows of several sizes, a third of whose groups have an outlier, one row of zeros and one huge one."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    weight[:, ::96] *= 9
    weight[1], weight[2] = 0, 3e38
    return weight


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_weight_gets_the_same_codes(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = mixed_weight(37, 384)
    found = form.quantize(weight)
    for module in (codebook4, uint_search):
        monkeypatch.setattr(module, "serves", lambda groups: False)
    wanted = form.quantize(weight)
    assert all(torch.equal(found[name], wanted[name]) for name in form.tensor_names)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_importance_weighs_the_same(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance = mixed_weight(70, 64), torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.01
    found = chosen(form, weight, importance)
    for module in (codebook4, uint_search):
        monkeypatch.setattr(module, "serves", lambda groups: False)
    assert all(map(torch.equal, found, chosen(form, weight, importance)))
    assert not all(map(torch.equal, found, chosen(form, weight, torch.ones(64))))


def chosen(form: Format, weight: Tensor, importance: Tensor) -> list[Tensor]:
    """Return what calibration chooses where columns do not depend on one another."""
    columns = form.columns(weight, importance)
    assert columns is not None
    size = columns.group_size
    assert size
    for column in range(weight.shape[1]):
        if column % size == 0:
            columns.begin_group(column // size, weight[:, column : column + size].t().contiguous())
        columns.encode(column, weight[:, column])
    return list(columns.tensors().values())


def test_only_plain_tensors_of_the_cpu_are_served() -> None:
    groups = torch.zeros(16, 4)
    assert compiled_search.serves(groups)
    assert not compiled_search.serves(groups.to("meta"))
    assert not compiled_search.serves(torch.nn.Parameter(groups))
