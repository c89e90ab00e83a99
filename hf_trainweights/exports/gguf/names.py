"""Where each tensor of a model lies in a GGUF file: its names there, and the order of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import gguf
from torch import Tensor
from transformers import PretrainedConfig

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.gguf.architectures import Architecture

Take = Callable[[Tensor], Tensor]


class Place(NamedTuple):
    """Where a tensor of a file comes from.

    Args:
        source: The name of the model's tensor.
        take: Takes its rows out of that tensor, and out of each stored tensor of a quantized one alike: whole rows,
            so that codes and scales stay together.
    """

    source: str
    take: Take


def places(names: Iterable[str], architecture: Architecture, config: PretrainedConfig) -> dict[str, Place]:
    """Return the tensors of a file.

    Args:
        names: Names in the model.
        architecture: Of the model.
        config: Its configuration.

    Returns:
        Names in the file to where the tensors come from.

    Raises:
        UnsupportedError: llama.cpp has no place for a tensor.
    """
    known = gguf.get_tensor_name_map(architecture.number, config.num_hidden_layers)
    found, unknown = {}, []
    for source in names:
        for name, take in _float_names(source, architecture, config).items():
            target = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                unknown.append(source)
            else:
                found[target] = Place(source, take)
    if unknown:
        where = ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in unknown))
        expected = f"tensors that llama.cpp's {architecture.name} has"
        raise UnsupportedError(where, expected, "others", "For other readers there is export_compressed_tensors.")
    return found


def _float_names(name: str, architecture: Architecture, config: PretrainedConfig) -> dict[str, Take]:
    """Return the names that gguf knows a tensor of Transformers by, and the rows that go there."""
    owner, _, parameter = name.rpartition(".")
    if parameter == "gate_up_proj":
        return {f"{owner}.gate_proj.weight": partial(_half, 0), f"{owner}.up_proj.weight": partial(_half, 1)}
    if parameter == "down_proj":
        return {f"{name}.weight": whole}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = owner.rpartition(".")[2]
    if architecture.interleaved and projection in heads:
        return {name: partial(_interleave, heads[projection])}
    return {name: whole}


def whole(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor.

    Args:
        tensor: The tensor.
    """
    return tensor


def _half(number: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(2, dim=-2)[number]


def _interleave(heads: int, tensor: Tensor) -> Tensor:
    """Return rows such that those that the rotary embedding turns together are neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
