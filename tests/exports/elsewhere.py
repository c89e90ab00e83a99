"""What a file computes in a process that knows only PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fresh_process import run_fresh
from torch import Tensor

READ = """
import sys, torch
path, given, result = sys.argv[1:]
program = torch.export.load(path).module() if path.endswith(".pt2") else torch.jit.load(path)
inputs = torch.load(given, weights_only=True)
torch.save(program(**inputs) if isinstance(inputs, dict) else program(*inputs), result)
assert not any(name.partition(".")[0] in ("hf_trainweights", "transformers") for name in sys.modules)
"""


def read_elsewhere(path: Path, inputs: list[Tensor] | dict[str, Tensor]) -> Any:
    """Return what a file of TorchScript or torch.export computes in a process that knows only PyTorch."""
    given, result = path.with_suffix(".inputs"), path.with_suffix(".outputs")
    torch.save(inputs, given)
    run_fresh(READ, path, given, result, cwd=path.parent).check_returncode()
    return torch.load(result, weights_only=True)
