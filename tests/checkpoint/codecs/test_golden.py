"""Files written by earlier versions: what they hold decodes to the same bits for ever.

Each file holds payloads and parameters as they were once written; inputs are made by integer arithmetic. A file
that is missing is an error: after adding a codec, run once with TRAINWEIGHTS_WRITE_GOLDEN=1 and commit what appears.
Never write one anew: a changed encoding is a new codec_id.
"""

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoint.codecs.cases import INSTANCES

from hf_trainweights.checkpoint.codecs import CODECS

GOLDEN = Path(__file__).parent / "golden"
# A vector, a matrix with special values in its first row, four dimensions, a matrix of several tiles, and one of
# several chunks. Most rows of the last two are the same or zero, so that their files are small all the same.
SHAPES = {"vector": [301], "matrix": [24, 40], "conv": [6, 5, 3, 3], "tiles": [600, 256], "chunks": [700, 400]}
REPEATING = ("tiles", "chunks")
MEANS = ("update-space", "norm-space", "row-uniform")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn]


def integers(shape: list[int], multiplier: int, period: int) -> torch.Tensor:
    """Returns whole numbers from -500 to 499, the same everywhere and for ever."""
    position = torch.arange(torch.Size(shape).numel()) % period
    return ((position * multiplier + (position * position) % 7919) % 1000 - 500).view(shape)


def lowest_byte(numbers, dtype):
    return (numbers % 256).to(torch.uint8).view(dtype)


def golden_input(codec_id, name, dtype):
    """Returns a tensor and its references."""
    shape = SHAPES[name]
    period = 1 << 40 if name in ("vector", "matrix", "conv") else shape[-1]
    first, second = integers(shape, 7367, period), integers(shape, 4099, period)
    if name in REPEATING:
        rare = (torch.arange(shape[0]) % 50 == 7)[:, None]
        second = second * rare
        first = first * rare if codec_id in (*MEANS, "planes-magnitudes") else first
    if codec_id in ("log-rank1", "planes-rank1"):
        # Whole powers of two times 1 to 1.499; every 50th is zero.
        tensor = torch.ldexp(1 + first.clamp(min=0) / 1000, (second // 40 - 8).float()).to(dtype)
        tensor[(first % 50) == 0] = 0
        return tensor, {}
    if codec_id == "planes-magnitudes":
        # Exponents of rows and columns, and signs; some elements are zeros of either sign.
        position = torch.arange(torch.Size(shape).numel()).view(shape)
        exponents = position // shape[-1] % 7 * 2 + position % shape[-1] % 5 + second // 200 - 12
        signs = 1 if name == "tiles" else first.sign()
        tensor = torch.ldexp(signs * (1 + first.abs() / 512), exponents.float()).to(dtype)
        tensor[(first % 50) == 0] *= 0
        return tensor, {}
    if codec_id in MEANS:
        squares = torch.ldexp(1 + second.clamp(min=0) / 1000, (second // 60 - 6).float()).to(dtype)
        squares[(second % 50) == 0] = 0
        tensor = (torch.ldexp(first.float(), (second // 120 - 11).float())).to(dtype)
        return tensor, {"exp_avg_sq": squares}
    if not dtype.is_floating_point:
        return (first * 3).to(dtype), {"anchor": (first * 3 + second // 100).to(dtype)}
    if dtype.itemsize == 1:
        # Not by conversion: torch 2.13 saturates where 2.8 does not.
        return lowest_byte(first, dtype), {"anchor": lowest_byte(first + second // 100, dtype)}
    anchor = (first.float() / 512).to(torch.float32)
    tensor = (anchor + second.float() / 2**16).to(dtype)
    if name == "matrix" and codec_id != "grouped":
        tensor[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-8]).to(dtype)
    return tensor, {"anchor": anchor.to(dtype)}


def cases():
    """Returns what there should be a file for: codec, shape and dtype by the file's name."""
    found, numbers = {}, {}
    for codec in INSTANCES:
        number = numbers[codec.codec_id] = numbers.get(codec.codec_id, 0) + 1
        for name in SHAPES:
            is_pointless = name == "chunks" if not codec.lossless else codec.codec_id == "raw" and name in REPEATING
            for dtype in DTYPES if name == "matrix" and number == 1 else DTYPES[:1]:
                if dtype in codec.dtypes and not is_pointless:
                    found[f"{codec.codec_id}-{number}-{name}-{str(dtype).removeprefix('torch.')}"] = codec, name, dtype
    return found


CASES = cases()


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def write(path, codec, name, dtype):
    tensor, references = golden_input(codec.codec_id, name, dtype)
    encoded = codec.encode(tensor, references)
    decoded = codec.decode(encoded.payloads, encoded.params, tensor.shape, tensor.dtype, references)
    content = {
        "codec": codec.codec_id,
        "shape": name,
        "dtype": str(dtype).removeprefix("torch."),
        "params": encoded.params,
        "payloads": [base64.b64encode(payload.numpy().tobytes()).decode() for payload in encoded.payloads],
        "input_sha256": {key: digest(each) for key, each in {"tensor": tensor, **references}.items()},
        "decoded_sha256": digest(decoded),
    }
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("label", sorted({*CASES, *(path.stem for path in GOLDEN.glob("*.json"))}))
def test_golden_file_decodes_to_the_same_bits(label):
    path = GOLDEN / f"{label}.json"
    if not path.exists():
        if os.environ.get("TRAINWEIGHTS_WRITE_GOLDEN") != "1":
            pytest.fail(f"{path.name} is missing: run with TRAINWEIGHTS_WRITE_GOLDEN=1, look at it and commit it")
        write(path, *CASES[label])
    golden = json.loads(path.read_text())
    dtype = getattr(torch, golden["dtype"])
    tensor, references = golden_input(golden["codec"], golden["shape"], dtype)
    digests = {key: digest(each) for key, each in {"tensor": tensor, **references}.items()}
    assert golden["input_sha256"] == digests, "the test's own input has changed, not the codec"
    payloads = [torch.tensor(list(base64.b64decode(payload)), dtype=torch.uint8) for payload in golden["payloads"]]
    decoded = CODECS[golden["codec"]].decode(payloads, golden["params"], tensor.shape, dtype, references)
    assert digest(decoded) == golden["decoded_sha256"]
