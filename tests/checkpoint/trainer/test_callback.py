"""An unmodified Trainer saves, resumes, rotates and loads the best of checkpoints that the callback makes small."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.runs import save
from checkpoint.trainers import STEPS, Losses, assert_equal, build, trainer_of, weights
from covering import exhaustive
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.serialization import config as serialization_settings
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trees import fingerprint

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint.directory import compress_directory, find_checkpoints, latest, restore_directory
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.trainer import callback as work
from hf_trainweights.checkpoint.whole.rewriting import WholeLayout
from hf_trainweights.errors import ConfigError, SaveError

pytestmark = pytest.mark.slow  # most train a second or two


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    trainer, losses = trainer_of(tmp_path_factory.mktemp("straight"), save_strategy="no")
    trainer.train()
    return weights(trainer), losses.by_step


def test_lossless_resume_is_bit_identical_to_training_straight_through(
    tmp_path: Path, straight: tuple[dict[str, torch.Tensor], dict[int, float]]
) -> None:
    trainer_of(tmp_path, TrainWeightsCheckpointCallback())[0].train()
    small = tmp_path / "checkpoint-4"
    for later in (6, 8):
        (tmp_path / f"checkpoint-{later}").rename(tmp_path / f"later-{later}")
    assert verify_checkpoint(small).ok
    assert not (small / "model.safetensors").exists()

    resumed, losses = trainer_of(tmp_path, TrainWeightsCheckpointCallback())
    resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed), straight[0])
    assert losses.by_step == {step: straight[1][step] for step in range(5, STEPS + 1)}


def test_a_resume_that_maps_its_files_is_bit_identical_too(
    tmp_path: Path, straight: tuple[dict[str, torch.Tensor], dict[int, float]]
) -> None:
    trainer_of(tmp_path, TrainWeightsCheckpointCallback())[0].train()
    resumed, losses = trainer_of(tmp_path, TrainWeightsCheckpointCallback())
    # pytest's monkeypatch would delete the setting at its end.
    with serialization_settings.patch("load.mmap", True):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_equal(weights(resumed), straight[0])
    assert losses.by_step == {step: straight[1][step] for step in range(5, STEPS + 1)}


def lora(model: PreTrainedModel) -> nn.Module:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.2, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        (lora, {}),
        *exhaustive(
            (nn.Module.bfloat16, {}),
            (None, {"optim": "adafactor"}),
            (None, {"bf16": True}),
            (None, {"optim": "sgd", "optim_args": "momentum=0.9"}),
            (None, {"gradient_accumulation_steps": 2}),
        ),
    ],
    ids=["LoRA", "bf16 weights", "Adafactor", "bf16 autocast", "SGD", "accumulation"],
)
def test_every_kind_of_training_resumes_exactly(tmp_path: Path, wrap: Any, options: dict[str, Any]) -> None:
    def run() -> tuple[Trainer, Losses]:
        torch.manual_seed(0)
        model = build() if wrap is None else wrap(build())
        return trainer_of(tmp_path, TrainWeightsCheckpointCallback(), model=model, save_steps=4, **options)

    def state(trainer: Trainer) -> Any:
        parts = (trainer.model, trainer.optimizer, trainer.lr_scheduler)
        return fingerprint([*(part.state_dict() for part in parts), torch.get_rng_state()])

    whole, losses = run()
    whole.train()
    expected = state(whole)
    (tmp_path / "checkpoint-8").rename(tmp_path / "last")
    assert verify_checkpoint(tmp_path / "checkpoint-4").ok
    resumed, continued = run()
    resumed.train(resume_from_checkpoint=True)
    assert state(resumed) == expected
    assert continued.by_step == {step: losses.by_step[step] for step in range(5, STEPS + 1)}


def test_a_checkpoint_in_shards_resumes_exactly(
    tmp_path: Path, straight: tuple[dict[str, torch.Tensor], dict[int, float]]
) -> None:
    trainer_of(tmp_path)[0].train()
    small = tmp_path / "checkpoint-4"
    model = AutoModelForCausalLM.from_pretrained(small)
    (small / "model.safetensors").unlink()
    model.save_pretrained(small, max_shard_size="20KB")
    assert len(list(small.glob("model-*.safetensors"))) > 1
    compress_directory(small)
    assert not list(small.glob("model*"))
    resumed, losses = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=str(small))
    assert_equal(weights(resumed), straight[0])
    assert losses.by_step == {step: straight[1][step] for step in range(5, STEPS + 1)}


def test_checkpoints_are_smaller_and_say_what_they_hold(tmp_path: Path) -> None:
    trainer_of(tmp_path / "plain")[0].train()
    trainer_of(tmp_path / "small", TrainWeightsCheckpointCallback(mode="compact"))[0].train()

    def size(root: Path) -> int:
        files = {
            file.stat().st_ino: file
            for file in root.glob("checkpoint-*/*")
            if file.suffix in (".safetensors", ".bin", ".pt")
        }
        return sum(file.stat().st_size for file in files.values())

    assert size(tmp_path / "small") < 0.8 * size(tmp_path / "plain")
    manifest = read_manifest(tmp_path / "small" / "checkpoint-8")
    assert manifest.step == 8
    assert "loss" in manifest.metrics
    assert {"pytorch_model.bin", "optimizer.pt"} <= manifest.files.keys()


@pytest.mark.covering(1)
@pytest.mark.parametrize("encoded", [True, False], ids=["encoded", "interrupted before"])
@pytest.mark.parametrize("name", ["gpt_neox", "qwen3_moe"])
def test_models_whose_files_have_other_names_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoded: bool
) -> None:
    torch.manual_seed(0)
    whole, losses = trainer_of(tmp_path / "whole", model=build(name), save_strategy="no")
    whole.train()
    first, _ = trainer_of(tmp_path / "run", TrainWeightsCheckpointCallback(), model=build(name), save_steps=4)
    if encoded:
        first.train()
        (tmp_path / "run" / "checkpoint-8").rename(tmp_path / "last")
    else:
        monkeypatch.setattr(WholeLayout, "compress", fail)
        first.train()
        assert latest(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-8")
        (tmp_path / "run" / "checkpoint-8").rename(tmp_path / "last")
    assert verify_checkpoint(tmp_path / "run" / "checkpoint-4").ok == encoded

    fresh = build(name)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(0.5)  # a resume that leaves a weight alone shows
    resumed, continued = trainer_of(tmp_path / "run", model=fresh, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed), weights(whole))
    assert continued.by_step == {step: losses.by_step[step] for step in range(5, STEPS + 1)}


def fail(layout: WholeLayout, *_: Any) -> None:
    raise SaveError(str(layout.path), "a disk that takes the checkpoint", "a full one", "Free space.")


def test_a_moved_run_resumes_from_any_of_its_checkpoints(
    tmp_path: Path, straight: tuple[dict[str, torch.Tensor], dict[int, float]]
) -> None:
    trainer_of(tmp_path / "here", TrainWeightsCheckpointCallback())[0].train()
    (tmp_path / "here").rename(tmp_path / "there")
    resumed, _ = trainer_of(tmp_path / "there", TrainWeightsCheckpointCallback())
    resumed.train(resume_from_checkpoint=str(tmp_path / "there" / "checkpoint-4"))
    assert_equal(weights(resumed), straight[0])


def test_from_pretrained_reads_a_small_checkpoint(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback())
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    assert_equal(dict(model.state_dict()), weights(trainer))


def test_rotation_leaves_checkpoints_that_resume(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(), save_total_limit=2)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    assert latest(tmp_path) == str(tmp_path / "checkpoint-8")
    assert_equal(torch.load(tmp_path / "checkpoint-8" / "pytorch_model.bin"), weights(trainer))


@pytest.mark.parametrize(("limit", "is_difference"), [(1, False), (2, True)])
def test_a_difference_outlives_the_rotation_of_its_anchor(tmp_path: Path, limit: int, is_difference: bool) -> None:
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(), save_total_limit=limit)
    trainer.train()
    last = tmp_path / "checkpoint-8"
    assert not (tmp_path / "checkpoint-2").exists()
    assert bool(list(last.glob("*.anchor"))) == is_difference
    assert verify_checkpoint(last).ok
    assert_equal(torch.load(last / "pytorch_model.bin"), weights(trainer))


def test_the_best_checkpoint_keeps_exact_weights_and_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer, _ = trainer_of(
        tmp_path,
        TrainWeightsCheckpointCallback(mode="compact"),
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    report = read_manifest(best).files["pytorch_model.bin"].report["tensors"]
    assert {tensor["bound"] for tensor in report if tensor["role"] == "weight"} == {None}
    assert_equal(torch.load(best / "pytorch_model.bin"), weights(trainer))


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_every_save_strategy_is_made_small(tmp_path: Path, strategy: str) -> None:
    options = {"eval_strategy": "epoch", "metric_for_best_model": "loss"} if strategy == "best" else {}
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(), save_strategy=strategy, **options)
    trainer.train()
    saved = list(tmp_path.glob("checkpoint-*"))
    assert saved
    assert all(verify_checkpoint(path).ok for path in saved)


def test_without_optimizer_state(tmp_path: Path) -> None:
    trainer_of(tmp_path, TrainWeightsCheckpointCallback(), save_only_model=True)[0].train()
    assert verify_checkpoint(tmp_path / "checkpoint-8").ok
    assert not (tmp_path / "checkpoint-8" / "optimizer.pt").exists()


def test_added_to_an_old_run_and_taken_away_again(
    tmp_path: Path, straight: tuple[dict[str, torch.Tensor], dict[int, float]]
) -> None:
    trainer_of(tmp_path)[0].train()
    for later in (6, 8):
        (tmp_path / f"checkpoint-{later}").rename(tmp_path / f"later-{later}")
    trainer_of(tmp_path, TrainWeightsCheckpointCallback())[0].train(resume_from_checkpoint=True)
    assert not (tmp_path / "checkpoint-4" / MANIFEST_NAME).exists()
    assert verify_checkpoint(tmp_path / "checkpoint-6").ok
    (tmp_path / "checkpoint-8").rename(tmp_path / "last")
    restore_directory(tmp_path / "checkpoint-6")
    resumed, _ = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed), straight[0])


@pytest.mark.parametrize("name", ["llama", *exhaustive("gpt_neox")])
def test_only_a_background_thread_that_is_no_daemon_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[tuple[str, bool, int]] = []
    original = WholeLayout.compress

    def watched(*args: Any) -> Any:
        thread = threading.current_thread()
        jobs = [other for other in threading.enumerate() if other.name == "trainweights-checkpoint"]
        seen.append((thread.name, thread.daemon, len(jobs)))
        return original(*args)

    monkeypatch.setattr(WholeLayout, "compress", watched)
    trainer_of(tmp_path, TrainWeightsCheckpointCallback(), model=build(name))[0].train()
    assert [thread for thread, _, _ in seen] == ["trainweights-checkpoint"] * 3 + ["MainThread"]
    assert all(not daemon for _, daemon, _ in seen)
    assert max(jobs for _, _, jobs in seen) == 1


def test_a_full_disk_leaves_checkpoints_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(work.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1})())
    callback = TrainWeightsCheckpointCallback(on_error="raise")
    trainer_of(tmp_path, callback, save_steps=8)[0].train()
    assert (tmp_path / "checkpoint-8" / "model.safetensors").exists()
    assert "checkpoint-8 stays as it is, plain" in caplog.text
    assert "MB of free disk space" in caplog.text


def test_modes_and_rules_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="lossless, near-lossless, compact"):
        TrainWeightsCheckpointCallback(mode="tiny")
    with pytest.raises(ConfigError, match="Nothing linear"):
        TrainWeightsCheckpointCallback(rules={"exp_avg_sq": "int8"})
    with pytest.raises(ConfigError, match="on_error: expected warn or raise, found 'ignore'"):
        TrainWeightsCheckpointCallback(on_error="ignore")


def test_a_rule_that_names_nothing_in_the_model_ends_the_training_before_its_first_step(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(rules={"mpl": "raw"}))
    with pytest.raises(ConfigError, match=r"rules\['mpl'\]: .*nothing that it selects"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_end_says_in_one_line_what_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(tmp_path, TrainWeightsCheckpointCallback())[0].train()
    assert "4 checkpoints made small" in caplog.text
    assert "weights exact" in caplog.text


def test_the_final_model_stays_plain(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback())
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "model.safetensors").exists()
    assert json.loads((tmp_path / "final" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_buffers_of_wrapped_modules_are_exact(tmp_path: Path, wrap: Any) -> None:
    inner = nn.Linear(64, 64)
    codebook = torch.zeros(128, 64)
    inner.register_buffer("codebook", codebook)
    model = nn.Sequential(wrap(inner))
    callback = TrainWeightsCheckpointCallback(mode="near-lossless")
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for step in (1, 2):
        path = save(tmp_path, step, manifest=False)
        codebook += 1e-3 * torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(weights, path / "model.safetensors")
        state = TrainerState(global_step=step, max_steps=step)
        callback.on_save(args, state, TrainerControl(), model=model, optimizer=None)
    name = "0._orig_mod.codebook" if wrap is torch.compile else "0.codebook"
    assert torch.equal(load_file(path / "pytorch_model.bin")[name], weights[name])


def test_a_trial_of_a_search_leaves_the_checkpoints_of_another_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, 2, manifest=False)
    before = {file: file.read_bytes() for file in path.iterdir()}
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    callback, model = TrainWeightsCheckpointCallback(), nn.Linear(2, 1)
    state = TrainerState(global_step=2, max_steps=2, is_hyper_param_search=True)  # saves to run-0/checkpoint-2
    for _ in range(2):
        callback.on_save(args, state, TrainerControl(), model=model, optimizer=None)
    assert {file: file.read_bytes() for file in path.iterdir()} == before
    assert caplog.text.count("hyperparameter search are left") == 1


def test_a_program_that_goes_elsewhere_after_a_save_has_small_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Move(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            monkeypatch.chdir(elsewhere)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            monkeypatch.chdir(tmp_path)

    monkeypatch.chdir(tmp_path)
    trainer_of(Path("run"), TrainWeightsCheckpointCallback(), Move(), max_steps=4)[0].train()
    assert [found.verified for found in find_checkpoints(tmp_path / "run")] == [True, True]
    assert list(elsewhere.iterdir()) == []
