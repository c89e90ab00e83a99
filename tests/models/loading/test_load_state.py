"""What the operations of one load share: the first typed error, and stand-ins for all that follows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats import get_format
from hf_trainweights.models.loading.conversion import LoadState


def test_the_first_error_is_kept_and_what_follows_takes_no_memory() -> None:
    state = LoadState(get_format({"format": "int8"}))
    skeleton = torch.empty(1 << 10, 1 << 10, dtype=torch.bfloat16, device="meta")

    def fail(where: str) -> Tensor:
        raise QuantizationError(where, "a", "b", "C.")

    first = state.parameter_or_stand_in("w", skeleton, lambda _: fail("first"))
    second = state.parameter_or_stand_in("w", skeleton, lambda _: fail("second"))
    built = "a weight was built though the load has failed"
    third = state.parameter_or_stand_in("w", skeleton, lambda _: pytest.fail(built))
    assert state.error is not None
    assert state.error.where.endswith("first")
    for stand_in in (first, second, third):
        assert isinstance(stand_in, nn.Parameter)
        assert (stand_in.shape, stand_in.dtype, stand_in.device.type) == (skeleton.shape, skeleton.dtype, "cpu")
        assert stand_in.untyped_storage().nbytes() <= 2
