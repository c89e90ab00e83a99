"""Operations that make quantized weights while Transformers loads them, and the state of a load that they share.

Every operation makes its weight through `LoadState.parameter_or_stand_in`, so that a typed error survives the load.

Experts are quantized one by one, so that no merged float weight is ever in memory. Experts do not depend on each other,
nor do rows, except in formats whose rows share stored tensors within an expert. So stacked experts and concatenated
rows of codes are exactly the tensors that quantizing the merged weight would give.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import CorruptFileError, SaveError, TrainWeightsError, UnsupportedError
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.checkpoints import NamedLoad, QuantizerOp, collected_by_suffix
from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.models.host.ranks import LocalPart, plan_of
from hf_trainweights.models.loading.stored_weights import StoredWeight
from hf_trainweights.tensor.distributed.placements import Placed, check_parts, is_distributed, local_tensor
from hf_trainweights.tensor.distributed.shards import cut, has_own_codes
from hf_trainweights.tensor.modules import as_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import CODED_SUFFIXES, unflatten_weight

Made = TypeVar("Made")
Weight = TypeVar("Weight", bound=Tensor)

# Whether loads in this thread serve to write the weights elsewhere, and the spill for tensors that they make.
_to_write: ContextVar[tuple[bool, Spill | None]] = ContextVar("to_write", default=(False, None))


@contextlib.contextmanager
def loading_to_write(spill: Spill | None) -> Iterator[None]:
    """Let loads in this thread put the tensors that they make into a spill's files, and not warn of slow products.

    If `spill` is None, these tensors stay in memory. Tensors that a load maps from a file stay there.
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
        # The rule that cuts each distributed weight that Transformers reads unsharded, as errors name it.
        self.plans: dict[str, str] = {}
        self.error: TrainWeightsError | None = None
        self.is_to_write, self.spill = _to_write.get()

    def parameter_or_stand_in(
        self, name: str, skeleton: Tensor, make: Callable[[torch.Size], Tensor]
    ) -> Tensor | LocalPart:
        """Return a weight, as a parameter if quantized; once the load has failed, a stand-in that takes no memory.

        `make` gets the shape that was read: that of the unsharded weight, or of this rank's part. If ranks hold parts
        of the weight, this rank's part is returned.
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
        """Return the result of a function, or None once the load has failed. Keep the first typed error."""
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
        """Return this rank's part of a weight: cut out of an unsharded weight, or as it was read."""
        if not is_distributed(skeleton):
            return weight
        if not isinstance(weight, QuantizedTensor):
            next_step = "Load the model in one process, and save it without compress for several."
            raise UnsupportedError(name, "float weights as they are", "an entropy-coded one", next_step)
        local = cut(weight, skeleton, name, self.plans[name]) if name in self.plans else weight
        local.padded_rows = Placed(name, local.format, local.transposed, skeleton).gathered_rows()
        return local

    def plan_cuts(self, model: PreTrainedModel, parameters: Mapping[str, Any], pre_quantized: bool) -> Iterable[str]:
        """Return the weights that every rank reads unsharded, and keep the rules that cut them.

        In a quantized checkpoint these are the quantized weights, in a float one the weights whose codes depend on more
        than this rank's part. For the others Transformers reads only the part, which is then quantized.
        UnsupportedError: a part would be empty, or would end within a group.
        """
        self.plans = {}
        for name, parameter in parameters.items():
            choice, plan = self.choices.get(name), plan_of(model, name)
            if pre_quantized:
                # The parts are checked when the stored tensors are read: only these tell the format.
                if self._is_stored_quantized(model, name):
                    self.plans[name] = plan
            elif choice is not None and choice.format is not None:
                placed = Placed(name, choice.format, choice.transposed, parameter, plan)
                check_parts(placed)
                if not has_own_codes(placed):
                    self.plans[name] = plan
        return self.plans

    def _is_stored_quantized(self, model: PreTrainedModel, name: str) -> bool:
        """Return whether a weight is quantized in its file. If it has another name there, the choices decide."""
        prefix = base_prefix(model)
        for option in (name, name.removeprefix(prefix), prefix + name):
            if option in self.stored:
                return self.stored[option].kind == "quantized"
        return name in self.choices

    def _file(self, name: str) -> str:
        """Return the file that holds a weight, or the directory if the checkpoint has it under another name."""
        if name in self.stored:
            return str(self.stored[name].file)
        files = sorted({weight.file for weight in self.stored.values()})
        return str(files[0] if len(files) == 1 else files[0].parent) if files else "state_dict"


def keep_in(spill: Spill | None, weight: Weight) -> Weight:
    """Return a new weight, with its tensors in files if there is a spill."""
    if spill is None:
        return weight
    # The memory that the last weight left is in pieces that are too small for the next one.
    return_freed_memory()
    return weight.map(spill.keep) if isinstance(weight, QuantizedTensor) else spill.keep(weight)  # type: ignore[return-value]


def return_freed_memory() -> None:
    """Give freed memory back to the operating system, where the C library can (glibc).

    Freed buffers leave holes between quantized weights, in some processes 37 MB beside 92 MB of weights.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class TrainWeightsQuantize(QuantizerOp):
    """Quantizes float weights as they are loaded."""

    def __init__(self, state: LoadState):
        self.state = state

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
        self, input_dict: dict[str, Any], model: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Quantize each entry, a tensor or a list of one, for which the quantizer chose a format."""
        loaded = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: self.quantize_one(name, weight, model) for name, weight in loaded.items()}

    def quantize_one(self, name: str, weight: Tensor, model: Any) -> Any:
        """Quantize a weight, or return it as it is if no format was chosen for it."""
        choice = self.state.choices.get(name)
        if choice is None:
            return weight

        def make(shape: torch.Size) -> Tensor:
            _check_shape(name, weight, shape)
            return keep_in(self.state.spill, choice.quantize(weight))

        return self.state.parameter_or_stand_in(name, model.get_parameter_or_buffer(name), make)

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Any:
        """Quantize experts before they are merged. None if the weight stays float, or its layer holds it transposed."""
        choice = self.state.choices.get(name)
        if choice is None or choice.format is None or choice.transposed:
            return None
        form, skeleton = choice.format, model.get_parameter_or_buffer(name)

        def make(shape: torch.Size) -> Tensor:
            return _quantize_experts(name, shape, form, parts, len(skeleton), self.state.spill)

        return self.state.parameter_or_stand_in(name, skeleton, make)


class TrainWeightsDeserialize(QuantizerOp):
    """Puts a quantized weight together from its stored tensors."""

    def __init__(self, state: LoadState):
        self.state = state

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Any]:
        """Build one weight from its stored tensors, each of them a tensor or a list of one."""
        skeleton = model.get_parameter_or_buffer(full_layer_name)
        collected = collected_by_suffix(input_dict).items()
        tensors = {suffix: value[0] if isinstance(value, list) else value for suffix, value in collected}

        # Weights that are not decoded are views of the file, so they need no spill.
        spill = self.state.spill if tensors.keys() & CODED_SUFFIXES else None

        def make(shape: torch.Size) -> Tensor:
            weight = unflatten_weight(full_layer_name, tensors, skeleton.dtype, self.state.default, shape)
            _check_shape(full_layer_name, weight, shape)
            return keep_in(spill, weight)

        return {full_layer_name: self.state.parameter_or_stand_in(full_layer_name, skeleton, make)}


def _check_shape(name: str, weight: Tensor, shape: torch.Size) -> None:
    # Transformers up to 5.22 accepts a quantized weight of any shape.
    if weight.shape != shape:
        raise wrong_shape(name, tuple(shape), str(tuple(weight.shape)))


def _quantize_experts(
    name: str, shape: torch.Size, form: Format, parts: Sequence[Sequence[NamedLoad]], count: int, spill: Spill | None
) -> QuantizedTensor:
    """Quantize the experts of a weight `[E, N, K]` one by one and put them together.

    `parts` are concatenated along N. Each of them has one tensor per expert, which loads None if the expert is another
    rank's. `count` is the number of experts that all ranks hold together.
    """
    _, N, K = shape
    _check_count(name, count, parts)
    merged: dict[str, Tensor] = {}
    dtype, expert = torch.float32, 0
    for sources in zip(*parts, strict=True):
        weights = _load_expert(sources, N, K)
        if not weights:
            continue
        if not form.has_independent_rows and len(weights) > 1:
            # The stored tensors that rows of an expert share depend on all its rows.
            weights = [(_names(weights), torch.cat([weight for _, weight in weights]))]
        row = 0
        for source_name, weight in weights:
            stored = form.quantize(weight, source_name)
            if not merged:
                dtype = weight.dtype
                if spill is None or weight.device.type != "cpu":
                    merged = form.empty(shape, dtype, weight.device)
                else:
                    merged = {key: spill.empty(*spec) for key, spec in form.tensor_specs(shape, dtype).items()}
            for key, tensor in stored.items():
                rows = slice(None) if key in form.shared_names else slice(row, row + weight.shape[0])
                merged[key][expert, rows].copy_(tensor)
            row += weight.shape[0]
        expert += 1
    return QuantizedTensor(merged, form, shape, dtype)


def rows_of_experts(name: str, shape: Sequence[int], parts: Sequence[Sequence[NamedLoad]], numbers: Tensor) -> Tensor:
    """Return float rows `[n, K]` of experts `[E, N, K]` as a new tensor, read expert by expert.

    `numbers` are the positions of these rows among the rows of all experts, in order.
    """
    E, N, K = shape
    _check_count(name, E, parts)
    rows = []
    for expert in range(E):
        wanted = numbers[numbers // N == expert] % N
        if len(wanted):
            weights = _load_expert([sources[expert] for sources in parts], N, K)
            rows.append(torch.cat([weight for _, weight in weights])[wanted])
    return torch.cat(rows)


def _check_count(name: str, E: int, parts: Sequence[Sequence[NamedLoad]]) -> None:
    if any(len(sources) != E for sources in parts):
        counts = " and ".join(str(len(sources)) for sources in parts)
        next_step = "A shard is missing; download or save the model and its config.json again."
        raise CorruptFileError(name, f"{E} experts", counts, next_step)


def _load_expert(sources: Sequence[NamedLoad], N: int, K: int) -> list[tuple[str, Tensor]]:
    """Return the tensors of one expert `[N, K]` with their names in the checkpoint, or [] if it is another rank's."""
    loaded = [(source_name, load()) for source_name, load in sources]
    weights = [(source_name, weight) for source_name, weight in loaded if weight is not None]
    shapes = [tuple(weight.shape) for _, weight in weights]
    if weights and ({shape[1:] for shape in shapes} != {(K,)} or sum(shape[0] for shape in shapes) != N):
        raise wrong_shape(_names(weights), (N, K), " and ".join(map(str, shapes)))
    return weights


def _names(weights: Sequence[tuple[str, Tensor]]) -> str:
    return " and ".join(source_name for source_name, _ in weights)


def wrong_shape(name: str, shape: tuple[int, ...], found: str) -> CorruptFileError:
    """Return the error for a weight that has another shape than the model's."""
    return CorruptFileError(
        name,
        f"shape {shape}, as config.json has it",
        found,
        "Weights and config.json belong to different models; download or save both again. A layer that starts anew, by "
        "ignore_mismatched_sizes, must be float: name it in modules_to_not_convert where the float model is quantized.",
    )
