"""Plain files written in the place of encoded ones, and safetensors in the place of plain weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hf_trainweights.checkpoint.encoded.reader import load_file, read_report
from hf_trainweights.checkpoint.manifest import reported_rounding
from hf_trainweights.checkpoint.whole.writer import WEIGHTS_NAME
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import move_file, remove_files, replace_file
from hf_trainweights.files.disk import temporary_path
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors


def restore_file(file: Path) -> dict[str, float]:
    """Write a plain file in the place of an encoded one, and return by role the rounding that the encoded one had."""
    tree, rounding, status = load_file(file), reported_rounding(read_report(file)), file.stat()
    with replace_file(file) as plain:
        torch.save(tree, plain)
    # The newer of two files with an optimizer's state counts.
    disk.file_system.set_times(file, status.st_atime_ns, status.st_mtime_ns)
    return rounding


def to_safetensors(file: Path) -> str:
    """Write a plain file of weights as safetensors in its place, tensor by tensor, and return the new name."""
    target = file.with_name("model.safetensors" if file.name == WEIGHTS_NAME else "adapter_model.safetensors")
    aside = temporary_path(file.parent)
    try:
        # As an argument alone: Windows removes no file from which something is mapped.
        _write_each_once(aside, load_file(file, mmap=True))
        move_file(aside, target, [file])
    finally:
        remove_files([aside])
    remove_files([file])
    return target.name


def _write_each_once(target: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights as safetensors does: a shared tensor under its first name, and the others as notes of that name."""
    first: dict[object, str] = {}
    notes = {"format": "pt"}
    for name, weight in weights.items():
        written_name = first.setdefault((weight.data_ptr() or name, weight.shape, weight.dtype), name)
        notes |= {} if written_name == name else {name: written_name}
    write_safetensors(target, {name: TensorToWrite.of(weights[name]) for name in first.values()}, notes)
