"""ONNX files of odd modules: ONNX Runtime computes with them what the dequantized module computes."""

from __future__ import annotations

import copy
import random
import shutil
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_trainweights import TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.exports import OnnxModel, export_onnx
from tests.fuzz.directories import read_tree
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_FORMATS: list[dict[str, Any]] = [
    {"format": "int8"},
    {"format": "int8", "group_size": 16},
    {"format": "int8", "group_size": 32},
    {"format": "int4", "group_size": 32},
    {"format": "int4", "group_size": 64},
    {"format": "int4", "group_size": 128},
    {"format": "float8_e4m3"},
]
_WIDTHS = (1, 7, 16, 32, 48, 64, 96, 128, 160, 384, 768)
_LAYERS = ("linear", "linear without bias", "conv1d", "product", "functional", "rows", "shared")
_EARLIER = "an earlier model"


@dataclass(frozen=True)
class OnnxExport:
    """A module to export.

    Args:
        vocab: Rows of its table.
        widths: Its width before and after each layer.
        layers: What each layer is.
        ends: What comes last: nothing, or a head that is tied to the table or not.
        positions: Whether a second table is looked up at constant places.
        configs: Arguments of `TrainWeightsConfig`, one for the table and one for each layer in turns.
        dtype: Its dtype.
        values: What is odd about its weights.
        runtime: As for `export_onnx`.
        external_data: As for `export_onnx`.
        over: Whether files of an earlier model are in the directory.
    """

    vocab: int
    widths: tuple[int, ...]
    layers: tuple[str, ...]
    ends: str
    positions: bool
    configs: tuple[dict[str, Any], ...]
    dtype: str
    values: str
    runtime: Any
    external_data: bool | None
    over: bool


class OddModule(nn.Module):
    """Looks ids up and multiplies, by weights that are used in one way or another.

    Args:
        given: How.
    """

    def __init__(self, given: OnnxExport):
        super().__init__()
        self.kinds = given.layers
        self.table = nn.Embedding(given.vocab, given.widths[0])
        self.positions = nn.Embedding(8, given.widths[0]) if given.positions else None
        self.layers = nn.ModuleList()
        for kind, before, after in zip(given.layers, given.widths, given.widths[1:], strict=False):
            made = (
                Conv1D(after, before) if kind == "conv1d" else nn.Linear(before, after, kind != "linear without bias")
            )
            self.layers.append(made)
        last = given.widths[len(given.layers)]
        self.head = nn.Linear(last, given.vocab, bias=False) if given.ends else None
        if given.ends == "tied" and last == given.widths[0]:
            self.head.weight = self.table.weight  # type: ignore[union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the last layer's values."""
        x = self.table(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = torch.tanh(self._called(kind, layer, x))
        return x if self.head is None else self.head(x)

    @staticmethod
    def _called(kind: str, layer: Any, x: Tensor) -> Tensor:
        if kind == "product":
            return x @ layer.weight.t() + layer.bias
        if kind == "functional":
            return F.linear(input=x, weight=layer.weight, bias=layer.bias)
        if kind == "rows":
            return layer(x) + layer.weight[:, 0]
        return layer(layer(x)) if kind == "shared" and layer.in_features == layer.out_features else layer(x)


class OnnxExports(Target):
    """ONNX Runtime computes what the dequantized module computes, or the export is refused and leaves nothing."""

    name = "onnx-exports"
    share = 2.0
    limit_seconds = 60.0
    inputs_in_suite = 12

    def mutate(self, rng: random.Random) -> OnnxExport:
        count = rng.randint(0, 3)
        same = rng.random() < 0.4
        width = rng.choice(_WIDTHS)
        return OnnxExport(
            vocab=rng.choice((8, 17, 64, 300)),
            widths=tuple(width if same else rng.choice(_WIDTHS) for _ in range(count + 1)),
            layers=tuple(rng.choice(_LAYERS) for _ in range(count)),
            ends=rng.choice(("", "own", "tied", "tied")),
            positions=rng.random() < 0.3,
            configs=tuple(rng.choice(_FORMATS) for _ in range(3)),
            dtype=rng.choice(("float32",) * 9 + ("bfloat16",)),
            values=rng.choice(("", "", "", "zeros", "tiny", "large")),
            runtime=rng.choice(("portable", "onnxruntime")),
            external_data=rng.choice((None, None, True)),
            over=rng.random() < 0.3,
        )

    def run(self, given: OnnxExport) -> Outcome:
        model, ids = built(given), torch.arange(10).view(2, 5) % given.vocab
        out = self.directory / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        if given.over:
            (out / "model.onnx").write_text(_EARLIER)
        options: dict[str, Any] = {"runtime": given.runtime, "external_data": given.external_data}
        try:
            # The comparison is done here: what the export itself would refuse for its results is a finding.
            export_onnx(model, out / "model.onnx", example_inputs=ids, verify=False, **options)
        except TrainWeightsError as error:
            left = read_tree(out)
            if left != ({"model.onnx": _EARLIER.encode()} if given.over else {}):
                raise BrokenPromiseError(f"a refused export left {sorted(left)}") from error
            raise
        (outputs,) = OnnxModel(out / "model.onnx", ["CPUExecutionProvider"]).predict(ids.flip(0)).values()
        dense = copy.deepcopy(model).eval()
        dequantize_(dense)
        with torch.no_grad():
            wanted = dense(ids.flip(0))
        difference = (torch.from_numpy(outputs) - wanted).abs().max()
        if not difference <= 1e-6 + 1e-5 * wanted.abs().max():
            raise BrokenPromiseError(f"ONNX Runtime computes something else: off by {difference}")
        return Outcome.ACCEPTED


def built(given: OnnxExport) -> nn.Module:
    """Return the quantized module that an input describes."""
    torch.manual_seed(0)
    model = OddModule(given).to(getattr(torch, given.dtype)).eval()
    if given.values:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::7] *= {"zeros": 0.0, "tiny": 1e-30, "large": 1e3}[given.values]
    names = ["table", "positions", "head", *(f"layers.{number}" for number in range(len(given.layers)))]
    there = {name for name, _ in model.named_modules()}
    configs = {name: given.configs[number % 3] for number, name in enumerate(names) if name in there}
    if given.ends == "tied":
        configs.pop("head", None)
    quantize_(model, TrainWeightsConfig(**given.configs[0], overrides=configs, include_embeddings=True))
    return model
