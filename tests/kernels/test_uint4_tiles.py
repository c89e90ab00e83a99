"""uint4 on a CPU: tiles hold every weight exactly, and their products are as exact as dequantizing."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weights import same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, kernels, quantize_
from hf_trainweights.formats.uint import UInt3, UInt4
from hf_trainweights.kernels.int4_tiles import tile_rows
from hf_trainweights.kernels.tiled_products import MOST_ROWS
from hf_trainweights.kernels.uint4_tiles import UInt4Tiles
from hf_trainweights.tensor.dispatch import FALLBACKS

SHAPES = [(192, 64), (128, 320), (320, 256)]
M_VALUES = [1, 3, MOST_ROWS, MOST_ROWS + 1, 100]


@pytest.fixture(autouse=True)
def fallbacks() -> Iterator[None]:
    before = FALLBACKS.copy()
    yield
    assert before == FALLBACKS


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(*shape: int, seed: int = 1, tiles: int = tile_rows() or 64) -> QuantizedTensor:
    return QuantizedTensor.quantize(random(*shape, seed=seed), UInt4(32)).in_layout(UInt4Tiles(tiles))


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "positive"])
def test_products_in_tiles_are_as_exact_as_dequantizing(shape: tuple[int, int], kind: str) -> None:
    weight, bias = weight_of(*shape), random(shape[0])
    for M in M_VALUES:
        x = random(M, shape[1], seed=100 + M)
        x = x if kind == "normal" else x.abs()
        for added in (None, bias):
            exact = F.linear(x.double(), weight.dequantize(torch.float64), None if added is None else added.double())
            result = kernels.linear(x, weight.held.tensors, weight.format, weight.kernel_layout, added)
            assert result is not None
            assert (result.dtype, result.shape) == (x.dtype, exact.shape)
            assert error(result, exact) <= 1.5 * error(F.linear(x, weight.dequantize(), added), exact), M


@pytest.mark.parametrize("shape", [(64, 64), (2, 64, 128), (320, 256)], ids=str)
@pytest.mark.parametrize("rows", [32, 64])
def test_tiles_are_exact_both_ways(shape: tuple[int, ...], rows: int) -> None:
    weight = QuantizedTensor.quantize(random(*shape), UInt4(32))
    # Whatever another writer stored comes back too, even where the scale is zero.
    weight.held.tensors["scale"][..., 3, :] = 0
    weight.held.tensors["scale"][..., 5, :] *= 1.3
    tiles = weight.in_layout(UInt4Tiles(rows))
    assert same_stored(tiles.canonical(), weight)
    assert all(stored.is_contiguous() for stored in tiles.canonical().tensors.values())


def test_rows_of_tiles_are_those_of_the_stored_tensors() -> None:
    tiles, indices = weight_of(128, 64), torch.tensor([0, 127, 64, 3, 3])
    layout = tiles.kernel_layout
    assert layout is not None
    taken, wanted = layout.take_rows(tiles.held.tensors, indices), tiles.format.take_rows(tiles.tensors, indices)
    assert taken.keys() == wanted.keys()
    assert all(torch.equal(taken[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("form", "shape", "dtype", "tiled"),
    [
        (UInt4(32), (64, 64), torch.bfloat16, True),
        (UInt4(32), (3, 64, 64), torch.bfloat16, True),
        (UInt4(32), (48, 64), torch.bfloat16, False),
        (UInt4(32), (64, 64), torch.float32, False),
        (UInt4(16), (64, 64), torch.bfloat16, False),
        (UInt3(32), (64, 64), torch.bfloat16, False),
    ],
    ids=str,
)
def test_groups_of_32_in_bfloat16_take_tiles(
    form: UInt4, shape: tuple[int, ...], dtype: torch.dtype, tiled: bool
) -> None:
    chosen = kernels.choose_layout(form, shape, dtype, torch.device("cpu"))
    assert chosen == (UInt4Tiles(tile_rows() or 64) if tiled and tile_rows() else None)


@pytest.mark.skipif(tile_rows() is None, reason="PyTorch has no op for tiles on this CPU")
def test_a_module_in_tiles_decodes_saves_and_copies_as_any_other() -> None:
    linear = nn.Linear(64, 64, dtype=torch.bfloat16)
    quantize_(linear, TrainWeightsConfig("uint4", group_size=32))
    assert isinstance(linear.weight, QuantizedTensor)
    assert linear.weight.kernel_layout == UInt4Tiles(tile_rows() or 64)
    x = random(1, 64)
    with torch.no_grad():
        decoded = linear(x)
    assert torch.equal(linear(x), decoded)
    assert torch.equal(copy.deepcopy(linear)(x), decoded)
    buffer = io.BytesIO()
    torch.save(linear.state_dict(), buffer)
    buffer.seek(0)
    again = nn.Linear(64, 64, dtype=torch.bfloat16)
    again.load_state_dict(torch.load(buffer), assign=True)
    assert same_stored(again.weight.canonical(), linear.weight.canonical())  # type: ignore[operator]
    assert torch.equal(again(x), decoded)


def test_a_product_in_tiles_compiles_whole() -> None:
    weight, x = weight_of(64, 64), random(3, 64)
    compiled = torch.compile(F.linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight), F.linear(x, weight))
