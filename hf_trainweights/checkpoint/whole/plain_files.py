"""Plain files that replace encoded ones, and safetensors files that replace plain files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME
from hf_trainweights.files.atomic import move_file, remove_files
from hf_trainweights.files.disk import temporary_path
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors


def to_safetensors(file: Path) -> str:
    """Replace a plain file of weights by a safetensors file, tensor by tensor, and return the new name."""
    target = file.with_name("model.safetensors" if file.name == WEIGHTS_NAME else "adapter_model.safetensors")
    aside = temporary_path(file.parent)
    try:
        # No variable may hold the mapped tensors: Windows cannot remove a file that is mapped.
        _write_each_once(aside, load_file(file, mmap=True))
        move_file(aside, target, [file])
    finally:
        remove_files([aside])
    remove_files([file])
    return target.name


def _write_each_once(target: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights as safetensors does: a shared tensor under its first name, its other names as notes."""
    first_names: dict[object, str] = {}
    notes = {"format": "pt"}
    for name, weight in weights.items():
        written_name = first_names.setdefault((weight.data_ptr() or name, weight.shape, weight.dtype), name)
        notes |= {} if written_name == name else {name: written_name}
    write_safetensors(target, {name: TensorToWrite.of(weights[name]) for name in first_names.values()}, notes)
