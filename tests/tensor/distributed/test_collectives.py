"""What no collective sends: tensors that are not quantized weights as they lie in files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weights import random_weight

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.tensor.distributed.sharded_ops import _scatter

WEIGHT = QuantizedTensor.quantize(random_weight(64, 64, dtype=torch.bfloat16), Int4(32))


def test_only_quantized_weights_are_scattered_as_such() -> None:
    other = WEIGHT.dequantize()

    def refuse(*_: Any) -> None:
        raise AssertionError("sent")

    for outputs, inputs in (([WEIGHT], [[WEIGHT, other]]), ([other], [[WEIGHT, WEIGHT]])):
        with pytest.raises(UnsupportedError, match="refuse"):
            _scatter(refuse, outputs, inputs)
