"""A fine-tune of a model on the Hub: its checkpoints name repository and commit, and need them to be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from bases import forget_directories
from checkpoint.trainers import trainer_of
from hub.server import LocalHub
from huggingface_hub import constants, snapshot_download
from transformers import AutoModelForCausalLM

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.errors import MissingAnchorError

REPOSITORY = "tester/base"
pytestmark = pytest.mark.filterwarnings("ignore:Cannot enable progress bars:UserWarning")


@pytest.mark.slow
def test_a_base_that_the_hub_has_moved_on_from_is_found_by_its_commit(
    local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_directories(monkeypatch)
    first = ARCHITECTURES["llama"].build()
    first.push_to_hub(REPOSITORY)
    model = AutoModelForCausalLM.from_pretrained(REPOSITORY)
    commit = local_hub.repositories[REPOSITORY].branches["main"]
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(anchor="base"), model=model, max_steps=2)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    loaded = load_file(checkpoint / "pytorch_model.bin")
    assert all(torch.equal(loaded[name], each) for name, each in model.state_dict().items() if name in loaded)

    with torch.no_grad():
        first.lm_head.weight.add_(1)
    first.push_to_hub(REPOSITORY)
    shutil.rmtree(constants.HF_HUB_CACHE)
    snapshot_download(REPOSITORY)  # the commit of today
    command = f"hf download {REPOSITORY} --revision {commit}"
    with pytest.raises(MissingAnchorError, match=command):
        load_file(checkpoint / "pytorch_model.bin")
    assert not verify_checkpoint(checkpoint).intact
    snapshot_download(REPOSITORY, revision=commit)  # what the command does
    again = load_file(checkpoint / "pytorch_model.bin")
    assert all(torch.equal(again[name], each) for name, each in loaded.items())
    assert verify_checkpoint(checkpoint).ok
