"""`save_file` and `load_file`: the weights of any module in one safetensors file, quantized ones included.

The file has the tensors that `save_pretrained` writes, guards included, and beside each quantized weight its format, so
it needs no config.json. A tensor that weights share lies under the first name, and the metadata lists the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.digests import read_quantization_config
from hf_trainweights.files.safetensors_file import TensorToWrite, safetensors_path, write_safetensors
from hf_trainweights.files.staging import staged_files
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config import QUANT_METHOD, TrainWeightsConfig
from hf_trainweights.models.loading.stored_weights import check_weight_files
from hf_trainweights.models.saving.saved_tensors import memory_key
from hf_trainweights.tensor.guards import guards_of, is_notice
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import flatten_state_dict, group_stored, parse_stored_name, unflatten_weight

_SHOWN_CHARACTERS = 100


def save_file(weights: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Save a module or a state dict, quantized or not, as one safetensors file.

    Args:
        weights: The module, or names to tensors; they stay as they are. Equal weights give equal files.
        path: The file. An older file there stays until the new one is complete.

    Raises:
        ConfigError: A value is no tensor; a tensor has no values, a dtype that safetensors files do not hold, or the
            name of a part of a quantized weight; a name is no text; or the file's name does not end in `.safetensors`.
        SaveError: The file cannot be written, or the disk is full; an older file there is untouched.

    Examples:
        >>> import tempfile
        >>> from hf_trainweights import quantize_
        >>> layer = nn.Linear(64, 64)
        >>> _ = quantize_(layer, TrainWeightsConfig("int8"))
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save_file(layer, path)
        >>> sorted(load_file(path))
        ['bias', 'weight']
    """
    state = dict(weights.state_dict(keep_vars=True) if isinstance(weights, nn.Module) else weights)
    for name, tensor in state.items():
        _check_name(name)
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            problem = type(tensor).__name__
            if isinstance(tensor, Tensor):
                problem = "one on the meta device" if tensor.is_meta else f"one of layout {tensor.layout}"
            raise ConfigError(name, "a tensor with values", problem, "Leave it out, load it first, or make it dense.")
        if parse_stored_name(name) is not None and not isinstance(tensor, QuantizedTensor):
            expected = "another name: load_file takes this one for a part of a quantized weight"
            raise ConfigError(name, expected, "a plain tensor", "Rename it, or save what load_file returns.")
    first_names: dict[object, str] = {}
    aliases = {name: first_names.setdefault(memory_key(tensor), name) for name, tensor in state.items()}
    # "format" is Transformers' own entry of the metadata.
    aliases = {name: first for name, first in aliases.items() if name not in (first, "format")}
    unique = {name: _plain(tensor.detach()) for name, tensor in state.items() if name not in aliases}
    path = safetensors_path(path)
    with staged_files(path.parent, is_replaced=lambda _: False) as staged:  # no other file leaves the directory
        flat = flatten_state_dict(unique, None)
        flat = guards_of(name for name, tensor in unique.items() if isinstance(tensor, QuantizedTensor)) | flat
        tensors = {name: TensorToWrite.of(tensor) for name, tensor in flat.items()}
        write_safetensors(staged.path / path.name, tensors, {**aliases, "format": "pt"})


def _check_name(name: object) -> None:
    """Check that a safetensors file can give a tensor this name."""
    # "__metadata__" is the format's own entry of the header; half of a surrogate pair has no UTF-8.
    if not isinstance(name, str) or name == "__metadata__" or name.encode(errors="replace").decode() != name:
        expected, next_step = "names that a safetensors file can hold", "Pass tensors by the names of their weights."
        raise ConfigError("weights", expected, repr(name)[:_SHOWN_CHARACTERS], next_step)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose bytes are its values: a copy if it is a conjugated or negated view."""
    return tensor if isinstance(tensor, QuantizedTensor) else tensor.resolve_conj().resolve_neg()


def load_file(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Load the weights of a safetensors file: one of `save_file`, of `save_pretrained`, or any other.

    Args:
        path: The file. One of `save_pretrained` needs the config.json beside it.
        device: The device of the tensors.

    Returns:
        Names to tensors for `module.load_state_dict(..., assign=True)`, also of a module on the meta device. Quantized
        weights are `QuantizedTensor`s. On the CPU they are views of the memory-mapped file. Names that shared one
        tensor share one again.

    Raises:
        CorruptFileError: The file is damaged or incomplete, or does not say the format of a weight.
        ConfigError: The file is missing, or its name does not end in `.safetensors`; or the config.json beside it names
            a format that does not exist.

    Examples:
        >>> load_file("model.safetensors")["lm_head.weight"].shape  # doctest: +SKIP
        torch.Size([32000, 4096])
    """
    path = safetensors_path(path)
    if not path.exists():
        raise ConfigError(str(path), "a safetensors file", "nothing there", "Check the path.")
    check_weight_files([path])
    # safetensors makes its tensors on the default device, whatever it was told.
    with torch.device("cpu"), safe_open(path, framework="pt", device=str(device)) as file:
        metadata: dict[str, str] = file.metadata() or {}
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    groups = group_stored(stored)
    # Guards lie under the names of quantized weights, and the notice beside them is no weight either.
    plain = {name: t for name, t in stored.items() if parse_stored_name(name) is None and not is_notice(name)}
    weights = {name: t for name, t in plain.items() if name not in groups}
    default = _format_beside(path.parent) if groups else None
    weights |= {name: unflatten_weight(name, tensors, None, default) for name, tensors in groups.items()}
    return weights | {twin: weights[name] for twin, name in metadata.items() if name in weights and twin not in weights}


def _format_beside(directory: Path) -> Format | None:
    """Return the format that the config.json beside a file names, None if there is none."""
    config = read_quantization_config(directory) or {}
    return TrainWeightsConfig.from_dict(config).default_format if config.get("quant_method") == QUANT_METHOD else None
