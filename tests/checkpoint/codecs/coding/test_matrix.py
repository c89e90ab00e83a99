import math

import pytest
import torch

from hf_trainweights.checkpoint.codecs.coding.matrix import TILE, matrix_shape, tiles


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
