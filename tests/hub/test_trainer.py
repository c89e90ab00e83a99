"""A Trainer with push_to_hub=True: adapters on a quantized base, and small checkpoints that need nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from fresh_process import run_fresh
from hub.server import LocalHub
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_trainweights import TrainWeightsCheckpointCallback, TrainWeightsConfig, quantize_
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint

LLAMA = ARCHITECTURES["llama"]
pytestmark = [
    # PEFT uses names that Transformers is about to change.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    # With disable_tqdm the Trainer switches progress bars off and on, which tests/conftest.py forbids.
    pytest.mark.filterwarnings("ignore:Cannot enable progress bars:UserWarning"),
]


def trainer_of(model: nn.Module, directory: Path, repo_id: str, *callbacks: Any, **options: Any) -> Trainer:
    ids = (torch.arange(8 * 12).reshape(8, 12) * 7) % 96
    # One save, at the last step: of two, the second waits for nothing and may replace files the first still uploads.
    arguments = TrainingArguments(
        str(directory),
        push_to_hub=True,
        hub_model_id=repo_id,
        max_steps=2,
        save_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))


def logits(model: nn.Module) -> torch.Tensor:
    return outputs(model.eval(), LLAMA.make_inputs())[0]


@pytest.mark.slow
def test_lora_on_a_quantized_base_is_pushed_and_comes_back(local_hub: LocalHub, tmp_path: Path) -> None:
    built = LLAMA.build()
    quantize_(built, TrainWeightsConfig("int4", group_size=32))
    built.push_to_hub("me/base")
    base = AutoModelForCausalLM.from_pretrained("me/base", cache_dir=tmp_path / "train")
    trainer = trainer_of(
        get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")),
        tmp_path / "run",
        "me/adapter",
        hub_strategy="checkpoint",
    )
    trainer.train()
    trainer.push_to_hub()
    files = local_hub.files("me/adapter")
    assert {"adapter_model.safetensors", "last-checkpoint/adapter_model.safetensors"} <= files.keys()
    assert not any(b"_qdata" in data for data in files.values())
    assert b"base_model: me/base" in files["README.md"]

    for subfolder in ("", "last-checkpoint"):
        cache = tmp_path / f"pull-{subfolder}"
        fresh = AutoModelForCausalLM.from_pretrained("me/base", cache_dir=cache)
        folder = snapshot_download("me/adapter", cache_dir=cache)
        untrained = logits(fresh)
        pulled = PeftModel.from_pretrained(fresh, Path(folder, subfolder))
        assert torch.equal(logits(pulled), logits(trainer.model))
        assert not torch.equal(logits(pulled), untrained)


WITHOUT_US = """
import sys, torch
from transformers import AutoModelForCausalLM
ids, expected = torch.load("expected.pt")
for folder in ("", "last-checkpoint"):
    model = AutoModelForCausalLM.from_pretrained("me/run", subfolder=folder).eval()
    assert torch.equal(model(ids).logits, expected), folder
assert not any(name.startswith("hf_trainweights") for name in sys.modules)
print("equal")
"""


@pytest.mark.slow
def test_small_checkpoints_that_are_pushed_load_without_this_package(local_hub: LocalHub, tmp_path: Path) -> None:
    callback = TrainWeightsCheckpointCallback(mode="near-lossless")
    trainer = trainer_of(LLAMA.build(), tmp_path / "run", "me/run", callback, hub_strategy="checkpoint")
    trainer.train()
    trainer.push_to_hub()

    checkpoint = Path(snapshot_download("me/run", cache_dir=tmp_path / "cache"), "last-checkpoint")
    names = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "trainweights.json"} <= names
    assert not any(name.endswith(".anchor") for name in names)
    # A copy of files: the cache consists of links, which a manifest does not follow.
    copied = tmp_path / "checkpoint-2"
    copied.mkdir()
    for path in checkpoint.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    assert verify_checkpoint(copied).ok
    assert is_encoded(copied / "optimizer.pt")
    assert len(load_file(copied / "optimizer.pt")["state"]) == len(list(trainer.model.parameters()))

    torch.save((LLAMA.make_inputs()["input_ids"], logits(trainer.model)), tmp_path / "expected.pt")
    variables = {"HF_ENDPOINT": local_hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = run_fresh(WITHOUT_US, cwd=tmp_path, environment={**variables, "HF_HUB_DISABLE_TELEMETRY": "1"})
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
