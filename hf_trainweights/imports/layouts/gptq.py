"""GPTQ's layout: codes of 2, 3, 4 or 8 bits as one stream along K, or in planes, with a zero point for each group.

| tensor | shape | dtype |
|---|---|---|
| `qweight` | `[K * bits / 32, N]` | int32 |
| `qzeros` | `[G, N * bits / 32]`, a stream along N | int32 |
| `scales` | `[G, N]` | float16, or another float |
| `g_idx` | `[K]`: the group of each column | int32 |

`weight = (code - zero) * scale`, in the dtype of the scales. Version 1 stores each zero point minus 1. The
columns of a group lie scattered after `desc_act`. `gptq_p` has planes of bits (`unpack_planar`), and also codes of 5, 6
and 7 bits. Source: https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import (
    INTEGERS,
    WHERE,
    Layout,
    check_groups,
    check_tensor,
    group_count,
    integer,
    matrix,
    unsupported,
)
from hf_trainweights.imports.layouts.codes import unpack_planar, unpack_stream
from hf_trainweights.imports.layouts.weights import integer_weight, ordered_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_PLANAR = "gptq_p"
# Columns and rows whose codes lie in planes together.
_BLOCK = 32
# GPTQ stores each zero point minus this number, by `checkpoint_format`.
_ZERO_POINT_OFFSETS = {"gptq": 1, "gptq_v2": 0, _PLANAR: 0}
# No format has codes of 7 bits. They become codes of 8 bits: 64 is added to codes and zero points, so that 64, the
# middle of 7 bits, becomes 128, the middle of 8 bits.
_WITHOUT_FORMAT, _MIDDLE = 7, 64
# Settings with which a model does not use the weights as they are stored.
_OTHER_WEIGHTS = ("rotation", "adapter")


class Sizes:
    """The bits of a code and the sizes of groups that a model has: those for all weights, and those of exceptions.

    Which weight is an exception shows in the shapes of its tensors.

    Args:
        config: The `quantization_config` of config.json.

    Raises:
        ConfigError: A size is missing, or no integer.
    """

    def __init__(self, config: Mapping[str, Any]):
        settings, rules = [config], config.get("dynamic")
        for selector, changed in rules.items() if isinstance(rules, Mapping) else ():
            # A rule that begins with `-:` leaves weights in float, as does one of 16 bits.
            if isinstance(changed, Mapping) and not selector.startswith("-:") and changed.get("bits") not in (16, 32):
                settings.append({**config, **changed})
        self.bits = {integer(setting, "bits") for setting in settings}
        self.group_sizes = {integer(setting, "group_size") for setting in settings}

    def groups(self, name: str, K: int) -> list[int]:
        """Return the numbers of groups that a row of K columns may have; UnsupportedError: no size divides K."""
        fitting = [size for size in self.group_sizes if size < 1 or size >= K or K % size == 0]
        if not fitting:
            check_groups(name, K, min(self.group_sizes))
        return sorted({group_count(K, size) for size in fitting})


class Gptq(Layout):
    """Weights of 2, 3, 4 or 8 bits, or in planes of 2 to 8 bits."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._sizes = Sizes(config)
        version = self._version()
        if not isinstance(version, str) or version not in _ZERO_POINT_OFFSETS:
            raise unsupported(f"{WHERE}: checkpoint_format", f"one of {', '.join(_ZERO_POINT_OFFSETS)}", repr(version))
        self._is_planar = version == _PLANAR
        readable = (2, 3, 4, 5, 6, 7, 8) if self._is_planar else (2, 3, 4, 8)
        if not self._sizes.bits <= {*readable}:
            expected = f"one of {', '.join(map(str, readable))} for {version}"
            raise unsupported(f"{WHERE}: bits", expected, ", ".join(map(str, sorted(self._sizes.bits))))
        for key in _OTHER_WEIGHTS:
            if config.get(key):
                raise unsupported(f"{WHERE}: {key}", "weights that are used as they are", repr(config[key])[:200])
        self._zero_point_offset = _ZERO_POINT_OFFSETS[version]
        self._from_gptqmodel = "gptqmodel" in str(config.get("meta", "")).lower()

    def _version(self) -> object:
        return self.config.get("checkpoint_format", self.config.get("format", "gptq"))

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name = f"{module}.weight"
        words, N = matrix(module, tensors, "qweight", torch.int32)
        bits = self._bits(words, N, tensors)
        K = words * 32 // bits
        groups = self._sizes.groups(name, K)
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, *((G, N) for G in groups))
        G = len(tensors["scales"])
        check_tensor(module, tensors, "qzeros", (torch.int32,), (G, -(-N * bits // 32)))
        # desc_act scatters the columns of a group, and only g_idx says where they are.
        check_tensor(module, tensors, "g_idx", INTEGERS, (K,), required=bool(self.config.get("desc_act")))
        if self._is_planar and (words % bits or N % _BLOCK):
            raise unsupported(name, f"multiples of {_BLOCK} rows and columns for {_PLANAR}", f"{N} rows, {K} columns")
        unpack = unpack_planar if self._is_planar else unpack_stream
        codes = unpack(tensors["qweight"].t(), bits)
        zero, scale = self._zero_points(tensors["qzeros"], bits)[:, :N].t(), tensors["scales"].t()
        if bits == _WITHOUT_FORMAT:
            codes, zero, bits = codes + _MIDDLE, zero + _MIDDLE, 8
        if "g_idx" in tensors:
            return ordered_weight(name, codes, scale, bits, zero, tensors["g_idx"])
        return integer_weight(name, codes, scale, bits, zero)

    def _bits(self, words: int, N: int, tensors: Mapping[str, Tensor]) -> int:
        """Return the bits of a weight's codes: of the sizes that the model has, the one that fits the zero points."""
        zeros = tensors.get("qzeros")
        columns = zeros.shape[-1] if zeros is not None and zeros.dim() else 0
        fitting = [bits for bits in self._sizes.bits if words % bits == 0 or 32 % bits == 0]
        fitting = [bits for bits in fitting if columns == -(-N * bits // 32)] or sorted(self._sizes.bits)
        return fitting[0]

    def _zero_points(self, words: Tensor, bits: int) -> Tensor:
        """Return the zero points of groups, `[G, N]`, 0 to `2**bits`."""
        if self._is_planar:
            return unpack_planar(words, bits)
        if not self._zero_point_offset:
            return unpack_stream(words, bits)
        if self._from_gptqmodel and 32 % bits == 0:
            # GPTQModel subtracts 1 from all zero points of a word at once, and adds it so. A zero point of 0 has
            # borrowed from its neighbour.
            return unpack_stream(words + sum(1 << start for start in range(0, 32, bits)), bits)
        zero = unpack_stream(words, bits).to(torch.int16) + 1
        return zero % 2**bits if self._from_gptqmodel else zero
