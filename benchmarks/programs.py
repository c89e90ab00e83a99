"""TorchScript, torch.export and AOTInductor: how exact, small and fast the programs of MiniLM-L6-v2 are.

Run `python -m benchmarks.programs`, which takes about ten minutes, most of which compiles C++, and needs the `test`
extra; it writes `benchmarks/results/programs.json`. Each speed is relative to the float32 model in the same runtime,
measured by turns in one process on one thread.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from benchmarks.machine import commit, cpu_name, versions
from benchmarks.minilm import SENTENCES, minilm, tokens
from benchmarks.speed.rounds import interleave, timed_call
from hf_trainweights import TrainWeightsConfig, export_program, export_torchscript, quantize_

RESULTS = Path(__file__).parent / "results" / "programs.json"
ROUNDS = 15
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4, groups of 32": {"format": "int4", "group_size": 32},
    "float8_e4m3": {"format": "float8_e4m3"},
}
Program = Callable[[Tensor, Tensor], Tensor]


class Hidden(nn.Module):
    """MiniLM with two arguments and one result, so that each exporter and each reader calls it alike."""

    def __init__(self) -> None:
        super().__init__()
        self.model = minilm()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden state of each token."""
        return self.model(ids, attention_mask=mask).last_hidden_state


def write(target: str, model: nn.Module, inputs: tuple[Tensor, Tensor], path: Path, is_float: bool) -> None:
    """Write a program: a quantized model by this package, a float one by PyTorch alone."""
    aot = target == "AOTInductor"
    if not is_float and target == "TorchScript":
        export_torchscript(model, path, inputs)
    elif not is_float:
        export_program(model, path, inputs, aot=aot)
    elif target == "TorchScript":
        torch.jit.save(torch.jit.trace(model, inputs), str(path))
    elif aot:
        torch._inductor.aoti_compile_and_package(torch.export.export(model, inputs), package_path=str(path))
    else:
        torch.export.save(torch.export.export(model, inputs), str(path))


def read(target: str, path: Path) -> Program:
    """Return the program in a file."""
    if target == "TorchScript":
        return torch.jit.load(str(path))
    if target == "AOTInductor":
        return torch._inductor.aoti_load_package(str(path))
    return torch.export.load(str(path)).module()


def output(program: Program, inputs: tuple[Tensor, Tensor]) -> Tensor:
    found: Any = program(*inputs)
    return found[0] if isinstance(found, tuple | list) else found


def measure(target: str, inputs: tuple[Tensor, Tensor], folder: Path) -> list[dict[str, Any]]:
    """Return a row for each format in one runtime; float32 comes first."""
    suffix = ".pt" if target == "TorchScript" else ".pt2"
    rows, runs = [], {}
    for name in ("float32", *FORMATS):
        model = Hidden().eval()
        if name in FORMATS:
            quantize_(model, TrainWeightsConfig(**FORMATS[name], include_embeddings=True))
        path = folder / f"{name}{suffix}"
        write(target, model, inputs, path, name == "float32")
        program = read(target, path)
        if name in FORMATS:
            model.model.dequantize()
        expected = model(*inputs)
        difference = (output(program, inputs) - expected).abs().max() / expected.abs().max()
        rows.append({"runtime": target, "format": name, "difference": difference.item(), "bytes": path.stat().st_size})
        runs[name] = timed_call(lambda program=program: program(*inputs))
    speeds = {each["name"]: each for each in interleave(runs, ROUNDS, "float32")}
    for row in rows:
        row["ratio"], row["range"] = (speeds[row["format"]][key] for key in ("ratio", "ratio_range"))
    return rows


@torch.no_grad()
def main() -> None:
    """Measure every runtime and write the report."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # torch deprecates TorchScript at each step of it
    torch.set_num_threads(1)
    encoded = tokens(SENTENCES)
    inputs = (encoded["input_ids"], encoded["attention_mask"])
    report: dict[str, Any] = {
        "machine": f"{cpu_name()}, one thread",
        "commit": commit(),
        "versions": versions(),
        "rounds": ROUNDS,
        "rows": [],
    }
    for target in ("TorchScript", "torch.export", "AOTInductor"):
        with tempfile.TemporaryDirectory() as directory:
            report["rows"] += measure(target, inputs, Path(directory))
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(target, *report["rows"][-len(FORMATS) - 1 :], sep="\n", flush=True)


if __name__ == "__main__":
    main()
