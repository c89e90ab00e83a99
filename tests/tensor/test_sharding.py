"""Quantized weights under FSDP2, in two and four processes over gloo, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weights import FORMS

from hf_trainweights import QuantizedTensor

# Each test starts processes, and some need seconds.
pytestmark = pytest.mark.slow

K, STEPS = 128, 10


class Adapted(nn.Module):
    """A frozen quantized layer with a trainable adapter beside it, as LoRA has it."""

    def __init__(self, form: str, rows: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(K, rows, bias=False)
        weight = QuantizedTensor.quantize(self.base.weight.detach(), FORMS[form])
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(K, 4), nn.Linear(4, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def stack(form: str, rows: int = K) -> nn.Sequential:
    """Return two adapted layers and a head."""
    return nn.Sequential(Adapted(form, K, 0), nn.Tanh(), Adapted(form, rows, 1))


def train(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Return the losses of some steps, always on the same inputs."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(8, K, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded(model: nn.Module, **how: Any) -> nn.Module:
    """Return the model with each adapted layer, and the rest, spread over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.modules():
        if isinstance(layer, Adapted):
            fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def losses(rank: int, form: str, rows: int) -> list[float]:
    del rank
    return train(sharded(stack(form, rows)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_training_over_ranks_gives_the_bits_of_one_process(form: str, world_size: int) -> None:
    # 7 rows over 4 ranks: two each for three, one for the last.
    expected = train(stack(form, 7))
    assert run_ranks(world_size, losses, form, 7) == [expected] * world_size
