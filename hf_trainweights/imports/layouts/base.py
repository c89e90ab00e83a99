"""What a layout of another quantizer is: a configuration, and how one of its weights is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.imports.weights import FROM_FLOAT
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

WHERE = "quantization_config (in config.json)"


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

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        self.config = config
        self.metadata = metadata

    @abstractmethod
    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module.

        Args:
            module: Its full name, for errors.
            tensors: Those tensors of the module whose names are in `leaves`.

        Returns:
            The weight, with the very codes and scales of the file; None where it is not quantized.

        Raises:
            CorruptFileError: A tensor is missing, or one does not fit the others.
            UnsupportedError: None of this package's formats can hold it exactly.
        """


def integer(config: Mapping[str, Any], key: str, where: str = WHERE) -> int:
    """Return a number of a configuration.

    Args:
        config: JSON values.
        key: Its name.
        where: What errors call the configuration.

    Raises:
        ConfigError: It is missing, or no integer.
    """
    value = config.get(key)
    if type(value) is not int:
        raise ConfigError(f"{where}: {key}", "an integer", repr(value), "Download config.json again.")
    return value


def tables(config: Mapping[str, Any], key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables in a table of a configuration, with their names.

    Args:
        config: JSON values.
        key: The name of the outer table.

    Raises:
        ConfigError: There is no such table of tables.
    """
    outer = config.get(key)
    if not isinstance(outer, Mapping) or not all(isinstance(inner, Mapping) for inner in outer.values()):
        raise ConfigError(f"{WHERE}: {key}", "a table of tables", repr(outer)[:200], "Download config.json again.")
    yield from outer.items()


def no_place(where: str, expected: str, found: str) -> UnsupportedError:
    """Return the error for what this package's formats cannot hold exactly.

    Args:
        where: The option or tensor.
        expected: What they could hold.
        found: What is there.
    """
    return UnsupportedError(where, expected, found, FROM_FLOAT)
