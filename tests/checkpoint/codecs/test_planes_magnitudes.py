import numpy as np
import pytest
import torch
from checkpoint.codecs.test_planes_rank1 import bits, squares

from hf_trainweights.checkpoint.codecs import magnitudes
from hf_trainweights.checkpoint.codecs.coding.blocks import BlockReader
from hf_trainweights.checkpoint.codecs.exact import Planes, PlanesRank1
from hf_trainweights.checkpoint.codecs.magnitudes import PlanesMagnitudes
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.testing.codecs import bits_equal, decode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def means(*shape, rest=0.7):
    """Returns numbers of both signs whose sizes follow those of their rows and columns."""
    sizes = squares(*shape, rest=rest).sqrt()
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * sizes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_of_rows_and_columns_are_free_whatever_the_sign(dtype):
    tensor = means(700, 900).mul_(2.0**8 if dtype == torch.float16 else 1).to(dtype)
    assert bits(PlanesMagnitudes(), tensor) < bits(Planes(), tensor) - 0.6


def test_signs_and_squares_take_fewer_bits_than_by_differences_of_bit_patterns():
    for tensor, gain in ((means(700, 900), 0.1), (squares(700, 900, rest=1.0), 0.2)):
        assert bits(PlanesMagnitudes(), tensor) < bits(PlanesRank1(), tensor) - gain


def test_what_follows_no_row_or_column_takes_no_more_than_plain():
    noise = torch.randint(-(2**31), 2**31, [600, 600], generator=torch.Generator().manual_seed(0)).to(torch.int32)
    assert bits(PlanesMagnitudes(), noise.view(torch.float32)) < 32.05
    weights = torch.randn(600, 600, generator=torch.Generator().manual_seed(0)) * 0.02
    assert bits(PlanesMagnitudes(), weights) < bits(Planes(), weights) + 0.05


def test_zeros_of_either_sign_do_not_spoil_their_tile():
    tensor = means(600, 700)
    plain = bits(PlanesMagnitudes(), tensor)
    tensor[5, ::9] = 0
    tensor[7, ::9] = -0.0
    assert bits(PlanesMagnitudes(), tensor) < plain + 0.1


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38, -3e38, 1e-30])
def test_any_number_comes_back_beside_numbers_of_usual_size(special):
    tensor = means(70, 90)
    tensor[3, 4] = special
    bits(PlanesMagnitudes(), tensor)


def test_rows_without_gradients_that_have_decayed_to_denormals_come_back():
    tensor = means(600, 700)
    tensor[::3] *= 2.0**-115
    tensor[1::3] = 0
    assert bits(PlanesMagnitudes(), tensor) < bits(Planes(), tensor) + 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits_comes_back(dtype):
    words = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for matrix in (words, words.view(256, 256), words.view(256, 256).T.contiguous()):
        bits(PlanesMagnitudes(), matrix.view(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_packed_bytes_are_the_same_without_compiled_functions(dtype, monkeypatch):
    for shape in ((40, 51), (1, 1), (3, 257), (64, 300)):
        tensor = means(*shape).to(dtype)
        tensor[0, ::5] = -0.0
        compiled = PlanesMagnitudes().encode(tensor)
        with monkeypatch.context() as patch:
            patch.setattr(magnitudes, "compiled_for", lambda *_: None)
            patch.setattr(magnitudes, "compiled", lambda: None)
            plain = PlanesMagnitudes().encode(tensor)
            back = PlanesMagnitudes.decode(compiled.payloads, {}, shape, dtype)
        assert all(torch.equal(*pair) for pair in zip(compiled.payloads, plain.payloads, strict=True))
        assert bits_equal(back, tensor)


LAYOUTS = [(2, False, 28), (1, True, 29)]


@pytest.mark.parametrize(("flag", "is_signed", "bits"), LAYOUTS)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
def test_a_change_is_coded_if_it_lies_above_zero_and_within_its_bits(flag, is_signed, bits, compiled, monkeypatch):
    layout = magnitudes._LAYOUTS[torch.float32][flag]
    rows, columns = np.full([1, 1], 5, np.int32), np.full(16, 7, np.int32)
    if not compiled:
        monkeypatch.setattr(magnitudes, "compiled_for", lambda *_: None)
    for change in (0, 1, 2**bits - 1, 2**bits):
        for sign in (0, -(2**31)):
            words = np.full([1, 16], sign + 5 + 7 + change, np.int32)
            codes = np.empty_like(words)
            is_coded = magnitudes._encode(words, layout, rows, columns, codes)
            assert is_coded == (0 < change < 2**bits and (is_signed or not sign))
            if is_coded:
                above = rows + np.int32(layout.low << 23)
                PlanesMagnitudes._undo_(codes, torch.float32, flag, above, columns)
                np.testing.assert_array_equal(codes, words)


def flags(encoded, tensor, tile_count):
    reader = BlockReader(PlanesMagnitudes, encoded.payloads[0], tile_count * tensor.itemsize + 1)
    return reader.read(tile_count * tensor.itemsize, tile_count).tolist()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_positive_numbers_have_no_sign_and_those_far_apart_more_octaves(dtype):
    tensor = squares(40, 50, rest=0.5).to(dtype)
    assert flags(PlanesMagnitudes().encode(tensor), tensor, 1) == [2]
    tensor[3, 7] *= 2.0**-40
    assert flags(PlanesMagnitudes().encode(tensor), tensor, 1) == [1]
    tensor[39, 7] *= -1  # not in the row that is looked at first
    assert flags(PlanesMagnitudes().encode(tensor), tensor, 1) == [1]
    bits(PlanesMagnitudes(), tensor)


def test_an_unknown_flag_is_an_error():
    tensor = means(70, 90)
    encoded = PlanesMagnitudes().encode(tensor)
    payload = encoded.payloads[0]
    payload[len(payload) - 4 * 5 - 1] = 3
    with pytest.raises(CorruptFileError, match="flag of a tile: expected 0 or one of 2, 1, found 3"):
        decode(PlanesMagnitudes(), encoded, tensor)


@pytest.mark.parametrize("spare", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 255, 256, 257, 511, 1000])
def test_packed_bytes_come_back_and_take_their_bits(count, spare, monkeypatch):
    plane = np.random.default_rng(0).integers(0, 256 >> spare, count).astype(np.uint8) << spare
    packed = magnitudes._packed(plane, spare).copy()
    assert len(packed) < count * (8 - spare) / 8 + 3
    np.testing.assert_array_equal(magnitudes._unpacked(packed, count, spare), plane)
    monkeypatch.setattr(magnitudes, "compiled", lambda: None)
    np.testing.assert_array_equal(magnitudes._packed(plane, spare), packed)
    np.testing.assert_array_equal(magnitudes._unpacked(packed, count, spare), plane)
