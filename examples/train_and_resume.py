"""Train, be killed in the middle, resume from the last checkpoint, and end with the weights of a run without a stop."""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_trainweights.checkpoint import CheckpointManager

STEPS = 60
EPOCHS = 2
KILLED_AT = 38


def train(root: str, killed_at: int | None = None) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    inputs = torch.randn(STEPS // EPOCHS * 8, 32)
    loader = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=8, shuffle=True)

    with CheckpointManager(root, every_steps=10, keep_last=2) as manager:
        for _ in range(EPOCHS):
            for step, (x, y) in manager.steps(loader, model, optimizer, scheduler):
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                manager.log(loss=loss)
                if step % 10 == 1:
                    print(f"  step {step:2}: loss {loss.item():.4f}", flush=True)
                if step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
    return model.state_dict()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        print("Straight through:")
        expected = train(f"{directory}/straight")

        print(f"Killed at step {KILLED_AT}:")
        process = multiprocessing.get_context("spawn").Process(target=train, args=(f"{directory}/killed", KILLED_AT))
        process.start()
        process.join()
        left = sorted(path.name for path in Path(directory, "killed").iterdir())
        print(f"  exit code {process.exitcode}; it left {', '.join(left)}")

        print("Resumed:")
        resumed = train(f"{directory}/killed")
        print("equal weights:", all(torch.equal(resumed[name], expected[name]) for name in expected))


if __name__ == "__main__":
    main()
