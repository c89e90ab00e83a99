"""The tensors of a GGUF file compared with those of the model: their names, and which rows of the model each one holds.

Some models of Transformers hold rows in another order than llama.cpp, or several tensors of a file in one. A quantized
weight keeps its codes if full rows are moved: so each tensor of a file is full rows of one tensor of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import gguf
import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_trainweights.exports.gguf.architectures import Architecture
from hf_trainweights.exports.gguf.metadata import key_value_heads, skipped_positions

Take = Callable[[Tensor], Tensor]


class Origin(NamedTuple):
    """The origin of a file's tensor: a tensor of the model, and the way in which it is converted.

    Args:
        source: The name of the model's tensor.
        take: Takes full rows from a tensor: the same rows from codes and from scales, so that these stay together.
        transposed: Whether a float tensor is transposed. A quantized weight is stored by rows anyway.
        offset: A number that is added to each value of a float tensor.
    """

    source: str
    take: Take
    transposed: bool = False
    offset: float = 0.0


def origins_of(
    names: Iterable[str], architecture: Architecture, config: PretrainedConfig
) -> tuple[dict[str, Origin], list[str]]:
    """Return the origin of each tensor of a file, by its name there, and the model's tensors that llama.cpp lacks."""
    name_map = gguf.get_tensor_name_map(architecture.number, config.num_hidden_layers)
    origins, unknown = {}, []
    for source in names:
        if source.startswith(architecture.unused):
            continue
        transposed = source.endswith(architecture.transposed)
        # Gemma and Nemotron multiply by 1 + weight, llama.cpp by the number in the file.
        offset = architecture.norm_offset if source.endswith("norm.weight") else 0.0
        for name, take in _float_names(source, architecture, config).items():
            target = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                unknown.append(source)
            else:
                origins[target] = Origin(source, take, transposed, offset)
    return origins, unknown


def _float_names(name: str, architecture: Architecture, config: PretrainedConfig) -> dict[str, Take]:
    """Return the names by which gguf knows a tensor of a model, and the rows that each of them has.

    gguf's table has the names of the float checkpoints that people publish. Transformers renames and merges tensors
    when it loads one, for example those of experts, so the model's names differ from these.
    """
    owner, _, parameter = name.rpartition(".")
    kind = "bias" if parameter.endswith("_bias") else "weight"
    # The experts of a layer: Transformers merges gate and up, a file has them apart.
    if parameter.startswith("gate_up_proj"):
        part = _every_second if architecture.alternating else _half
        return {f"{owner}.gate_proj.{kind}": partial(part, 0), f"{owner}.up_proj.{kind}": partial(part, 1)}
    if parameter.startswith("down_proj"):
        return {f"{owner}.down_proj.{kind}": all_rows}
    # The bias of DeepSeek's router.
    if parameter == "e_score_correction_bias":
        return {f"{owner}.gate.e_score_correction.bias": all_rows}
    # LFM2's convolution of each channel by itself, `[channels, 1, width]`; in a file `[channels, width]`.
    if name.endswith(".conv.conv.weight"):
        return {name: _without_second_dimension}
    # GPT-OSS's extra score of each head.
    if parameter == "sinks":
        return {f"{name}.weight": all_rows}
    projection = owner.rpartition(".")[2]
    # Falcon's fused projection.
    if projection == "query_key_value":
        return {name: partial(_by_kind, key_value_heads(config), config.num_attention_heads)}
    # RoBERTa never uses the first positions, which a file leaves out.
    if projection == "position_embeddings":
        return {name: itemgetter(slice(skipped_positions(architecture, config), None))}
    # Qwen2-MoE's weight `[1, K]`; in a file `[K]`.
    if projection == "shared_expert_gate":
        return {name: itemgetter(0)}
    heads = {"q_proj": config.num_attention_heads, "k_proj": key_value_heads(config)}
    if architecture.interleaved and projection in heads:
        return {name: partial(_interleave, heads[projection])}
    return {name: all_rows}


def all_rows(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor."""
    return tensor


def _half(number: int, tensor: Tensor) -> Tensor:
    """Return the first or second half of each expert's rows; the first dimension counts experts."""
    return tensor.chunk(2, dim=1)[number]


def _without_second_dimension(tensor: Tensor) -> Tensor:
    return tensor[:, 0]


def _every_second(number: int, tensor: Tensor) -> Tensor:
    """Return every second of each expert's rows, from row `number` on."""
    return tensor[:, number::2]


def _interleave(heads: int, tensor: Tensor) -> Tensor:
    """Reorder rows so that rows that the rotary embedding turns together are neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _by_kind(groups: int, heads: int, tensor: Tensor) -> Tensor:
    """Reorder the rows of a fused projection: all queries first, then all keys, then all values.

    The projection has groups of some heads of queries, one head of keys and one head of values.
    """
    grouped = tensor.unflatten(0, (groups, heads // groups + 2, -1))
    return torch.cat([rows.flatten(0, 2) for rows in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])])
