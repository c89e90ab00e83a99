import numpy as np
import pytest
import torch

from hf_trainweights.checkpoint.codecs.coding.blocks import fill, tiles
from hf_trainweights.checkpoint.codecs.coding.levels import (
    SAME,
    LevelWriter,
    _to_symbols,
    decode_tiles,
    place_levels,
    to_levels,
)
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform

CODED_TILE = 1 << 16


def written(levels, exact_share=0.0, same_share=0.0, seed=0):
    """Returns payloads of float levels [R, C], the elements, and where they are exact and the same."""
    rng = np.random.default_rng(seed)
    elements = torch.from_numpy(rng.standard_normal(levels.shape)).to(torch.float32)
    exact = torch.from_numpy(rng.random(levels.shape) < exact_share)
    same = torch.from_numpy(rng.random(levels.shape) < same_share)
    writer = LevelWriter(elements)
    for tile in tiles(*levels.shape):

        def encode(tile_elements, *place, tile=tile):
            assert torch.equal(tile_elements, elements[tile])
            errors = exact[tile].float().numpy()
            missed, worst = place_levels(levels[tile].numpy(), same[tile].numpy(), errors, 0.5, *place)
            assert (missed, worst) == (exact[tile].sum(), 0)
            return missed, worst

        writer.write(tile, encode)
    assert writer.bound == 0
    return writer.payloads(), elements, exact, same


def check(levels, **shares):
    """Writes and reads back; returns the size of the levels in bits an element."""
    payloads, elements, exact, same = written(levels, **shares)
    same[exact] = False

    def decode(rows, columns, found, place):
        assert torch.equal(same[rows, columns], torch.from_numpy(found == SAME))
        fill(place, np.where(found == SAME, 0, found))

    back = decode_tiles(DeltaUniform, payloads, levels.shape, torch.float32, decode)
    assert torch.equal(back, torch.where(exact, elements, levels.masked_fill(same, 0)))
    return 8 * len(payloads[0]) / max(levels.numel(), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(0, 1), (1, 1), (1, 7), (3, 5), (129, 257), (1, CODED_TILE + 1), (3, CODED_TILE), (600, 300)]
)
def test_levels_of_any_size_come_back(shape):
    for spread in (0, 0.5, 2, 5, 40, 300, 9000):
        generator = torch.Generator().manual_seed(1)
        levels = torch.randn(shape, generator=generator).mul_(spread).round_().clamp_(-32767, 32766)
        check(levels)
        check(levels, exact_share=0.1, same_share=0.3)
        check(levels, exact_share=1.0)
        check(levels, same_share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 6, 7, 8, 126, 127, 128, 510, 511, 512, 8190, 8191, 8192, 32766])
def test_levels_at_the_edges_of_the_symbols_come_back(limit):
    edges = torch.tensor([-limit - 2, -limit - 1, -limit, 1 - limit, 0, limit - 1, limit, limit + 1, limit + 2.0])
    levels = edges.clamp(-32767, 32766).repeat(40)[None]
    check(levels)
    few = torch.zeros(1, 5000)
    few[0, ::500][: len(edges)] = levels[0, :9]
    check(few)
    check(few, exact_share=0.05, same_share=0.2)


def test_clipping_keeps_what_fits():
    levels = np.array([-np.inf, -32768, -32767, 5, 32766, 32767, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(to_levels(levels), [-32767, -32767, -32767, 5, 32766, 32766, 32766, -32767])


def gaussian(shape, spread, rows=0.0):
    """Returns rounded normal levels; `rows` is the spread of the rows' own sizes in powers of e."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randn(shape[0], 1, generator=generator).mul_(rows).exp_()
    return (torch.randn(shape, generator=generator) * sizes * spread).round_()


def entropy(levels):
    share = levels.unique(return_counts=True)[1].double() / levels.numel()
    return -(share * share.log2()).sum().item()


@pytest.mark.slow
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
    writer = LevelWriter(levels)
    same = (np.arange(2000) % 8 != 0)[:, None] & np.ones(levels.shape, bool)
    for tile in tiles(*levels.shape):
        arguments = levels[tile].numpy(), same[tile], np.zeros(levels[tile].shape), 0.5
        writer.write(tile, lambda _, *place, arguments=arguments: place_levels(*arguments, *place))
    bits = 8 * len(writer.payloads()[0]) / levels.numel()
    assert bits < check(levels) / 8 + 0.06


@pytest.mark.parametrize("width", [2, 4, 8, 10, 16])
@pytest.mark.parametrize("same", [False, True])
def test_symbols_are_the_documented_ones(width, same):
    c = 2 ** (width - 1)
    levels = np.unique(np.clip([-c - 1, -c, 1 - c, -2, -1, 0, 1, 2, c - 2, c - 1, c], -32767, 32766)).astype(np.int16)
    if same:
        levels = np.append(levels, np.int16(-32768))
    symbols, escapes = _to_symbols(levels, width)
    offset, lowest, highest = (1, -1, 1) if width == 2 else (c, 1 - c, c - 2)
    fits = (levels >= lowest) & (levels <= highest)
    expected = np.where(fits, levels.astype(int) + offset, 2 * c - 1)
    if same and width > 2:
        expected[-1] = 0
    assert symbols.tolist() == expected.tolist()
    assert escapes.tolist() == levels[expected == 2 * c - 1].tolist()
