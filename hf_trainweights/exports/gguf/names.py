"""Where each tensor of a model lies in a GGUF file: its names there, and the order of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import gguf
import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.gguf.architectures import Architecture
from hf_trainweights.exports.gguf.metadata import key_value_heads, skipped_positions

Take = Callable[[Tensor], Tensor]


class Place(NamedTuple):
    """Where a tensor of a file comes from.

    Args:
        source: The name of the model's tensor.
        take: Takes its rows out of that tensor, and out of each stored tensor of a quantized one alike: whole rows,
            so that codes and scales stay together.
        transposed: Whether the rows of a float tensor are its columns there. A quantized one is stored by rows anyway.
        offset: What is added to each value of a float tensor.
    """

    source: str
    take: Take
    transposed: bool = False
    offset: float = 0.0


def places(names: Iterable[str], architecture: Architecture, config: PretrainedConfig) -> dict[str, Place]:
    """Return by their names in a file where its tensors come from; UnsupportedError: llama.cpp has no place for one."""
    known = gguf.get_tensor_name_map(architecture.number, config.num_hidden_layers)
    found, unknown = {}, []
    for source in names:
        if source.startswith(architecture.unused):
            continue
        transposed = source.endswith(architecture.transposed)
        offset = architecture.norm_offset if source.endswith("norm.weight") else 0.0
        for name, take in _float_names(source, architecture, config).items():
            target = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                unknown.append(source)
            else:
                found[target] = Place(source, take, transposed, offset)
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
    projection = owner.rpartition(".")[2]
    if projection == "query_key_value":
        return {name: partial(_by_kind, key_value_heads(config), config.num_attention_heads)}
    if projection == "position_embeddings":
        return {name: partial(_from, skipped_positions(architecture, config))}
    if projection == "shared_expert_gate":
        return {name: _only_row}
    heads = {"q_proj": config.num_attention_heads, "k_proj": key_value_heads(config)}
    if architecture.interleaved and projection in heads:
        return {name: partial(_interleave, heads[projection])}
    return {name: whole}


def whole(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor."""
    return tensor


def _half(number: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(2, dim=-2)[number]


def _interleave(heads: int, tensor: Tensor) -> Tensor:
    """Return rows such that those that the rotary embedding turns together are neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _by_kind(groups: int, heads: int, tensor: Tensor) -> Tensor:
    """Return the rows of all queries, then those of all keys, then those of all values.

    They come in groups of some heads of queries, one of keys and one of values, the three fused into one projection.
    """
    grouped = tensor.unflatten(0, (groups, heads // groups + 2, -1))
    return torch.cat([part.flatten(0, 2) for part in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])])


def _only_row(tensor: Tensor) -> Tensor:
    return tensor[0]


def _from(first: int, tensor: Tensor) -> Tensor:
    return tensor[first:]
