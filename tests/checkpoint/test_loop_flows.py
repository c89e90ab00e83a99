"""Plain loops with more than a model and an optimizer: a scaler that skips steps, and averaged weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.trainers import STEPS, build, trainer_of
from covering import by_default
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback
from trees import fingerprint

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint import CheckpointManager, load_checkpoint, verify_checkpoint
from hf_trainweights.checkpoint.encoded.reader import is_encoded
from hf_trainweights.checkpoint.loop.progress import rng_state
from hf_trainweights.checkpoint.manifest import read_manifest

BATCHES = 12


class Loop:
    """A loop in float16 autocast, whose scale grows until steps are skipped, with an average of the weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 300), nn.Dropout(0.3), nn.Linear(300, 16))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.both = nn.ModuleDict({"model": self.model, "average": self.average})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
        self.seen: list[tuple[int, float, float]] = []

    def __call__(self, root: Path, stop: int = 99, **options: Any) -> Loop:
        batches = torch.randn(BATCHES, 4, 16, generator=torch.Generator().manual_seed(1))
        with CheckpointManager(root, every_steps=1, **options) as manager:
            for step, x in manager.steps(batches, self.both, self.optimizer, scaler=self.scaler):
                self.optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = self.model(x).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.average.update_parameters(self.model)
                self.seen.append((step, loss.item(), self.scaler.get_scale()))
                if step == stop:
                    break
        return self

    def state(self) -> Any:
        parts = (self.both, self.optimizer, self.scaler)
        return fingerprint([*(part.state_dict() for part in parts), rng_state()["torch"]])


@pytest.mark.slow
@pytest.mark.parametrize("stop", by_default((4,), range(1, BATCHES)))
def test_a_loop_whose_scaler_skips_steps_goes_on_exactly_wherever_it_stopped(tmp_path: Path, stop: int) -> None:
    whole = Loop()(tmp_path / "whole")
    scales = [scale for *_, scale in whole.seen]
    assert any(later < earlier for earlier, later in itertools.pairwise(scales))  # steps were skipped
    first = Loop()(tmp_path / "parts", stop)
    second = Loop()(tmp_path / "parts")
    assert first.seen + second.seen == whole.seen
    assert second.state() == whole.state()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_averaged_weights_come_back_within_the_bounds_of_the_manifest(tmp_path: Path, mode: Any) -> None:
    trained = Loop()(tmp_path, mode=mode)
    last = tmp_path / f"checkpoint-{BATCHES}"
    report = read_manifest(last).files["pytorch_model.bin"].report["tensors"]
    bounds = {tensor["name"]: tensor["bound"] for tensor in report}
    stored = load_checkpoint(last)["model"]
    for name, tensor in trained.both.state_dict().items():
        bound = bounds.get(name) or 0.0
        assert (stored[name] - tensor).abs().max() <= bound * (1 + 1e-5), name
    assert bounds["average.module.0.weight"] is not None


class Average(TrainerCallback):
    """Keeps an average of a Trainer's weights in a file of each checkpoint."""

    def __init__(self, model: nn.Module):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.average.update_parameters(model)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.save(self.average.state_dict(), Path(args.output_dir, f"checkpoint-{state.global_step}", "average.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", by_default(("compact",), ("lossless", "compact")))
def test_a_file_that_a_callback_adds_to_a_trainers_checkpoint_is_stored_exactly(tmp_path: Path, mode: Any) -> None:
    model = build()
    average = Average(model)
    trainer_of(tmp_path, average, TrainWeightsCheckpointCallback(mode=mode), model=model)[0].train()
    last = tmp_path / f"checkpoint-{STEPS}"
    assert verify_checkpoint(last).ok
    assert "average.pt" in read_manifest(last).files
    assert is_encoded(last / "average.pt")
    stored = torch.load(last / "average.pt", weights_only=True)
    assert fingerprint(stored) == fingerprint(average.average.state_dict())
