"""A C++ program that knows only libtorch runs a TorchScript file, and computes what the dequantized model computes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from exports.models import Convolutional, dequantized_outputs, images, quantized
from torch import nn
from torch.utils import cpp_extension

from hf_trainweights.exports import export_torchscript

pytestmark = [
    pytest.mark.exhaustive,  # the fixture compiles PyTorch's headers
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, and there is no g++ here"),
]

SOURCE = Path(__file__).with_name("run_torchscript.cpp")


class Tensors(nn.Module):
    """Holds tensors, in order, as C++ reads them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"tensor_{index}", tensor)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("libtorch") / "run_torchscript"
    folders = cpp_extension.library_paths()
    command = [
        *("g++", "-std=c++17", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        *(f"-I{folder}" for folder in cpp_extension.include_paths()),
        *(SOURCE, "-o", program),
        *(f"-L{folder}" for folder in folders),
        *(f"-Wl,-rpath,{folder}" for folder in folders),
        # The program calls no kernel by name, and the linker would drop the library that holds them.
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    subprocess.run(command, check=True)
    return program


def run(program: Path, model: Path, inputs: list[torch.Tensor]) -> torch.Tensor:
    given, result = model.with_suffix(".inputs"), model.with_suffix(".output")
    torch.jit.save(torch.jit.script(Tensors(inputs)), given)
    subprocess.run([program, model, given, result], check=True)
    return torch.load(result, weights_only=True)


@pytest.mark.parametrize("config", ["int8", "int4 g32", "float8"])
def test_cpp_runs_a_compiled_module(tmp_path: Path, program: Path, config: str) -> None:
    model = quantized(Convolutional(), config)
    export_torchscript(model, tmp_path / "model.pt", method="script")
    (wanted,) = dequantized_outputs(model, images(5))
    torch.testing.assert_close(run(program, tmp_path / "model.pt", [images(5)]), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("config", ["int8", "int4 g32", "float8"])
def test_cpp_runs_a_traced_bert(tmp_path: Path, program: Path, config: str) -> None:
    model = quantized("bert", config)
    inputs = ARCHITECTURES["bert"].inputs(model)
    export_torchscript(model, tmp_path / "model.pt", inputs)
    wanted = dequantized_outputs(model, **inputs)[0]
    outputs = run(program, tmp_path / "model.pt", list(inputs.values()))
    torch.testing.assert_close(outputs, wanted, rtol=1e-6, atol=1e-6)
