"""Where they are on, checks refuse whatever a product would not read as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fresh_process import run_fresh
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels.arguments import check_product


def check(any_strides: bool = False, **changes: Any) -> None:
    """Check a product of x `[3, 1, 32]` with an int8 weight `[8, 32]` in groups of 16."""
    given = {
        "x": torch.zeros(3, 1, 32),
        "qdata": torch.zeros(8, 32, dtype=torch.int8),
        "scale": torch.zeros(8, 2),
        "bias": torch.zeros(8),
    } | changes
    check_product("op", given.pop("x"), given, Int8(16), given.pop("bias"), any_strides)


def without_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"x": torch.zeros(32)},
        {"x": torch.zeros(0, 32)},
        {"bias": None},
        {"x": torch.zeros(32, 4).t(), "bias": torch.zeros(8, 2)[:, 1], "any_strides": True},
    ],
    ids=["as they should be", "a vector", "no rows", "no bias", "strides that the op reads"],
)
def test_right_tensors_pass(changes: dict[str, Any]) -> None:
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 16)}, r"op, argument x: expected shape \(3, 32\), found \(3, 16\)"),
        ({"scale": torch.zeros(9, 2)}, r"argument scale: expected shape \(8, 2\), found \(9, 2\)"),
        ({"scale": torch.zeros(8)}, r"argument scale: expected shape \(8, 2\), found \(8,\)"),
        ({"scale": torch.zeros(8, 3)}, r"argument scale: expected shape \(8, 2\), found \(8, 3\)"),
        ({"bias": torch.zeros(9)}, r"argument bias: expected shape \(8,\), found \(9,\)"),
        ({"bias": torch.zeros(8).half()}, r"argument bias: expected one of torch\.float32, found torch\.float16"),
        ({"qdata": torch.zeros(8, 32)}, r"argument qdata: expected one of torch\.int8, found torch\.float32"),
        (
            {"scale": torch.zeros(8, 2, device="meta")},
            r"scale: expected a plain .* on cpu, found a tensor on meta",
        ),
        (
            {"scale": torch.zeros(1, 2).expand(8, 2)},
            r"scale: expected a plain contiguous .*, found strides \(0",
        ),
        ({"x": torch.zeros(32, 4).t()}, r"argument x: expected a plain contiguous tensor on cpu, found strides \(1, 4"),
        (
            {"scale": without_memory(torch.zeros(8, 2))},
            r"scale: expected a plain .*, found one that ends at byte 64 of 0",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check(**changes)


# A scale that the op would misread, and what it reads as it is: x and a bias may have any strides.
MISREAD = """
import torch
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats import FORMATS
from hf_trainweights.kernels import stored

for form in (FORMATS["int8"](), FORMATS["int4"](32), FORMATS["uint4"]()):
    weight, x, bias = torch.randn(64, 64).bfloat16(), torch.zeros(64, 2).bfloat16().t(), torch.zeros(64, 2).bfloat16()
    qdata, scale, *others = form.quantize(weight).values()
    config = stored.config_of(form)
    stored.LINEAR(x, [qdata, scale, *others], bias[:, 0], config)
    try:
        stored.LINEAR(x, [qdata, scale[:1].expand(scale.shape), *others], None, config)
    except UnsupportedError as error:
        print(str(error).startswith("hf_trainweights::linear, argument scale"))
"""


@pytest.mark.slow
def test_the_op_is_checked_where_checks_are_on() -> None:
    done = run_fresh(MISREAD, environment={"TRAINWEIGHTS_DEBUG": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 3
