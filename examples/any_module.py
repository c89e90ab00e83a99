"""Quantize any nn.Module, keep its state dict's keys, and load it into a skeleton without a float copy."""

import tempfile

import torch
from torch import nn

from hf_trainweights import TrainWeightsConfig, get_model_size_in_bytes, quantize_


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.GELU(), nn.Linear(1024, 1024, bias=False)).bfloat16()


def main() -> None:
    torch.manual_seed(0)
    module = build()
    keys = list(module.state_dict())
    print(f"float: {get_model_size_in_bytes(module) / 2**20:.2f} MiB")
    print(quantize_(module, TrainWeightsConfig("int4", group_size=128)))
    print(f"int4:  {get_model_size_in_bytes(module) / 2**20:.2f} MiB")
    print("keys unchanged:", list(module.state_dict()) == keys)

    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(module.state_dict(), file.name)
        with torch.device("meta"):
            skeleton = build()
        print(skeleton.load_state_dict(torch.load(file.name), assign=True))
        x = torch.randn(4, 1024, dtype=torch.bfloat16)
        print("equal outputs:", torch.equal(skeleton(x), module(x)))


if __name__ == "__main__":
    main()
