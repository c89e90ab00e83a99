"""Encoding and decoding take a few times the tensor, not a multiple that grows with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own, as memory that other tests have freed and the allocator kept would hide what is needed.
SCRIPT = """
import ctypes
import json
import torch
from checkpoint.codecs.cases import INSTANCES

torch.set_num_threads(1)

def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def measure(codec, tensor, references):
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # what was freed goes back to the system
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = peak_bytes()
    encoded = codec.encode(tensor, references)
    encoding = peak_bytes() - before
    payloads, params = encoded.payloads, encoded.params
    del encoded  # with the decoded tensor that it may hold
    codec.decode(payloads, params, tensor.shape, tensor.dtype, references)
    return encoding / tensor.nbytes, (peak_bytes() - before) / tensor.nbytes

weight = torch.randn(3000, 1500, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
anchor = weight + 2.0**-12
squares = weight.square()
measured = {}
for codec in INSTANCES:
    tensor = squares if codec.codec_id == "log-rank1" else weight
    references = {"anchor": anchor, "exp_avg_sq": squares}
    measured[repr(codec)] = measure(codec, tensor, references)
print(json.dumps(measured))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux lets a process reset its peak")
def test_codecs_take_at_most_a_few_times_the_tensor():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    # Encoded bytes, and decoded ones, are part of it.
    assert {name for name, (encoding, _) in measured.items() if encoding > 2.5} == set()
    assert {name for name, (_, decoding) in measured.items() if decoding > 3} == set()
    assert max(encoding for encoding, _ in measured.values()) > 0.3, "nothing was measured"
