"""Files written by earlier versions: what they hold decodes to the same bits for ever.

Each file holds payloads and parameters as they were once written; inputs are made by integer arithmetic. A file
that is missing is an error: after adding a codec, run once with TRAINWEIGHTS_WRITE_GOLDEN=1 and commit what appears.
Never write one anew: a changed encoding is a new codec_id.
"""

import base64
import hashlib
import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint.codecs.cases import INSTANCES
from hf_trainweights.checkpoint.codecs import CODECS

GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("TRAINWEIGHTS_WRITE_GOLDEN") == "1"
# A vector, a matrix with a special value in its first row, four dimensions, a matrix of several tiles, and of several
# chunks. The last two repeat themselves, so their files are small all the same.
SHAPES = {"vector": [301], "matrix": [24, 40], "conv": [6, 5, 3, 3], "tiles": [600, 256], "chunks": [700, 400]}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn]


def integers(shape: list[int], multiplier: int, period: int) -> torch.Tensor:
    """Returns whole numbers from -500 to 499, the same everywhere and for ever."""
    position = torch.arange(torch.Size(shape).numel()) % period
    return ((position * multiplier + (position * position) % 7919) % 1000 - 500).view(shape)


def golden_input(codec_id, name, dtype):
    """Returns a tensor and its references."""
    shape = SHAPES[name]
    period = 1 << 40 if name in ("vector", "matrix", "conv") else shape[-1]
    first, second = integers(shape, 7367, period), integers(shape, 4099, period)
    if codec_id == "log-rank1":
        # Whole powers of two times 1 to 1.499; every 50th is zero.
        tensor = torch.ldexp(1 + first.clamp(min=0) / 1000, (second // 40 - 8).float()).to(dtype)
        tensor[(first % 50) == 0] = 0
        return tensor, {}
    if codec_id == "update-space":
        squares = torch.ldexp(1 + second.clamp(min=0) / 1000, (second // 60 - 6).float()).to(dtype)
        squares[(second % 50) == 0] = 0
        tensor = (torch.ldexp(first.float(), (second // 120 - 11).float())).to(dtype)
        return tensor, {"exp_avg_sq": squares}
    if not dtype.is_floating_point:
        return (first * 3).to(dtype), {"anchor": (first * 3 + second // 100).to(dtype)}
    anchor = (first.float() / 512).to(torch.float32)
    tensor = (anchor + second.float() / 2**16).to(dtype)
    if name == "matrix" and codec_id != "grouped":
        tensor[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-8]).to(dtype)
    return tensor, {"anchor": anchor.to(dtype)}


def cases():
    numbers: dict[str, int] = {}
    for codec in INSTANCES:
        number = numbers[codec.codec_id] = numbers.get(codec.codec_id, 0) + 1
        for name in SHAPES:
            for dtype in DTYPES if name == "matrix" and number == 1 else DTYPES[:1]:
                if dtype in codec.dtypes and not (codec.codec_id == "raw" and name in ("tiles", "chunks")):
                    label = f"{codec.codec_id}-{number}-{name}-{str(dtype).removeprefix('torch.')}"
                    yield pytest.param(codec, name, dtype, label, id=label)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def write(path, codec, tensor, references):
    encoded = codec.encode(tensor, references)
    decoded = codec.decode(encoded.payloads, encoded.params, tensor.shape, tensor.dtype, references)
    content = {
        "codec": codec.codec_id,
        "params": encoded.params,
        "payloads": [base64.b64encode(payload.numpy().tobytes()).decode() for payload in encoded.payloads],
        "input_sha256": {"tensor": digest(tensor), **{name: digest(each) for name, each in references.items()}},
        "decoded_sha256": digest(decoded),
    }
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    warnings.warn(f"wrote {path}: look at it, then commit it", stacklevel=1)


@pytest.mark.parametrize(("codec", "name", "dtype", "label"), list(cases()))
def test_golden_file_decodes_to_the_same_bits(codec, name, dtype, label):
    path = GOLDEN / f"{label}.json"
    tensor, references = golden_input(codec.codec_id, name, dtype)
    if not path.exists():
        if not WRITE:
            pytest.fail(f"{path.name} is missing: run with TRAINWEIGHTS_WRITE_GOLDEN=1 and commit it")
        with pytest.warns(UserWarning, match="commit it"):
            write(path, codec, tensor, references)
    golden = json.loads(path.read_text())
    digests = {"tensor": digest(tensor), **{key: digest(each) for key, each in references.items()}}
    assert golden["input_sha256"] == digests, "the test's own input has changed, not the codec"
    payloads = [
        torch.tensor(list(base64.b64decode(payload)), dtype=torch.uint8) for payload in golden["payloads"]
    ]
    decoded = CODECS[golden["codec"]].decode(payloads, golden["params"], tensor.shape, dtype, references)
    assert digest(decoded) == golden["decoded_sha256"]


def test_no_golden_file_is_forgotten():
    labels = {case.values[3] for case in cases()}
    assert {path.stem for path in GOLDEN.iterdir()} >= labels if WRITE else True
    assert all(path.stem.split("-")[0] in " ".join(CODECS) for path in GOLDEN.iterdir())
