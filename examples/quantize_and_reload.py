"""Quantize a model while it loads, use it, save it in both serializations, and load it again.

Run it as it stands: it makes a small random model. Give a path or a Hub id to use your own.
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_trainweights
from hf_trainweights import TrainWeightsConfig


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        source = sys.argv[1] if len(sys.argv) > 1 else small_llama(f"{directory}/float")
        config = TrainWeightsConfig("int4", group_size=32, overrides={"re:.*down_proj": "int8"})
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", quantization_config=config)
        print(model.hf_quantizer.summary())
        print(f"{hf_trainweights.get_model_size_in_bytes(model) / 1e6:.2f} MB in memory")

        prompt = torch.tensor([[1, 2, 3, 4]])
        logits = model(prompt).logits
        print("generated:", model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist())

        for safe_serialization in (True, False):
            out = f"{directory}/{'safetensors' if safe_serialization else 'bin'}"
            model.save_pretrained(out, safe_serialization=safe_serialization)
            reloaded = AutoModelForCausalLM.from_pretrained(out)
            print(f"{out.rpartition('/')[2]}: equal logits {torch.equal(reloaded(prompt).logits, logits)}")

        model.dequantize()
        print("dequantized:", type(model.model.layers[0].self_attn.q_proj.weight).__name__)


def small_llama(path: str) -> str:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **shape)).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
