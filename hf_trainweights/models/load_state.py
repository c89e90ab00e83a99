"""What the operations of one load share: the choices, the files, and the first error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.formats.base import Format
from hf_trainweights.models.stored_weights import StoredWeight
from hf_trainweights.models.summary import Choice
from hf_trainweights.tensor.modules import as_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

Made = TypeVar("Made")


class LoadState:
    """The choices, the files and the first error of one load.

    Transformers catches an error inside an operation and reports it as untyped text at the end. So the first typed
    error is kept here, and the quantizer raises it when the load is over.

    Args:
        default: The format that the configuration names.
    """

    def __init__(self, default: Format):
        self.default = default
        self.choices: dict[str, Choice] = {}
        self.stored: Mapping[str, StoredWeight] = {}
        self.error: TrainWeightsError | None = None

    def parameter_or_stand_in(self, skeleton: Tensor, make: Callable[[], QuantizedTensor]) -> nn.Parameter:
        """Return a quantized parameter, or once the load has failed a stand-in for it that takes no memory.

        Args:
            skeleton: The parameter of the model on the meta device.
            make: Makes the weight; a typed error that it raises is kept, with the file that the weight lies in.
        """
        made = self.attempt(make)
        return self.stand_in(skeleton) if made is None else as_parameter(made)

    def attempt(self, make: Callable[[], Made]) -> Made | None:
        """Return what a function makes, or None once the load has failed.

        Args:
            make: The function; a typed error that it raises is kept, with the file that the weight lies in.
        """
        if self.error is None:
            try:
                return make()
            except TrainWeightsError as error:
                where = f"{self._file(error.where)}: {error.where}"
                self.error = type(error)(where, error.expected, error.found, error.next_step)
                self.error.__cause__ = error
        return None

    def stand_in(self, skeleton: Tensor) -> nn.Parameter:
        """Return a parameter that takes no memory.

        Args:
            skeleton: The parameter of the model on the meta device.
        """
        stand_in = torch.zeros((), dtype=skeleton.dtype).expand(skeleton.shape)
        return nn.Parameter(stand_in, requires_grad=False)

    def _file(self, name: str) -> str:
        """Return the file that holds a weight; the directory where the checkpoint has it under another name."""
        if name in self.stored:
            return str(self.stored[name].file)
        files = sorted({weight.file for weight in self.stored.values()})
        return str(files[0] if len(files) == 1 else files[0].parent) if files else "state_dict"
