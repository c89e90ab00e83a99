"""Guards refuse whatever an op would not read as it is, and cost nothing where they are off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fresh_process import run_fresh
from torch import Tensor
from weights import random_weight

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.kernels import guards
from hf_trainweights.kernels.guards import Needs, check, guarded

NEEDS = (
    Needs("x", ("*", "K"), any_strides=True),
    Needs("qdata", ("N", "K"), (torch.int8,), alignment_bytes=16),
    Needs("scale", ("N", 2)),
)
RULES = {"K to be a multiple of 16": lambda sizes: sizes["K"] % 16 == 0}


def arguments(**changes: Any) -> tuple[Any, ...]:
    given = {
        "x": torch.zeros(3, 1, 32),
        "qdata": torch.zeros(8, 32, dtype=torch.int8),
        "scale": torch.zeros(8, 2),
    }
    return tuple((given | changes).values())


def without_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "changes",
    [{}, {"x": torch.zeros(32)}, {"x": torch.zeros(32, 4).t()}, {"scale": None}],
    ids=["as they should be", "a vector", "strides that the op reads", "left out"],
)
def test_right_tensors_pass(changes: dict[str, Any]) -> None:
    check("op", NEEDS, arguments(**changes), RULES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"qdata": torch.zeros(8, 16, dtype=torch.int8)},
            r"argument qdata: expected shape \('N', 32\), found \(8, 16\)",
        ),
        ({"scale": torch.zeros(9, 2)}, r"argument scale: expected shape \(8, 2\), found \(9, 2\)"),
        ({"scale": torch.zeros(8)}, r"argument scale: expected shape \(8, 2\), found \(8,\)"),
        ({"scale": torch.zeros(8, 3)}, r"argument scale: expected shape \(8, 2\), found \(8, 3\)"),
        ({"qdata": torch.zeros(8, 32)}, r"argument qdata: expected one of torch\.int8, found torch\.float32"),
        ({"scale": torch.zeros(8, 2, device="meta")}, r"argument scale: expected cpu, found meta"),
        ({"scale": torch.zeros(1, 2).expand(8, 2)}, r"argument scale: expected a contiguous tensor, found strides \(0"),
        ({"qdata": torch.zeros(257, dtype=torch.int8)[1:].view(8, 32)}, r"qdata: expected an address that 16 divides"),
        ({"scale": without_memory(torch.zeros(8, 2))}, r"scale: expected a storage of 64 bytes, found 0"),
        ({"x": torch.zeros(3, 8), "qdata": torch.zeros(8, 8, dtype=torch.int8)}, r"op: expected K to be a multiple of"),
    ],
)
def test_other_tensors_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check("op", NEEDS, arguments(**changes), RULES)


def test_a_guarded_op_runs_once_the_tensors_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "ENABLED", True)
    calls: list[tuple[Any, ...]] = []
    op: Callable[..., None] = guarded("op", *NEEDS, rules=RULES)(lambda *args, **kwargs: calls.append((args, kwargs)))
    op(*arguments(), 5, out=None)
    with pytest.raises(UnsupportedError, match="op, argument scale"):
        op(*arguments(scale=torch.zeros(8, 2, 2)))
    assert [(len(args), kwargs) for args, kwargs in calls] == [(4, {"out": None})]


@pytest.mark.skipif(guards.ENABLED, reason="guards are on")
def test_an_op_without_guards_is_the_op_itself() -> None:
    assert guarded("op", *NEEDS)(random_weight) is random_weight


# Each op that reads addresses, with a scale or a second factor that it would misread.
MISREAD = """
import torch
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.kernels import int8_pack, stored

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)

codes, words = zeros(64, 64, dtype=torch.int8), zeros(64, 8, dtype=torch.int32)
calls = {
    "torch._weight_int8pack_mm": lambda: int8_pack._weight_int8pack_mm(zeros(1, 64), codes, zeros(1).expand(64)),
    "hf_trainweights::int8_linear": lambda: stored.INT8_LINEAR(zeros(1, 64), codes, zeros(64, 2)[:, ::2], None, False),
    "hf_trainweights::int4_linear": lambda: stored.INT4_LINEAR(zeros(1, 64), words, zeros(64, 1).expand(64, 2), None),
}
# What each of them reads as it is: x and a bias may have any strides.
x, bias, bytes = zeros(64, 2).t(), zeros(64, 2)[:, 0], zeros(64, 2, dtype=torch.uint8)
stored.INT8_LINEAR(x, codes, zeros(64, 1), bias, False)
stored.INT8_LINEAR(x, codes, zeros(64, 2), bias, False)
stored.INT4_LINEAR(x, words, zeros(64, 2), bias)
stored.FLOAT8_LINEAR(x, codes.view(torch.float8_e4m3fn), zeros(64, 1), bias)
stored.UINT_LINEAR(x, words, zeros(64, 1), bytes, bytes, bias, 16)
for name, call in calls.items():
    try:
        call()
    except UnsupportedError as error:
        print(name, str(error).startswith(name))
    else:
        print(name, "not refused")
"""


@pytest.mark.slow
def test_every_op_that_reads_addresses_is_guarded() -> None:
    done = run_fresh(MISREAD, environment={"TRAINWEIGHTS_DEBUG": "1"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.endswith(" True") for line in lines), done.stdout
