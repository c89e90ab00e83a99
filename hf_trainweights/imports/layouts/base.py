"""What a layout of another quantizer is: a configuration, the tensors of a weight, and how these are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.weights import AGAIN, FROM_FLOAT
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

WHERE = "quantization_config (in config.json)"
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

# None stands for any size but 0.
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Part:
    """What a tensor of a quantized weight has to be."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Shape, ...]
    required: bool = True

    def check(self, name: str, tensor: Tensor | None) -> None:
        """Raise CorruptFileError unless a tensor is this one; None stands for a tensor that is not there."""
        if tensor is None:
            if self.required:
                raise CorruptFileError(name, "this tensor of a quantized weight", "none", AGAIN)
        elif tensor.dtype not in self.dtypes or not any(_fits(tensor.shape, shape) for shape in self.shapes):
            dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            shapes = " or ".join(str(tuple("any" if size is None else size for size in shape)) for shape in self.shapes)
            expected = f"{dtypes} of shape {shapes}".replace("'any'", "any")
            raise CorruptFileError(name, expected, f"{tensor.dtype} of shape {tuple(tensor.shape)}", AGAIN)


def _fits(found: torch.Size, shape: Shape) -> bool:
    return len(found) == len(shape) and all(
        size == want or (want is None and size > 0) for size, want in zip(found, shape, strict=True)
    )


class Layout(ABC):
    """A layout as its configuration describes it.

    Args:
        config: The `quantization_config` of config.json.
        metadata: What the headers of its safetensors files say beside the tensors.

    Raises:
        ConfigError: The configuration is none of this layout.
        UnsupportedError: None of this package's formats can hold exactly what it describes.
    """

    # The last parts of the names of all tensors that may stand for a quantized weight, or for its activations.
    leaves: ClassVar[frozenset[str]]
    # Those of them that no float weight has.
    marks: ClassVar[frozenset[str]]

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        self.config = config
        self.metadata = metadata

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module, once all tensors that it needs are there in the right dtypes and shapes.

        Args:
            module: Its full name, for errors.
            tensors: Those tensors of the module whose names are in `leaves`, and `weight`.

        Returns:
            The weight, with the very codes and scales of the file; None where it is not quantized.

        Raises:
            CorruptFileError: A tensor is missing, or one does not fit the others.
            UnsupportedError: None of this package's formats can hold it exactly.
        """
        plain = tensors.get("weight")
        has_codes = plain is not None and not (plain.dtype in FLOAT_DTYPES or plain.dtype is torch.float64)
        if not has_codes and not self.marks & tensors.keys():
            return None
        parts = self.parts(module, tensors)
        for leaf, part in parts.items():
            part.check(f"{module}.{leaf}", tensors.get(leaf))
        if plain is not None and "weight" not in parts:
            found = f"both codes and a weight in {plain.dtype}"
            raise CorruptFileError(f"{module}.weight", "codes alone", found, AGAIN)
        return self.weight(module, tensors)

    @abstractmethod
    def parts(self, module: str, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return what the tensors of a quantized weight have to be; its codes, which tell the sizes, are checked here.

        Raises:
            CorruptFileError: The codes are missing, or are none.
            UnsupportedError: None of this package's formats can hold such a weight exactly.
        """

    @abstractmethod
    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight that tensors stand for, which are what `parts` says.

        Raises:
            CorruptFileError: Their values do not fit each other.
            UnsupportedError: None of this package's formats can hold it exactly.
        """


def matrix(module: str, tensors: Mapping[str, Tensor], leaf: str, *dtypes: torch.dtype) -> tuple[int, int]:
    """Return the shape of the matrix of a weight's codes; CorruptFileError: it is missing, or none of these dtypes."""
    Part(dtypes, ((None, None),)).check(f"{module}.{leaf}", tensors.get(leaf))
    rows, columns = tensors[leaf].shape
    return rows, columns


def integer(config: Mapping[str, Any], key: str, where: str = WHERE) -> int:
    """Return a number of a configuration; ConfigError: it is missing, or no integer."""
    value = config.get(key)
    if type(value) is not int:
        raise ConfigError(f"{where}: {key}", "an integer", repr(value), "Download config.json again.")
    return value


def block_size(config: Mapping[str, Any], key: str, where: str = WHERE) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, None if none are given; ConfigError: they are no sizes."""
    block = config.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        expected = "two positive integers"
        raise ConfigError(f"{where}: {key}", expected, repr(block)[:200], "Download config.json again.")
    return block[0], block[1]


def no_place(where: str, expected: str, found: str) -> UnsupportedError:
    """Return the error for what this package's formats cannot hold exactly."""
    return UnsupportedError(where, expected, found, FROM_FLOAT)
