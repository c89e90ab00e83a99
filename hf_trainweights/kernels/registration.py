"""How a kernel becomes an op of PyTorch: `torch.ops.hf_trainweights.<name>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The bare library: torch.library.custom_op wraps every call in Python, which at one token costs more than the product.
_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")


def define(schema: str, fake: Callable[..., Any], **implementations: Callable[..., Any]) -> Any:
    """Define an op, which changes no argument, with implementations by dispatch key, e.g. `CPU=...`, and return it.

    The schema is such as `"f(Tensor x) -> Tensor"`; `fake` makes an empty tensor of the result's shape, dtype and
    strides from tensors without values.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    torch.library.register_fake(f"hf_trainweights::{name}", fake, lib=_LIBRARY)
    implement(name, **implementations)
    return getattr(torch.ops.hf_trainweights, name).default


def implement(name: str, **implementations: Callable[..., Any]) -> None:
    """Register implementations of a defined op by dispatch key, e.g. `CUDA=...`."""
    for key, function in implementations.items():
        _LIBRARY.impl(name, function, key)
