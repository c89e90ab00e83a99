"""Runs that save at every step: a Trainer and a plain loop, killed and resumed until they reach their end."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
from checkpoint.trainers import build, trainer_of
from safetensors.torch import load_file as load_safetensors
from soak.scenario import Scenario, require, require_equal, require_tidy, require_within_bounds
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint.directory import latest
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.loop.manager import CheckpointManager
from hf_trainweights.checkpoint.loop.training_state import load_checkpoint
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_step
from hf_trainweights.models.host.module_names import converted_names

STEPS = 8
KEEP = 3
ANCHOR_EVERY = 3


class Training(Scenario):
    """A run that notes weights and optimizer after each step, right before it saves them."""

    mode: ClassVar[str] = "lossless"

    def learn(self) -> None:
        """Keep what an undisturbed run has noted."""
        shutil.copytree(self.run, self.folder / "reference")

    def work(self, rng: random.Random) -> None:
        """Train to the end and note the final weights."""
        (self.run / "steps").mkdir(exist_ok=True)
        final = self.train(self.run / "out")
        torch.save(final, self.run / "final.pt")

    def train(self, root: Path) -> dict[str, Any]:
        """Train from the newest checkpoint on, and return the final weights."""
        raise NotImplementedError

    def load(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the weights and the optimizer's state of a checkpoint."""
        raise NotImplementedError

    def note(self, step: int, model: nn.Module, optimizer: Any) -> None:
        """Write down what a checkpoint of this step has to hold."""
        unfinished = self.run / "steps" / "unfinished"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
        os.replace(unfinished, self.run / "steps" / f"{step}.pt")

    def check_kill(self) -> None:
        """The newest whole checkpoint is at most a step behind, and holds what training had then."""
        steps = [int(path.stem) for path in (self.run / "steps").glob("*.pt")]
        actual = latest(self.run / "out")
        if actual is None:
            require(max(steps, default=0) <= 1, f"no checkpoint to resume from after step {max(steps, default=0)}")
            return
        checkpoint = Path(actual)
        step = checkpoint_step(checkpoint)
        require(step >= max(steps) - 1, f"the newest checkpoint is of step {step}, training was at {max(steps)}")
        exact = self.mode == "lossless"
        truth = (self.folder / "reference" if exact else self.run) / "steps" / f"{step}.pt"
        expected = torch.load(truth, weights_only=True)
        weights, optimizer = self.load(checkpoint)
        if exact:
            require_equal(weights, expected["model"], f"{checkpoint.name}: weights")
            require_equal(optimizer, expected["optimizer"], f"{checkpoint.name}: optimizer")
        else:
            plain = checkpoint / "model.safetensors"
            file = plain if plain.exists() else checkpoint / "pytorch_model.bin"
            require_within_bounds(file, weights, expected["model"])

    def check_end(self) -> None:
        """The run ends as if nothing had happened, up to the mode's errors, and leaves nothing but its checkpoints."""
        self.check_kill()
        final = torch.load(self.run / "final.pt", weights_only=True)
        if self.mode == "lossless":
            expected = torch.load(self.folder / "reference" / "final.pt", weights_only=True)
            require_equal(final, expected, "final weights")
        require(all(bool(tensor.isfinite().all()) for tensor in final.values()), "final weights are not finite")
        require_tidy(self.run / "out", keep=KEEP)


class _Noting(TrainerCallback):
    def __init__(self, training: Training):
        self.training = training

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.note(state.global_step, kwargs["model"], kwargs["optimizer"])


class TrainerLossless(Training):
    """A Trainer with the callback."""

    kind = "trainer lossless"
    architecture: ClassVar[str] = "llama"

    def prepare(self) -> None:
        """Have Transformers build its table of conversions, which takes half a second, before children are forked."""
        converted_names(build(self.architecture))

    def train(self, root: Path) -> dict[str, Any]:
        """Resume from `latest`, into a model whose own weights are of no use."""
        newest = latest(root)
        model = build(self.architecture)
        if newest is not None:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.5)
        callback = TrainWeightsCheckpointCallback(mode=self.mode, anchor_every=ANCHOR_EVERY, on_error="raise")
        options = {"max_steps": STEPS, "save_steps": 1, "save_total_limit": KEEP, "logging_strategy": "no"}
        trainer, _ = trainer_of(root, _Noting(self), callback, model=model, **options)
        trainer.train(resume_from_checkpoint=newest)
        return model.state_dict()

    def load(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the files that a Trainer would read."""
        plain = checkpoint / "model.safetensors"
        weights = load_safetensors(plain) if plain.exists() else load_file(checkpoint / "pytorch_model.bin")
        return weights, load_file(checkpoint / "optimizer.pt")


class TrainerNearLossless(TrainerLossless):
    """Within bounds."""

    kind = "trainer near-lossless"
    mode = "near-lossless"


class TrainerCompact(TrainerLossless):
    """Within wider bounds."""

    kind = "trainer compact"
    mode = "compact"


class TrainerRenamed(TrainerLossless):
    """A model whose files name its weights otherwise than its modules do."""

    kind = "trainer gpt-neox"
    architecture = "gpt_neox"


class ManagerLossless(Training):
    """A plain loop with a CheckpointManager."""

    kind = "manager lossless"

    def train(self, root: Path) -> dict[str, Any]:
        """Resume from where the manager says."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.1), nn.Linear(96, 64))
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        data = torch.randn(5 * STEPS // 2, 64, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(data, batch_size=5, shuffle=True)  # pyright: ignore[reportArgumentType]
        options = {"every_steps": 1, "keep_last": KEEP, "anchor_every": ANCHOR_EVERY}
        with CheckpointManager(root, mode=self.mode, **options) as manager:
            for _ in range(2):
                for step, batch in manager.steps(loader, model, optimizer):
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self.note(step, model, optimizer)
        return model.state_dict()

    def load(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the checkpoint as a loop would."""
        state = load_checkpoint(checkpoint)
        return state["model"], state["optimizer"]


class ManagerNearLossless(ManagerLossless):
    """Within bounds."""

    kind = "manager near-lossless"
    mode = "near-lossless"


class ManagerCompact(ManagerLossless):
    """Within wider bounds."""

    kind = "manager compact"
    mode = "compact"
