"""How far an error in a state may move a weight in one step: the formulas of `update_rules`, for every class there."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """A step that is about to be done: settings, exact and decoded states, bounds, and a gradient.

    `gradient` has the sign and the weight decay that the optimizer gives it. `moved` is how far the exact states move
    the weight, before weight decay that does not go through the gradient.
    """

    group: dict[str, Any]
    exact: dict[str, Any]
    decoded: dict[str, Any]
    bounds: dict[str, float]
    gradient: Tensor
    moved: Tensor

    @property
    def lr(self) -> float:
        return self.group["lr"]

    @property
    def count(self) -> float:
        """The number of this step."""
        return float(self.exact.get("step", self.group.get("step", self.group.get("k", 0)))) + 1

    def correction(self, index: int) -> float:
        """1 - beta**t."""
        return 1 - self.group["betas"][index] ** self.count

    def factor(self, *keys: str, power: float = 0.5) -> float:
        """The largest relative change of what is divided by the power of these states."""
        return 2 ** (power * sum(self.bounds[key] for key in keys)) - 1

    def rows(self, key: str) -> Tensor:
        """The largest error of a momentum, by row."""
        state = self.exact[key]
        return self.bounds[key] * state.square().mean(-1, keepdim=True).sqrt().expand_as(state)

    def root(self, key: str, beta: float) -> Tensor:
        """The exact root of a mean of squares after this step."""
        return (beta * self.exact[key] + (1 - beta) * self.gradient.square()).sqrt()


def adam(step: Step, first: str = "exp_avg", second: str = "exp_avg_sq") -> Tensor:
    beta1, beta2 = step.group["betas"][:2]
    share = step.bounds[first] * beta1 / step.correction(0)
    if "max_exp_avg_sq" in step.bounds:
        largest = max(step.factor("max_exp_avg_sq"), step.factor(second))
        return step.lr * share * math.sqrt(step.correction(1)) + step.moved.abs() * largest
    return step.lr * share * math.sqrt(step.correction(1) / beta2) + step.moved.abs() * step.factor(second)


def radam(step: Step) -> Tensor:
    beta2 = step.group["betas"][1]
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step.count * beta2**step.count / step.correction(1)
    if length <= 5:
        share = step.bounds["exp_avg"] * step.group["betas"][0] / step.correction(0)
        return step.lr * share * step.decoded["exp_avg_sq"].sqrt()
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    share = adam(step) - step.moved.abs() * step.factor("exp_avg_sq")
    return share * math.sqrt(rectified) + step.moved.abs() * step.factor("exp_avg_sq")


def nadam(step: Step) -> Tensor:
    beta1, beta2 = step.group["betas"]
    mu, later = (beta1 * (1 - 0.5 * 0.96 ** ((step.count + i) * step.group["momentum_decay"])) for i in (0, 1))
    product = float(step.exact["mu_product"]) * mu * later
    share = step.bounds["exp_avg"] * beta1 * later / (1 - product) * math.sqrt(step.correction(1) / beta2)
    return step.lr * share + step.moved.abs() * step.factor("exp_avg_sq")


def adamax(step: Step) -> Tensor:
    beta1, beta2 = step.group["betas"]
    share = step.bounds["exp_avg"] * beta1 / (beta2 * step.correction(0))
    return step.lr * share + step.moved.abs() * step.factor("exp_inf", power=1)


def rmsprop(step: Step) -> Tensor:
    if "square_avg" not in step.bounds:
        return sgd(step) if "momentum_buffer" in step.bounds else step.moved * 0
    divided = step.gradient / (step.root("square_avg", step.group["alpha"]) + step.group["eps"])
    changed = step.lr * divided.abs() * step.factor("square_avg")
    if "momentum_buffer" not in step.bounds:
        return changed
    return changed + step.lr * step.group["momentum"] * step.rows("momentum_buffer")


def sgd(step: Step, key: str = "momentum_buffer") -> Tensor:
    momentum = step.group["momentum"]
    return step.lr * momentum * step.rows(key) * (momentum if step.group.get("nesterov") else 1)


def muon(step: Step) -> Tensor:
    """In Frobenius' norm: the iterations act on singular values, and change no distance by more than their slope."""
    momentum, coefficient = step.group["momentum"], step.group["ns_coefficients"][0]
    directions = []
    for states in (step.exact, step.decoded):
        mean = momentum * states["momentum_buffer"] + (1 - momentum) * step.gradient
        update = (1 - momentum) * step.gradient + momentum * mean if step.group["nesterov"] else mean
        directions.append(update / update.norm())
    slope = coefficient ** step.group["ns_steps"]
    apart = slope * ((directions[0] - directions[1]).norm() + 2**-7)  # it computes in bfloat16
    height, width = step.gradient.shape
    rate = step.lr * math.sqrt(max(1, height / width))
    return rate * torch.minimum(apart, torch.tensor(2.5 * math.sqrt(min(height, width))))


def lion(step: Step, key: str = "exp_avg") -> Tensor:
    beta1 = step.group["betas"][0]
    mean = beta1 * step.exact[key] + (1 - beta1) * step.gradient
    return 2 * step.lr * (mean.abs() <= beta1 * step.rows(key))


def prodigy(step: Step) -> Tensor:
    beta1, beta2 = step.group["betas"]
    rate = step.group["d"] * step.lr
    return rate * step.bounds["exp_avg"] * beta1 / math.sqrt(beta2) + step.moved.abs() * step.factor("exp_avg_sq")


def adopt(step: Step) -> Tensor:
    beta1 = step.group["betas"][0]
    divided = step.gradient / step.exact["exp_avg_sq"].sqrt().clamp(min=step.group["eps"])
    changed = (1 - beta1) * divided.abs() * step.factor("exp_avg_sq")
    return step.lr * (beta1 * step.rows("exp_avg") + changed)


def ademamix(step: Step) -> Tensor:
    _, beta2, beta3 = step.group["betas"]
    mean = beta2 * step.decoded["exp_avg_sq"] + (1 - beta2) * step.gradient.square()
    divisor = (mean / step.correction(1)).sqrt() + step.group["eps"]
    return adam(step) + step.lr * step.group["alpha"] * beta3 * step.rows("exp_avg_slow") / divisor


def schedule_free(step: Step) -> Tensor:
    divisor = step.root("exp_avg_sq", step.group["betas"][1]) / math.sqrt(step.correction(1)) + step.group["eps"]
    return step.lr * (step.gradient / divisor).abs() * step.factor("exp_avg_sq")


def divided(*keys: str) -> Callable[[Step], Tensor]:
    """Return the formula of an optimizer that divides by the roots of these states and averages nothing."""
    return lambda step: step.moved.abs() * step.factor(*keys)


@dataclass(frozen=True)
class Row:
    """A class of the table, the settings to try, and its formula. `dtype` is that in which it can take a step."""

    optimizer_class: str
    settings: dict[str, tuple[Any, ...]]
    formula: Callable[[Step], Tensor]
    dtype: torch.dtype = torch.float64
    is_sparse: bool = False

    def make(self, weight: Tensor, choose: random.Random) -> torch.optim.Optimizer:
        """Return an optimizer with settings drawn at random; it skips the test if its package is missing."""
        module, _, name = self.optimizer_class.rpartition(".")
        settings = {key: choose.choice(values) for key, values in self.settings.items()}
        return getattr(importlib.import_module(module), name)([weight], **settings)


_DECAY = {"weight_decay": (0.0, 0.1)}
_TORCH = {**_DECAY, "maximize": (False, True), "foreach": (False, True)}
_BETAS = {"lr": (1e-3, 0.1), "betas": ((0.9, 0.999), (0.8, 0.95)), "eps": (1e-8, 1e-3)}
_SINGLE = {"dtype": torch.float32}
ROWS = [
    Row("torch.optim.adam.Adam", {**_BETAS, **_TORCH, "amsgrad": (False, True)}, adam),
    Row("torch.optim.adamw.AdamW", {**_BETAS, **_TORCH, "amsgrad": (False, True)}, adam),
    Row("torch.optim.sparse_adam.SparseAdam", {**_BETAS, "maximize": (False, True)}, adam, is_sparse=True),
    Row("torch.optim.radam.RAdam", {**_BETAS, **_TORCH, "decoupled_weight_decay": (False, True)}, radam),
    Row("torch.optim.nadam.NAdam", {**_BETAS, **_TORCH, "decoupled_weight_decay": (False, True)}, nadam),
    Row("torch.optim.adamax.Adamax", {**_BETAS, **_TORCH}, adamax),
    Row(
        "torch.optim.rmsprop.RMSprop",
        {**_TORCH, "eps": (1e-8, 1e-3), "momentum": (0.0, 0.9), "centered": (False, True)},
        rmsprop,
    ),
    Row("torch.optim.adagrad.Adagrad", {**_TORCH, "eps": (1e-10, 1e-3), "lr_decay": (0.0, 0.1)}, divided("sum")),
    Row("torch.optim.adadelta.Adadelta", {**_TORCH, "eps": (1e-6, 1e-3)}, divided("square_avg", "acc_delta")),
    Row("torch.optim.sgd.SGD", {**_TORCH, "lr": (0.1,), "momentum": (0.9, 0.5), "nesterov": (False, True)}, sgd),
    Row("torch.optim.Muon", {**_DECAY, "lr": (1e-2,), "nesterov": (False, True), "momentum": (0.9, 0.95)}, muon),
    Row("torch.optim.Adafactor", {**_DECAY, "maximize": (False, True)}, lambda step: step.moved * 0),
    Row(
        "transformers.optimization.Adafactor",
        {**_DECAY, "lr": (1e-2,), "relative_step": (False,), "scale_parameter": (False, True), "beta1": (0.9, None)},
        lambda step: step.group["beta1"] * step.rows("exp_avg") if step.group["beta1"] else step.moved * 0,
    ),
    Row("lion_pytorch.lion_pytorch.Lion", {**_DECAY, "lr": (1e-3,), "betas": ((0.9, 0.99), (0.95, 0.98))}, lion),
    Row("prodigyopt.prodigy.Prodigy", {**_DECAY, "lr": (1.0,), "d0": (1e-3,), "slice_p": (1, 3)}, prodigy),
    Row("pytorch_optimizer.optimizer.adopt.ADOPT", {**_DECAY, "weight_decouple": (False, True)}, adopt),
    Row("pytorch_optimizer.optimizer.ademamix.AdEMAMix", {**_DECAY, "alpha": (5.0, 2.0)}, ademamix),
    Row("schedulefree.adamw_schedulefree.AdamWScheduleFree", {**_BETAS, **_DECAY}, schedule_free),
    Row("schedulefree.radam_schedulefree.RAdamScheduleFree", {**_BETAS, **_DECAY}, schedule_free),
    Row("schedulefree.sgd_schedulefree.SGDScheduleFree", {**_DECAY, "lr": (0.1,)}, lambda step: step.moved * 0),
    Row("bitsandbytes.optim.adam.Adam", _DECAY, lambda step: adam(step, "state1", "state2"), **_SINGLE),
    Row("bitsandbytes.optim.adamw.AdamW", _DECAY, lambda step: adam(step, "state1", "state2"), **_SINGLE),
    Row("bitsandbytes.optim.lion.Lion", _DECAY, lambda step: lion(step, "state1"), **_SINGLE),
    Row(
        "bitsandbytes.optim.sgd.SGD",
        {**_DECAY, "lr": (0.1,), "momentum": (0.9,)},
        lambda step: step.lr * step.group["betas"][0] * step.rows("state1"),
        **_SINGLE,
    ),
    Row("bitsandbytes.optim.rmsprop.RMSprop", {}, divided("state1"), **_SINGLE),
]
