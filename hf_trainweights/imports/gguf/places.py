"""The places of a GGUF file's tensors in a model: which rows of which tensor of the model each one holds."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.exports.gguf.architectures import Architecture
from hf_trainweights.exports.gguf.rows import Origin, origins_of
from hf_trainweights.imports.gguf.blocks import ALTERNATIVES, FLOATS
from hf_trainweights.imports.gguf.file import GgufFile, GgufTensor
from hf_trainweights.imports.layouts.base import AGAIN

_logger = logging.getLogger(__name__)

# Tensors from which settings are read, and other scales of NVFP4: no parameters of a model.
_NO_PARAMETERS = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|.*\.(input_)?scale|dec\.blk\.\d+\.cross_attn_rel_b\.weight"
)
_LAYER = re.compile(r"blk\.(\d+)\.")
_KEYS_AND_VALUES = re.compile(r"blk\.\d+\.attn_(k|v|k_norm|v_norm)\.")
_MERGED_EXPERTS, LATENT_KEYS = ".ffn_gate_up_exps.", ".attn_k_b."
_SHOWN = 3


class Slot(NamedTuple):
    """A parameter of a model.

    Args:
        shape: Its stored shape, `[*, N, K]` or that of a bias.
        columns: How many neighbouring numbers the file stores side by side, too: the columns of a row, or 1 if each
            number is placed by itself, as in a bias.
        transposed: Whether the module keeps it as `[*, K, N]`.
        takes_codes: Whether it can be a quantized weight.
    """

    shape: tuple[int, ...]
    columns: int
    transposed: bool
    takes_codes: bool


class Place(NamedTuple):
    """A tensor of a file that holds rows of a model's tensor.

    Args:
        name: The name in the file.
        tensor: The tensor of the file.
        rows: For each row of the file the rows of the model's tensor, with all leading dimensions flattened, `[n, m]`:
            one row, but for a slot whose rows are single numbers.
        origin: The way in which the file's tensor was made of the model's.
        factors: The number by which the scales of each row of an NVFP4 weight are multiplied, float32.
    """

    name: str
    tensor: GgufTensor
    rows: Tensor
    origin: Origin
    factors: Tensor


def places_of(
    file: GgufFile, slots: Mapping[str, Slot], architecture: Architecture, config: PretrainedConfig
) -> dict[str, list[Place]]:
    """Return the tensors of a file that make up each tensor of a model, by its name in the model.

    CorruptFileError: the file lacks a tensor, or one has another shape. UnsupportedError: the model has no place for a
    tensor of the file, or it is of a kind that this package cannot hold.
    """
    if any(_MERGED_EXPERTS in name for name in file.tensors):
        architecture = replace(architecture, merged_experts=True)
    if any(LATENT_KEYS in name for name in file.tensors):
        architecture = replace(architecture, split_latent=True)
    origins, unknown = origins_of(slots, architecture, config)
    _refuse(file, unknown, f"tensors that llama.cpp's {architecture.name} has", "Give the right config.json.")
    missing = [name for name in origins if name not in file.tensors and not name.endswith(".bias")]
    if missing:
        expected = f"all tensors of {architecture.name} with {config.num_hidden_layers} layers"
        raise CorruptFileError(str(file.path), expected, f"no {', '.join(missing[:_SHOWN])}", AGAIN)
    beside = [name for name in file.tensors if name not in origins and not _is_left_out(name, file, config)]
    _refuse(
        file,
        beside,
        f"tensors that {(config.architectures or ['the model'])[0]} has places for",
        "Give base_model, if the model is of another class.",
    )
    if zeros := [name for name in slots if name.startswith(architecture.unused)]:
        message = (
            "%s: llama.cpp stores no %s. These weights are zero here, and so is what the model computes with them."
        )
        _logger.warning(message, file.path, " and ".join(zeros))
    # A bias that the file lacks is zero: a class may have more biases than the models that were trained with it.
    places: dict[str, list[Place]] = {name: [] for name in slots}
    for name, origin in origins.items():
        if name in file.tensors:
            places[origin.source].append(_place(file, name, origins, slots[origin.source]))
    return places


def _is_left_out(name: str, file: GgufFile, config: PretrainedConfig) -> bool:
    """Return whether a tensor is no parameter.

    Others are those of layers that predict further tokens, behind the others, and keys and values of layers that take
    those of other layers.
    """
    layer = int(match[1]) if (match := _LAYER.match(name)) else -1
    own_keys = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    is_shared = layer >= own_keys and _KEYS_AND_VALUES.match(name) is not None
    if _NO_PARAMETERS.fullmatch(name) or is_shared or layer >= config.num_hidden_layers:
        return True
    # Zeros, such as biases of layers that have none, change nothing.
    tensor = file.tensors[name]
    return tensor.kind.name in FLOATS and not bool(tensor.data.any())


def _refuse(file: GgufFile, names: Iterable[str], expected: str, next_step: str) -> None:
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    if patterns:
        raise UnsupportedError(str(file.path), expected, ", ".join(patterns[:_SHOWN]), next_step)


def _place(file: GgufFile, name: str, origins: Mapping[str, Origin], slot: Slot) -> Place:
    tensor, origin, where = file.tensors[name], origins[name], f"{file.path}: {name}"
    shape = tuple(origin.take(torch.empty(slot.shape, device="meta")).shape)
    if tensor.shape != shape:
        raise CorruptFileError(where, f"shape {shape}, as the settings have it", f"{tensor.shape}", AGAIN)
    if tensor.kind.name not in ALTERNATIVES and tensor.kind.name not in FLOATS:
        supported = ", ".join((*ALTERNATIVES, *FLOATS))
        next_step = "Take a file of another kind, such as Q4_K_M; or quantize the float model."
        raise UnsupportedError(where, f"one of {supported}", tensor.kind.name, next_step)
    numbers = torch.arange(torch.Size(slot.shape).numel() // slot.columns)
    rows = origin.take(numbers.view(*slot.shape[:-1], slot.shape[-1] // slot.columns))
    rows = rows.reshape(math.prod(shape[:-1]), -1)
    scale_name = f"{name.removesuffix('.weight')}.scale"
    # A scale that the model has a parameter for, such as Gemma 4's, multiplies no weight.
    is_scaled = scale_name in file.tensors and scale_name not in origins
    factors = _factors(file, scale_name, slot, len(rows)) if is_scaled else torch.ones(len(rows), dtype=torch.float32)
    return Place(name, tensor, rows, origin, factors)


def _factors(file: GgufFile, scale_name: str, slot: Slot, count: int) -> Tensor:
    """Return the number for each of `count` rows: a file may have one for an NVFP4 weight, or one for each expert."""
    tensor = file.tensors[scale_name]
    counts = {1, *slot.shape[:-2]}
    values = tensor.data.flatten().view(torch.float32) if tensor.kind.name == "F32" else torch.empty(0)
    if len(values) not in counts or not bool(values.isfinite().all()):
        expected = f"{' or '.join(map(str, sorted(counts)))} finite float32 numbers"
        raise CorruptFileError(f"{file.path}: {scale_name}", expected, f"{tensor.kind.name} {tensor.shape}", AGAIN)
    return values.repeat_interleave(count // len(values))
