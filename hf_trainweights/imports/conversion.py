"""The files of a checkpoint in this package's layout, made of those of another, module by module."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.imports.layouts.base import AGAIN, FROM_FLOAT, Layout
from hf_trainweights.imports.skeleton import Skeleton
from hf_trainweights.imports.source import Source
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import flatten_weight

# Bytes that wait, in files without names, until they are written together: a loader opens each shard.
_SHARD_BYTES = 1 << 29


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
        merged = _merge(name, shape, parts, matrices, spill)
        formats[merged.format] += 1
        yield flatten_weight(name, merged, default=None)


def _read(source: Source, layout: Layout, module: str, leaves: dict[str, str]) -> QuantizedTensor | None:
    read = layout.leaves | {"weight"}
    return layout.read(module, {leaf: source.tensor(name) for leaf, name in leaves.items() if leaf in read})


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
