"""MLX, as mlx-lm writes it, and the same layout as Transformers' `metal` has it.

| mode | `weight`: uint32 words, one stream of codes along K | `scales` `[N, K / group_size]` | beside them |
|---|---|---|---|
| `affine` | `[N, K * bits / 32]`, 2, 3, 4, 5, 6 or 8 bits | float | `biases`, of the scales' shape and dtype |
| `mxfp4` | `[N, K / 8]` | uint8 exponents, groups of 32 | |
| `nvfp4` | `[N, K / 8]` | uint8, the bytes of float8_e4m3fn, groups of 16 | |
| `mxfp8` | `[N, K / 4]`, the bytes of float8_e4m3fn | uint8 exponents, groups of 32 | |

`weight = code * scale + bias`. MLX rounds product and sum to the dtype of the scales, Transformers rounds both to
float32 and the result to the dtype. MLX stacks experts as `switch_mlp`. `quantization` in config.json has the settings
of all weights, and those of single ones under their names. Source: https://github.com/ml-explore/mlx-lm
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import (
    CONFIG_AGAIN,
    EXPONENTS,
    WHERE,
    Layout,
    check_groups,
    check_tensor,
    integer,
    unsupported,
)
from hf_trainweights.imports.layouts.codes import unpack_stream
from hf_trainweights.imports.layouts.weights import exponents, float8_weight, offset_weight, table_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_BITS = (2, 3, 4, 5, 6, 8)
# The only group size and bits of each mode but `affine`.
_MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
_WORDS = (torch.uint32, torch.int32)
# Convolutions along the text with a kernel for each channel, `[channels, kernel, 1]` in MLX.
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight", ".conv.weight")
_STACKED = re.compile(r"(?P<block>.*)\.switch_mlp\.(?P<matrix>gate_proj|up_proj|down_proj)\.(?P<leaf>\w+)", re.DOTALL)
# The names of an expert's matrices in the blocks that are called so.
_RENAMED = {"block_sparse_moe": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}
# MLX adds 1 to these norms of these models, in their dtype, when it converts a model.
_SHIFTED = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_NORMS = re.compile(r".*\b(input_layernorm|post_attention_layernorm|q_norm|k_norm|model\.norm)\.weight", re.DOTALL)


class Mlx(Layout):
    """Weights of 2 to 8 bits with a bias for each group, and those of MLX's other modes."""

    leaves = frozenset(("weight", "scales", "biases"))
    marks = frozenset(("scales", "biases"))
    bias_name = "biases"
    rounding = "each"

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._settings(self.config, WHERE)
        # To the module of each expert's matrix, the module that stacks them.
        self._stacked: dict[str, str] = {}

    def float_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a float tensor; a convolution with its kernel last, and a norm less 1 if MLX has added that."""
        if name.endswith(_CONVOLUTIONS) and tensor.dim() == 3 and tensor.shape[2] == 1:
            return tensor.movedim(1, 2).contiguous()
        is_shifted = self.config.get("model_type") in _SHIFTED
        if not is_shifted or not _NORMS.fullmatch(name) or tensor.dim() != 1:
            return tensor
        exact = tensor.double() - 1
        less = exact.to(tensor.dtype)
        if not torch.equal(less.double(), exact):
            raise unsupported(name, f"a norm from which 1 can be subtracted in {tensor.dtype}", "other numbers")
        return less

    def expert_names(self, name: str, count: int) -> list[str] | None:
        """Return the names of each expert's matrices in a checkpoint of Transformers."""
        match = _STACKED.fullmatch(name)
        if match is None:
            return None
        block, matrix, leaf = match["block"], match["matrix"], match["leaf"]
        renamed = _RENAMED.get(block.rpartition(".")[2], {}).get(matrix, matrix)
        modules = [f"{block}.experts.{expert}.{renamed}" for expert in range(count)]
        self._stacked |= dict.fromkeys(modules, f"{block}.switch_mlp.{matrix}")
        return [f"{module}.{leaf}" for module in modules]

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name = f"{module}.weight"
        group_size, bits, mode = self._settings_of(module)
        words = tensors.get("weight")
        if words is not None and words.dim() > 2:
            raise unsupported(name, "matrices, or experts that are called switch_mlp", f"shape {tuple(words.shape)}")
        check_tensor(module, tensors, "weight", _WORDS, (None, None))
        words = tensors["weight"].view(torch.int32)
        N, K = len(words), words.shape[1] * 32 // bits
        check_groups(name, K, group_size)
        shape = (N, max(1, K // group_size))
        if mode != "affine":
            check_tensor(module, tensors, "scales", EXPONENTS, shape)
            return _of_mode(name, mode, words.contiguous().view(torch.uint8), tensors["scales"].view(torch.uint8))
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, shape)
        scale = tensors["scales"]
        check_tensor(module, tensors, self.bias_name, (scale.dtype,), shape)
        return offset_weight(
            name, unpack_stream(words, bits), scale, bits, "bias", tensors[self.bias_name], self.rounding
        )

    def _settings_of(self, module: str) -> tuple[int, int, str]:
        own = self.config.get(self._stacked.get(module, module))
        if isinstance(own, Mapping):
            return self._settings({**self.config, **own}, f"{WHERE}: {module}")
        return self._settings(self.config, WHERE)

    def _settings(self, settings: Mapping[str, Any], where: str) -> tuple[int, int, str]:
        """Return the group size, the bits and the mode; UnsupportedError: MLX has no such mode, or others for it."""
        bits, group_size = integer(settings, "bits", where), integer(settings, "group_size", where)
        mode = settings.get("mode", "affine")
        if not isinstance(mode, str) or mode not in ("affine", *_MODES):
            raise unsupported(f"{where}: mode", f"affine, {', '.join(_MODES)}", repr(mode))
        is_sound = bits in _BITS and group_size > 0 if mode == "affine" else _MODES[mode] == (group_size, bits)
        if not is_sound:
            raise unsupported(where, f"bits and group_size that MLX has for {mode}", f"{bits} and {group_size}")
        return group_size, bits, mode


class Metal(Mlx):
    """Transformers' `metal`: MLX's `affine` mode with other names and roundings."""

    leaves = frozenset(("weight", "scales", "qbiases"))
    marks = frozenset(("scales", "qbiases"))
    bias_name = "qbiases"
    rounding = "once"

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        if config.get("bits") not in (2, 4, 8):
            raise ConfigError(f"{WHERE}: bits", "2, 4 or 8", repr(config.get("bits")), CONFIG_AGAIN)


def _of_mode(name: str, mode: str, octets: Tensor, scale: Tensor) -> QuantizedTensor:
    """Return a weight of another mode than `affine`."""
    group_size, _ = _MODES[mode]
    if mode == "mxfp8":
        return float8_weight(name, octets.view(torch.float8_e4m3fn), scale, (1, group_size))
    if mode == "mxfp4":
        return table_weight(name, octets, group_size, "e8m0", {"scale": exponents(name, scale)})
    scales = {"scale": scale.view(torch.float8_e4m3fn), "global_scale": torch.ones(len(scale), 1, dtype=torch.float32)}
    return table_weight(name, octets, group_size, "e4m3", scales)
