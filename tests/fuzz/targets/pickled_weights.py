"""Pickled quantized weights: arguments that lie to `rebuild_quantized_tensor`, and damaged or hostile pickles."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights import QuantizedTensor, inspect_weights
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.formats import get_format
from hf_trainweights.models.loading.stored_weights import check_weight_files
from hf_trainweights.tensor.quantized_tensor import rebuild_quantized_tensor
from tests.fuzz.mutate_pickle import change_pickle
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

FORMATS: list[dict[str, Any]] = [
    {"format": "int8", "group_size": None},
    {"format": "int8", "group_size": None, "activations": "int8"},
    {"format": "int8", "group_size": 32},
    {"format": "int4", "group_size": 32},
    {"format": "int4", "group_size": 128},
    {"format": "float8_e4m3"},
    {"format": "coded", "bits": 3.5},
]
_SHAPES = [(16, 128), (64, 256), (1, 128), (7, 64), (3, 8, 128)]
_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_OPTIONS = ["format", "group_size", "activations", "x"]
_OPTION_VALUES = ["int8", "int4", "float8_e4m3", 0, -1, 32, 1 << 40, None, True, [32], "32"]
_STORED_DTYPES = [torch.int8, torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float64, torch.bool]
_MOST_ELEMENTS = 1 << 20

Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Arguments:
    """The arguments of `rebuild_quantized_tensor`.

    Args:
        values: In its order.
        through_file: Whether they go through torch.save and torch.load.
    """

    values: tuple[Any, ...]
    through_file: bool

    def __repr__(self) -> str:
        tensors, *others = self.values
        shown = {name: (t.dtype, tuple(t.shape), t.layout, t.device.type) for name, t in tensors.items()}
        return f"{shown}, {others}, through_file={self.through_file}"


class _Call:
    def __init__(self, arguments: Arguments):
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_quantized_tensor, self.arguments.values


class PickledWeights(Target):
    """A weight from a pickle is refused, or multiplies like its own dequantized form and outlives a save."""

    name = "pickled-weights"
    share = 3.0
    inputs_in_suite = 5000

    def prepare(self, directory: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples: list[tuple[Stored, dict[str, Any], tuple[int, ...], torch.dtype]] = []
        for config in FORMATS:
            for shape in _SHAPES:
                for dtype in _DTYPES:
                    weight = torch.randn(shape, generator=generator).to(dtype)
                    form = get_format(config).fallback(shape)
                    self.samples.append((form.quantize(weight), form.get_config(), shape, dtype))

    def mutate(self, rng: random.Random) -> Arguments:
        tensors, config, shape, dtype = rng.choice(self.samples)
        arguments: list[Any] = [dict(tensors), dict(config), shape, dtype, rng.random() < 0.2, rng.random() < 0.5]
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            rng.choice((_change_tensor, _change_tensor, _change_tensor, _change_config, _change_shape, _change_dtype))(
                rng, arguments
            )
        return Arguments(tuple(arguments), rng.random() < 0.2)

    def run(self, given: Arguments) -> Outcome:
        weight = _rebuilt(given)
        if weight.device.type == "meta" or weight.numel() > _MOST_ELEMENTS:
            return Outcome.ACCEPTED
        dense = weight.dequantize()
        if weight.dim() == 2:
            _compare_products(weight, dense)
        again = torch.load(_saved(weight), weights_only=True)
        if not torch.equal(again.dequantize().nan_to_num(), dense.nan_to_num()):
            raise BrokenPromiseError("a saved and loaded weight has other values")
        return Outcome.ACCEPTED


def _rebuilt(given: Arguments) -> QuantizedTensor:
    if not given.through_file:
        return rebuild_quantized_tensor(*given.values)
    return torch.load(_saved(_Call(given)), weights_only=True)


def _saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _compare_products(weight: QuantizedTensor, dense: Tensor) -> None:
    """Compare products with an exact one: what a kernel reads beyond its tensors is far off."""
    limit = 0.05 if weight.format.get_config().get("activations") else 0.02
    for rows in (1, 17):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, weight.shape[-1], generator=generator).to(weight.dtype)
        with torch.no_grad():
            products = [F.linear(x, each).double() for each in (dense, weight)]
        if not products[0].isfinite().all():
            continue
        exact = F.linear(x.double(), dense.double())
        # A sum near zero is not more exact than its terms.
        largest = limit * exact.norm() + 0.004 * F.linear(x.double().abs(), dense.double().abs()).norm()
        if not (products[1] - exact).norm() <= largest:
            raise BrokenPromiseError(f"a product of {rows} rows differs from that of the dequantized weight")


def _change_tensor(rng: random.Random, arguments: list[Any]) -> None:
    tensors = arguments[0]
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    if tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.dim() >= 2:
        tensors[name] = rng.choice(_TENSOR_CHANGES)(rng, tensor)
    if rng.random() < 0.03:
        tensors[rng.choice(("x", "zero_point", ""))] = tensors.pop(name)


def _change_config(rng: random.Random, arguments: list[Any]) -> None:
    arguments[1][rng.choice(_OPTIONS)] = rng.choice(_OPTION_VALUES)


def _change_shape(rng: random.Random, arguments: list[Any]) -> None:
    shape: tuple[int, ...] = rng.choice(_SHAPES)
    sizes = tuple(rng.choice((0, 1, size, size, 2 * size, 1 << 31, 1 << 62)) for size in shape)
    odd = [(), shape[:1], list(shape), *((first, *shape[1:]) for first in (True, -1, 16.0, "16"))]
    arguments[2] = rng.choice((sizes, sizes, shape[::-1], (*shape, 1), *odd, "ab", None))


def _change_dtype(rng: random.Random, arguments: list[Any]) -> None:
    arguments[3] = rng.choice((*_DTYPES, torch.float64, torch.int8, torch.float8_e4m3fn, "float32", None))


def _unaligned(rng: random.Random, tensor: Tensor) -> Tensor:
    base = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
    return base[3:].view(tensor.shape).copy_(tensor)


def _strided(rng: random.Random, tensor: Tensor) -> Tensor:
    strides = [2 * stride for stride in tensor.contiguous().stride()]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _filled(rng: random.Random, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.float().fill_(rng.choice((0.0, float("nan"), float("inf"), -1e30, 1e-20))).to(tensor.dtype)
    return torch.full_like(tensor, rng.choice((0, -128, 127)))


def _sparse(rng: random.Random, tensor: Tensor) -> Tensor:
    return tensor.to_sparse() if tensor.dim() == 2 and tensor.dtype in (torch.float32, torch.int8) else tensor


_TENSOR_CHANGES: list[Callable[[random.Random, Tensor], Tensor]] = [
    lambda rng, tensor: torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape),
    lambda rng, tensor: tensor.transpose(-1, -2).contiguous().transpose(-1, -2),
    lambda rng, tensor: tensor.to("meta"),
    lambda rng, tensor: tensor.to(rng.choice(_STORED_DTYPES)),
    lambda rng, tensor: tensor[..., :1],
    lambda rng, tensor: tensor[:0],
    lambda rng, tensor: tensor.flatten(),
    lambda rng, tensor: tensor.unsqueeze(0),
    _strided,
    _unaligned,
    _filled,
    _sparse,
]


class PickledFiles(Target):
    """A damaged or hostile `.bin` is refused or read, and nothing in it is run."""

    name = "pickled-files"
    share = 2.0
    inputs_in_suite = 4000

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        self.files: list[bytes] = []
        for config in FORMATS:
            weight = QuantizedTensor.quantize(torch.randn((8, 128), generator=generator), get_format(config))
            state = {"a.weight": weight, "a._weight_qdata": weight.qdata, "a.bias": torch.zeros(3), "n": [1, "x", None]}
            for zipped in (True, False):
                file = io.BytesIO()
                torch.save(state, file, _use_new_zipfile_serialization=zipped)
                self.files.append(file.getvalue())

    def mutate(self, rng: random.Random) -> tuple[str, bytes]:
        reader = rng.choice(("torch.load", "load_file", "load_file", "check_weight_files", "inspect_weights"))
        return reader, change_pickle(rng, rng.choice(self.files))

    def run(self, given: tuple[str, bytes]) -> Outcome:
        reader, data = given
        path = self.directory / "pytorch_model.bin"
        path.write_bytes(data)
        if reader == "check_weight_files":
            check_weight_files([path])
        elif reader == "inspect_weights":
            inspect_weights(path)
        else:
            loaded = torch.load(io.BytesIO(data), weights_only=True) if reader == "torch.load" else load_file(path)
            for value in loaded.values() if isinstance(loaded, dict) else ():
                if isinstance(value, QuantizedTensor) and value.numel() <= _MOST_ELEMENTS:
                    value.dequantize()
        return Outcome.ACCEPTED
