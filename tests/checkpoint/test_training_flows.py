"""Kinds of training that a Trainer runs: each stops, resumes from a small checkpoint and ends as the whole run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.trainers import STEPS, Losses, trainer_of
from covering import by_default
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from trees import fingerprint

from hf_trainweights import TrainWeightsCheckpointCallback, TrainWeightsConfig, quantize_
from hf_trainweights.checkpoint.encoded.reader import is_encoded
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint

# One epoch has 8 batches and ends at step 8 without accumulation, so a run that saves here stops within an epoch.
SAVED = 3

pytestmark = [
    pytest.mark.slow,  # each trains
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",  # peft asks for it
        "ignore:.*expected a plain dense tensor, found a torchao:UserWarning",  # their files stay plain
        "ignore:This implementation of AdamW is deprecated:FutureWarning",  # GaLore's own
        "ignore:Paged optimizers are not supported on CPU:UserWarning",  # bitsandbytes keeps them in memory then
    ),
]


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    """Let torchao's optimizers, which compile their steps, run as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def llama() -> LlamaForCausalLM:
    """Return a model with weights of 4,096 elements and more, from which on 8-bit optimizers have 8 bits."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, attention_dropout=0.1, **sizes))


def lora(model: nn.Module) -> nn.Module:
    config = LoraConfig(r=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.2, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def lora_on_int8() -> nn.Module:
    model = llama()
    quantize_(model, TrainWeightsConfig("int8"))
    return lora(model)


def of_package(package: str, name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return what builds an optimizer of a package that is not installed everywhere."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        module = pytest.importorskip(package)
        return getattr(module, name)(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3
        )

    return make


@dataclass(frozen=True)
class Flow:
    """A kind of training.

    Args:
        build: Makes the model.
        optimizer: Makes the optimizer; the Trainer does if it is None.
        options: Arguments of the Trainer.
        package: What has to be installed for these.
    """

    build: Callable[[], nn.Module] = llama
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    package: str | None = None

    def run(self, out: Path, *callbacks: Any, resume: bool = False) -> tuple[Trainer, Losses]:
        if self.package:
            pytest.importorskip(self.package)
        model = self.build()
        trainer, losses = trainer_of(out, *callbacks, model=model, save_steps=SAVED, **self.options)
        if self.optimizer is not None:
            trainer.optimizer = self.optimizer(model)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, losses


PROJECTED = {"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=8, update_proj_gap=2"}
FLOWS = {
    "GaLore": Flow(options={"optim": "galore_adamw", **PROJECTED}, package="galore_torch"),
    "GaLore Adafactor": Flow(options={"optim": "galore_adafactor", **PROJECTED}, package="galore_torch"),
    "APOLLO": Flow(options={"optim": "apollo_adamw", **PROJECTED}, package="apollo_torch"),
    "accumulation": Flow(options={"gradient_accumulation_steps": 3}),
    "dispatched batches": Flow(options={"accelerator_config": {"dispatch_batches": True, "split_batches": True}}),
    "each node": Flow(options={"save_on_each_node": True}),
    "LoRA": Flow(lambda: lora(llama())),
    "LoRA on int8": Flow(lora_on_int8),
    "bitsandbytes AdamW8bit": Flow(optimizer=of_package("bitsandbytes.optim", "AdamW8bit")),
    "bitsandbytes PagedAdamW8bit": Flow(optimizer=of_package("bitsandbytes.optim", "PagedAdamW8bit")),
    "bitsandbytes Lion8bit": Flow(optimizer=of_package("bitsandbytes.optim", "Lion8bit")),
    "torchao AdamW8bit": Flow(optimizer=of_package("torchao.optim", "AdamW8bit")),
    "torchao AdamW4bit": Flow(optimizer=of_package("torchao.optim", "AdamW4bit")),
    "torchao AdamWFp8": Flow(optimizer=of_package("torchao.optim", "AdamWFp8")),
}


def plain(value: Any) -> Any:
    """Return a tree whose tensor subclasses are replaced by the tensors in them."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, about = value.__tensor_flatten__()
        return type(value).__name__, [getattr(value, name) for name in names], repr(about)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value).__name__.endswith("Projector"):
        return type(value).__name__, plain(vars(value))
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def state(trainer: Trainer) -> Any:
    parts = (trainer.model, trainer.optimizer, trainer.lr_scheduler)
    return fingerprint(plain([*(part.state_dict() for part in parts), torch.get_rng_state()]))


@pytest.mark.parametrize("name", by_default(FLOWS.keys() - {"dispatched batches", "each node", "LoRA"}, FLOWS))
def test_a_flow_that_stops_within_an_epoch_goes_on_exactly(tmp_path: Path, name: str) -> None:
    flow = FLOWS[name]
    whole, losses = flow.run(tmp_path, TrainWeightsCheckpointCallback())
    expected = state(whole)
    for later in (2 * SAVED, STEPS):
        (tmp_path / f"checkpoint-{later}").rename(tmp_path / f"later-{later}")
    assert verify_checkpoint(tmp_path / f"checkpoint-{SAVED}").ok
    resumed, continued = flow.run(tmp_path, TrainWeightsCheckpointCallback(), resume=True)
    assert continued.by_step == {step: losses.by_step[step] for step in range(SAVED + 1, STEPS + 1)}
    assert state(resumed) == expected


@pytest.mark.parametrize("name", ["LoRA", "LoRA on int8"])
def test_a_checkpoint_of_adapters_holds_nothing_of_the_base_model(tmp_path: Path, name: str) -> None:
    trainer, _ = FLOWS[name].run(tmp_path, TrainWeightsCheckpointCallback())
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    manifest = read_manifest(tmp_path / f"checkpoint-{STEPS}")
    weights = manifest.files["adapter_model.bin"].report["tensors"]
    assert len(weights) == len(trained)
    assert all("lora_" in tensor["name"] for tensor in weights)
    moments = [tensor for tensor in manifest.files["optimizer.pt"].report["tensors"] if tensor["role"] != "other"]
    assert sum(tensor["bytes_in"] for tensor in moments) == 2 * sum(each.nbytes for each in trained)
    assert not list(tmp_path.rglob("*model.safetensors"))


@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
@pytest.mark.parametrize("name", ["bitsandbytes AdamW8bit", "bitsandbytes Lion8bit"])
def test_states_of_eight_bits_stay_exact_where_weights_are_rounded(tmp_path: Path, name: str, mode: Any) -> None:
    trainer, _ = FLOWS[name].run(tmp_path, TrainWeightsCheckpointCallback(mode=mode))
    last = tmp_path / f"checkpoint-{STEPS}"
    assert verify_checkpoint(last).ok
    assert is_encoded(last / "optimizer.pt")
    stored = torch.load(last / "optimizer.pt", weights_only=True)
    assert fingerprint(stored) == fingerprint(trainer.optimizer.state_dict())
    eight_bits = [tensor for tensor in tensors_in(stored) if tensor.dtype == torch.uint8]
    assert len(eight_bits) >= 8
    report = read_manifest(last).files["pytorch_model.bin"].report["tensors"]
    assert any(tensor["bound"] for tensor in report)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def test_states_that_are_tensor_subclasses_stay_plain_beside_small_weights(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"optimizer\.pt stays as it is: state\.0\.exp_avg: .*OptimState8bit"):
        FLOWS["torchao AdamW8bit"].run(tmp_path, TrainWeightsCheckpointCallback())
    last = tmp_path / f"checkpoint-{STEPS}"
    assert verify_checkpoint(last).ok
    assert is_encoded(last / "pytorch_model.bin")
    assert not is_encoded(last / "optimizer.pt")
