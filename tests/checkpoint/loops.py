"""A plain training loop, its objects in every kind that is resumed."""

import random

import numpy as np
import torch
from torch import nn
from trees import fingerprint

from hf_trainweights.checkpoint.loop.progress import rng_state

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "SGD-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=1e-2, max_iter=2),
}


SCHEDULERS = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "multi step": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 15]),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [4],
    ),
}


class Net(nn.Module):
    """Ties, a buffer, dropout, a frozen weight and a weight that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(70, 64)
        self.conv = nn.Conv1d(64, 64, 1)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(64, 70, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, tokens):
        hidden = self.norm(self.conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        return self.head(self.dropout(self.frozen(hidden)))


def everything(optimizer="AdamW", scheduler="cosine", *, dtype=torch.float32, enabled=False):
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=enabled)
    return model, optimizer, SCHEDULERS[scheduler](optimizer), scaler


def train(model, optimizer, scheduler, scaler, steps, *, accumulate=1):
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            tokens = torch.randint(0, 70, (4, 6))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            scaler.scale(loss).backward()
            losses.append(loss.item() + random.random() + np.random.rand())
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda loss=loss: loss.detach())
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def state_of(model, optimizer, scheduler, scaler):
    parts = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), scaler.state_dict(), rng_state()]
    return fingerprint(parts)


def seed():
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
