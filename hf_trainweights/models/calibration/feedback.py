"""Codes with error feedback: what rounding one column loses, the columns after it make up for as far as they can.

The method is GPTQ (Frantar et al., 2022, arXiv 2210.17323), with the scales of a group chosen when its first column is
reached, by squared errors that count as much as the later columns cannot make up for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.files.coded_tensors import encode_tensors
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.columns import ColumnCodes
from hf_trainweights.models.calibration.moments import Moments

# Columns whose errors reach the columns behind the block by one product. A multiple of every group size.
_BLOCK_COLUMNS = 128


def quantize_with_feedback(weight: Tensor, form: Format, moments: Moments, factor: Tensor) -> dict[str, Tensor] | None:
    """Quantize a finite weight `[N, K]` so that its products with inputs of such moments change least.

    The weight has the dtype its scales will have; `factor` is `moments.factor()`. None for a format that gains nothing.
    """
    codes = form.columns(weight, _importance(factor))
    if codes is None:
        return None
    target = moments.corrected(weight.float(), factor).t().contiguous()
    while True:
        _choose(target.clone(), factor, codes)
        if not codes.again(_file_bits):
            return codes.tensors()


def _file_bits(tensors: Mapping[str, Tensor]) -> float:
    """Return how many bits the entropy-coded tensors of a weight take in a file."""
    return 8 * encode_tensors(tensors).numel()


def _importance(factor: Tensor) -> Tensor:
    """Return what a squared error in each column costs once the columns behind it have made up for what they can."""
    importance = factor.diagonal().pow(-2)
    return importance / importance.mean()


def _choose(columns: Tensor, factor: Tensor, codes: ColumnCodes) -> None:
    """Choose codes for columns `[K, N]`, which are overwritten: a column is contiguous, and groups lie one by one."""
    K, diagonal = len(columns), factor.diagonal().tolist()
    for start in range(0, K, _BLOCK_COLUMNS):
        block = columns[start : start + _BLOCK_COLUMNS]
        end = start + len(block)
        errors = torch.empty_like(block)
        for place, column in enumerate(range(start, end)):
            if codes.group_size and column % codes.group_size == 0:
                codes.begin_group(column // codes.group_size, block[place : place + codes.group_size])
            values = block[place]
            torch.sub(values, codes.encode(column, values), out=errors[place]).div_(diagonal[column])
            block[place + 1 :].addr_(factor[column, column + 1 : end], errors[place], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
