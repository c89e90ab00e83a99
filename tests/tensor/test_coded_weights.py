"""Coded weights: only where it saves enough bytes, and nothing else is read as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weights import random_weight

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.coded_tensors import encode_tensors
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.tensor.stored_names import decode_float, encode_float, encode_stored

COMPRESSIBLE = torch.ones(1 << 13, dtype=torch.bfloat16)  # 16 KiB


def test_a_float_tensor_is_coded_from_16_kib_on() -> None:
    coded = encode_float(COMPRESSIBLE)
    assert coded is not None
    assert coded.nbytes < COMPRESSIBLE.nbytes
    assert torch.equal(decode_float("w", coded), COMPRESSIBLE)
    assert encode_float(COMPRESSIBLE[:-1]) is None


def test_what_does_not_become_smaller_stays_as_it_is() -> None:
    noise = torch.randint(-(1 << 15), 1 << 15, (1 << 13,), generator=torch.Generator().manual_seed(0))
    assert encode_float(noise.to(torch.int16).view(torch.bfloat16)) is None
    assert encode_float(COMPRESSIBLE.to(torch.int16)) is None
    assert encode_float("16 KiB" * 4096) is None


@pytest.mark.parametrize("compress", [False, True])
def test_formats_that_are_coded_always_are_so_and_others_on_request(compress: bool) -> None:
    weight = torch.ones(128, 256)
    assert encode_stored(Coded().quantize(weight), Coded(), compress) is not None
    assert (encode_stored(Int8().quantize(weight), Int8(), compress) is not None) == compress


@pytest.mark.parametrize(
    "tensors",
    [
        {"values": COMPRESSIBLE, "more": COMPRESSIBLE},
        {"other": COMPRESSIBLE},
        {"values": random_weight(8, 8).to(torch.int8)},
    ],
    ids=["one tensor more", "another name", "integers"],
)
def test_other_tensors_are_no_float_weight(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(CorruptFileError, match="w, coded: expected values of a float dtype"):
        decode_float("w", encode_tensors(tensors))


def test_of_a_float_weight_on_the_meta_device_only_the_header_is_read() -> None:
    coded = encode_float(COMPRESSIBLE)
    assert coded is not None
    found = decode_float("w", coded, (1 << 13,), values=False)
    assert (found.device.type, found.dtype, found.shape) == ("meta", COMPRESSIBLE.dtype, COMPRESSIBLE.shape)
    with pytest.raises(CorruptFileError, match=r"expected shape \(8191,\), found \(8192,\)"):
        decode_float("w", coded, ((1 << 13) - 1,))
