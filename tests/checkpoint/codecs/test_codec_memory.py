"""Encoding and decoding take a few times the tensor, not a multiple that grows with it."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from checkpoint.codecs.cases import INSTANCES
from fork_server import exit_code_of_fork


def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure(codec, tensor, references):
    """Return the peaks while a tensor is encoded and until it is decoded, over its size."""
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # what was freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_bytes()
    encoded = codec.encode(tensor, references)
    encoding = peak_bytes() - before
    codec.decode(encoded.payloads, encoded.params, tensor.shape, tensor.dtype, references)
    return encoding / tensor.nbytes, (peak_bytes() - before) / tensor.nbytes


def measure_all(result: Path):
    torch.set_num_threads(1)
    weight = torch.randn(3000, 1500, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
    anchor, squares = weight + 2.0**-12, weight.square()
    measured = {}
    for codec in INSTANCES:
        tensor = squares if codec.codec_id == "log-rank1" else weight
        divisor = weight.abs() if codec.codec_id == "norm-space" else squares
        measured[repr(codec)] = measure(codec, tensor, {"anchor": anchor, "exp_avg_sq": divisor})
    result.write_text(json.dumps(measured))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux lets a process reset its peak")
@pytest.mark.exhaustive
def test_codecs_take_at_most_a_few_times_the_tensor(tmp_path):
    # A process of its own: memory that other tests have freed and the allocator kept would hide what is needed.
    assert exit_code_of_fork(measure_all, tmp_path / "measured") == 0
    measured = json.loads((tmp_path / "measured").read_text())
    # Encoded bytes, and decoded ones, are part of it.
    assert {name for name, (encoding, _) in measured.items() if encoding > 2.5} == set()
    assert {name for name, (_, decoding) in measured.items() if decoding > 3} == set()
    assert max(encoding for encoding, _ in measured.values()) > 0.3, "nothing was measured"
