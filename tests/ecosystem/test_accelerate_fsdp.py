"""LoRA on a quantized base model over two processes: accelerate and the Trainer, with FSDP2 and with DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from covering import exhaustive
from peft import LoraConfig, get_peft_model
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_trainweights import QuantizedTensor, TrainWeightsConfig
from hf_trainweights.errors import UnsupportedError

# Each test starts processes that train.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
LAYER = "LlamaDecoderLayer"
STEPS = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("float")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **SHAPE)).save_pretrained(directory)
    return directory


def adapted(source: Path) -> nn.Module:
    """Return a quantized model with trainable adapters, the same at every call."""
    base = AutoModelForCausalLM.from_pretrained(source, quantization_config=TrainWeightsConfig("int8"))
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def join_ranks(rank: int) -> None:
    """Set what a launcher would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}


def allow_fsdp() -> None:
    """Let accelerate take FSDP on a CPU, which it leaves to GPUs."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def is_spread(model: nn.Module) -> bool:
    """Return whether the base weights are quantized shards."""
    weights = [parameter for name, parameter in model.named_parameters() if "k_proj" in name]
    return all(isinstance(weight, DTensor) and isinstance(weight.to_local(), QuantizedTensor) for weight in weights)


def prepared(rank: int, source: Path, **how: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    join_ranks(rank)
    allow_fsdp()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        state_dict_type="SHARDED_STATE_DICT",
        **how,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = adapted(source)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any = torch.Tensor.backward) -> float:
    tokens = torch.arange(64).view(2, 32)
    loss = model(input_ids=tokens, labels=tokens).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def with_accelerate(rank: int, source: Path, directory: Path) -> list[float]:
    accelerator, model, optimizer = prepared(rank, source, cpu_ram_efficient_loading=False)
    assert is_spread(model)
    losses = [step(model, optimizer, accelerator.backward) for _ in range(STEPS)]
    accelerator.save_state(str(directory))
    behind = step(model, optimizer, accelerator.backward)
    accelerator.load_state(str(directory))
    assert step(model, optimizer, accelerator.backward) == behind
    return losses


def test_accelerate_trains_saves_and_resumes_as_one_process(source: Path, tmp_path: Path) -> None:
    model = adapted(source)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    expected = [step(model, optimizer) for _ in range(STEPS)]
    assert run_ranks(2, with_accelerate, source, tmp_path) == [expected] * 2


def sent_from_the_first(rank: int, source: Path) -> None:
    with pytest.raises(UnsupportedError, match="Set fsdp_cpu_ram_efficient_loading: false"):
        prepared(rank, source, cpu_ram_efficient_loading=True)


def test_weights_that_only_the_first_rank_would_send_are_refused_on_every_rank(source: Path) -> None:
    run_ranks(2, sent_from_the_first, source)


def with_trainer(rank: int, source: Path, directory: Path, state: str | None) -> list[float]:
    """Return the losses of a whole run, after the same from its first checkpoint on; with DDP if `state` is None."""
    join_ranks(rank)
    losses = train(source, directory / "whole", 2, state)
    again = train(source, directory / "again", 2, state, directory / "whole" / f"checkpoint-{STEPS // 2}")
    assert again == losses
    return losses


def train(
    source: Path, directory: Path, batch_size: int, state: str | None = None, resume: Path | None = None
) -> list[float]:
    sequences = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).repeat(8).split(16)]
    config = {"version": 2, "transformer_layer_cls_to_wrap": [LAYER], "state_dict_type": state}
    arguments = TrainingArguments(
        str(directory),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        learning_rate=1e-2,
        logging_steps=1,
        per_device_train_batch_size=batch_size,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **({"fsdp": True, "fsdp_config": config} if state else {}),
    )
    if state:
        allow_fsdp()
    trainer = Trainer(model=adapted(source), args=arguments, train_dataset=sequences)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert is_spread(trainer.model) == (state is not None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


DDP = pytest.param(
    None,
    marks=[
        pytest.mark.exhaustive,
        pytest.mark.skipif(
            transformers.__version__ < "5.18",
            reason="this Trainer asks torch.load for cpu:0, which torch does not know",
        ),
    ],
)


@pytest.mark.parametrize("state", [*exhaustive("SHARDED_STATE_DICT", "FULL_STATE_DICT"), DDP])
def test_a_trainer_over_ranks_trains_saves_and_resumes(state: str | None, source: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, with_trainer, source, tmp_path, state)
    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(train(source, tmp_path / "one", 4)), rtol=1e-4, atol=0)
    if state != "SHARDED_STATE_DICT":
        saved = tmp_path / "whole" / f"checkpoint-{STEPS}" / "adapter_model.safetensors"
        assert saved.stat().st_size < 20_000
