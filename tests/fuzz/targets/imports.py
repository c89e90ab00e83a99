"""Models of other quantizers, changed: a weight without a part of its own is refused, whole models leave nothing."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from imports.number_writers import LAYOUTS
from imports.writers import METADATA, Tensors, write_model
from torch import Tensor

from hf_trainweights import import_directory, verify_model
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.imports.layouts import layout_of
from hf_trainweights.imports.layouts.quanto import MAP_NAME
from tests.fuzz.directories import Content, read_tree, write_tree
from tests.fuzz.model_corpus import change_header, change_kind, change_raw, change_tensors
from tests.fuzz.mutate_bytes import change_bytes
from tests.fuzz.mutate_json import change_json
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_GOLDEN = Path(__file__).parents[2] / "imports" / "golden"
_SHAPE = (96, 64)
_MODULE = "m"
# A changed dtype of scales rounds them; other weights than those of the source are off by more.
_TOLERANCE = 0.02
_KEYS = [
    *("quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "version", "zero_point", "format"),
    *("config_groups", "num_bits", "strategy", "symmetric", "type", "actorder", "weight_block_size", "load_in_8bit"),
    *("modules_to_not_convert", "ignore", "dynamic", "sparsity_config", "transform_config", "quant_type"),
    *("mode", "packing_format", "extra_config", "load_in_4bit", "quant_algo", "meta", "data_type"),
]
_VALUES: list[Any] = [
    *(2, 4, 8, 32, -1, 128, "gptq", "gptq_v2", "awq", "gemm", "gemv", "int", "float", "group", "channel", "tensor"),
    *("mxfp4", "nvfp4", "mlx", "auto_round", "auto_round:auto_awq", "nvfp4-pack-quantized", 3, 5, 64, True, False),
    *("pack-quantized", "int-quantized", "float-quantized", "compressed-tensors", [128, 128], [1, 0], {"a": {"b": 1}}),
]
_MODEL_KEYS = ["num_hidden_layers", "hidden_size", "vocab_size", "architectures", "rope_parameters", "dtype"]
_MODEL_VALUES: list[Any] = [["LlamaForCausalLM"], ["LlamaModel"], ["BertModel"], {"rope_type": "x"}, "float16", "llama"]
_WRITTEN = (
    *("gptq", "gptq-activation-order", "awq", "ct-int4", "ct-int8", "ct-float8", "ct-nvfp4", "fp8", "fp8-blocks"),
    *("modelopt-nvfp4", "modelopt-mxfp8", "mlx-6-bits", "hqq-3-bits", "bitsandbytes-nf4-nested", "auto-round"),
)


def _rows(tensor: Tensor, count: int) -> Tensor:
    return tensor[:count] if tensor.dim() else tensor


# What damages the form of a tensor, whatever its values.
_FORMS: list[Callable[[Tensor], Tensor]] = [
    lambda tensor: tensor.float().double(),
    lambda tensor: tensor.float().half(),
    lambda tensor: tensor.float().bool(),
    lambda tensor: tensor.float().to(torch.complex64),
    lambda tensor: tensor.long() if not tensor.is_floating_point() else tensor.float().bfloat16(),
    lambda tensor: tensor.flatten()[0].clone() if tensor.numel() else tensor,
    lambda tensor: _rows(tensor, 0),
    lambda tensor: _rows(tensor, max(1, len(tensor) // 2) if tensor.dim() else 0),
    lambda tensor: tensor[None],
    lambda tensor: tensor.flatten(),
    lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    lambda tensor: tensor[..., : max(1, tensor.shape[-1] // 2)] if tensor.dim() else tensor,
    lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2),
    lambda tensor: torch.cat([tensor, tensor], -1) if tensor.dim() else tensor.repeat(2, 2),
]


@dataclass(frozen=True)
class ChangedWeight:
    """The tensors of one module.

    Args:
        layout: One of `LAYOUTS`.
        config: Its `quantization_config`.
        tensors: The tensors by the last part of their names, as `torch.save` keeps them; pickle lacks float8.
        same_values: Whether nothing but dtypes and shapes was changed, and tensors left out.
    """

    layout: str
    config: Any
    tensors: bytes
    same_values: bool


class ImportedWeights(Target):
    """A layout reads the weight that its tensors stand for, or refuses them by name."""

    name = "imported-weights"
    inputs_in_suite = 3000

    def prepare(self, directory: Path) -> None:
        weight = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)) * 0.05
        self.written = {name: layout.write(weight) for name, layout in LAYOUTS.items()}

    def mutate(self, rng: random.Random) -> ChangedWeight:
        name = rng.choice(sorted(LAYOUTS))
        config: Any = copy.deepcopy(LAYOUTS[name].config)
        tensors = {leaf: tensor.contiguous() for leaf, tensor in self.written[name][0].items()}
        kind = rng.random()
        if kind < 0.3:
            change_json(rng, config, _KEYS, _VALUES)
        leaf = rng.choice(sorted(tensors))
        if 0.2 < kind < 0.5:
            tensors[leaf] = _damaged(rng, tensors[leaf])
        # Two changes of one tensor may give it its shape back, with other values.
        for leaf in rng.sample(sorted(tensors), min(len(tensors), rng.choice((1, 1, 2)))) if kind >= 0.5 else ():
            if rng.random() < 0.3 and len(tensors) > 1:
                del tensors[leaf]
            else:
                tensors[leaf] = rng.choice(_FORMS)(tensors[leaf]).contiguous()
        stream = io.BytesIO()
        torch.save(tensors, stream)
        return ChangedWeight(name, config, stream.getvalue(), kind >= 0.5)

    def run(self, given: ChangedWeight) -> Outcome:
        tensors = torch.load(io.BytesIO(given.tensors))
        weight = layout_of(given.config, METADATA, {_MODULE: _SHAPE}).read(_MODULE, tensors)
        if weight is None or weight.shape != _SHAPE:  # which the load compares with config.json
            return Outcome.REFUSED
        values = weight.dequantize(torch.float32)
        if given.same_values and not _are_exponents_floats(self.written[given.layout][0], tensors):
            wanted = self.written[given.layout][1].float()
            if not torch.allclose(values, wanted, rtol=_TOLERANCE, atol=1e-6):
                raise BrokenPromiseError(f"{given.layout} is read as another weight")
        return Outcome.ACCEPTED


def _are_exponents_floats(written: Tensors, tensors: Tensors) -> bool:
    """Return whether scales are floats that were exponents in bytes: as floats the same numbers are other scales."""
    pairs = [(written[leaf], tensor) for leaf, tensor in tensors.items() if "scale" in leaf]
    return any(before.dtype == torch.uint8 and after.is_floating_point() for before, after in pairs)


def _damaged(rng: random.Random, tensor: Tensor) -> Tensor:
    data = change_bytes(rng, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class ChangedSource:
    """A directory to import.

    Args:
        base: Which one it was.
        changes: What was done to it.
        tree: Its files.
    """

    base: str
    changes: tuple[str, ...]
    tree: dict[str, Content]


class ImportedDirectories(Target):
    """import_directory writes a model that verifies, or refuses the source and leaves nothing."""

    name = "imported-directories"
    share = 1.5
    limit_seconds = 30.0
    inputs_in_suite = 100

    def prepare(self, directory: Path) -> None:
        self.sources: dict[str, dict[str, Content]] = {}
        for name in _WRITTEN:
            write_model(directory / name, LAYOUTS[name])
            self.sources[name] = read_tree(directory / name)
        for folder in sorted(_GOLDEN.glob("*/config.json")):
            tree = read_tree(folder.parent)
            tree.pop("expected.safetensors", None)
            self.sources[folder.parent.name] = tree

    def mutate(self, rng: random.Random) -> ChangedSource:
        base = rng.choice(sorted(self.sources))
        saved = self.sources[base]
        tree = dict(saved)
        changes = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            change = rng.choice((change_header, change_tensors, change_raw, change_kind, _change_config, _change_model))
            change(rng, saved, tree)
            changes.append(change.__name__)
        return ChangedSource(base, tuple(changes), tree)

    def run(self, given: ChangedSource) -> Outcome:
        return import_whole_or_not_at_all(write_tree(self.directory / "source", given.tree), self.directory / "made")


def import_whole_or_not_at_all(source: Path, directory: Path) -> Outcome:
    """Import a source into an empty directory; what is written verifies, and a refusal leaves nothing."""
    out = write_tree(directory, {}) / "out"
    try:
        import_directory(source, out)
    except TrainWeightsError as error:
        if left := sorted(path.name for path in directory.iterdir()):
            raise BrokenPromiseError(f"a refused import left {left}") from error
        raise
    if not verify_model(out).ok:
        raise BrokenPromiseError("an import wrote a model that does not verify")
    return Outcome.ACCEPTED


def _change_config(rng: random.Random, saved: dict[str, Content], tree: dict[str, Content]) -> None:
    """Change what config.json, or the file beside it, says about the quantization."""
    file = MAP_NAME if MAP_NAME in saved else "config.json"
    config = json.loads(saved[file])
    change_json(rng, config.get("quantization_config", config), _KEYS, _VALUES)
    tree[file] = json.dumps(config).encode()


def _change_model(rng: random.Random, saved: dict[str, Content], tree: dict[str, Content]) -> None:
    """Change what config.json says about the model."""
    config = json.loads(saved["config.json"])
    kept = {key: config.pop(key) for key in ("quantization_config",) if key in config}
    change_json(rng, config, _MODEL_KEYS, _MODEL_VALUES)
    tree["config.json"] = json.dumps({**config, **kept}).encode()
