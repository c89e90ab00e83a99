"""Training on a GPU: a Trainer and a plain loop stop, resume from a small checkpoint, and end as the whole run does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.trainers import STEPS, build, trainer_of
from torch import nn
from trees import fingerprint

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint import (
    CheckpointManager,
    build_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from hf_trainweights.checkpoint.encoded.reader import is_encoded
from hf_trainweights.checkpoint.manifest import read_manifest

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # What has no deterministic form on a GPU warns.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let equal steps end in equal bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def state(*parts: Any) -> Any:
    return fingerprint([*(part.state_dict() for part in parts), torch.get_rng_state(), torch.cuda.get_rng_state()])


OPTIONS = [{}, {"bf16": True}, {"fp16": True}, {"optim": "adamw_torch_fused"}, {"optim": "paged_adamw_8bit"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_trainer_goes_on_exactly(options: dict[str, Any], tmp_path: Path) -> None:
    if "8bit" in options.get("optim", ""):
        pytest.importorskip("bitsandbytes")

    def train(resume: bool = False) -> tuple[Any, dict[int, float]]:
        model = build()
        model.config.attention_dropout = 0.1
        callback = TrainWeightsCheckpointCallback()
        trainer, losses = trainer_of(tmp_path, callback, model=model, use_cpu=False, save_steps=3, **options)
        trainer.train(resume_from_checkpoint=resume)
        assert next(trainer.model.parameters()).is_cuda
        return state(trainer.model, trainer.optimizer, trainer.lr_scheduler), losses.by_step

    expected, losses = train()
    for later in (6, STEPS):
        (tmp_path / f"checkpoint-{later}").rename(tmp_path / f"later-{later}")
    saved = tmp_path / "checkpoint-3"
    assert verify_checkpoint(saved).ok
    assert is_encoded(saved / "optimizer.pt")
    actual, continued = train(resume=True)
    assert continued == {step: losses[step] for step in range(4, STEPS + 1)}
    assert actual == expected


class Loop:
    """A loop in float16 autocast with dropout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 300), nn.Dropout(0.3), nn.Linear(300, 16)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18, growth_interval=2)
        self.losses: list[float] = []

    def __call__(self, root: Path, stop: int = 99, **options: Any) -> Loop:
        batches = torch.randn(10, 4, 16, generator=torch.Generator().manual_seed(1))
        with CheckpointManager(root, every_steps=1, **options) as manager:
            for step, x in manager.steps(batches, self.model, self.optimizer, scaler=self.scaler):
                self.optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = self.model(x.cuda()).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.losses.append(loss.item())
                if step == stop:
                    break
        return self

    def state(self) -> Any:
        return state(self.model, self.optimizer, self.scaler)


def test_a_loop_goes_on_exactly(tmp_path: Path) -> None:
    whole = Loop()(tmp_path / "whole")
    first, second = Loop()(tmp_path / "parts", 4), Loop()(tmp_path / "parts")
    assert first.losses + second.losses == whole.losses
    assert second.state() == whole.state()


@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_rounded_weights_keep_the_bounds_of_the_manifest(mode: Any, tmp_path: Path) -> None:
    trained = Loop()(tmp_path, mode=mode)
    last = tmp_path / "checkpoint-10"
    bounds = {
        entry["name"]: entry["bound"] for entry in read_manifest(last).files["pytorch_model.bin"].report["tensors"]
    }
    assert bounds["0.weight"] is not None
    stored = load_checkpoint(last)["model"]
    for name, tensor in trained.model.state_dict().items():
        assert (stored[name].to(tensor.device) - tensor).abs().max() <= (bounds.get(name) or 0.0) * (1 + 1e-5), name


@pytest.mark.parametrize("map_location", ["cpu", "cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
def test_files_come_back_as_plain_ones_do_to_any_device(map_location: Any, tmp_path: Path) -> None:
    loop = Loop()(tmp_path / "run")
    checkpoint = build_checkpoint(loop.model, loop.optimizer)
    save_checkpoint(checkpoint, tmp_path / "small")
    for part, file in (("model", "pytorch_model.bin"), ("optimizer", "optimizer.pt")):
        torch.save(checkpoint[part], tmp_path / file)
        plain, small = (
            torch.load(path / file, map_location=map_location, weights_only=True)
            for path in (tmp_path, tmp_path / "small")
        )
        assert is_encoded(tmp_path / "small" / file)
        assert fingerprint(small) == fingerprint(plain)
        assert devices(small) == devices(plain)


def devices(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: devices(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [devices(item) for item in value]
    return str(value.device) if isinstance(value, torch.Tensor) else None
