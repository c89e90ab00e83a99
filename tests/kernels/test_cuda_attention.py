"""What attends to stored tokens on a GPU, and when: everything but the kernels, on CPU tensors and on fake ones."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from stored_tokens import Sizes, expected, operands
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_trainweights.cache.layers import KVLayer
from hf_trainweights.kernels import attention, cuda, cuda_attention
from hf_trainweights.kernels.tokens import StoredTokens

SIZES = Sizes(1, 2, 2, 1, 64, 64, 40)
KINDS = [("int8", "int8"), ("int8", "int4"), ("int4", "int4")]


class FakeLaunch:
    """In place of the launch of the kernels: right, wrong or broken, and counting its calls."""

    def __init__(self, factor: float = 1.0, error: Exception | None = None) -> None:
        self.factor, self.error, self.calls = factor, error, 0

    def __call__(
        self,
        query: Tensor,
        keys: StoredTokens,
        values: StoredTokens,
        tokens: slice,
        scaling: float,
        mask: Tensor | None,
    ) -> Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.factor * expected(query * (scaling / 0.2), keys, values, tokens, mask).to(query.dtype)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be a GPU on which nothing has been checked."""
    monkeypatch.setattr(cuda, "_CHECKED", {})
    monkeypatch.setattr(cuda, "has_triton", lambda index: True)
    # A build of PyTorch without CUDA cannot be asked.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def attend(sizes: Sizes = SIZES, dtype: torch.dtype = torch.float32) -> Tensor | None:
    query, keys, values = operands(sizes, torch.float32)
    return cuda_attention.attend(query.to(dtype), keys, values, slice(sizes.first, sizes.tokens), 0.2, None)


def test_the_kernels_are_checked_once_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = FakeLaunch()
    monkeypatch.setattr(cuda_attention, "_launch", launch)
    for _ in range(3):
        out = attend()
        assert out is not None
        torch.testing.assert_close(out, expected(*operands(SIZES, torch.float32), slice(0, 40), None))
    assert launch.calls == 4


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (FakeLaunch(1.1), "results differ by 0.1 of"),
        (FakeLaunch(torch.nan), "results differ by nan of"),
        (FakeLaunch(error=RuntimeError("out of resources")), "RuntimeError: out of resources"),
    ],
)
def test_kernels_that_fail_their_check_are_never_used(
    launch: FakeLaunch, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_attention, "_launch", launch)
    with caplog.at_level(logging.WARNING):
        assert [attend(), attend()] == [None, None]
    assert [reason in record.message for record in caplog.records] == [True]
    assert launch.calls == 1


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (Sizes(1, 2, 2, 33, 64, 64, 40), torch.float32),
        (Sizes(1, 1, 1, 1, 1024, 64, 40), torch.float32),
        (Sizes(1, 1, 1, 1, 64, 64, 40, 40), torch.float32),
        (SIZES, torch.float64),
    ],
    ids=["many rows", "many columns", "no tokens", "float64"],
)
def test_what_the_kernels_do_not_hold_is_left_to_floats(
    sizes: Sizes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "_launch", FakeLaunch(error=AssertionError("a launch")))
    assert attend(sizes, dtype) is None


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = FakeLaunch()
    monkeypatch.setattr(cuda_attention, "_launch", launch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert attend() is None
    assert launch.calls == 0


class NoWaiting(TorchDispatchMode):
    """Fails at an op that gets or returns a tensor of the CPU. Numbers of meta tensors cannot be read anyway."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert all(x.device.type != "cpu" for x in (*args, out) if isinstance(x, Tensor)), func
        return out


@pytest.mark.parametrize("kinds", [("bf16", "bf16"), *KINDS], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_storing_tokens_never_waits_for_another_device(kinds: tuple[str, str], window: int | None) -> None:
    layer = KVLayer(*kinds, window=window)
    with torch.inference_mode(), NoWaiting():
        for count in (50, 30, 1, 1, 5, 400, 1):
            states = torch.empty(2, 2, count, 64, dtype=torch.bfloat16, device="meta")
            layer.update(states, states)
        layer.crop(-3)
        layer.batch_repeat_interleave(2)
        layer.update(states.repeat(2, 1, 1, 1), states.repeat(2, 1, 1, 1))
    assert layer.length + layer.dropped == 486


def test_a_query_on_a_gpu_meets_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    _, keys, values = operands(SIZES, torch.float32)
    monkeypatch.setattr(cuda_attention, "attend", lambda query, *_: query)
    with FakeTensorMode():
        query = torch.empty(1, 4, 1, 64, device="cuda")
    assert attention.attend(query, keys, values, slice(0, 40), 0.2, None) is query
