"""Files of each architecture become the model that llama.cpp computes, with the settings that the file tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from covering import by_default
from imports.gguf.architectures import SPECS, write_architecture
from peft import LoraConfig, get_peft_model
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM

from hf_trainweights import QuantizedTensor, import_directory
from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.imports.gguf.architectures import READABLE

pytestmark = pytest.mark.slow  # together they take long

NOT_DESCRIBED = [name for name in SPECS if not READABLE[SPECS[name][0]].described]
# A file has no such settings, or tells them in another way.
NOT_COMPARED = {"architectures", "dtype", "pad_token_id", "transformers_version", "rope_parameters", "layer_types"}
NOT_COMPARED |= {"_name_or_path", "moe_layer_end_index", "sliding_window_pattern", "head_dim", "quantization_config"}


@pytest.mark.parametrize("name", by_default(["qwen3_5", "llama4", "granitemoe"], SPECS))
def test_the_model_has_the_weights_and_settings_of_the_file(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    model = write_architecture(source / "model.gguf", name)
    byte_level().save_pretrained(source)
    if name in NOT_DESCRIBED:
        with pytest.raises(UnsupportedError, match=r"Give base_model"):
            import_directory(source, out)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(source)
    import_directory(source, out)
    back = type(model).from_pretrained(out, dtype=torch.float32)
    assert sum(isinstance(parameter, QuantizedTensor) for parameter in back.parameters()) > 5
    wanted = json.loads(model.config.to_json_string(use_diff=False))
    settings = json.loads(back.config.to_json_string(use_diff=False))
    differing = {key for key in wanted if settings.get(key) != wanted[key]} - NOT_COMPARED
    assert differing == set()
    back.dequantize()
    values, expected = back.state_dict(), model.state_dict()
    # A file has -exp(A_log), and the logarithm of that is rounded.
    for key in [key for key in expected if key.endswith("A_log")]:
        torch.testing.assert_close(values[key], expected[key], rtol=1e-6, atol=1e-6)
        expected[key].copy_(values[key])
    assert [key for key in expected if not torch.equal(values[key], expected[key])] == []
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(back.eval()(tokens)[0], model(tokens)[0])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_imported_model_saves_again_and_trains_adapters(tmp_path: Path) -> None:
    source, out, again = (tmp_path / name for name in ("source", "out", "again"))
    source.mkdir()
    write_architecture(source / "model.gguf", "qwen3_5")
    byte_level().save_pretrained(source)
    import_directory(source, out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model.save_pretrained(again)
    assert [file.read_bytes() for file in sorted(again.glob("*.safetensors"))] == [
        file.read_bytes() for file in sorted(out.glob("*.safetensors"))
    ]
    forms = {str(parameter.format) for parameter in model.parameters() if isinstance(parameter, QuantizedTensor)}
    assert "int8 g32 with ordered columns" in forms
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "out_proj", "down_proj"], r=4))
    tokens = torch.arange(40).view(2, 20)
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    gradients = [each.grad for name, each in adapted.named_parameters() if "lora_B" in name]
    assert gradients
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("name", ["qwen3_5", "exaone4"])
def test_a_number_of_layers_that_no_file_has_is_refused_before_lists_of_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "model.gguf"
    write_architecture(file, name)
    key, data = b"block_count" + (4).to_bytes(4, "little"), file.read_bytes()
    start = data.index(key) + len(key)
    file.write_bytes(data[:start] + (2**32 - 1).to_bytes(4, "little") + data[start + 4 :])
    with pytest.raises(CorruptFileError, match=r"block_count: expected 1 to \d+ layers, .* found 4294967295"):
        import_directory(tmp_path / "source", tmp_path / "out")
