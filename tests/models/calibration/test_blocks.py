"""How the blocks of a model run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpus import GENOA, GRAVITON, HASWELL, ICE_LAKE
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from hf_trainweights.kernels import cpu_features
from hf_trainweights.models.calibration.blocks import fast_products


class Dtypes(TorchFunctionMode):
    """Notes the dtypes that products are computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch.addmm, torch.matmul, F.scaled_dot_product_attention):
            self.seen |= {value.dtype for value in args if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "Conv1D": lambda x: Conv1D(8, 8).to(x.dtype)(x),
    "matmul": lambda x: torch.matmul(x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=x),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("cpu", "dtype", "expected"),
    [
        (GENOA, torch.bfloat16, torch.bfloat16),
        (ICE_LAKE, torch.bfloat16, torch.float32),
        (HASWELL, torch.bfloat16, torch.float32),
        (GENOA, torch.float16, torch.float32),
        (GRAVITON, torch.bfloat16, torch.bfloat16),
        (ICE_LAKE, torch.float64, torch.float64),
    ],
)
def test_products_are_computed_in_the_dtype_that_is_faster(
    name: str, cpu: dict[str, object], dtype: torch.dtype, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "capabilities", lambda: cpu)
    module, x = nn.Linear(8, 8).to(dtype), torch.eye(8, dtype=dtype)
    with Dtypes() as products, torch.no_grad(), fast_products(module):
        actual = PRODUCTS[name](x)
    assert products.seen == {expected}
    assert actual.dtype == dtype
