"""Weights that were imported from a GGUF file are written with the bytes that they were read from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from imports.gguf.files import all_of, blocks, mixture, write_gguf
from tiny_tokenizers import byte_level

from hf_trainweights import QuantizedTensor, export_gguf, import_directory
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.gguf.blocks import encoder_of
from hf_trainweights.imports.gguf.blocks import ALTERNATIVES

KINDS = ["Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_encoded_as_it_was_decoded(kind: str) -> None:
    data = torch.from_numpy(blocks(kind, (5, 768))).view(5, -1, gguf.GGML_QUANT_SIZES[Kind[kind]][1])
    (way, *_) = ALTERNATIVES[kind]
    stored = {**way.decode(data), **way.shared}
    encoder = encoder_of(QuantizedTensor(stored, way.format, (5, 768), torch.float32))
    assert encoder is not None
    assert encoder[0] == Kind[kind]
    assert torch.equal(encoder[1](stored), data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_file_comes_back_byte_by_byte(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "source" / "model.gguf", name, mixture)
    import_directory(tmp_path / "source", tmp_path / "out")
    export_gguf(tmp_path / "out", tmp_path / "again.gguf", byte_level())
    first, second = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (tmp_path / "source" / "model.gguf", tmp_path / "again.gguf")
    )
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert second[key].tensor_type == tensor.tensor_type, key
        assert np.array_equal(second[key].data, tensor.data), key


@pytest.mark.slow
def test_imported_weights_without_an_encoder_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "source" / "model.gguf", kinds=all_of("IQ3_S"))
    import_directory(tmp_path / "source", tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"weight: expected int8 or int4, .* found table4 g32 iq4_xs"):
        export_gguf(tmp_path / "out", tmp_path / "again.gguf", byte_level())
