"""Convert a checkpoint of another quantizer: read its tensors, ask its model for shapes, and write this layout."""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

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

# Converted tensors wait in unnamed files until they have this many bytes, and then become a shard. A loader opens each
# shard, so few are better.
_SHARD_BYTES = 1 << 29
# Four codes of 2 bits, the fewest, fit into a byte. A tied weight is in the files once and is counted twice.
_WEIGHTS_PER_BYTE = 8


class Source:
    """The tensors of a model's weight files, one or several, safetensors or `.bin`; no code in them is executed.

    ConfigError: the directory has no weight files under the names that Transformers looks for. CorruptFileError: a file
    is missing, damaged, no regular file, or holds more than plain tensors; or two files have a tensor of the same name.
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
        with torch.device("cpu"):  # else safetensors creates the tensor on the default device
            return self._readers[name](name)

    def drop_prefix(self, prefix: str) -> None:
        """Read each tensor whose name begins with a prefix by its name without that."""
        for name in [name for name in self._readers if name.startswith(prefix)]:
            self._readers[name.removeprefix(prefix)] = functools.partial(_named, self._readers.pop(name), name)

    def modules(self, layout: Layout) -> dict[str, dict[str, str]]:
        """Return the names of the tensors of each module, by the leaves into which `layout` splits names."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(self._readers):
            module, leaf = layout.split_name(name)
            modules[module][leaf] = name
        return dict(modules)

    def split_experts(self, layout: Layout) -> None:
        """Replace each tensor that stacks experts by a view for each expert, if `layout` has names for these."""
        for name, read in list(self._readers.items()):
            if layout.expert_names(name, 0) is None:
                continue
            stacked = self.tensor(name)
            if stacked.dim() > 1 and stacked.numel():
                del self._readers[name]
                for expert, expert_name in enumerate(layout.expert_names(name, len(stacked)) or ()):
                    self._readers[expert_name] = functools.partial(_slice_of, read, name, expert)


def _named(read: Callable[[str], Tensor], name: str, _: str) -> Tensor:
    return read(name)


def _slice_of(read: Callable[[str], Tensor], name: str, index: int, _: str) -> Tensor:
    return read(name)[index]


def _readers(path: Path) -> tuple[dict[str, Callable[[str], Tensor]], dict[str, str]]:
    """Return functions that read the tensors of a file, by the tensors' names, and the metadata of its header."""
    if path.suffix == ".safetensors":
        file: Any = safe_open(path, framework="pt")
        get: Callable[[str], Tensor] = file.get_tensor
        return dict.fromkeys(file.keys(), get), file.metadata() or {}
    loaded = torch.load(path, weights_only=True, map_location="cpu", mmap=is_torch_zip(path) or None)
    tensors = {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
        if not isinstance(name, str) or not plain:
            entry = f"{name!r} to a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device.type}"
            raise CorruptFileError(str(path), "names to plain tensors with values", entry, AGAIN)
    return dict.fromkeys(tensors, tensors.__getitem__), {}


def text_alone(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the configuration of a model's text part, which names its class; None if Transformers has no such class.

    If the model has no other parts, this is its configuration itself.
    """
    text = config.get_text_config()
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if cls is None:
        return None
    text.architectures, text.dtype = [cls.__name__], text.dtype or config.dtype
    vars(text).pop("quantization_config", None)
    return text


class Skeleton:
    """A model on the meta device, which knows the shapes and names of its weights; its files have `size_bytes`.

    UnsupportedError: the class cannot be built from the configuration. CorruptFileError: the files are too small for
    the weights that the configuration asks for.
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
            # Transformers checks few settings, so a wrong one may raise an error of any class.
            expected, reason = f"what {cls.__name__} can be built of", f"{type(error).__name__}: {error}"[:200]
            raise UnsupportedError(CONFIG_NAME, expected, reason, CONFIG_AGAIN) from error
        count = self._model.num_parameters()
        if count > _WEIGHTS_PER_BYTE * size_bytes:
            name, largest = max(self._model.named_parameters(), key=lambda named: named[1].numel())
            expected = f"a model whose weights {size_bytes} bytes can hold"
            counted = f"{count} weights, most of them in {name} of shape {tuple(largest.shape)}"
            raise CorruptFileError(CONFIG_NAME, expected, counted, CONFIG_AGAIN)

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self._model

    def names_in_checkpoint(self, names: Iterable[str]) -> dict[str, str]:
        """Return the checkpoint's name of each matrix by the model's name, if the two differ."""
        parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameters[name].shape) for name in names if name in parameters}
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        matrices = matrices_in_checkpoint(self._model, shapes) if shapes else {}
        alone = {name: next(iter(rows)) for name, rows in matrices.items() if rows is not None and len(rows) == 1}
        return {name: saved for name, saved in alone.items() if saved != name}

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape `[N, K]` of each matrix in a checkpoint by its module, also of the matrices of experts."""
        shapes = {
            name: (rows.stop - rows.start, shape[-1])
            for shape, matrices in self.merged_experts().values()
            for name, rows in matrices.items()
        }
        matrices = {name: tensor.shape for name, tensor in self._model.named_parameters() if tensor.dim() == 2}
        saved = self.names_in_checkpoint(matrices)
        for name, (N, K) in matrices.items():
            shapes[saved.get(name, name).removesuffix(".weight")] = (N, K)
        return shapes

    def transposed_weights(self) -> set[str]:
        """Return the weights that modules keep transposed, by name with and without the base model's prefix."""
        names = {
            f"{name}.{leaf}"
            for name, module in self._model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
            if (parameter.dim() == 2 or is_experts(module, parameter)) and is_transposed(module, parameter)
        }
        return names | {name.removeprefix(base_prefix(self._model)) for name in names}

    def merged_experts(self) -> dict[str, tuple[tuple[int, ...], dict[str, slice]]]:
        """Return the weights of experts that the model merges and a checkpoint holds as one matrix for each expert.

        For each weight, by its full name, that is its shape `[E, N, K]`, and the name of each matrix's module with the
        rows that the matrix takes among the `E * N` rows of the weight.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for module_name, module in self._model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if is_experts(module, parameter) and not is_transposed(module, parameter):
                    shapes[f"{module_name}.{leaf}"] = tuple(parameter.shape)
        matrices = matrices_in_checkpoint(self._model, shapes) if shapes else {}
        return {
            name: (shapes[name], {saved.removesuffix(".weight"): rows for saved, rows in saved_rows.items()})
            for name, saved_rows in matrices.items()
            if saved_rows is not None
        }


def convert(source: Source, layout: Layout, skeleton: Skeleton, target: Path) -> Counter[Format]:
    """Write a checkpoint in this package's layout into an empty directory, and count the weights of each format.

    ConfigError: no weight is quantized. UnsupportedError: no format can hold a weight exactly.
    """
    formats: Counter[Format] = Counter()
    write_tensors(target, _converted(source, layout, skeleton, formats, Spill(target)))
    if not formats:
        reason = "none: its weights are float, or lie under names that its layout does not have"
        raise ConfigError(str(source.directory), "quantized weights, as config.json says", reason, AGAIN)
    return formats


def write_tensors(target: Path, groups: Iterable[Mapping[str, Tensor]]) -> None:
    """Write tensors, which come in groups, as a checkpoint into an empty directory."""
    shards, waiting, waiting_bytes = 0, {}, 0
    weight_map: dict[str, str] = {}
    for tensors in groups:
        waiting |= tensors
        waiting_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if waiting_bytes >= _SHARD_BYTES:
            shards += 1
            weight_map |= _write_shard(target, shards, waiting)
            waiting, waiting_bytes = {}, 0
    if waiting:
        weight_map |= _write_shard(target, shards + 1, waiting)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


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
    """Yield the tensors of each module, then the tensors of merged experts, and count the formats."""
    source.split_experts(layout)
    modules, transposed = source.modules(layout), skeleton.transposed_weights()
    experts = skeleton.merged_experts()
    expert_modules = {module for _, matrices in experts.values() for module in matrices}
    for module, leaves in modules.items():
        weight = None if module in expert_modules else _read(source, layout, module, leaves)
        if weight is not None:
            name = layout.weight_name(module)
            if name in transposed:
                weight = QuantizedTensor(weight.tensors, weight.format, weight.stored_shape, weight.dtype, True)
            formats[weight.format] += 1
            yield flatten_weight(name, weight.map(spill.keep), default=None)
            leaves = {leaf: name for leaf, name in leaves.items() if leaf not in layout.leaves and leaf != "weight"}
        if module not in expert_modules:
            yield {name: layout.float_tensor(name, source.tensor(name)) for name in leaves.values()}
    for name, (shape, matrices) in experts.items():
        weights = (_read(source, layout, module, modules.get(module, {})) for module in matrices)
        spilled = (None if weight is None else weight.map(spill.keep) for weight in weights)
        expert_weights = dict(zip(matrices, spilled, strict=True))
        if all(weight is None for weight in expert_weights.values()):
            yield {saved: source.tensor(saved) for module in matrices for saved in modules.get(module, {}).values()}
            continue
        _check_nothing_beside(source, layout, [modules[module] for module in matrices if module in modules])
        merged = _merge(name, shape, expert_weights, matrices, spill)
        formats[merged.format] += 1
        yield flatten_weight(name, merged, default=None)


def _read(source: Source, layout: Layout, module: str, leaves: dict[str, str]) -> QuantizedTensor | None:
    leaves_to_read = layout.leaves | {"weight"}
    return layout.read(module, {leaf: source.tensor(name) for leaf, name in leaves.items() if leaf in leaves_to_read})


def _check_nothing_beside(source: Source, layout: Layout, experts: Iterable[Mapping[str, str]]) -> None:
    """Check that all tensors beside the experts' quantized weights, such as a bias, are zero; else UnsupportedError."""
    for leaves in experts:
        for leaf, name in leaves.items():
            if leaf not in layout.leaves | {"weight"} and bool(source.tensor(name).any()):
                raise UnsupportedError(name, "experts of a weight alone", "a tensor beside it", FROM_FLOAT)


def _merge(
    name: str,
    shape: tuple[int, ...],
    expert_weights: dict[str, QuantizedTensor | None],
    matrices: dict[str, slice],
    spill: Spill,
) -> QuantizedTensor:
    """Merge the experts' matrices into one weight `[E, N, K]`; `matrices` has the rows of each, by its module."""
    first = next(weight for weight in expert_weights.values() if weight is not None)
    specs = first.format.tensor_specs(shape, first.scale_dtype)
    merged = {key: spill.empty(*spec) for key, spec in specs.items()}
    shared: dict[tuple[int, str], Tensor] = {}
    for module, weight in expert_weights.items():
        if weight is None:
            raise CorruptFileError(module, "a quantized weight, as of the other experts", "none", AGAIN)
        if (weight.format, weight.scale_dtype) != (first.format, first.scale_dtype):
            pair = f"{first.format} and {weight.format} with scales in {first.scale_dtype} and {weight.scale_dtype}"
            raise UnsupportedError(name, "experts of one format", pair, FROM_FLOAT)
        rows = matrices[module]
        if tuple(weight.stored_shape) != (rows.stop - rows.start, shape[-1]):
            expected = f"shape {(rows.stop - rows.start, shape[-1])}, as config.json has it"
            raise CorruptFileError(f"{module}.weight", expected, f"{tuple(weight.stored_shape)}", AGAIN)
        expert = rows.start // shape[-2]
        for key, tensor in weight.tensors.items():
            if key not in first.format.shared_names:
                merged[key].flatten(0, -2)[rows] = tensor
            elif not torch.equal(shared.setdefault((expert, key), tensor), tensor):
                raise UnsupportedError(
                    f"{module}.weight", f"{key} as in the expert's other matrices", "another", FROM_FLOAT
                )
            else:
                merged[key][expert] = tensor
    return QuantizedTensor(merged, first.format, shape, first.dtype)
