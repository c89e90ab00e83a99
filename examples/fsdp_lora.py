"""Train a LoRA adapter on a quantized model that FSDP2 spreads over two processes; start it by torchrun or alone."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_

RANKS = 2


def main() -> None:
    dist.init_process_group("gloo")
    expected = train(adapted_model())

    model = adapted_model()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    shard = model.base_model.model.model.layers[0].mlp.up_proj.weight.to_local()
    assert isinstance(shard, QuantizedTensor)

    losses = train(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        print(f"each of {RANKS} ranks holds {tuple(shard.shape)} of an up_proj in {shard.format}; losses {losses}")
        print(f"in one process              {expected}")
        print(f"{sum('lora' in name for name in state)} adapter weights to save")
    assert losses == expected
    dist.destroy_process_group()


def adapted_model() -> nn.Module:
    """Return the same quantized model with adapters at every call."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **shape))
    quantize_(base, TrainWeightsConfig("int4", group_size=32))
    return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(model: nn.Module) -> list[float]:
    """Return the losses of a few steps. Each rank sees the same tokens here, so that one process can be compared."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    tokens = torch.arange(64).view(4, 16)
    losses = []
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
        # All is done. As Python takes it apart, PyTorch 2.13 aborts about every tenth process that has trained so.
        sys.stdout.flush()
        os._exit(0)
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__]
        sys.exit(subprocess.run(launcher, check=False).returncode)
