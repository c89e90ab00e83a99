"""A Trainer and a plain loop whose checkpoints are stored against the weights that the model was loaded from."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bases import COMMIT, REPOSITORY, forget_directories
from checkpoint.trainers import assert_equal, build, trainer_of, weights
from covering import exhaustive
from huggingface_hub import constants
from torch import nn
from transformers import AutoModelForCausalLM

from hf_trainweights import TrainWeightsCheckpointCallback, latest
from hf_trainweights.checkpoint import CheckpointManager, find_checkpoints
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.run.base import BaseChoice, RunBase
from hf_trainweights.errors import ConfigError, MissingAnchorError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:Cannot enable progress bars:UserWarning")


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_directories(monkeypatch)


@pytest.fixture
def pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the snapshot of a model in the Hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache" / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / COMMIT
    build().save_pretrained(snapshot)
    return snapshot


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.slow
def test_of_several_commits_the_one_with_the_weights_of_the_model_is_the_base(pretrained: Path) -> None:
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.save_pretrained(pretrained.with_name("a" * 40))
    refs = pretrained.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    model = load(pretrained)
    model.config._name_or_path = REPOSITORY
    base = RunBase("base", keep=False)
    base.find(model)
    assert base.choice == BaseChoice(pretrained)


def test_a_model_of_the_hub_that_is_no_longer_in_the_cache_has_no_base(pretrained: Path) -> None:
    model = load(pretrained)
    model.config._name_or_path = REPOSITORY
    shutil.rmtree(pretrained.parent)
    with pytest.raises(ConfigError, match=f"{REPOSITORY} in the Hub's cache"):
        RunBase("base", keep=False).find(model)


@pytest.mark.slow
def test_a_callback_that_another_process_unpickles_finds_its_base(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(pretrained, tmp_path / "model")
    callback = TrainWeightsCheckpointCallback(anchor=model)
    trainer, _ = trainer_of(tmp_path / "run", callback, model=load(model))
    trainer.train()
    sent = pickle.dumps(TrainWeightsCheckpointCallback(anchor=model))
    checkpoint = Path(latest(tmp_path / "run") or "")
    forget_directories(monkeypatch)  # as in a new process
    with pytest.raises(MissingAnchorError, match="register_base"):
        torch.load(checkpoint / "pytorch_model.bin")
    trainer_of(tmp_path / "run", pickle.loads(sent), model=load(model))
    torch.load(checkpoint / "pytorch_model.bin")


@pytest.mark.slow
def test_a_trainer_saves_against_the_base_and_an_unmodified_one_resumes_exactly(
    pretrained: Path, tmp_path: Path
) -> None:
    straight, _ = trainer_of(tmp_path / "straight", model=load(pretrained))
    straight.train()
    callback = TrainWeightsCheckpointCallback(anchor="base")
    trainer, _ = trainer_of(tmp_path / "run", callback, model=load(pretrained), save_total_limit=1)
    trainer.train()
    (checkpoint,) = find_checkpoints(tmp_path / "run")  # even the only checkpoint is a difference
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.base is not None
    assert (checkpoint.manifest.base.repository, checkpoint.manifest.base.commit) == (REPOSITORY, COMMIT)
    again, _ = trainer_of(tmp_path / "again", model=load(pretrained), max_steps=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again.args, "max_steps", 8)
        again.train(resume_from_checkpoint=str(checkpoint.path))
    assert_equal(weights(again), weights(straight))


@pytest.mark.slow
def test_a_model_from_a_directory_needs_the_directory_and_the_callback_finds_it_again(
    pretrained: Path, tmp_path: Path
) -> None:
    mine = Path(shutil.move(pretrained, tmp_path / "mine"))
    trainer, _ = trainer_of(
        tmp_path / "run", TrainWeightsCheckpointCallback(anchor="base"), model=load(mine), max_steps=4
    )
    trainer.train()
    base = read_manifest(tmp_path / "run" / "checkpoint-4").base
    assert base is not None
    assert (base.repository, base.path) == (None, str(mine))
    reader._base_directories.clear()
    resumed, _ = trainer_of(tmp_path / "run", TrainWeightsCheckpointCallback(anchor="base"), model=load(mine))
    resumed.train(resume_from_checkpoint=latest(tmp_path / "run"))
    assert resumed.state.global_step == 8


def test_a_model_that_was_not_loaded_has_no_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"anchor: expected a model with a base.*not loaded by from_pretrained"):
        trainer_of(tmp_path, TrainWeightsCheckpointCallback(anchor="base"), model=build())


def test_a_path_without_weights_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="anchor: expected a directory with"):
        TrainWeightsCheckpointCallback(anchor=tmp_path)
    with pytest.raises(ConfigError, match="keep_base: expected an anchor"):
        TrainWeightsCheckpointCallback(keep_base=True)


def test_sharded_checkpoints_have_no_base(pretrained: Path) -> None:
    for anchor in ("base", pretrained):
        with pytest.raises(UnsupportedError, match="anchor: expected checkpoints in whole files"):
            RunBase(anchor, keep=False).require_whole_files(True)
    RunBase(None, keep=False).require_whole_files(True)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_an_adapter_takes_the_base_of_its_base_model(pretrained: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load(pretrained), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    base = RunBase("base", keep=False)
    base.find(model)
    assert base.choice == BaseChoice(pretrained)


@pytest.mark.slow
def test_a_plain_loop_saves_against_a_path_and_keeps_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(80, 64)
    mine = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), mine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with CheckpointManager(tmp_path / "run", every_steps=1, anchor=mine, keep_base=True) as manager:
        for _step, batch in manager.steps(torch.ones(3, 80), model, optimizer):
            model(batch).mean().backward()
            optimizer.step()
    mine.unlink()
    assert read_manifest(tmp_path / "run" / "checkpoint-1").keeps_base
    again = nn.Linear(80, 64)
    with CheckpointManager(tmp_path / "run", every_steps=1) as manager:
        manager.steps([], again)
    assert torch.equal(again.weight, model.weight)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run", *exhaustive("run/checkpoint-2", "link", "relative")])
def test_a_base_that_its_own_run_may_write_over_is_kept(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(pretrained, tmp_path / "run" / "checkpoint-2" if place == "run/checkpoint-2" else run)
    (tmp_path / "link").symlink_to(run)
    model = load(Path("run") if place == "relative" else tmp_path / place)
    callback = TrainWeightsCheckpointCallback(anchor="base")
    trainer, _ = trainer_of(run, callback, model=model, max_steps=4, save_steps=2 if place != "run/checkpoint-2" else 4)
    trainer.train()
    trainer.save_model()
    shutil.rmtree(run / "checkpoint-2")
    reader._base_directories.clear()
    checkpoint = Path(latest(run) or "")
    assert read_manifest(checkpoint).keeps_base
    assert_equal(torch.load(checkpoint / "pytorch_model.bin"), weights(trainer))


@pytest.mark.slow
def test_a_base_beside_the_run_is_not_kept(pretrained: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(pretrained, tmp_path / "run" / "base")
    trainer_of(tmp_path / "run", TrainWeightsCheckpointCallback(anchor="base"), model=load(mine), max_steps=2)[
        0
    ].train()
    manifest = read_manifest(tmp_path / "run" / "checkpoint-2")
    assert manifest.base is not None
    assert not manifest.keeps_base


@pytest.mark.slow
def test_the_base_is_sought_for_each_model_and_once_for_a_training_that_begins_again(
    pretrained: Path, tmp_path: Path
) -> None:
    base = RunBase("base", keep=False)
    mine = shutil.copytree(pretrained, tmp_path / "mine")
    for path in (pretrained, mine, pretrained):
        base.find(load(path))
        assert base.choice == BaseChoice(path)
    model = load(pretrained)
    model.save_pretrained(pretrained.with_name("a" * 40))
    model.config._name_or_path = REPOSITORY
    model.config._commit_hash = None  # Transformers 5.17 records it, later ones do not
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(pretrained.with_name("b" * 40))
    base.find(model)
    assert base.choice == BaseChoice(pretrained.with_name("b" * 40))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    base.find(model)
    assert base.choice == BaseChoice(pretrained.with_name("b" * 40))
    with pytest.raises(ConfigError, match="a model with a base"):
        base.find(build())
