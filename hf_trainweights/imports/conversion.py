"""A checkpoint of another quantizer: its tensors, what its model says of them, and their files in this layout."""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.files.digests import CONFIG_NAME
from hf_trainweights.files.reading import is_torch_zip
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.imports.layouts.base import AGAIN, CONFIG_AGAIN, FROM_FLOAT, Layout
from hf_trainweights.models.choosing.selection import is_experts, is_transposed
from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.models.loading.stored_weights import check_weight_files, weight_files
from hf_trainweights.models.saving.saved_tensors import matrices_in_checkpoint
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import flatten_weight

# Bytes that wait, in files without names, until they are written together: a loader opens each shard.
_SHARD_BYTES = 1 << 29
# Codes have 2 bits or more, and a tied weight that files hold once is counted twice.
_WEIGHTS_PER_BYTE = 8


class Source:
    """The tensors of a model's weight files, safetensors or `.bin`, whole or sharded; nothing in them is executed.

    ConfigError: there are no files under names that Transformers looks for. CorruptFileError: one is missing, damaged,
    no regular file, or holds more than plain tensors; or two have a tensor of the same name.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._readers: dict[str, Callable[[str], Tensor]] = {}
        self.metadata: dict[str, str] = {}
        self.size_bytes = 0
        files = weight_files(directory)
        check_weight_files(files, directory)
        for path in files:
            self.size_bytes += path.stat().st_size
            readers, metadata = _readers(path)
            for name in readers.keys() & self._readers.keys():
                next_step = "Download the model again, or save it again from its source."
                raise CorruptFileError(str(path), f"{name} in one file", "it in several", next_step)
            self._readers |= readers
            self.metadata |= metadata

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._readers.keys()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by its name, a view of the mapped file."""
        with torch.device("cpu"):  # else safetensors makes it on the default device
            return self._readers[name](name)

    def modules(self) -> dict[str, dict[str, str]]:
        """Return the tensors by the module that they belong to: module to last part of the name to whole name."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(self._readers):
            module, _, leaf = name.rpartition(".")
            modules[module][leaf] = name
        return dict(modules)


def _readers(path: Path) -> tuple[dict[str, Callable[[str], Tensor]], dict[str, str]]:
    """Return by name what reads each tensor of a file, and the metadata of its header."""
    if path.suffix == ".safetensors":
        file: Any = safe_open(path, framework="pt")
        get: Callable[[str], Tensor] = file.get_tensor
        return dict.fromkeys(file.keys(), get), file.metadata() or {}
    loaded = torch.load(path, weights_only=True, map_location="cpu", mmap=is_torch_zip(path) or None)
    tensors = {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
        if not isinstance(name, str) or not plain:
            found = f"{name!r} to a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device.type}"
            raise CorruptFileError(str(path), "names to plain tensors with values", found, AGAIN)
    return dict.fromkeys(tensors, tensors.__getitem__), {}


class Skeleton:
    """A model without weights, whose files have so many bytes.

    UnsupportedError: its class cannot be built of its configuration; CorruptFileError: the files are too small for it.
    """

    def __init__(self, cls: type[PreTrainedModel], config: PretrainedConfig, size_bytes: int):
        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)
        try:
            with torch.device("meta"):
                self._model = cls(config)
        except Warning:
            raise
        except Exception as error:
            # What is wrong in a configuration, Transformers tells by whatever error that leads to.
            expected, found = f"what {cls.__name__} can be built of", f"{type(error).__name__}: {error}"[:200]
            raise UnsupportedError(CONFIG_NAME, expected, found, CONFIG_AGAIN) from error
        count = self._model.num_parameters()
        if count > _WEIGHTS_PER_BYTE * size_bytes:
            name, largest = max(self._model.named_parameters(), key=lambda named: named[1].numel())
            expected = f"a model whose weights {size_bytes} bytes can hold"
            found = f"{count} weights, most of them in {name} of shape {tuple(largest.shape)}"
            raise CorruptFileError(CONFIG_NAME, expected, found, CONFIG_AGAIN)

    def names_in_checkpoint(self, names: Iterable[str]) -> dict[str, str]:
        """Return under which name a checkpoint holds each of some matrices, where that is another one."""
        parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameters[name].shape) for name in names if name in parameters}
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        found = matrices_in_checkpoint(self._model, shapes) if shapes else {}
        alone = {name: next(iter(each)) for name, each in found.items() if each is not None and len(each) == 1}
        return {name: saved for name, saved in alone.items() if saved != name}

    def transposed_modules(self) -> set[str]:
        """Return the modules that keep their weight transposed, with and without the prefix of the base model."""
        names = {
            name
            for name, module in self._model.named_modules()
            for parameter in module.parameters(recurse=False)
            if parameter.dim() == 2 and is_transposed(module, parameter)
        }
        return names | {name.removeprefix(base_prefix(self._model)) for name in names}

    def merged_experts(self) -> dict[str, tuple[tuple[int, ...], dict[str, slice]]]:
        """Return the weights that a checkpoint holds expert by expert.

        By full name, these are the shape `[E, N, K]` and the modules of the matrices, each with its rows among those of
        all experts.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for module_name, module in self._model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if is_experts(module, parameter) and not is_transposed(module, parameter):
                    shapes[f"{module_name}.{leaf}"] = tuple(parameter.shape)
        matrices = matrices_in_checkpoint(self._model, shapes) if shapes else {}
        return {
            name: (shapes[name], {saved.removesuffix(".weight"): rows for saved, rows in each.items()})
            for name, each in matrices.items()
            if each is not None
        }


def convert(source: Source, layout: Layout, skeleton: Skeleton, target: Path) -> Counter[Format]:
    """Write a checkpoint in this package's layout into an empty directory, and count the weights of each format.

    ConfigError: none is quantized; UnsupportedError: no format can hold one exactly.
    """
    formats: Counter[Format] = Counter()
    shards, waiting, waiting_bytes = 0, {}, 0
    weight_map: dict[str, str] = {}
    for tensors in _converted(source, layout, skeleton, formats, Spill(target)):
        waiting |= tensors
        waiting_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if waiting_bytes >= _SHARD_BYTES:
            shards += 1
            weight_map |= _write_shard(target, shards, waiting)
            waiting, waiting_bytes = {}, 0
    if waiting:
        weight_map |= _write_shard(target, shards + 1, waiting)
    if not formats:
        found = "none: its weights are float, or lie under names that its layout does not have"
        raise ConfigError(str(source.directory), "quantized weights, as config.json says", found, AGAIN)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return formats


def _write_shard(target: Path, number: int, tensors: dict[str, Tensor]) -> dict[str, str]:
    file = f"model-{number:05}.safetensors"
    to_write = {name: TensorToWrite.of(tensor) for name, tensor in tensors.items()}
    try:
        write_safetensors(target / file, to_write, {"format": "pt"})
    except KeyError as error:  # complex numbers of 128 bits, for example
        expected = "tensors of dtypes that safetensors has"
        raise UnsupportedError(", ".join(tensors)[:200], expected, str(error), FROM_FLOAT) from error
    return dict.fromkeys(tensors, file)


def _converted(
    source: Source, layout: Layout, skeleton: Skeleton, formats: Counter[Format], spill: Spill
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each module, then those of merged experts, and count the formats."""
    modules, transposed = source.modules(), skeleton.transposed_modules()
    experts = skeleton.merged_experts()
    of_experts = {module for _, matrices in experts.values() for module in matrices}
    for module, leaves in modules.items():
        weight = None if module in of_experts else _read(source, layout, module, leaves)
        if weight is not None:
            if module in transposed:
                weight = QuantizedTensor(weight.tensors, weight.format, weight.stored_shape, weight.dtype, True)
            formats[weight.format] += 1
            yield flatten_weight(f"{module}.weight", weight.map(spill.keep), default=None)
            leaves = {leaf: name for leaf, name in leaves.items() if leaf not in layout.leaves and leaf != "weight"}
        if module not in of_experts:
            yield {name: source.tensor(name) for name in leaves.values()}
    for name, (shape, matrices) in experts.items():
        read = (_read(source, layout, module, modules.get(module, {})) for module in matrices)
        kept = (None if part is None else part.map(spill.keep) for part in read)
        parts = dict(zip(matrices, kept, strict=True))
        if all(part is None for part in parts.values()):
            yield {saved: source.tensor(saved) for module in matrices for saved in modules.get(module, {}).values()}
            continue
        _check_nothing_beside(source, layout, [modules[module] for module in matrices if module in modules])
        merged = _merge(name, shape, parts, matrices, spill)
        formats[merged.format] += 1
        yield flatten_weight(name, merged, default=None)


def _read(source: Source, layout: Layout, module: str, leaves: dict[str, str]) -> QuantizedTensor | None:
    read = layout.leaves | {"weight"}
    return layout.read(module, {leaf: source.tensor(name) for leaf, name in leaves.items() if leaf in read})


def _check_nothing_beside(source: Source, layout: Layout, experts: Iterable[Mapping[str, str]]) -> None:
    """Check that experts have no tensors but zeros beside their quantized weights, such as a bias; UnsupportedError."""
    for leaves in experts:
        for leaf, name in leaves.items():
            if leaf not in layout.leaves | {"weight"} and bool(source.tensor(name).any()):
                raise UnsupportedError(name, "experts of a weight alone", "a tensor beside it", FROM_FLOAT)


def _merge(
    name: str,
    shape: tuple[int, ...],
    parts: dict[str, QuantizedTensor | None],
    matrices: dict[str, slice],
    spill: Spill,
) -> QuantizedTensor:
    """Return the weight `[E, N, K]` of all experts, from its matrices by their modules and the rows of each."""
    first = next(part for part in parts.values() if part is not None)
    specs = first.format.tensor_specs(shape, first.scale_dtype)
    merged = {key: spill.empty(*spec) for key, spec in specs.items()}
    for module, part in parts.items():
        if part is None:
            raise CorruptFileError(module, "a quantized weight, as of the other experts", "none", AGAIN)
        if (part.format, part.scale_dtype) != (first.format, first.scale_dtype):
            found = f"{first.format} and {part.format} with scales in {first.scale_dtype} and {part.scale_dtype}"
            raise UnsupportedError(name, "experts of one format", found, FROM_FLOAT)
        rows = matrices[module]
        if tuple(part.stored_shape) != (rows.stop - rows.start, shape[-1]):
            expected = f"shape {(rows.stop - rows.start, shape[-1])}, as config.json has it"
            raise CorruptFileError(f"{module}.weight", expected, f"{tuple(part.stored_shape)}", AGAIN)
        for key, tensor in part.tensors.items():
            merged[key].flatten(0, -2)[rows] = tensor
    return QuantizedTensor(merged, first.format, shape, first.scale_dtype)
