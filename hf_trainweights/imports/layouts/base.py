"""`Layout`, the interface of another quantizer's layout, and functions that check its tensors and make weights.

A weight keeps its values. `(code - zero_point) * scale` is a difference of integers times a scale. For codes of 4 bits
the difference is -15 to 15, which `int8` holds, in the groups of the source. If each row has only one scale and one
zero point, `uint4` holds the codes and the zero point themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import GROUP_SIZES, Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.packing import pack_int4, unpack_int4
from hf_trainweights.formats.planes import pack_planes
from hf_trainweights.formats.uint import UInt4
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

WHERE = "quantization_config (in config.json)"
AGAIN = "The files are damaged or belong to another model; download them again."
CONFIG_AGAIN = "Download config.json again."
FROM_FLOAT = "Quantize the float model that it was made from."
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOAT8_SCALES = (*FLOAT_DTYPES, torch.float8_e8m0fnu)  # the last one holds powers of two by their exponents alone
# The shapes of a scale that all elements of a weight share.
TENSOR_SHAPES = ((), (1,), (1, 1))

# A size of None stands for any size except 0.
Shape = tuple[int | None, ...]


class Layout(ABC):
    """A layout of quantized weights, with the settings of one model.

    Args:
        config: The `quantization_config` of config.json.
        metadata: The metadata in the headers of the model's safetensors files.

    Raises:
        ConfigError: The configuration does not describe this layout.
        UnsupportedError: This package's formats cannot hold weights of this configuration exactly.
    """

    # The last parts of the names of all tensors that may belong to a quantized weight or to its activations.
    leaves: ClassVar[frozenset[str]]
    # The leaves that only a quantized weight has.
    marks: ClassVar[frozenset[str]]

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        self.config = config
        self.metadata = metadata

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module, or None if it is not quantized; it raises the errors of `weight`."""
        plain = tensors.get("weight")
        has_codes = plain is not None and not (plain.dtype in FLOAT_DTYPES or plain.dtype is torch.float64)
        return self.weight(module, tensors) if has_codes or self.marks & tensors.keys() else None

    @abstractmethod
    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Check the dtypes and shapes of a module's tensors, and return its quantized weight.

        Args:
            module: The full name of the module, for errors.
            tensors: The tensors of the module whose names are in `leaves`, and `weight`.

        Raises:
            CorruptFileError: A tensor is missing, or one does not fit the others.
            UnsupportedError: None of this package's formats can hold the weight exactly.
        """


def check_tensor(
    module: str,
    tensors: Mapping[str, Tensor],
    leaf: str,
    dtypes: tuple[torch.dtype, ...],
    *shapes: Shape,
    required: bool = True,
) -> None:
    """Check the dtype and the shape of a tensor of a weight; CorruptFileError: they are wrong, or it is missing."""
    name, tensor = f"{module}.{leaf}", tensors.get(leaf)
    if tensor is None:
        if required:
            raise CorruptFileError(name, "this tensor of a quantized weight", "none", AGAIN)
    elif tensor.dtype not in dtypes or not any(_fits(tensor.shape, shape) for shape in shapes):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = " or ".join(str(tuple("any" if size is None else size for size in shape)) for shape in shapes)
        expected = f"{wanted} of shape {sizes}".replace("'any'", "any")
        raise CorruptFileError(name, expected, f"{tensor.dtype} of shape {tuple(tensor.shape)}", AGAIN)


def _fits(sizes: torch.Size, shape: Shape) -> bool:
    return len(sizes) == len(shape) and all(
        size == want or (want is None and size > 0) for size, want in zip(sizes, shape, strict=True)
    )


def matrix(module: str, tensors: Mapping[str, Tensor], leaf: str, *dtypes: torch.dtype) -> tuple[int, int]:
    """Check the matrix of a weight's codes, and return its shape.

    CorruptFileError: it is missing, has none of these dtypes, or lies beside a tensor called `weight`.
    """
    check_tensor(module, tensors, leaf, dtypes, (None, None))
    if leaf != "weight" and "weight" in tensors:
        both = f"both codes and a weight in {tensors['weight'].dtype}"
        raise CorruptFileError(f"{module}.weight", "codes alone", both, AGAIN)
    rows, columns = tensors[leaf].shape
    return rows, columns


def integer(config: Mapping[str, Any], key: str, where: str = WHERE) -> int:
    """Return an integer of a configuration; ConfigError: it is missing, or no integer."""
    value = config.get(key)
    if type(value) is not int:
        raise ConfigError(f"{where}: {key}", "an integer", repr(value), CONFIG_AGAIN)
    return value


def block_size(config: Mapping[str, Any], key: str, where: str = WHERE) -> tuple[int, int] | None:
    """Return the rows and columns of a block with one scale, or None without blocks; ConfigError: they are no sizes."""
    block = config.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        expected = "two positive integers"
        raise ConfigError(f"{where}: {key}", expected, repr(block)[:200], CONFIG_AGAIN)
    return block[0], block[1]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int8 codes from int32 words. The first code is in the lowest bits; each is stored as code + 2^(bits - 1).

    Examples:
        >>> unpack(torch.tensor([[0x7F800081]], dtype=torch.int32), 8).tolist()
        [[1, -128, 0, -1]]
    """
    return unpack_int4(words) if bits == 4 else (words.contiguous().view(torch.uint8) ^ 128).view(torch.int8)


def unsupported(where: str, expected: str, found: str) -> UnsupportedError:
    """Return the error for weights that this package's formats cannot hold exactly."""
    return UnsupportedError(where, expected, found, FROM_FLOAT)


def asymmetric_weight(name: str, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> QuantizedTensor:
    """Return a weight of integer codes and zero points; these have the scale's shape, or are None for symmetric codes.

    If all differences of codes and zero points fit into `bits`, `integer_weight` makes the weight. Else 4-bit codes
    with one group in a row become uint4, and others int8. UnsupportedError: a difference does not fit into int8.
    """
    if zero is None or not bool(zero.any()):
        return integer_weight(name, codes, scale, bits)
    N, K = codes.shape
    scale, zero = _by_row(name, scale, N), zero.reshape(-1, 1).expand(N, 1) if zero.dim() < 2 else zero.expand(N, -1)
    differences = codes.int() - zero.int().repeat_interleave(K // zero.shape[1], dim=1)
    low, high = (int(end) for end in differences.aminmax())
    if low < -128 or high > 127:
        expected = "codes that differ from their zero points by -128 to 127"
        raise unsupported(name, expected, f"{low} to {high}")
    if bits == 4 and not -8 <= low <= high <= 7:
        form = UInt4(32).fallback((N, K))
        if isinstance(form, UInt4) and scale.shape[1] == 1:
            return _uint4(name, codes, scale, zero, form)
        bits = 8
    return integer_weight(name, differences.to(torch.int8), scale, bits)


def _uint4(name: str, codes: Tensor, scale: Tensor, zero: Tensor, form: UInt4) -> QuantizedTensor:
    """Return a uint4 weight in which all groups of a row have the row's scale and zero point."""
    pairs = codes.shape[1] // form.group_size // 2
    zero = (zero + 8).to(torch.uint8)
    tensors = {
        "qdata": pack_planes((codes + 8).to(torch.uint8), bits=4),
        "scale": scale,
        # A stored 0 is a factor of 1.
        "group_scale": torch.zeros(len(codes), pairs, dtype=torch.uint8, device=codes.device),
        "zero_point": (zero | zero << 4).expand(-1, pairs),
    }
    return _make_weight(name, form, tensors, tuple(codes.shape))


def integer_weight(name: str, codes: Tensor, scale: Tensor, bits: int) -> QuantizedTensor:
    """Return a weight of int8 codes `[N, K]` and scales: one number, `[N]`, or `[N, G]` for groups of K / G columns.

    The weight is int4 if `bits` is 4 and a group consists of groups of 32, 64 or 128 columns. Otherwise it is int8.
    """
    N, K = codes.shape
    scale = _by_row(name, scale, N)
    G = scale.shape[1]
    if bits == 4 and not bool(((codes >= -8) & (codes <= 7)).all()):
        code_range = f"{int(codes.amin())} to {int(codes.amax())}"
        raise CorruptFileError(name, "int4 codes of -8 to 7", code_range, AGAIN)
    # A group of 256 columns, or a row, becomes several groups of 128 columns that repeat its scale.
    sizes = [size for size in GROUP_SIZES if bits == 4 and (K // G) % size == 0]
    if sizes and Int4(sizes[-1]).fallback((N, K)) == Int4(sizes[-1]):
        size = sizes[-1]
        scale = scale.repeat_interleave(K // G // size, dim=1)
        return _make_weight(name, Int4(size), {"qdata": pack_int4(codes), "scale": scale}, (N, K))
    return _make_weight(name, Int8(None if G == 1 else K // G), {"qdata": codes, "scale": scale}, (N, K))


def float8_weight(name: str, codes: Tensor, scale: Tensor, rows_per_block: int = 1) -> QuantizedTensor:
    """Return a weight of float8 codes `[N, K]` and its scales: one number, `[N]`, or `[R, C]` for R * C blocks.

    A block has `rows_per_block` rows. UnsupportedError: the scales of a row differ.
    """
    N, K = codes.shape
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.float()  # exact, because these scales are powers of two
    if scale.dim() == 2 and scale.shape[0] == -(-N // rows_per_block):
        scale = scale.repeat_interleave(min(rows_per_block, N), dim=0)[:N]
    scale = _by_row(name, scale, N)
    if not bool((scale == scale[:, :1]).all()):
        several = f"{scale.shape[1]} scales along a row of {K} columns"
        raise unsupported(name, "float8 with one scale a row, as this package stores it", several)
    if bool(codes.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).any()):
        raise CorruptFileError(name, "finite float8 codes", "NaN", AGAIN)
    return _make_weight(name, Float8E4M3(), {"qdata": codes, "scale": scale[:, :1]}, (N, K))


def check_groups_in_order(name: str, g_idx: Tensor, K: int, G: int) -> None:
    """Check that the columns of a group are neighbours, by the group of each column, `g_idx`; else UnsupportedError."""
    ordered = torch.arange(K, device=g_idx.device) // max(1, K // max(1, G))
    if g_idx.shape != ordered.shape or not torch.equal(g_idx.to(torch.int64), ordered):
        scattered = "columns in groups by activation order (desc_act, actorder)"
        raise unsupported(name, "groups of neighbouring columns", scattered)


def check_groups(name: str, K: int, group_size: int) -> None:
    """Check that the group size divides the K columns of a row, unless the row is one group; else UnsupportedError."""
    if 0 < group_size < K and K % group_size:
        raise unsupported(name, f"groups that divide {K} columns", f"groups of {group_size}")


def group_count(K: int, group_size: int) -> int:
    """Return the number of groups in a row of K columns; a group size below 1 stands for one group."""
    return 1 if group_size < 1 else -(-K // group_size)


def channel_shapes(N: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that scales may have when each of N rows has one."""
    return (N, 1), (N,)


def block_shape(N: int, K: int, block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of an `[N, K]` weight with one scale for each block."""
    return -(-N // block[0]), -(-K // block[1])


def _by_row(name: str, scale: Tensor, N: int) -> Tensor:
    """Return scales (one number, `[N]` or `[N, G]`) as a view `[N, G]`.

    CorruptFileError: the number of rows is not N, or a scale is not finite.
    """
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(N, 1)
    elif scale.dim() == 1:
        scale = scale.unsqueeze(1)
    if len(scale) != N:
        raise CorruptFileError(name, f"scales for {N} rows", f"{len(scale)}", AGAIN)
    if not bool(scale.isfinite().all()):
        raise CorruptFileError(name, "finite scales", "NaN or Inf", AGAIN)
    return scale


def _make_weight(name: str, form: Format, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
    """Make a weight of stored tensors of any strides; CorruptFileError: they do not fit the format and the shape."""
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    form.check(tensors, shape, name)
    return QuantizedTensor(tensors, form, shape, tensors["scale"].dtype)
