import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from checkpoint.codecs.cases import bits_equal

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.coding.tiles import (
    TILE,
    matrix_shape,
    rounded_to,
    scratch,
    tiles,
    to_float32,
)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([], (1, 1)),
        ([5], (1, 5)),
        ([0, 5], (0, 1)),
        ([7, 3], (7, 3)),
        ([512, 512, 3], (512, 1536)),
        ([64, 64, 3, 3], (64, 576)),
        ([8, 1024, 512], (8192, 512)),
        ([1, 1, 9], (1, 9)),
    ],
)
def test_matrix_is_the_squarest_split(shape, expected):
    assert matrix_shape(torch.Size(shape)) == expected


@pytest.mark.parametrize(
    "shape", [(0, 1), (1, 1), (5, 7), (1, 3 * TILE + 1), (3, TILE + 5), (TILE + 1, 1), (1000, 999)]
)
def test_tiles_cover_every_element_once_in_row_major_order(shape):
    seen = torch.arange(math.prod(shape)).view(shape)
    parts = [seen[tile] for tile in tiles(*shape)]
    assert all(part.is_contiguous() and 0 < part.numel() <= TILE for part in parts)
    assert torch.equal(torch.cat([seen.new_empty(0), *[part.reshape(-1) for part in parts]]), seen.view(-1))


@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=str)
def test_float32_is_worked_on_where_it_lies_and_other_dtypes_in_scratch(dtype):
    tile = torch.tensor([[1 / 3, -0.0, torch.inf]]).to(dtype)
    values = to_float32(tile, "x")
    assert bits_equal(torch.from_numpy(values), tile.to(torch.float32))
    assert (values.ctypes.data == tile.data_ptr()) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=str)
def test_values_are_rounded_once_to_the_dtype(dtype):
    values = np.array([1 / 3, 1e-9, 70000.0, np.nan], np.float32)
    expected = torch.from_numpy(values).to(dtype).to(torch.float32)
    np.testing.assert_array_equal(rounded_to(dtype, values), expected.numpy())


def test_threads_do_not_share_scratch():
    mine = scratch("levels", [2, 3])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(scratch, "levels", [2, 3]).result()
    assert not np.shares_memory(mine, other)
    assert np.shares_memory(mine, scratch("levels", [3, 2]))
    assert not np.shares_memory(mine, scratch("decoded", [2, 3]))


def test_scratch_grows_to_the_largest_shape_of_its_use():
    assert scratch("grown", [2, 3], np.uint8).nbytes == 6
    assert scratch("grown", [5, 7]).shape == (5, 7)
    assert scratch("grown", [5, 7]).dtype == np.float32
    assert np.shares_memory(scratch("grown", [140], np.uint8), scratch("grown", [5, 7]))
