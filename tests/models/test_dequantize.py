"""A saved quantized model written as a float one: the very files that dequantizing it in memory would save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from covering import exhaustive
from safetensors import safe_open
from safetensors.torch import load_file

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.directory import dequantize_directory, quantize_directory
from hf_trainweights.models.loading.saved_models import load_quantized

INT4 = {"format": "int4", "group_size": 32}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as it was saved", "float32"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"column_scale": True}),
        ("llama_tied", {"include_embeddings": True}),
        ("qwen3_moe", {}),
        ("mixtral", {"overrides": {r"re:.*experts\.down_proj": None}}),
        ("gpt_oss", {}),
        ("gpt2", {"include_embeddings": True}),
        *exhaustive(("gpt_neox", {}), ("t5", {}), ("clip", {})),
    ],
)
def test_it_writes_what_dequantizing_in_memory_writes(
    name: str, options: dict[str, object], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    ARCHITECTURES[name].build(torch.bfloat16).save_pretrained(tmp_path / "float")
    quantize_directory(tmp_path / "float", tmp_path / "small", TrainWeightsConfig(**INT4, **options))
    dequantize_directory(tmp_path / "small", tmp_path / "out", dtype=dtype or "auto")
    model = load_quantized(tmp_path / "small")
    model.dequantize(dtype)
    if dtype is not None:
        model.to(dtype)  # what was never quantized too
    model.save_pretrained(tmp_path / "expected")
    written, expected = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "expected"))
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        assert written[key].dtype == tensor.dtype
        assert torch.equal(written[key], tensor), key
    with safe_open(tmp_path / "float" / "model.safetensors", "pt") as source:
        assert written.keys() == set(source.keys())
    of_out, of_expected = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "expected"))
    assert of_out == of_expected
    reloaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not hasattr(reloaded, "hf_quantizer")


@pytest.mark.parametrize("dtype", ["fp16", "load", "int8", torch.int8])
def test_what_is_no_float_dtype_is_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"dtype: expected a float dtype of torch, found '?{dtype}"):
        dequantize_directory(tmp_path / "small", tmp_path / "out", dtype=dtype)
