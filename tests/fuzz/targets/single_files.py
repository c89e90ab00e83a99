"""Single files: damaged ones are refused by name, and odd weights come back bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, load_file, quantize_, save_file
from tests.fuzz.directories import Content, write_tree
from tests.fuzz.model_corpus import change_header, change_raw, change_tensors
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_FILE = "model.safetensors"
_MOST_ELEMENTS = 1 << 20
_CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8-g32": {"format": "int8", "group_size": 32},
    "int4": {"format": "int4", "group_size": 32},
    "int4-columns": {"format": "int4", "group_size": 32, "column_scale": True},
    "float8": {"format": "float8_e4m3"},
    "codebook4": {"format": "codebook4"},
    "uint3": {"format": "uint3"},
    "uint6": {"format": "uint6"},
    "coded": {"format": "coded"},
}
_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool]


class SingleFiles(Target):
    """`load_file` of a damaged file: weights that can be dequantized, or a typed error."""

    name = "single-files"
    inputs_in_suite = 2000

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.saved: dict[str, dict[str, Content]] = {}
        for name, config in _CONFIGS.items():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 128), nn.Linear(128, 32, bias=False))
            model.append(model[1])
            save_file(quantized(model, config), directory / _FILE)
            self.saved[name] = {_FILE: (directory / _FILE).read_bytes()}

    def mutate(self, rng: random.Random) -> tuple[str, bytes]:
        name = rng.choice(sorted(self.saved))
        saved, tree = self.saved[name], dict(self.saved[name])
        rng.choice((change_header, change_header, change_tensors, change_raw))(rng, saved, tree)
        content = tree[_FILE]
        assert isinstance(content, bytes)
        return name, content

    def run(self, given: tuple[str, bytes]) -> Outcome:
        directory = write_tree(self.directory / "single", {_FILE: given[1]})
        for tensor in load_file(directory / _FILE).values():
            if isinstance(tensor, QuantizedTensor) and tensor.numel() <= _MOST_ELEMENTS:
                tensor.dequantize()
        return Outcome.ACCEPTED


@dataclass(frozen=True)
class OddWeights:
    """A state dict to save.

    Args:
        seed: Of its values.
        names: Its names, each with what its tensor is: a format, a dtype or a view of an earlier tensor.
    """

    seed: int
    names: dict[str, str]


class SavedWeights(Target):
    """What `save_file` takes, `load_file` gives back bit for bit, with the ties that there were."""

    name = "saved-weights"
    inputs_in_suite = 600

    def mutate(self, rng: random.Random) -> OddWeights:
        kinds = [*_CONFIGS, *map(str, _DTYPES), *_VIEWS]
        names = rng.sample(["a", "a.weight", "b.weight", "format", "_a_qdata", "c.b.weight", "c", "é", "x y"], 4)
        return OddWeights(rng.randrange(1000), {name: rng.choice(kinds) for name in names})

    def run(self, given: OddWeights) -> Outcome:
        weights = _weights(given)
        path = self.directory / "odd.safetensors"
        path.unlink(missing_ok=True)
        save_file(weights, path)
        loaded = load_file(path)
        if loaded.keys() != weights.keys():
            raise BrokenPromiseError(f"{sorted(weights)} come back as {sorted(loaded)}")
        for name, tensor in weights.items():
            pair = [_values(each) for each in (loaded[name], tensor)]
            if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
                raise BrokenPromiseError(f"{name} comes back as another tensor")
        return Outcome.ACCEPTED


# Views of a tensor that came before.
_VIEWS = {
    "the same": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "a row": lambda tensor: tensor[:1],
    "every second": lambda tensor: tensor if isinstance(tensor, QuantizedTensor) else tensor[:, ::2],
    "conjugated": lambda tensor: tensor if isinstance(tensor, QuantizedTensor) else tensor.conj(),
    "negated": lambda tensor: tensor if isinstance(tensor, QuantizedTensor) else torch._neg_view(tensor),
    "detached": lambda tensor: tensor.detach(),
    "repeated": lambda tensor: tensor if isinstance(tensor, QuantizedTensor) else tensor[:1].expand(3, -1),
}


def _weights(given: OddWeights) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(given.seed)
    weights: dict[str, Tensor] = {}
    last = torch.randn(64, 64, generator=generator)
    for name, kind in given.names.items():
        if kind in _CONFIGS:
            layer = nn.Linear(64, 64, bias=False)
            layer.weight.data = torch.randn(64, 64, generator=generator)
            last = quantized(nn.Sequential(layer), _CONFIGS[kind])[0].weight
        elif kind in _VIEWS:
            usable = last.dim() == 2 and last.dtype is not torch.bool
            weights[name] = _VIEWS[kind](last) if usable else last
            continue
        else:
            dtype = next(each for each in _DTYPES if str(each) == kind)
            last = (torch.randn(64, 64, generator=generator) * 3).to(dtype)
        weights[name] = last
    return weights


def _values(tensor: Tensor) -> Tensor:
    plain = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
    return plain.detach().resolve_conj().resolve_neg()


def quantized(model: nn.Sequential, config: dict[str, Any]) -> nn.Sequential:
    """Return a model with all of its weights quantized."""
    quantize_(model, TrainWeightsConfig(**config, include_embeddings=True))
    return model
