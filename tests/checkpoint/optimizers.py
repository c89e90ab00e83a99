"""Optimizers whose states have the names of Adam's and other values, written here so that no package is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def begin(state: dict[str, Any], weight: Tensor) -> None:
    """Make the states of a weight at the first step."""
    if not state:
        state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))


class Adopt(torch.optim.Optimizer):
    """ADOPT (Taniguchi et al. 2024): exp_avg holds gradients that are divided already."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.9999), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    zeros, square = torch.zeros_like(weight), weight.grad.square()
                    state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=square)
                    continue
                state["step"] += 1
                normed = weight.grad / state["exp_avg_sq"].sqrt().clamp(min=group["eps"])
                state["exp_avg"].lerp_(normed, 1 - group["betas"][0])
                weight.add_(state["exp_avg"], alpha=-group["lr"])
                state["exp_avg_sq"].lerp_(weight.grad.square(), 1 - group["betas"][1])


class Prodigy(torch.optim.Optimizer):
    """Prodigy (Mishchenko and Defazio 2023) with a constant d: its lr is 1, and its rate is d."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state, d = self.state[weight], group["d"]
                begin(state, weight)
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(weight.grad, alpha=d * 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(weight.grad, weight.grad, value=d**2 * 1e-3)
                divisor = state["exp_avg_sq"].sqrt().add_(d * 1e-8)
                weight.addcdiv_(state["exp_avg"], divisor, value=-d * group["lr"])


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2019): Adam's moments, and a rate for each layer in proportion to the weight."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                begin(state, weight)
                state["step"] += 1
                state["exp_avg"].lerp_(weight.grad, 0.1)
                state["exp_avg_sq"].lerp_(weight.grad.square(), 1e-3)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                weight.add_(update, alpha=-group["lr"] * float(weight.norm() / update.norm()))


class Signs(torch.optim.AdamW):
    """A subclass with a step of its own: exp_avg holds signs, and nothing is divided by exp_avg_sq."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(weight))
                    state["exp_avg_sq"] = torch.full_like(weight, 1e3)
                state["step"] += 1
                state["exp_avg"].lerp_(weight.grad.sign(), 0.1)
                weight.add_(state["exp_avg"], alpha=-group["lr"])


class Renamed(torch.optim.AdamW):
    """A subclass that moves weights as AdamW does."""


MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
OTHERS: dict[str, MakeOptimizer] = {
    "Adopt": Adopt,
    "Prodigy": Prodigy,
    "Lamb": Lamb,
    "Signs": Signs,
}
# Optimizers of torch that have a rule, with the roles of their states that lossy modes round.
RULED: dict[str, tuple[MakeOptimizer, list[str]]] = {
    "AMSGrad": (lambda params: torch.optim.AdamW(params, amsgrad=True), ["exp_avg", "exp_avg_sq", "maximum"]),
    "NAdam": (torch.optim.NAdam, ["exp_avg", "exp_avg_sq"]),
    "RAdam": (torch.optim.RAdam, ["exp_avg", "exp_avg_sq"]),
    "Adamax": (torch.optim.Adamax, ["exp_avg", "norm"]),
    "RMSprop": (torch.optim.RMSprop, ["exp_avg_sq"]),
    "RMSprop, momentum": (lambda params: torch.optim.RMSprop(params, momentum=0.9), ["exp_avg_sq", "momentum"]),
    "RMSprop, centered": (lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True), ["momentum"]),
    "Adagrad": (torch.optim.Adagrad, ["sum"]),
    "Adadelta": (torch.optim.Adadelta, ["exp_avg_sq"]),
    "SGD": (lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9), ["momentum"]),
    "Muon": (lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]), ["momentum"]),
}
# Their settings are those of other classes, so a file that names no class does not show whose they are.
AMBIGUOUS = ("RAdam", "Adamax", "Adadelta")
ADAMS: dict[str, MakeOptimizer] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Renamed": Renamed,
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "maximize": lambda params: torch.optim.Adam(params, maximize=True),
}


def trained(make: MakeOptimizer, steps: int = 6, scale: float = 1e-3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model after some steps, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        (scale * (model(torch.randn(16, 128)) - 1).square().mean()).backward()
        optimizer.step()
    return model, optimizer


def moments(state: dict[str, Any]) -> dict[tuple[int, str], Tensor]:
    """Return the tensors of an optimizer's state dict by index and key."""
    states = state["state"].items()
    return {(index, key): each for index, values in states for key, each in values.items() if isinstance(each, Tensor)}
