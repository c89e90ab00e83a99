"""Every entry of CODECS keeps the contract of `hf_trainweights.testing`, and a few promises of this package's own."""

from __future__ import annotations

import pytest
import torch
from checkpoint.codecs import cases
from checkpoint.codecs.cases import INSTANCES
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec, References
from hf_trainweights.testing import CodecContract
from hf_trainweights.testing.codecs import bits_equal, copied, decode, name_of

SLOW = {"exact_or_within", "share_no_memory", "only_the_values", "truncated"}


class TestEveryCodec(CodecContract):
    optional_parameters = frozenset({"shift"})

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marks = [pytest.mark.slow] if any(word in metafunc.function.__name__ for word in SLOW) else []
        metafunc.parametrize("codec", [pytest.param(codec, marks=marks) for codec in INSTANCES], ids=name_of)

    def inputs(
        self, codec: Codec, shape: list[int], dtype: torch.dtype, seed: int = 0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return cases.inputs(codec, shape, dtype, seed)

    def error(self, codec: Codec, original: Tensor, decoded: Tensor, references: References) -> float:
        return cases.error(codec, original, decoded, references)


@pytest.mark.parametrize("codec", [codec for codec in INSTANCES if "anchor" in codec.references], ids=name_of)
def test_an_anchor_that_nobody_needs_lends_its_memory_and_any_other_is_only_read(codec: Codec) -> None:
    tensor, references = cases.inputs(codec, [300, 300], torch.float32)
    encoded, given_up = codec.encode(tensor, references), copied(references)
    assert bits_equal(decode(codec, encoded, tensor, references), decode(codec, encoded, tensor, references))
    decoded = decode(codec, encoded, tensor, given_up, is_anchor_spare=True)
    assert decoded.data_ptr() == given_up["anchor"].data_ptr()


@pytest.mark.parametrize("codec", INSTANCES, ids=name_of)
def test_zeros_stay_zeros_and_take_next_to_nothing(codec: Codec) -> None:
    zeros = torch.zeros(512, 512)
    references = {"anchor": zeros, "exp_avg_sq": zeros}
    encoded = codec.encode(zeros, references)
    assert torch.equal(decode(codec, encoded, zeros, references), zeros)
    # A scale per row, or a few bytes per block.
    assert encoded.payload_bytes < zeros.nbytes / 100 or codec.codec_id == "raw"
