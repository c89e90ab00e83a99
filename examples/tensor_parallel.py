"""Quantize a model over two processes by its tensor-parallel plan, generate, and save what one process would."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_trainweights import QuantizedTensor, TrainWeightsConfig

RANKS = 2


def main() -> None:
    dist.init_process_group("gloo")
    directory = Path(sys.argv[1])
    alone = load(directory / "float")
    model = load(directory / "float", distributed_config=DistributedConfig(tp_size=RANKS))
    part = model.model.layers[0].mlp.down_proj.weight.to_local()
    assert isinstance(part, QuantizedTensor)

    tokens = generate(model)
    assert torch.equal(tokens, generate(alone))

    # Every rank calls it, and rank 0 writes.
    model.save_pretrained(directory / "by_ranks")
    if dist.get_rank() == 0:
        alone.save_pretrained(directory / "by_one")
        files = [directory / name / "model.safetensors" for name in ("by_one", "by_ranks")]
        assert files[0].read_bytes() == files[1].read_bytes()
        print(f"each of {RANKS} ranks holds {tuple(part.shape)} of a down_proj in {part.format}")
        print(f"tokens of both: {tokens[0].tolist()}")
        print(f"{model.get_memory_footprint()} bytes on a rank, {alone.get_memory_footprint()} in one process")

    dist.barrier()
    reloaded = AutoModelForCausalLM.from_pretrained(
        directory / "by_ranks", distributed_config=DistributedConfig(tp_size=RANKS)
    )
    assert torch.equal(generate(reloaded), tokens)
    dist.destroy_process_group()


def load(path: Path, **options: object) -> PreTrainedModel:
    config = TrainWeightsConfig("int4", group_size=32)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **options)


def generate(model: PreTrainedModel) -> torch.Tensor:
    return model.generate(torch.arange(8).view(1, 8), max_new_tokens=8, do_sample=False)


def start() -> int:
    """Start the ranks, with a random model."""
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **shape)).save_pretrained(f"{directory}/float")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        return subprocess.run([*launcher, __file__, directory], check=False).returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start())
