"""The model that gptqmodel is measured with is one of GPTQ: its directory is imported, code by code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.gptq_directory import GROUP_SIZE, save_as_gptq
from hf_trainweights import QuantizedTensor, import_directory


def test_the_codes_that_were_written_are_imported(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    float_model: Any = LlamaForCausalLM(config).bfloat16()
    save_as_gptq(float_model, source)
    import_directory(source, out)
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    stored = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    weight = model.get_parameter(f"{name}.weight")
    assert isinstance(weight, QuantizedTensor)
    words = stored[f"{name}.qweight"]
    codes = (words[:, None] >> 4 * torch.arange(8)[:, None] & 15).flatten(0, 1)
    values = (codes - 8) * stored[f"{name}.scales"].float().repeat_interleave(GROUP_SIZE, 0)
    assert torch.equal(weight.dequantize().float(), values.t().to(weight.dtype).float())
    assert not isinstance(model.get_output_embeddings().weight, QuantizedTensor)
