"""What encoders in float32 are compared with: this package's formats, and with `--peers` what else runs on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn

from benchmarks.float_onnx import export_float
from benchmarks.speed.encoder_models import Inputs
from benchmarks.speed.methods import OURS, PEERS, Method

# From inputs to the hidden states `[B, T, C]`.
Encode = Callable[[Inputs], Tensor]
# A way to encode with as many threads as torch has when it is called.
MakeEncode = Callable[[], Encode]
# Of the other quantizers those that take plain modules in float32, and are not meant for language models alone.
_PEERS = (
    "torchao int8",
    "torchao int8, 8-bit activations",
    "bitsandbytes int8, 8-bit activations",
    "bitsandbytes nf4",
    "quanto int8",
)
_FLOAT_FILE = "float32.onnx"


@dataclass(frozen=True)
class EncoderMethod:
    """One way to run an encoder.

    Args:
        name: What tables call it.
        prepare: Makes a way to encode from a float32 model, which it may change, from inputs that a model may be
            traced with, and a folder for files of this model.
    """

    name: str
    prepare: Callable[[nn.Module, Inputs, Path], MakeEncode]


def eager(model: nn.Module) -> MakeEncode:
    """Return what makes a function that calls a model."""
    return lambda: lambda inputs: model(**inputs).last_hidden_state


def _in_place(method: Method) -> EncoderMethod:
    def prepare(model: nn.Module, _: Inputs, __: Path) -> MakeEncode:
        method.apply(model)
        return eager(model)

    return EncoderMethod(method.name, prepare)


def _dynamic(model: nn.Module, _: Inputs, __: Path) -> MakeEncode:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it in favour of torchao
        return eager(torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8))


def _float_file(model: nn.Module, inputs: Inputs, folder: Path) -> Path:
    path = folder / _FLOAT_FILE
    if not path.exists():
        export_float(model, inputs, path)
    return path


def _session(path: Path) -> Encode:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def encode(inputs: Inputs) -> Tensor:
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return torch.from_numpy(session.run(None, arrays)[0])

    return encode


def _onnx_float(model: nn.Module, inputs: Inputs, folder: Path) -> MakeEncode:
    path = _float_file(model, inputs, folder)
    return lambda: _session(path)


def _onnx_dynamic(model: nn.Module, inputs: Inputs, folder: Path) -> MakeEncode:
    path = folder / "int8.onnx"
    # Linear layers alone, as all others here; by default it would quantize embeddings too.
    quantize_dynamic(
        _float_file(model, inputs, folder), path, op_types_to_quantize=["MatMul", "Gemm"], weight_type=QuantType.QInt8
    )
    return lambda: _session(path)


FLOAT = EncoderMethod("fp32", lambda model, _, __: eager(model))
_ENGINES = [
    EncoderMethod("torch quantize_dynamic", _dynamic),
    EncoderMethod("ONNX Runtime fp32", _onnx_float),
    EncoderMethod("ONNX Runtime dynamic int8", _onnx_dynamic),
]


def encoder_methods(peers: bool) -> list[EncoderMethod]:
    """Return what is compared with the float32 model."""
    ours = [method for method in OURS if not method.whole_model_only and method.dtype == torch.bfloat16]
    others = [method for method in PEERS if method.name in _PEERS]
    return [*map(_in_place, ours), *(_ENGINES + list(map(_in_place, others)) if peers else [])]
