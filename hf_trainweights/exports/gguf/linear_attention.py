"""The rows and columns of Qwen's linear attention in a GGUF file.

Several heads of values share a head of keys. In Transformers the heads of values that share a head of keys lie side by
side. In files of Qwen3.5 the first head of values of every head of keys comes first, then the second of every one.
Qwen3-Next has one projection, in which all rows that belong to a head of keys lie side by side. A file has two tensors
for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig

_MODULE = ".linear_attn."


def linear_attention_parts(name: str, config: PretrainedConfig, tiled: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return gguf's names for a tensor of a linear attention, and the rows of each; none if all rows stay in order."""
    owner, _, parameter = name.partition(_MODULE)
    projection = parameter.removesuffix(".weight")
    if not parameter:
        return {}
    if projection == "in_proj_qkvz":
        kinds = {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)}
        return {f"{owner}{_MODULE}{name}.weight": partial(_of_kinds, config, kinds[name]) for name in kinds}
    if not tiled:
        return {}
    if projection == "dt_bias":
        return {f"{owner}{_MODULE}dt_proj.bias": partial(_tile, config)}
    if projection in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log"):
        return {name: partial(_tile, config)}
    if projection in ("in_proj_qkv", "conv1d"):
        return {name: partial(_tile_values, config)}
    return {}


def column_order(name: str, config: PretrainedConfig, tiled: bool) -> Tensor | None:
    """Return the model's column for each column of a file, int64 `[K]`, or None if all stay in order."""
    if not tiled or not name.endswith(f"{_MODULE}out_proj.weight"):
        return None
    return _tile(config, torch.arange(config.linear_num_value_heads * config.linear_value_head_dim, device="cpu"))


def _tile(config: PretrainedConfig, tensor: Tensor) -> Tensor:
    heads = (config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads, -1)
    return tensor.unflatten(0, heads).transpose(0, 1).flatten(0, 2)


def _tile_values(config: PretrainedConfig, tensor: Tensor) -> Tensor:
    """Tile the rows of values, which lie behind those of queries and keys."""
    rows = tensor[:, 0] if tensor.dim() == 3 else tensor
    start = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rows[:start], _tile(config, rows[start:])])


def _of_kinds(config: PretrainedConfig, kinds: tuple[int, ...], tensor: Tensor) -> Tensor:
    """Take the rows of queries (0), keys (1), values (2) or gates (3) of all heads, one kind after another."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [*[config.linear_key_head_dim] * 2, *[values * config.linear_value_head_dim] * 2]
    parts = tensor.unflatten(0, (keys, sum(sizes))).split(sizes, dim=1)
    return torch.cat([parts[kind].flatten(0, 1) for kind in kinds])
