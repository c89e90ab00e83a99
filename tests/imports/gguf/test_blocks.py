"""Each kind of blocks becomes stored tensors of the same values, for any bits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Number
from imports.gguf.files import blocks, halves_of

from hf_trainweights.imports.gguf.blocks import ALTERNATIVES, FLOATS, Blocks
from hf_trainweights.imports.gguf.file import KINDS

N, K = 6, 768
WAYS = [(kind, way) for kind, ways in ALTERNATIVES.items() for way in ways]
NAMES = [f"{kind}-{way.format}" for kind, way in WAYS]


def wild_blocks(kind: str) -> np.ndarray:
    """Return random blocks whose scales have every size that float16 has."""
    data = blocks(kind, (N, K)).reshape(N, -1, gguf.GGML_QUANT_SIZES[Number[kind]][1]).copy()
    rng = np.random.default_rng(1)
    for start in halves_of(kind):
        numbers = rng.integers(0, 1 << 16, (*data.shape[:-1], 1), dtype=np.uint16).view(np.float16)
        data[..., start : start + 2] = np.where(np.isfinite(numbers), numbers, np.float16(1)).view(np.uint8)
    return data


@pytest.mark.parametrize(("kind", "way"), WAYS, ids=NAMES)
def test_the_values_are_those_of_the_package_gguf(kind: str, way: Blocks) -> None:
    data = wild_blocks(kind)
    wanted = torch.from_numpy(gguf.quants.dequantize(data.reshape(N, -1), Number[kind]).astype(np.float32))
    stored = {**way.decode(torch.from_numpy(data)), **way.shared}
    if "global_scale" in way.format.tensor_names:
        stored["global_scale"] = torch.ones(N, 1)
    way.format.check(stored, (N, K), "weight")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = way.format.dequantize(stored, (N, K), dtype)
        assert torch.equal(values, wanted.to(dtype))


@pytest.mark.parametrize("kind", ALTERNATIVES)
def test_the_smallest_way_comes_first_and_no_format_twice(kind: str) -> None:
    sizes = [way.format.stored_bytes((1024, 1024), torch.float16) for way in ALTERNATIVES[kind]]
    assert sizes == sorted(sizes)
    assert len({str(way.format) for way in ALTERNATIVES[kind]}) == len(sizes)


def test_kinds_that_become_nothing_are_few() -> None:
    unread = {kind.name for kind in KINDS.values()} - ALTERNATIVES.keys() - FLOATS.keys()
    in_no_model_file = {"I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}
    assert unread - in_no_model_file == {"IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "Q1_0"}
