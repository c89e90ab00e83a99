"""The allocation for a budget: a format for each weight of a module, chosen by the errors that formats cause.

If each byte had a price, each weight would take the format with the smallest sum of loss and price. The price at which
the bytes are just spent gives the best choice there is (Shoham and Gersho, 1988). As the price falls, a weight goes
along the lower convex hull of its options. So only steps along the hulls count, in the order of their gain per byte.
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
from hf_trainweights.models.choosing.config import DEFAULT_FORMAT
from hf_trainweights.models.choosing.config_values import TARGETS, Budget, shortest
from hf_trainweights.models.choosing.selection import OVERRIDE, Choices
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.models import tied_names
from hf_trainweights.tensor.distributed.placements import is_distributed
from hf_trainweights.tensor.guards import NOTICE_NAME, guarded_names
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import FORMAT_SUFFIX, stored_name

# The most bytes that a header takes for a tensor beside its name: dtype, shape and offsets in JSON.
_ENTRY_BYTES = 110
# The length of the header, its metadata, and the padding that aligns the tensors.
_HEADER_BYTES = 128

# The formats to choose from, from the smallest to the most exact. codebook4 stands in the place of uint4 in groups of
# 32, which takes as much and loses more. Column scales are left out: their gain does not show in the error of a weight.
CANDIDATES: tuple[Format, ...] = (
    *(get_format({"format": f"uint{bits}", "group_size": size}) for bits in (2, 3) for size in (32, 16)),
    get_format({"format": "codebook4"}),
    get_format({"format": "uint4", "group_size": 16}),
    *(get_format({"format": f"uint{bits}", "group_size": size}) for bits in (5, 6) for size in (32, 16)),
    get_format({"format": "int8"}),
)

# The formats to choose from for each layout that a model may be exported to, from the smallest on.
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

# Candidates are measured on evenly spaced rows of a weight: on as many as have the first number of elements, but at
# least on the second number of rows, because some rows are unlike others. All candidates get the same rows, so which
# one is better hardly depends on the rows: allocations for MiniLM at 3 to 5 bits lose .2 % more at most than
# allocations by all rows.
_SAMPLED_ELEMENTS, _SAMPLED_ROWS = 1 << 16, 32

# Returns some rows of a stored weight `[*, N, K]` by their numbers, which count through all its matrices.
Rows = Callable[[Tensor], Tensor]
# The relative error of a weight in each candidate, see `relative_errors`.
Losses = Mapping[Format, float]


@dataclass(frozen=True)
class Option:
    """A format that a weight may have, its size, and the loss of the model by it, in any unit that adds up."""

    format: Format
    stored_bytes: int
    loss: float


def candidates(shape: Sequence[int], target: str | None) -> list[Format]:
    """Return the formats that a stored weight `[*, N, K]` can have, each once; `target` is None for no export."""
    return list(dict.fromkeys(form.fallback(shape) for form in OF_TARGETS.get(target or "", CANDIDATES)))


def rows_of(weight: Tensor) -> Rows:
    """Return a function that reads rows of a weight in memory, stored as `[*, N, K]` with any strides."""
    return lambda numbers: weight[tuple(torch.unravel_index(numbers.to(weight.device), weight.shape[:-1]))]


@torch.no_grad()
def relative_errors(name: str, shape: Sequence[int], rows: Rows, target: str | None) -> dict[Format, float]:
    """Return the squared error of a stored weight `[*, N, K]` in each candidate, over its squared norm, of a sample.

    The numbers have six digits, which are the same on every machine.
    """
    *lead, K = shape
    count = math.prod(lead)
    taken = min(count, max(_SAMPLED_ROWS, _SAMPLED_ELEMENTS // max(1, K)))
    sample = rows(torch.arange(taken, device="cpu") * count // max(1, taken)).detach().cpu().contiguous()
    norm = _squares(sample)
    losses = {}
    for form in candidates(shape, target):
        # A format that holds the weight may not hold a sample of one row.
        sample_form = form.fallback(sample.shape)
        rounded = sample_form.dequantize(sample_form.quantize(sample, name), sample.shape, torch.float32)
        losses[form] = float(f"{_squares(rounded - sample.float()) / norm if norm else 0.0:.5e}")
    return losses


def _squares(rows: Tensor) -> float:
    # The sum of a row has one order, and fsum is exact: the order in which threads add would change the last digits.
    return math.fsum(rows.double().square_().sum(dim=-1).tolist())


def weights_to_allocate(choices: Choices) -> list[Choice]:
    """Return the choices for the weights whose formats the budget decides."""
    chosen = [choice for choice in _once(choices.module, choices.summary.quantized) if choice.reason != OVERRIDE]
    return [choice for choice in chosen if not isinstance(choice.weight, QuantizedTensor)]


def _once(module: nn.Module, choices: Sequence[Choice]) -> list[Choice]:
    """Return choices, but none for a weight that will be tied to another one of them."""
    names, sources = {choice.name for choice in choices}, tied_names(module)
    return [choice for choice in choices if sources.get(choice.name) not in names]


def check_loaded(name: str, weight: Tensor) -> None:
    """Check that a weight is not on the meta device, where it has no values, and that ranks do not share it."""
    if is_distributed(weight):
        next_step = "Quantize the module, then shard it."
        raise QuantizationError(name, "a weight that this process has whole", "a DTensor", next_step)
    if weight.is_meta:
        next_step = "Load the weights, then quantize."
        raise QuantizationError(name, "a weight with values", "one on the meta device", next_step)


def allocate(choices: Choices, losses: Mapping[str, Losses], sensitivities: Mapping[str, float]) -> Choices:
    """Choose a format for each weight, and keep the configuration's budget; ConfigError: no choice fits it.

    `losses` lacks the weights that a checkpoint lacks. `sensitivities` tells how much a relative error of each weight
    changes the outputs of the model, in any unit; some weights or all may be missing.
    """
    config = choices.config
    assert config.budget is not None
    weights = weights_to_allocate(choices)
    others = _others(choices, weights)
    count = sum(choice.numel for choice in (*weights, *others))
    if config.budget.size_bytes is not None:
        limit, size = config.budget.size_bytes, _file_bytes
        fixed = _rest_bytes(choices.module, [choice.name for choice in weights])
        fixed += sum(_file_bytes(choice, choice.format) for choice in others)
    else:
        limit, size = math.floor((config.budget.bits or 0) * count / 8), Choice.stored_bytes_in
        fixed = sum(choice.bytes_after for choice in others)
    importance = _importance(weights, sensitivities)
    options = {
        choice.name: [
            Option(form, size(choice, form), importance[choice.name] * losses.get(choice.name, {}).get(form, 0.0))
            for form in candidates(choice.stored_shape, config.for_target)
        ]
        for choice in weights
    }
    least = fixed + smallest_bytes(options)
    if least > limit:
        raise _too_small(config.budget, config.for_target, least, count)
    chosen = choose_options(options, limit - fixed)
    plan = {name: shortest(option.format) for name, option in chosen.items()}
    return choices.by(config.but(format=DEFAULT_FORMAT, plan=plan))


def _others(choices: Choices, weights: Sequence[Choice]) -> list[Choice]:
    """Return the choices that are settled already and count for the budget beside the `weights`.

    A size counts all parameters. Bits count quantized weights, and float ones that only the user's exceptions keep so.
    """
    names, budget = {choice.name for choice in weights}, choices.config.budget
    others = [choice for choice in _once(choices.module, choices.summary.tensors) if choice.name not in names]
    if budget is not None and budget.size_bytes is not None:
        return others
    quantizable = {choice.name for choice in choices.without_exceptions().summary.quantized}
    return [choice for choice in others if choice.format is not None or choice.name in quantizable]


def _importance(weights: Sequence[Choice], measured: Mapping[str, float]) -> dict[str, float]:
    """Return how much a relative error of each weight matters, compared with the same error of the others.

    A weight that was not measured, such as an embedding, counts by its size, like the median of the others. If none was
    measured, each counts by the root of its size: errors of small weights matter more than in proportion.
    """
    if not measured:
        return {choice.name: math.sqrt(choice.numel) for choice in weights}
    density = statistics.median_low([measured[item.name] / item.numel for item in weights if item.name in measured])
    return {choice.name: measured.get(choice.name, density * choice.numel) for choice in weights}


def _too_small(budget: Budget, target: str | None, least: int, count: int) -> ConfigError:
    smallest = str(OF_TARGETS.get(target or "", CANDIDATES)[0])
    if budget.size_bytes is not None:
        where, limit, expected = "size", f"{budget.size_bytes:,}", f"at least {least:,} bytes"
    else:
        bits = math.ceil(800 * least / count) / 100
        where, limit, expected = "bits", f"{budget.bits}", f"at least {bits:.2f}"
    next_step = "Give as much, or let include_embeddings and fewer exceptions make the rest smaller."
    return ConfigError(where, f"{expected}, which the smallest formats take ({smallest})", limit, next_step)


def _file_bytes(choice: Choice, form: Format | None) -> int:
    """Return the most bytes that a parameter takes in a file, header entries included; `form` is None for float."""
    if form is None:
        # Experts in float are saved one by one.
        entries = len(choice.weight) if choice.weight.dim() == 3 else 1
        return choice.bytes_after + entries * (len(choice.name.encode()) + _ENTRY_BYTES)
    stored_bytes = choice.bytes_after if form == choice.format else choice.stored_bytes_in(form)
    description_bytes = len(json.dumps(form.get_config() | {"transposed": True, "dtype": "bfloat16"}))
    names = [stored_name(choice.name, suffix) for suffix in (*form.tensor_names, FORMAT_SUFFIX)]
    return stored_bytes + description_bytes + sum(len(name.encode()) + _ENTRY_BYTES for name in names)


def _rest_bytes(module: nn.Module, names: Sequence[str]) -> int:
    """Return the most bytes in a file beside the parameters: buffers, guards of the quantized `names`, the header."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict(keep_vars=True).items()
    buffers = [(name, value.nbytes) for name, value in state if name not in parameters and hasattr(value, "nbytes")]
    guards = [(name, 1) for name in (NOTICE_NAME, *guarded_names(names))]
    return _HEADER_BYTES + sum(len(name.encode()) + _ENTRY_BYTES + count for name, count in (*buffers, *guards))


def smallest_bytes(options: Mapping[str, Sequence[Option]]) -> int:
    """Return the fewest bytes that weights can take."""
    return sum(min(option.stored_bytes for option in weight_options) for weight_options in options.values())


def choose_options(options: Mapping[str, Sequence[Option]], limit_bytes: int) -> dict[str, Option]:
    """Return an option for each weight, so that the loss is least and the bytes add up to a limit at most.

    The limit is at least `smallest_bytes(options)`. Ties go to the weight that comes first.
    """
    hulls = {name: _hull(weight_options) for name, weight_options in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    bytes_left = limit_bytes - sum(option.stored_bytes for option in chosen.values())
    steps = [(_gain_per_byte(a, b), name, b) for name, hull in hulls.items() for a, b in itertools.pairwise(hull)]
    stopped: set[str] = set()
    # Python's sort is stable, and along a hull the gain falls, so the steps of a weight stay in order.
    for _, name, option in sorted(steps, key=lambda step: -step[0]):
        added = option.stored_bytes - chosen[name].stored_bytes
        if name in stopped or added > bytes_left:
            stopped.add(name)
            continue
        chosen[name], bytes_left = option, bytes_left - added
    return _spend_rest(options, chosen, bytes_left)


def _spend_rest(options: Mapping[str, Sequence[Option]], chosen: dict[str, Option], rest: int) -> dict[str, Option]:
    """Spend the `rest` of the bytes, on options off the hull too, the largest gain first, and return the choice."""
    pairs = [(name, option) for name, weight_options in options.items() for option in weight_options]
    while better := [
        (name, option)
        for name, option in pairs
        if option.loss < chosen[name].loss and option.stored_bytes - chosen[name].stored_bytes <= rest
    ]:
        name, option = max(better, key=lambda pair: chosen[pair[0]].loss - pair[1].loss)
        rest -= option.stored_bytes - chosen[name].stored_bytes
        chosen[name] = option
    return chosen


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of loss over bytes, from the smallest to the most exact."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.stored_bytes, option.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain_per_byte(hull[-2], hull[-1]) <= _gain_per_byte(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _gain_per_byte(smaller: Option, larger: Option) -> float:
    # Two options of equal size are never both on a hull.
    return (smaller.loss - larger.loss) / (larger.stored_bytes - smaller.stored_bytes)
