"""HQQ with scales along the columns (`axis=1`), as Transformers saves it.

| tensor | shape | dtype |
|---|---|---|
| `W_q` | `[R, group_size]`: the groups, by `packing` several in one row | uint8, int32, or a float of their bytes |
| `scale`, `zero` | `[N * G, 1]` | the compute dtype |
| `nbits`, `group_size`, `axis`, `shape`, `view_as_float` | settings of the weight | integers |
| `packing` | text | uint8 |

`weight = (code - zero) * scale`, both operations rounded to the compute dtype. The rows of groups are divided into as
many equal blocks as a packed number holds codes. Packed row i holds row i of each block, that of the first block in the
highest bits. Source: https://github.com/mobiusml/hqq
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import AGAIN, INTEGERS, Layout, check_tensor, unsupported
from hf_trainweights.imports.layouts.weights import offset_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# To each packing, the bits of a code and how many rows a packed row has.
_PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4)}
_BITS = (2, 3, 4, 5, 6, 8)
_SETTINGS = frozenset(("nbits", "group_size", "axis", "shape", "view_as_float", "packing"))
_OTHER_SETTINGS = frozenset(
    ("unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict")
) | frozenset(("stores_quant_config", "channel_wise", "optimize", "round_zero"))
_QUANTIZED_SCALES = frozenset(("scale_q", "zero_q", "meta_scale", "meta_zero", "zero_scale"))


class Hqq(Layout):
    """Weights of 2 to 8 bits with a float zero point for each group."""

    marks = frozenset(("W_q", "nbits", "packing"))
    leaves = marks | {"scale", "zero", "weight"} | _SETTINGS | _OTHER_SETTINGS | _QUANTIZED_SCALES

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name = f"{module}.weight"
        if quantized := sorted(_QUANTIZED_SCALES & tensors.keys()):
            raise unsupported(f"{module}.{quantized[0]}", "scales and zero points that are floats", "quantized ones")
        bits, axis = self._number(module, tensors, "nbits"), self._number(module, tensors, "axis")
        if axis != 1:
            raise unsupported(f"{module}.axis", "1: groups of neighbouring columns", f"{axis}")
        check_tensor(module, tensors, "shape", INTEGERS, (2,))
        N, K = tensors["shape"].tolist()
        size = self._number(module, tensors, "group_size") if "group_size" in tensors else K
        if min(N, K, size) < 1 or K % size or bits not in _BITS:
            expected = "groups of 2 to 6 or 8 bits that divide the columns"
            raise unsupported(name, expected, f"{N} rows of {K} columns in groups of {size}, {bits} bits")
        groups = N * K // size
        for leaf in ("scale", "zero"):
            check_tensor(module, tensors, leaf, FLOAT_DTYPES, (groups, 1))
        scale, zero = (tensors[leaf].view(N, K // size) for leaf in ("scale", "zero"))
        if scale.dtype != zero.dtype:
            raise unsupported(f"{module}.zero", f"{scale.dtype}, as the scales", f"{zero.dtype}")
        codes = self._codes(module, tensors, groups, size, bits).reshape(N, K)
        # "each": HQQ rounds after each operation, not once at the end.
        return offset_weight(name, codes, scale, bits, "float_zero_point", zero, "each")

    def _number(self, module: str, tensors: Mapping[str, Tensor], leaf: str) -> int:
        check_tensor(module, tensors, leaf, INTEGERS, (), (1,))
        return int(tensors[leaf])

    def _codes(self, module: str, tensors: Mapping[str, Tensor], groups: int, size: int, bits: int) -> Tensor:
        """Return the codes of all groups, uint8 `[groups, size]`."""
        check_tensor(module, tensors, "packing", (torch.uint8,), (None,))
        packing = bytes(tensors["packing"][:32].tolist()).decode("latin-1")
        # Codes of 5 and 6 bits lie in a byte each, as codes of 8 bits do. All others have a packing of their own.
        if packing not in _PACKINGS or bits > _PACKINGS[packing][0] or (bits < 5 and bits != _PACKINGS[packing][0]):
            raise unsupported(f"{module}.packing", f"one of {', '.join(_PACKINGS)}, as of {bits} bits", repr(packing))
        field, parts = _PACKINGS[packing]
        word = torch.int32 if packing == "3bit_32" else torch.uint8
        check_tensor(module, tensors, "W_q", (word, *FLOAT_DTYPES), (None, None))
        packed = tensors["W_q"].contiguous().view(word)
        rows = -(-groups // parts)
        if tuple(packed.shape) != (rows, size):
            expected = f"{rows} rows of {size} {word}".replace("torch.", "")
            raise CorruptFileError(f"{module}.W_q", expected, f"shape {tuple(packed.shape)}", AGAIN)
        mask = 2**field - 1
        fields = [(packed >> start) & mask for start in range(field * (parts - 1), -1, -field)]
        codes = torch.cat(fields).to(torch.uint8)[:groups]
        if int(codes.amax()) >= 2**bits:
            raise CorruptFileError(f"{module}.W_q", f"codes of 0 to {2**bits - 1}", f"{int(codes.amax())}", AGAIN)
        return codes
