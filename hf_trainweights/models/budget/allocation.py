"""An allocation for a budget: from the weights of a module and what each format loses of them to a format for each.

For a price of a byte, each weight takes the format with the smallest sum of loss and price; the price at which the
bytes are spent gives the best choice there is (Shoham and Gersho, 1988). As the price falls, a weight goes along the
lower convex hull of its options, so all that is needed is these steps, in the order of what they gain per byte.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_trainweights.errors import ConfigError, QuantizationError
from hf_trainweights.formats import FORMATS, get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config import DEFAULT_FORMAT, TrainWeightsConfig
from hf_trainweights.models.choosing.config_values import TARGETS, Budget, shortest
from hf_trainweights.models.choosing.selection import OVERRIDE, choose
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.models import tied_names
from hf_trainweights.tensor.distributed.placements import is_distributed
from hf_trainweights.tensor.guards import NOTICE_NAME, guarded_names
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import FORMAT_SUFFIX, stored_name

# What a header has at most for a tensor beside its name: dtype, shape and offsets in JSON.
_ENTRY_BYTES = 110
# The header's own length and its metadata, and what aligns the tensors.
_HEADER_BYTES = 128

# From the smallest to the most exact. codebook4 stands where uint4 in groups of 32 would, which takes as much and loses
# more. Column scales are left out: what they gain is not seen in the error of a weight.
CANDIDATES: tuple[Format, ...] = (
    *(get_format({"format": f"uint{bits}", "group_size": size}) for bits in (2, 3) for size in (32, 16)),
    get_format({"format": "codebook4"}),
    get_format({"format": "uint4", "group_size": 16}),
    *(get_format({"format": f"uint{bits}", "group_size": size}) for bits in (5, 6) for size in (32, 16)),
    get_format({"format": "int8"}),
)

# Where a model is to be exported to a layout that does not hold all of these: what it holds, from the smallest too.
OF_TARGETS: dict[str, tuple[Format, ...]] = {
    target: tuple(
        sorted(
            (
                get_format({"format": name, "group_size": size})
                for name, form in FORMATS.items()
                for size in form.groups_for_targets.get(target, ())
            ),
            key=lambda form: form.stored_bytes((1, 1024), torch.bfloat16),
        )
    )
    for target in TARGETS
}

# Candidates are measured on so many elements of a weight: rows, evenly spaced, and enough of them not to miss that some
# are unlike others. All candidates get the same rows, so which is better hardly depends on the choice: allocations for
# MiniLM at 3 to 5 bits lose .2 % more at most than those that all rows give.
_SAMPLED_ELEMENTS, _SAMPLED_ROWS = 1 << 16, 32

# Returns some rows of a stored weight `[*, N, K]`, by their numbers among those of all its matrices.
Rows = Callable[[Tensor], Tensor]
# What each candidate loses of a weight, see `relative_errors`.
Losses = Mapping[Format, float]


@dataclass(frozen=True)
class Option:
    """A format that a weight may have, and what the model loses by it, in any unit that adds up."""

    format: Format
    stored_bytes: int
    loss: float


def candidates(shape: Sequence[int], target: str | None) -> list[Format]:
    """Return the formats that a stored weight `[*, N, K]` can have, each once; None stands for any target."""
    return list(dict.fromkeys(form.fallback(shape) for form in OF_TARGETS.get(target or "", CANDIDATES)))


def rows_of(weight: Tensor) -> Rows:
    """Return what reads rows of a weight in memory, stored as `[*, N, K]` with any strides, by their numbers."""
    return lambda numbers: weight[tuple(torch.unravel_index(numbers.to(weight.device), weight.shape[:-1]))]


@torch.no_grad()
def relative_errors(name: str, shape: Sequence[int], rows: Rows, target: str | None) -> dict[Format, float]:
    """Return what each candidate loses of a stored weight `[*, N, K]`: squared error over squared norm, of a sample.

    The numbers have six digits, which are the same on every machine.
    """
    *lead, K = shape
    count = math.prod(lead)
    taken = min(count, max(_SAMPLED_ROWS, _SAMPLED_ELEMENTS // max(1, K)))
    sample = rows(torch.arange(taken, device="cpu") * count // max(1, taken)).detach().cpu().contiguous()
    norm = _squares(sample)
    losses = {}
    for form in candidates(shape, target):
        # A single row may not fit where the whole weight does.
        here = form.fallback(sample.shape)
        rounded = here.dequantize(here.quantize(sample, name), sample.shape, torch.float32)
        losses[form] = float(f"{_squares(rounded - sample.float()) / norm if norm else 0.0:.5e}")
    return losses


def _squares(rows: Tensor) -> float:
    # Row by row, and these exactly: the order in which threads add would change the last digits.
    return math.fsum(rows.double().square_().sum(dim=-1).tolist())


def weights_to_allocate(module: nn.Module, config: TrainWeightsConfig) -> list[Choice]:
    """Return the weights whose formats a budget decides about."""
    chosen = _once(module, choose(module, config).quantized)
    return [each for each in chosen if each.reason != OVERRIDE and not isinstance(each.weight, QuantizedTensor)]


def _once(module: nn.Module, choices: Sequence[Choice]) -> list[Choice]:
    """Return choices without those of weights that will be tied to others."""
    names, tied = {each.name for each in choices}, tied_names(module)
    return [each for each in choices if tied.get(each.name) not in names]


def check_loaded(name: str, weight: Tensor) -> None:
    """Check that a weight is not on the meta device, where it has no values, and that ranks do not share it."""
    if is_distributed(weight):
        expected, found = "a weight that this process has whole", "a DTensor"
        raise QuantizationError(name, expected, found, "Quantize the module, then shard it.")
    if weight.is_meta:
        expected, found = "a weight with values", "one on the meta device"
        raise QuantizationError(name, expected, found, "Load the weights, then quantize.")


def allocate(
    module: nn.Module, config: TrainWeightsConfig, losses: Mapping[str, Losses], sensitivities: Mapping[str, float]
) -> TrainWeightsConfig:
    """Return a configuration with a format for each weight of a module; ConfigError: no choice fits the budget.

    `losses` has none for a weight that a checkpoint lacks. `sensitivities` tell how much a relative error of a weight
    changes what the model returns, in any unit; of some weights or of all they may be missing.
    """
    assert config.budget is not None
    weights = weights_to_allocate(module, config)
    others = _others(module, config, weights)
    count = sum(each.numel for each in (*weights, *others))
    if config.budget.size_bytes is not None:
        limit, size = config.budget.size_bytes, _file_bytes
        fixed = _rest_bytes(module, [each.name for each in weights])
        fixed += sum(_file_bytes(each, each.format) for each in others)
    else:
        limit, size = math.floor((config.budget.bits or 0) * count / 8), Choice.stored_bytes_in
        fixed = sum(each.bytes_after for each in others)
    matters = _importance(weights, sensitivities)
    options = {
        each.name: [
            Option(form, size(each, form), matters[each.name] * losses.get(each.name, {}).get(form, 0.0))
            for form in candidates(each.stored_shape, config.for_target)
        ]
        for each in weights
    }
    least = fixed + smallest_bytes(options)
    if least > limit:
        raise _too_small(config.budget, config.for_target, least, count)
    chosen = choose_options(options, limit - fixed)
    return config.but(format=DEFAULT_FORMAT, plan={name: shortest(each.format) for name, each in chosen.items()})


def _others(module: nn.Module, config: TrainWeightsConfig, weights: Sequence[Choice]) -> list[Choice]:
    """Return the choices that count and are made already: of a size all; of bits those of weights.

    What no configuration would quantize does not count as bits, but what the user excepts does.
    """
    to_allocate = {each.name for each in weights}
    others = [each for each in _once(module, choose(module, config).tensors) if each.name not in to_allocate]
    if config.budget is not None and config.budget.size_bytes is not None:
        return others
    plain = {each.name for each in choose(module, config.but(overrides={}, modules_to_not_convert=None)).quantized}
    return [each for each in others if each.format is not None or each.name in plain]


def _importance(weights: Sequence[Choice], measured: Mapping[str, float]) -> dict[str, float]:
    """Return how much a relative error of each weight matters beside the same error of the others.

    A weight of which that is not known, such as an embedding, counts by its size, like the median of the others; if it
    is known of none, by the root of its size: errors of small weights matter more than in proportion.
    """
    if not measured:
        return {each.name: math.sqrt(each.numel) for each in weights}
    density = statistics.median_low([measured[each.name] / each.numel for each in weights if each.name in measured])
    return {each.name: measured.get(each.name, density * each.numel) for each in weights}


def _too_small(budget: Budget, target: str | None, least: int, count: int) -> ConfigError:
    smallest = str(OF_TARGETS.get(target or "", CANDIDATES)[0])
    if budget.size_bytes is not None:
        where, found, expected = "size", f"{budget.size_bytes:,}", f"at least {least:,} bytes"
    else:
        bits = math.ceil(800 * least / count) / 100
        where, found, expected = "bits", f"{budget.bits}", f"at least {bits:.2f}"
    next_step = "Give as much, or let include_embeddings and fewer exceptions make the rest smaller."
    return ConfigError(where, f"{expected}, which the smallest formats take ({smallest})", found, next_step)


def _file_bytes(choice: Choice, form: Format | None) -> int:
    """Return the most bytes that a parameter takes in a file in a format, None for float, header entries included."""
    if form is None:
        # Experts in float are saved one by one.
        entries = len(choice.weight) if choice.weight.dim() == 3 else 1
        return choice.bytes_after + entries * (len(choice.name.encode()) + _ENTRY_BYTES)
    stored_bytes = choice.bytes_after if form == choice.format else choice.stored_bytes_in(form)
    described = len(json.dumps(form.get_config() | {"transposed": True, "dtype": "bfloat16"}))
    names = [stored_name(choice.name, suffix) for suffix in (*form.tensor_names, FORMAT_SUFFIX)]
    return stored_bytes + described + sum(len(name.encode()) + _ENTRY_BYTES for name in names)


def _rest_bytes(module: nn.Module, names: Sequence[str]) -> int:
    """Return the bytes in a file beside the parameters: buffers, guards of the quantized `names`, header, at most."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict(keep_vars=True).items()
    buffers = [(name, each.nbytes) for name, each in state if name not in parameters and hasattr(each, "nbytes")]
    guards = [(name, 1) for name in (NOTICE_NAME, *guarded_names(names))]
    return _HEADER_BYTES + sum(len(name.encode()) + _ENTRY_BYTES + count for name, count in (*buffers, *guards))


def smallest_bytes(options: Mapping[str, Sequence[Option]]) -> int:
    """Return the fewest bytes that weights can take."""
    return sum(min(each.stored_bytes for each in choices) for choices in options.values())


def choose_options(options: Mapping[str, Sequence[Option]], limit_bytes: int) -> dict[str, Option]:
    """Return an option for each weight: those of least loss whose bytes add up to a limit at most.

    The limit is at least `smallest_bytes(options)`. Ties go to the weight that comes first.
    """
    hulls = {name: _hull(choices) for name, choices in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = limit_bytes - sum(each.stored_bytes for each in chosen.values())
    steps = [(_gain_per_byte(a, b), name, b) for name, hull in hulls.items() for a, b in itertools.pairwise(hull)]
    stopped: set[str] = set()
    # Python's sort is stable, and along a hull the gain falls, so the steps of a weight stay in order.
    for _, name, option in sorted(steps, key=lambda step: -step[0]):
        added = option.stored_bytes - chosen[name].stored_bytes
        if name in stopped or added > left:
            stopped.add(name)
            continue
        chosen[name], left = option, left - added
    return _spend_rest(options, chosen, left)


def _spend_rest(options: Mapping[str, Sequence[Option]], chosen: dict[str, Option], left: int) -> dict[str, Option]:
    """Return the choice with what is left spent: on options off the hull too, the largest gain first."""
    pairs = [(name, each) for name, choices in options.items() for each in choices]
    while better := [
        (name, each)
        for name, each in pairs
        if each.loss < chosen[name].loss and each.stored_bytes - chosen[name].stored_bytes <= left
    ]:
        name, option = max(better, key=lambda pair: chosen[pair[0]].loss - pair[1].loss)
        left -= option.stored_bytes - chosen[name].stored_bytes
        chosen[name] = option
    return chosen


def _hull(choices: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of loss over bytes, from the smallest to the most exact."""
    hull: list[Option] = []
    for option in sorted(choices, key=lambda each: (each.stored_bytes, each.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain_per_byte(hull[-2], hull[-1]) <= _gain_per_byte(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _gain_per_byte(smaller: Option, larger: Option) -> float:
    # Two options of equal size are never both on a hull.
    return (smaller.loss - larger.loss) / (larger.stored_bytes - smaller.stored_bytes)
