import math

import numpy as np
import pytest
import torch
from checkpoint.codecs.cases import bits_equal

from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.levels import (
    TILE,
    LevelWriter,
    clip_,
    matrix_shape,
    moved_from,
    read_levels,
    split_misfits,
    tiles,
)


def written(levels, exact_share=0.0, same_share=0.0, seed=0):
    """Returns payloads of float levels [R, C], the elements, and where they are exact and the same."""
    rng = np.random.default_rng(seed)
    elements = torch.from_numpy(rng.standard_normal(levels.shape)).to(torch.float32)
    exact = torch.from_numpy(rng.random(levels.shape) < exact_share)
    moved = torch.from_numpy(rng.random(levels.shape) >= same_share).float()
    writer = LevelWriter(*levels.shape)
    for tile in tiles(*levels.shape):
        positions = exact[tile].reshape(-1).nonzero().view(-1)
        writer.write(
            tile,
            clip_(levels[tile].clone()),
            elements[tile],
            positions if exact_share else None,
            moved[tile] if same_share else None,
        )
    return writer.payloads(torch.float32), elements, exact, moved


def check(levels, **shares):
    """Writes and reads back; returns the size of the levels in bits an element."""
    payloads, elements, exact, moved = written(levels, **shares)
    moved[exact] = 1
    for tile, back in read_levels(DeltaUniform, payloads, levels.shape, torch.float32):
        found = torch.zeros_like(elements[tile])
        back.put(back.values, found)
        expected = torch.where(exact[tile], elements[tile], levels[tile] * moved[tile])
        assert torch.equal(found, expected)
        assert torch.equal(moved[tile], torch.ones_like(found) if back.moved is None else back.moved)
    return 8 * len(payloads[0]) / max(levels.numel(), 1)


@pytest.mark.parametrize("shape", [(0, 1), (1, 1), (1, 7), (3, 5), (129, 257), (1, TILE + 1), (3, TILE), (600, 300)])
@pytest.mark.parametrize("spread", [0, 0.5, 2, 5, 40, 300, 9000])
def test_levels_of_any_size_come_back(shape, spread):
    generator = torch.Generator().manual_seed(1)
    levels = torch.randn(shape, generator=generator).mul_(spread).round_().clamp_(-32767, 32766)
    check(levels)
    check(levels, exact_share=0.1, same_share=0.3)
    check(levels, exact_share=1.0)
    check(levels, same_share=1.0)


@pytest.mark.parametrize("limit", [1, 2, 6, 7, 8, 126, 127, 128, 510, 511, 512, 8190, 8191, 8192, 32766])
def test_levels_at_the_edges_of_the_symbols_come_back(limit):
    edges = torch.tensor([-limit - 2, -limit - 1, -limit, 1 - limit, 0, limit - 1, limit, limit + 1, limit + 2.0])
    levels = edges.clamp(-32767, 32766).repeat(40)[None]
    check(levels)
    few = torch.zeros(1, 5000)
    few[0, ::500][: len(edges)] = levels[0, :9]
    check(few)
    check(few, exact_share=0.05, same_share=0.2)


def test_clipping_keeps_what_fits_and_nan():
    levels = torch.tensor([-torch.inf, -32768, -32767, 5, 32766, 32767, torch.inf, torch.nan])
    expected = torch.tensor([-32767, -32767, -32767, 5, 32766, 32766, 32766, torch.nan])
    assert torch.equal(clip_(levels).nan_to_num(1), expected.nan_to_num(1))


def gaussian(shape, spread, rows=0.0):
    """Returns rounded normal levels; `rows` is the spread of the rows' own sizes in powers of e."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randn(shape[0], 1, generator=generator).mul_(rows).exp_()
    return (torch.randn(shape, generator=generator) * sizes * spread).round_()


def entropy(levels):
    share = levels.unique(return_counts=True)[1].double() / levels.numel()
    return -(share * share.log2()).sum().item()


@pytest.mark.parametrize("spread", [0.3, 1, 4, 30, 2000])
def test_size_is_close_to_the_entropy(spread):
    levels = gaussian([700, 700], spread)
    # Huffman cannot use less than one bit for four symbols.
    assert check(levels) < 1.04 * entropy(levels) + 0.12


def test_rows_of_different_size_cost_less_than_the_entropy_of_all():
    levels = gaussian([700, 700], 1, rows=1.0)
    assert check(levels) < 0.93 * entropy(levels)


def test_rows_of_the_same_cost_next_to_nothing():
    levels = gaussian([2000, 384], 1)
    writer = LevelWriter(*levels.shape)
    moved = (torch.arange(2000) % 8 == 0).float()[:, None].expand(levels.shape).contiguous()
    for tile in tiles(*levels.shape):
        writer.write(tile, levels[tile].clone(), levels[tile], None, moved[tile])
    bits = 8 * len(writer.payloads(torch.float32)[0]) / levels.numel()
    assert bits < check(levels) / 8 + 0.06


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


def test_misfits_are_where_errors_are_too_large_or_nan():
    errors = torch.tensor([[0.1, 0.5, torch.nan], [0.4, torch.inf, 0.0]])
    positions, worst = split_misfits(errors, 0.45)
    assert positions is not None
    assert positions.tolist() == [1, 2, 4]
    assert worst == pytest.approx(0.4)
    assert split_misfits(errors[:, :1], 0.45) == (None, pytest.approx(0.4))
    assert split_misfits(torch.full([3], torch.nan), 0.45)[1] == 0.0


def test_moved_is_none_or_zero_where_the_value_is_zero():
    assert moved_from(torch.tensor([1.0, -1e-45, torch.nan])) is None
    moved = moved_from(torch.tensor([0.0, -0.0, 3.0, torch.inf]))
    assert moved is not None
    assert bits_equal(moved, torch.tensor([0.0, 0.0, 1.0, 1.0]))
