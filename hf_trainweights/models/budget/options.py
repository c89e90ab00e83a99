"""The formats that a budget chooses from, and what each loses of a weight, told from a sample of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_trainweights.formats import FORMATS, get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config_values import TARGETS

# From the smallest to the most exact. codebook4 stands where uint4 in groups of 32 would, which takes as much and loses
# more. Column scales are left out: what they gain is not seen in the error of a weight.
CANDIDATES: tuple[Format, ...] = tuple(
    map(
        get_format,
        (
            *({"format": f"uint{bits}", "group_size": size} for bits in (2, 3) for size in (32, 16)),
            {"format": "codebook4"},
            {"format": "uint4", "group_size": 16},
            *({"format": f"uint{bits}", "group_size": size} for bits in (5, 6) for size in (32, 16)),
            {"format": "int8"},
        ),
    )
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
# are unlike others. All candidates get the same rows, so which is better hardly depends on the choice: plans for MiniLM
# at 3 to 5 bits lose .2 % more at most than those that all rows give.
_SAMPLED_ELEMENTS, _SAMPLED_ROWS = 1 << 16, 32

# Returns some rows of a stored weight `[*, N, K]`, by their numbers among those of all its matrices.
Rows = Callable[[Tensor], Tensor]


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
