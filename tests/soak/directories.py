"""A Trainer's checkpoint that is made small and plain again where it lies."""

from __future__ import annotations

import json
import random

import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file
from soak.scenario import Scenario, require, require_equal, require_no_leftovers
from trees import ADAM_SETTINGS

from hf_trainweights.checkpoint.directory import collect_garbage, compress_directory, latest, restore_directory
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint


class CompressesAndRestores(Scenario):
    """The second of two checkpoints, which refers to the first one."""

    kind = "compress and restore"

    def begin(self) -> None:
        """Write two checkpoints as a Trainer leaves them."""
        for step in (1, 2):
            path = self.run / f"checkpoint-{step}"
            path.mkdir()
            state = _state(step)
            save_file(state["weights"], path / "model.safetensors")
            torch.save(state["optimizer"], path / "optimizer.pt")
            (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5}))
        compress_directory(self.run / "checkpoint-1")

    def work(self, rng: random.Random) -> None:
        """Turn it back and forth; at the end it is small."""
        path = self.run / "checkpoint-2"
        for _ in range(4):
            compress_directory(path, rules=rng.choice([{}, {"optimizer": "raw"}]))
            restore_directory(path)
        compress_directory(path)

    def check_kill(self) -> None:
        """It can be resumed from at every moment, and has not lost a bit."""
        path = self.run / "checkpoint-2"
        require(latest(self.run) == str(path), f"latest offers {latest(self.run)}")
        plain = path / "model.safetensors"
        expected = _state(2)
        weights = load_safetensors(plain) if plain.exists() else load_file(path / "pytorch_model.bin")
        require_equal(weights, expected["weights"], "weights")
        require_equal(load_file(path / "optimizer.pt"), expected["optimizer"], "optimizer")

    def check_end(self) -> None:
        """It verifies, and the collector finds all that killed ones have left."""
        self.check_kill()
        collect_garbage(self.run)
        require_no_leftovers(self.run)
        report = verify_checkpoint(self.run / "checkpoint-2")
        require(report.ok, f"{dict(report.problems)}, foreign {report.foreign}")


def _state(step: int) -> dict[str, dict]:
    noise = torch.randn(64, 96, generator=torch.Generator().manual_seed(step))
    base = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    moments = {"step": torch.tensor(float(step)), "exp_avg": noise, "exp_avg_sq": noise.square()}
    group = {"lr": 0.1, "betas": (0.9, 0.99), **ADAM_SETTINGS, "params": [0]}
    return {
        "weights": {"w": base + 1e-3 * noise, "b": torch.arange(5.0)},
        "optimizer": {"state": {0: moments}, "param_groups": [group]},
    }
