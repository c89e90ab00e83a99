"""Damaged and hostile input: a typed error or a tensor of the right kind, in bounded memory, never anything else."""

import itertools
import random
import struct
import tracemalloc

import pytest
import torch
import zstandard
from checkpoint.codecs.cases import INSTANCES, inputs

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.testing.codecs import decode, name_of

# torch says so of every complex32 tensor it makes.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

every_codec = pytest.mark.parametrize("codec", INSTANCES, ids=name_of)

SHAPE = [70, 1000]
JUNK = [None, True, "x", "", [], {}, {"format": "int8", "nope": 1}, -1, 0, 17, 2**70, 0.0, -1.0, 1e300, 5e-324, 1e999]


def encoded_example(codec):
    tensor, references = inputs(codec, SHAPE, torch.float32)
    return tensor, references, codec.encode(tensor, references)


@pytest.mark.slow
@every_codec
def test_payloads_that_are_not_flat_bytes_are_errors(codec):
    tensor, references, encoded = encoded_example(codec)
    first = encoded.payloads[0]
    wrong = [
        first.view(torch.int8),
        first[None],
        torch.stack([first, first], 1)[:, 0],
        first.to("meta"),
        b"bytes",
        None,
    ]
    for each in wrong:
        with pytest.raises(CorruptFileError, match="payload 0: expected a"):
            codec.decode([each, *encoded.payloads[1:]], encoded.params, SHAPE, tensor.dtype, references)


@every_codec
def test_junk_parameters_are_errors_or_harmless(codec):
    tensor, references, encoded = encoded_example(codec)
    for name, junk in itertools.product(encoded.params, JUNK):
        try:
            decoded = codec.decode(encoded.payloads, {**encoded.params, name: junk}, SHAPE, tensor.dtype, references)
        except CorruptFileError as error:
            assert f"parameter {name}" in str(error)  # noqa: PT017 (it may also not be raised)
        else:
            assert type(junk) is type(encoded.params[name])
            assert (list(decoded.shape), decoded.dtype) == (SHAPE, tensor.dtype)


WRONG_SHAPES = [
    *([], [0], [70, 999], [71, 1000], [7000, 1000], [2**40], [2**20, 2**30], [2**55], [2**56], [1] * 63 + [2**30]),
    *([-1, 5], [70.0, 1000], [True, 70000], [2**63], [1] * 100, ["70", 1000]),
]


@pytest.mark.slow
@every_codec
def test_another_shape_is_an_error_in_little_memory(codec):
    tensor, references, encoded = encoded_example(codec)
    tracemalloc.start()
    try:
        for shape in WRONG_SHAPES:
            given = like_shape(references, shape)
            tracemalloc.reset_peak()
            with pytest.raises(CorruptFileError, match=r"codec .*: expected .*, found "):
                codec.decode(encoded.payloads, encoded.params, shape, tensor.dtype, given)
            assert tracemalloc.get_traced_memory()[1] < 80e6, shape
    finally:
        tracemalloc.stop()


def like_shape(references, shape):
    """Returns references of a shape where they can have it: expanded, so that nothing else tells that it is absurd."""
    if not all(type(size) is int and 0 <= size < 2**56 for size in shape) or len(shape) >= 64:
        return references
    expanded = {name: reference.new_zeros([]).expand(shape) for name, reference in references.items()}
    return references if any(each.numel() > 1e8 for each in expanded.values()) else expanded


@pytest.mark.slow
@every_codec
def test_another_dtype_is_an_error_or_harmless(codec):
    tensor, _, encoded = encoded_example(codec)
    for dtype in {*ALL_DTYPES, torch.float4_e2m1fn_x2} - {tensor.dtype}:
        anchor = torch.zeros(70000 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(SHAPE)
        references = {"anchor": anchor, "exp_avg_sq": torch.zeros(SHAPE)}
        try:
            decoded = codec.decode(encoded.payloads, encoded.params, SHAPE, dtype, references)
        except CorruptFileError as error:
            assert "codec" in str(error)  # noqa: PT017 (it may also not be raised)
        else:
            assert (list(decoded.shape), decoded.dtype) == (SHAPE, dtype)


@pytest.mark.slow
@every_codec
def test_flipped_bits_are_errors_or_harmless(codec):
    tensor, references, encoded = encoded_example(codec)
    rng = random.Random(5)
    for _ in range(150):
        payloads = [payload.clone() for payload in encoded.payloads]
        payload = rng.choice([each for each in payloads if len(each)])
        for _ in range(rng.choice([1, 1, 20])):
            # Half of the flips hit the tables at the end.
            position = rng.randrange(max(len(payload) - 40, 0), len(payload)) if rng.random() < 0.5 else None
            payload[rng.randrange(len(payload)) if position is None else position] ^= 1 << rng.randrange(8)
        try:
            decoded = codec.decode(payloads, encoded.params, SHAPE, tensor.dtype, references)
        except CorruptFileError as error:
            assert "restore them from a copy" in str(error)  # noqa: PT017 (it may also not be raised)
        else:
            assert (list(decoded.shape), decoded.dtype) == (SHAPE, tensor.dtype)


def payload_of(*blocks: bytes) -> torch.Tensor:
    data = b"".join(blocks) + struct.pack(f"<{len(blocks)}I", *map(len, blocks))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


FRAME = zstandard.ZstdCompressor().compress(bytes(1000))
NOT_FRAMES = {
    "a frame of 2 GB of zeros": zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(write_content_size=False)
    ).compress(bytes(1 << 21)),
    # Single segment, an 8-byte content size of 2**40, then nothing.
    "a size of 2**40": b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40),
    "the right size, a window of 2**41 bytes": b"\x28\xb5\x2f\xfd\x40\xff" + struct.pack("<H", 1000 - 256) + FRAME[-9:],
    "the right size, then nothing": b"\x28\xb5\x2f\xfd\x60" + struct.pack("<H", 1000 - 256),
    "a truncated frame": FRAME[:-1],
    "two frames": FRAME + FRAME,
    "a byte too many": FRAME + b"\0",
    "a skippable frame": b"\x50\x2a\x4d\x18" + struct.pack("<I", 1000) + bytes(900),
    "a frame of another size": zstandard.ZstdCompressor().compress(bytes(1001)),
    "an unknown dictionary": b"\x28\xb5\x2f\xfd\x63\x07\0\0\0" + struct.pack("<H", 1000 - 256) + FRAME[7:],
    "nothing": b"",
    "noise": b"noise",
    "more than there should be": bytes(1001),
}


def test_an_honest_frame_is_decoded():
    assert torch.equal(
        CODECS["planes"].decode([payload_of(FRAME)], {}, [1000], torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    )


@pytest.mark.parametrize("block", NOT_FRAMES.values(), ids=NOT_FRAMES.keys())
def test_zstd_bombs_are_errors_in_little_memory(block):
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match="codec planes, block 0 at byte 0: expected"):
            CODECS["planes"].decode([payload_of(block)], {}, [1000], torch.uint8)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_table_that_does_not_add_up_is_an_error():
    payload = payload_of(FRAME)
    payload[-4:] = torch.tensor([255, 255, 255, 255], dtype=torch.uint8)
    with pytest.raises(CorruptFileError, match=r"payload: expected 4294967295 bytes of blocks, found \d+ bytes"):
        CODECS["planes"].decode([payload], {}, [1000], torch.uint8)


@pytest.mark.parametrize("codec_id", ["delta-uniform", "update-space", "log-rank1"])
def test_wrong_width_of_symbols_is_an_error(codec_id):
    params = {"step": 1 if codec_id == "log-rank1" else 0.5, "anchor": False}
    references = {"exp_avg_sq": torch.ones(2)}
    good = [payload_of(b"\x21", b"", b"", b"\x04", b""), torch.empty(0, dtype=torch.uint8), payload_of(b"")]
    bad = [payload_of(b"\x21", b"", b"", b"\x05", b""), *good[1:]]
    count = 3 if codec_id == "log-rank1" else 2
    CODECS[codec_id].decode(good[:count], params, [2], torch.float32, references)
    with pytest.raises(CorruptFileError, match=r"widths of symbols: expected 2, 4, 8, 10, 12, 14, 16, found \[5\]"):
        CODECS[codec_id].decode(bad[:count], params, [2], torch.float32, references)


def test_number_of_exact_elements_is_checked():
    escape = payload_of(b"\xf1", b"", struct.pack("<h", 32767), b"\x04", b"")
    params = {"step": 0.5, "anchor": False}
    element = torch.tensor([3.5]).view(torch.uint8)
    decoded = CODECS["delta-uniform"].decode([escape, element], params, [2], torch.float32)
    assert decoded[1] == 3.5
    for wrong in (element[:0], element.repeat(2)):
        with pytest.raises(CorruptFileError, match=r"payload 1: expected 1 elements, found [02]"):
            CODECS["delta-uniform"].decode([escape, wrong], params, [2], torch.float32)


@every_codec
def test_decoded_example_survives(codec):
    tensor, references, encoded = encoded_example(codec)
    assert decode(codec, encoded, tensor, references).shape == tensor.shape


@pytest.mark.parametrize("codec_id", ["raw", "planes", "planes-delta"])
def test_bools_that_are_neither_zero_nor_one_are_errors(codec_id):
    codec = CODECS[codec_id]()
    encoded = codec.encode(torch.tensor([0, 1, 2], dtype=torch.uint8))
    with pytest.raises(CorruptFileError, match="elements: expected 0 or 1 in each byte of a bool"):
        codec.decode(encoded.payloads, encoded.params, [3], torch.bool)
