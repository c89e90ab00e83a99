"""Train, save, train on, save in each way and load that into a second model: what it costs in size and exactness."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from hf_trainweights.checkpoint import build_checkpoint, load_checkpoint, restore_checkpoint, save_checkpoint

WAYS = {
    "lossless": {"mode": "lossless"},
    "near-lossless": {"mode": "near-lossless"},
    "compact": {"mode": "compact"},
    "quantize_i8": {"quantize_i8": True},
}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    return model, torch.optim.AdamW(model.named_parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    model.train()
    for _ in range(steps):
        x = torch.randn(32, 64)
        nn.functional.mse_loss(model(x), x.sin()).backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = build()
    with tempfile.TemporaryDirectory() as directory:
        train(model, optimizer, 100)
        save_checkpoint(build_checkpoint(model, optimizer, step=100), f"{directory}/checkpoint-100")
        train(model, optimizer, 100)
        checkpoint = build_checkpoint(model, optimizer, step=200)
        plain = Path(directory, "plain.pt")
        torch.save(checkpoint, plain)
        print("Size, and the largest difference of weights, outputs in eval mode and Adam's moments:")
        print(f"{'torch.save':<14} {plain.stat().st_size / 1e3:7.1f} kB")

        model.eval()
        x = torch.randn(16, 64)
        for name, options in WAYS.items():
            path = Path(directory, name)
            save_checkpoint(checkpoint, path, **options)
            second, second_optimizer = build()
            restore_checkpoint(load_checkpoint(path), second, second_optimizer)
            second.eval()
            size_bytes = sum(file.stat().st_size for file in path.iterdir())
            with torch.no_grad():
                outputs = (second(x) - model(x)).abs().max().item()
            weights = largest_difference(second.state_dict(), model.state_dict())
            states = [each.state_dict()["state"] for each in (second_optimizer, optimizer)]
            moments = max(largest_difference(states[0][index], states[1][index]) for index in states[1])
            print(f"{name:<14} {size_bytes / 1e3:7.1f} kB  {weights:8.2} {outputs:8.2} {moments:8.2}")


if __name__ == "__main__":
    main()
