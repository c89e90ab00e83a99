"""Quantize a saved model into a directory, load it, and push it to the Hub.

Run it as it stands: it makes a small random model, and pushes nothing. Your own: SOURCE REPOSITORY.
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_trainweights import TrainWeightsConfig, quantize_directory


def main() -> None:
    source, repository = sys.argv[1:] or (None, None)
    with tempfile.TemporaryDirectory() as directory:
        source = source or small_llama(f"{directory}/float")
        out = f"{directory}/int4"
        print(quantize_directory(source, out, TrainWeightsConfig("int4", group_size=32)))

        model = AutoModelForCausalLM.from_pretrained(out)
        print("generated:", model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)[0].tolist())
        if repository:
            print("pushed to", model.push_to_hub(repository, private=True))


def small_llama(path: str) -> str:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **shape)).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
