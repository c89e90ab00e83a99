"""A model of over 2 GB as an ONNX file with its weights beside it: what ONNX Runtime computes with it.

Run `python -m benchmarks.large_onnx`; it takes a minute, 15 GB of memory and 3 GB of disk, and writes
`benchmarks/results/large_onnx.json`. A protobuf of 2 GiB cannot be read, so the export puts the weights into a second
file by itself. The difference is to the model with dequantized weights, relative to its largest output.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.machine import cpu_name, versions
from hf_trainweights import QuantizedTensor
from hf_trainweights.exports import export_onnx, verify_onnx_model
from hf_trainweights.formats.int8 import Int8

RESULTS = Path(__file__).parent / "results" / "large_onnx.json"
WIDTH, LAYERS = 8192, 34


class Residual(nn.Module):
    """A Linear of random int8 codes, and its input.

    Args:
        seed: Of its weight.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
        weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) * WIDTH**-0.5
        self.linear.weight = nn.Parameter(QuantizedTensor.quantize(weight, Int8()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the product to the input."""
        return x + torch.relu(self.linear(x))


@torch.no_grad()
def main() -> None:
    """Export the model, run the file, and write the report."""
    model = nn.Sequential(*(Residual(seed) for seed in range(LAYERS))).eval()
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(LAYERS))
    with tempfile.TemporaryDirectory() as directory:
        path, start = Path(directory) / "model.onnx", time.perf_counter()
        export_onnx(model, path, example_inputs=x, verify=False)
        seconds = time.perf_counter() - start
        (output,) = verify_onnx_model(path, model, x).outputs
        report = {
            "machine": cpu_name(),
            "versions": versions("onnx", "onnxruntime", "onnxscript"),
            "layers": LAYERS,
            "width": WIDTH,
            "bytes": {file.name: file.stat().st_size for file in sorted(Path(directory).iterdir())},
            "difference": output.largest_difference / output.largest_value,
            "export_seconds": round(seconds),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    print(report)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
