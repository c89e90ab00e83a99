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
from hf_trainweights.exports.gguf.linear_attention import column_order, linear_attention_parts
from hf_trainweights.exports.gguf.metadata import key_value_heads, skipped_positions

Take = Callable[[Tensor], Tensor]


class Origin(NamedTuple):
    """The origin of a file's tensor: a tensor of the model, and the way in which it is converted.

    Args:
        source: The name of the model's tensor.
        take: Takes full rows from a tensor: the same rows from codes and from scales, so that these stay together.
        transposed: Whether a float tensor is transposed. A quantized weight is stored by rows anyway.
        offset: A number that is added to each value of a float tensor.
        negative_exponential: Whether the file has -exp(x) for each value x of a float tensor.
        columns: The column of the model's tensor that each column of the file's is, int64 `[K]`; None if all stay in
            order. Nobody writes such a file here.
    """

    source: str
    take: Take
    transposed: bool = False
    offset: float = 0.0
    negative_exponential: bool = False
    columns: Tensor | None = None


def origins_of(
    names: Iterable[str], architecture: Architecture, config: PretrainedConfig
) -> tuple[dict[str, Origin], list[str]]:
    """Return the origin of each tensor of a file, by its name there, and the model's tensors that llama.cpp lacks."""
    layers = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", None) or 0)
    name_map = gguf.get_tensor_name_map(architecture.number, layers)
    origins, unknown = {}, []
    for source in names:
        if source.startswith(architecture.unused):
            continue
        transposed = source.endswith(architecture.transposed)
        # Gemma, Nemotron and Qwen3-Next multiply by 1 + weight, llama.cpp by the number in the file.
        is_shifted = source.endswith("norm.weight") and not source.endswith("linear_attn.norm.weight")
        offset = architecture.norm_offset if is_shifted else 0.0
        columns = column_order(source, config, architecture.tiled)
        for name, take in _float_names(source, architecture, config).items():
            target = _name_in_file(name, name_map, architecture)
            if target is None:
                unknown.append(source)
            else:
                origins[target] = Origin(source, take, transposed, offset, source.endswith(".A_log"), columns)
    return origins, unknown


def _name_in_file(name: str, name_map: gguf.TensorNameMap, architecture: Architecture) -> str | None:
    """Return the name in a file of a tensor that gguf knows by `name`, or None if the architecture has none."""
    # gguf knows some tensors by their names in older classes, or in the class without a head.
    for alias in (name, name.removeprefix("transformer."), name.replace(".block_sparse_moe.", ".mlp.")):
        if target := name_map.get_name(alias, try_suffixes=(".weight", ".bias", ".scale")):
            return target
    if architecture.merged_experts and "gate_up_proj" in name:
        # Not all versions of gguf know the merged tensor of each architecture.
        alone = name_map.get_name(name.replace("gate_up_proj", "gate_proj"), try_suffixes=(".weight", ".bias"))
        return None if alone is None else alone.replace("ffn_gate_exps", "ffn_gate_up_exps")
    return None


def _float_names(name: str, architecture: Architecture, config: PretrainedConfig) -> dict[str, Take]:
    """Return the names by which gguf knows a tensor of a model, and the rows that each of them has.

    gguf's table has the names of the float checkpoints that people publish. Transformers renames and merges tensors
    when it loads one, for example those of experts, so the model's names differ from these.
    """
    owner, _, parameter = name.rpartition(".")
    kind = "bias" if parameter.endswith("_bias") else "weight"
    if parts := linear_attention_parts(name, config, architecture.tiled):
        return parts
    # The experts of a layer: Transformers merges gate and up, most files have them apart.
    if parameter.startswith("gate_up_proj") and architecture.merged_experts:
        return {f"{owner}.gate_up_proj.{kind}": _gate_then_up if architecture.alternating else all_rows}
    if parameter.startswith("gate_up_proj"):
        part = _every_second if architecture.alternating else _half
        return {f"{owner}.gate_proj.{kind}": partial(part, 0), f"{owner}.up_proj.{kind}": partial(part, 1)}
    if parameter.startswith("down_proj"):
        return {f"{owner}.down_proj.{kind}": all_rows}
    # LFM2's and Mamba's convolution of each channel by itself, `[channels, 1, width]`; in a file `[channels, width]`.
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        return {name: _without_second_dimension}
    if owner.endswith(".kv_b_proj") and architecture.split_latent:
        parts = {"k_b_proj": partial(_latent_keys, config), "v_b_proj": partial(_latent_values, config)}
        return {name.replace("kv_b_proj", projection): take for projection, take in parts.items()}
    return _renamed(owner, parameter) or {name: _rows_of_projection(owner.rpartition(".")[2], architecture, config)}


def _renamed(owner: str, parameter: str) -> dict[str, Take]:
    """Return the name and rows of a tensor that is no weight or bias of a module of its own, else nothing."""
    # The bias of a router: DeepSeek's, Ernie's `[1, experts]`, LFM2's.
    if parameter == "e_score_correction_bias":
        router = owner if owner.endswith(".gate") else f"{owner.removesuffix('.gate.moe_statics')}.gate"
        return {f"{router}.e_score_correction.bias": itemgetter(0) if owner.endswith("moe_statics") else all_rows}
    if parameter == "expert_bias":
        return {f"{owner}.{parameter}.bias": all_rows}
    # The step of a state: Qwen's.
    if parameter == "dt_bias":
        return {f"{owner}.dt_proj.bias": all_rows}
    # GPT-OSS's extra score of each head, and Gemma 4's factor of a layer.
    if parameter in ("sinks", "layer_scalar"):
        return {f"{owner}.{parameter}.weight": all_rows}
    # Gemma 4's factors of the router's inputs and of each expert's output.
    if parameter == "scale" and owner.endswith(".router"):
        return {f"{owner}.proj.scale": all_rows}
    if parameter == "per_expert_scale":
        return {f"{owner.removesuffix('router')}experts.down_proj.scale": all_rows}
    return {}


def _rows_of_projection(projection: str, architecture: Architecture, config: PretrainedConfig) -> Take:
    """Return the function that takes the rows of a weight or bias, by the last part of its module's name."""
    # The fused projection of Falcon, Bloom and GPT-NeoX.
    if projection == "query_key_value":
        return partial(_by_kind, key_value_heads(config), config.num_attention_heads)
    # RoBERTa never uses the first positions, which a file leaves out.
    if projection == "position_embeddings":
        return itemgetter(slice(skipped_positions(architecture, config), None))
    # Qwen2-MoE's weight `[1, K]`; in a file `[K]`.
    if projection == "shared_expert_gate":
        return itemgetter(0)
    if architecture.interleaved and projection in ("q_proj", "k_proj"):
        return partial(_interleave, config.num_attention_heads if projection == "q_proj" else key_value_heads(config))
    return all_rows


def all_rows(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor."""
    return tensor


def _latent_keys(config: PretrainedConfig, tensor: Tensor) -> Tensor:
    """Return the keys of each head with rows and columns exchanged, `[heads, K, keys of a head]`."""
    return tensor.unflatten(0, (config.num_attention_heads, -1))[:, : config.qk_nope_head_dim].mT


def _latent_values(config: PretrainedConfig, tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, (config.num_attention_heads, -1))[:, config.qk_nope_head_dim :]


def _half(number: int, tensor: Tensor) -> Tensor:
    """Return the first or second half of each expert's rows; the first dimension counts experts."""
    return tensor.chunk(2, dim=1)[number]


def _without_second_dimension(tensor: Tensor) -> Tensor:
    return tensor[:, 0]


def _every_second(number: int, tensor: Tensor) -> Tensor:
    """Return every second of each expert's rows, from row `number` on."""
    return tensor[:, number::2]


def _gate_then_up(tensor: Tensor) -> Tensor:
    return torch.cat([_every_second(0, tensor), _every_second(1, tensor)], dim=1)


def _interleave(heads: int, tensor: Tensor) -> Tensor:
    """Reorder rows so that rows that the rotary embedding turns together are neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _by_kind(groups: int, heads: int, tensor: Tensor) -> Tensor:
    """Reorder the rows of a fused projection: all queries first, then all keys, then all values.

    The projection has groups of some heads of queries, one head of keys and one head of values.
    """
    grouped = tensor.unflatten(0, (groups, heads // groups + 2, -1))
    return torch.cat([rows.flatten(0, 2) for rows in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])])
