"""Kinds of GGUF blocks: the format of each here, its bits, in which dtypes the weights are equal, and the speed.

Run `python -m benchmarks.gguf_import`; it needs the `test` extra and no network, and takes a minute. It writes
`benchmarks/results/gguf_import.json`. Speeds are of one thread, by CPU time, the best of several turns in which this
package and the numpy of the package gguf take turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights.exports.gguf.rows import Origin, all_rows
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.gguf.blocks import ALTERNATIVES
from hf_trainweights.imports.gguf.file import KINDS, GgufTensor
from hf_trainweights.imports.gguf.places import Place, Slot
from hf_trainweights.imports.gguf.weights import common_format, quantized_weight
from tests.imports.gguf.files import blocks

RESULTS = Path(__file__).parent / "results" / "gguf_import.json"
SHAPE = (2048, 4096)
TURNS = 5


def measure(kind: str) -> dict[str, Any]:
    """Return the figures of one kind of blocks."""
    data = blocks(kind, SHAPE)
    place, slot = _place(kind, torch.from_numpy(data)), Slot(SHAPE, SHAPE[1], transposed=False, takes_codes=True)
    form = common_format("weight", slot, [place])
    assert form is not None
    weight = quantized_weight("weight", slot, [place], form, Spill(Path()))
    wanted = torch.from_numpy(_by_gguf(kind, data))
    exact = [
        str(dtype).removeprefix("torch.")
        for dtype in FLOAT_DTYPES
        if torch.equal(form.dequantize(weight.tensors, SHAPE, dtype), wanted.to(dtype))
    ]
    read: Callable[[], object] = lambda: quantized_weight("weight", slot, [place], form, Spill(Path()))  # noqa: E731
    ours, theirs = _best([read, lambda: _by_gguf(kind, data)])
    count = wanted.numel()
    return {
        "kind": kind,
        "format": str(form),
        "source_bits": 8 * data.size / count,
        "bits": 8 * sum(tensor.nbytes for tensor in weight.tensors.values()) / count,
        "exact": exact,
        "million_weights_per_second": count / ours / 1e6,
        "times_as_fast_as_gguf": theirs / ours,
    }


def _place(kind: str, data: Tensor) -> Place:
    tensor = GgufTensor(next(each for each in KINDS.values() if each.name == kind), SHAPE, data)
    return Place("weight", tensor, torch.arange(SHAPE[0]), Origin("weight", all_rows), torch.ones(SHAPE[0]))


def _by_gguf(kind: str, data: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32)


def _best(works: Sequence[Callable[[], object]]) -> list[float]:
    """Return the least CPU time of each piece of work, in seconds; they take turns."""
    times = [[] for _ in works]
    for _ in range(TURNS):
        for work, taken in zip(works, times, strict=True):
            began = time.thread_time()
            work()
            taken.append(time.thread_time() - began)
    return [min(taken) for taken in times]


def main() -> None:
    """Measure, print and store the results."""
    torch.set_num_threads(1)
    rows = [measure(kind) for kind in ALTERNATIVES]
    result = {"commit": commit(), "cpu": cpu_name(), "versions": versions("gguf"), "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
