"""What the operations of one load share: the choices, the files, and the first error."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import SaveError, TrainWeightsError, UnsupportedError
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.models.host.ranks import LocalPart, plan_of
from hf_trainweights.models.loading.stored_weights import StoredWeight
from hf_trainweights.tensor.distributed.placements import Placed, check_parts, is_distributed, local_tensor
from hf_trainweights.tensor.distributed.shards import cut, has_own_codes
from hf_trainweights.tensor.modules import as_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

Made = TypeVar("Made")
Weight = TypeVar("Weight", bound=Tensor)

# Whether loads in this thread are to write the weights elsewhere, and what takes what they make.
_to_write: ContextVar[tuple[bool, Spill | None]] = ContextVar("to_write", default=(False, None))


@contextlib.contextmanager
def loading_to_write(spill: Spill | None) -> Iterator[None]:
    """Let loads in this thread put what they make into files, in memory without a spill, and say nothing of products.

    What they map stays where it is.
    """
    token = _to_write.set((True, spill))
    try:
        yield
    finally:
        _to_write.reset(token)


class LoadState:
    """The choices, the files and the first error of one load.

    Transformers catches an error inside an operation and reports it as untyped text at the end. So the first typed
    error is kept here, and the quantizer raises it when the load is over.
    """

    def __init__(self, default: Format):
        self.default = default
        self.choices: dict[str, Choice] = {}
        self.stored: Mapping[str, StoredWeight] = {}
        # What cuts each weight that ranks hold parts of and that Transformers reads whole.
        self.plans: dict[str, str] = {}
        self.error: TrainWeightsError | None = None
        self.is_to_write, self.spill = _to_write.get()

    def parameter_or_stand_in(
        self, name: str, skeleton: Tensor, make: Callable[[torch.Size], Tensor]
    ) -> Tensor | LocalPart:
        """Return a weight, as a parameter if quantized; once the load has failed, a stand-in that takes no memory.

        `make` gets the shape that a float weight or the weight of stored tensors arrives in. Where ranks hold parts of
        the weight, the part of this rank is returned.
        """
        local = local_tensor(skeleton).shape
        shape = skeleton.shape if name in self.plans else local
        made = self.attempt(lambda: self._own_part(name, make(shape), skeleton))
        if made is None:
            made = torch.zeros((), dtype=skeleton.dtype, device="cpu").expand(local)
            made = nn.Parameter(made, requires_grad=False)
        if is_distributed(skeleton):
            return LocalPart(made)
        return as_parameter(made) if isinstance(made, QuantizedTensor) else made

    def attempt(self, make: Callable[[], Made]) -> Made | None:
        """Return what a function makes, None once the load has failed; a typed error that it raises is kept."""
        if self.error is None:
            try:
                return make()
            except SaveError as error:
                self.error = error
            except TrainWeightsError as error:
                where = f"{self._file(error.where)}: {error.where}"
                self.error = type(error)(where, error.expected, error.found, error.next_step)
                self.error.__cause__ = error
        return None

    def _own_part(self, name: str, weight: Tensor, skeleton: Tensor) -> Tensor:
        """Return what this rank holds of a weight that was read: its part of one that was read whole."""
        if not is_distributed(skeleton):
            return weight
        if not isinstance(weight, QuantizedTensor):
            expected, found = "float weights as they are", "an entropy-coded one"
            next_step = "Load the model in one process, and save it without compress for several."
            raise UnsupportedError(name, expected, found, next_step)
        part = cut(weight, skeleton, name, self.plans[name]) if name in self.plans else weight
        part.padded_rows = Placed(name, part.format, part.transposed, skeleton).gathered_rows()
        return part

    def plan_cuts(self, model: PreTrainedModel, parameters: Mapping[str, Any], pre_quantized: bool) -> Iterable[str]:
        """Return the weights that every rank reads whole, and keep what cuts them.

        Of a quantized checkpoint these are the quantized weights. Of a float one they are those whose codes depend on
        more than this rank's part: of the others Transformers reads the part alone, which is then quantized.
        UnsupportedError: a part would be empty, or would end within a group.
        """
        self.plans = {}
        for name, parameter in parameters.items():
            choice, plan = self.choices.get(name), plan_of(model, name)
            if pre_quantized:
                # Its format is known when its stored tensors are there.
                if self._is_stored_quantized(model, name):
                    self.plans[name] = plan
            elif choice is not None and choice.format is not None:
                placed = Placed(name, choice.format, choice.transposed, parameter, plan)
                check_parts(placed)
                if not has_own_codes(placed):
                    self.plans[name] = plan
        return self.plans

    def _is_stored_quantized(self, model: PreTrainedModel, name: str) -> bool:
        """Return whether files have a weight quantized; where they have another name for it, what was chosen tells."""
        prefix = base_prefix(model)
        for stored_name in (name, name.removeprefix(prefix), prefix + name):
            if stored_name in self.stored:
                return self.stored[stored_name].kind == "quantized"
        return name in self.choices

    def _file(self, name: str) -> str:
        """Return the file that holds a weight; the directory where the checkpoint has it under another name."""
        if name in self.stored:
            return str(self.stored[name].file)
        files = sorted({weight.file for weight in self.stored.values()})
        return str(files[0] if len(files) == 1 else files[0].parent) if files else "state_dict"


def keep_in(spill: Spill | None, weight: Weight) -> Weight:
    """Return a weight that was made, its tensors in files if there is a spill."""
    if spill is None:
        return weight
    # What was freed for the last weight is in pieces that the next one does not fit into.
    return_freed_memory()
    return weight.map(spill.keep) if isinstance(weight, QuantizedTensor) else spill.keep(weight)  # type: ignore[return-value]


def return_freed_memory() -> None:
    """Give memory that was freed back to the operating system, where the C library can (glibc).

    Between quantized weights stay holes where buffers were, in some processes 37 MB beside 92 MB of weights.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
