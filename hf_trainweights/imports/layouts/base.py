"""`Layout`, the interface of another quantizer's layout, and functions that check its tensors and settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

WHERE = "quantization_config (in config.json)"
AGAIN = "The files are damaged or belong to another model; download them again."
CONFIG_AGAIN = "Download config.json again."
FROM_FLOAT = "Quantize the float model that it was made from."
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOAT8_SCALES = (*FLOAT_DTYPES, torch.float8_e8m0fnu)  # the last one holds powers of two by their exponents alone
# Powers of two by their exponents, 2**(code - 127).
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
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
    # The shape `[N, K]` of each matrix that the model's class has, by its module; `layout_of` sets it.
    shapes: Mapping[str, tuple[int, int]]

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        self.config = config
        self.metadata = metadata

    def split_name(self, name: str) -> tuple[str, str]:
        """Split a tensor's name into the name of its module and the leaf."""
        module, _, leaf = name.rpartition(".")
        return module, leaf

    def weight_name(self, module: str) -> str:
        """Return the name of the weight that the tensors of a module stand for."""
        return f"{module}.weight"

    def expert_names(self, name: str, count: int) -> list[str] | None:
        """Return the names of a tensor's `count` slices if each slice belongs to an expert of its own, else None."""
        del name, count
        return None

    def float_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor that belongs to no quantized weight with the values that Transformers' class expects.

        `name` is its name in the source.
        UnsupportedError: its dtype does not hold the values that the class has.
        """
        del name
        return tensor

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
    """Check the dtype and the shape of a tensor of a weight; it may be missing unless `required`.

    CorruptFileError: dtype or shape is none of those allowed, or the tensor is missing.
    """
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


def unsupported(where: str, expected: str, found: str) -> UnsupportedError:
    """Return the error for weights that this package's formats cannot hold exactly."""
    return UnsupportedError(where, expected, found, FROM_FLOAT)


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
