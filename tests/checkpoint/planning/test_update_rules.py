"""The table of optimizers: what each promises of an error in its states holds in a real step; anyone may add a row."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from checkpoint.planning.formulas import ROWS, Row, Step
from torch import Tensor, nn

from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.planning.optimizers import class_name
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES, Policy
from hf_trainweights.checkpoint.planning.update_rules import RULES, StateRole, UpdateRule, register_update_rule
from hf_trainweights.errors import ConfigError

SHAPE = [72, 64]
# What a step rounds, beside weights of size one.
SLACK = {torch.float64: 1e-9, torch.float32: 1e-5}


def gradient(generator: torch.Generator, *, is_sparse: bool = False) -> Tensor:
    """Returns a gradient whose rows differ in size, with a row of zeros."""
    sizes = torch.logspace(-4, 0, SHAPE[0])[:, None]
    dense = torch.randn(SHAPE, generator=generator) * sizes
    dense[3] = 0
    return dense.to_sparse(1) if is_sparse else dense


def decoded(state: dict[str, Any], mode: str, name: str | None) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns a state dict after a way through a file, and the bounds of the parameter's states."""
    written = encode_file(state, Policy(mode).plan_optimizer(state, optimizer=name))
    bounds = {row.path.rpartition(".")[2]: row.bound for row in written.report if row.bound is not None}
    return decode_file(written.payload, written.structure), bounds


def stepped(row: Row, seed: int, state: dict[str, Any], weight: Tensor, grad: Tensor) -> Tensor:
    """Returns the weight after one step from a state."""
    moved = nn.Parameter(weight.to(row.dtype, copy=True))
    again = row.make(moved, random.Random(seed))
    again.load_state_dict(copy.deepcopy(state))
    moved.grad = grad.to(row.dtype)
    again.step()
    return moved.detach().double()


@pytest.mark.parametrize("mode", LOSSY_MODES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.optimizer_class)
def test_a_step_from_decoded_states_moves_a_weight_as_far_as_promised(row: Row, mode: str) -> None:
    pytest.importorskip(row.optimizer_class.partition(".")[0])
    for seed in range(8):
        choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        weight = nn.Parameter(torch.randn(SHAPE, generator=generator))
        optimizer: Any = row.make(weight, choose)
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        for _ in range(choose.choice([2, 4, 12])):
            weight.grad = gradient(generator, is_sparse=row.is_sparse)
            optimizer.step()
        before, name = optimizer.state_dict(), class_name(optimizer)
        assert name == row.optimizer_class
        after, bounds = decoded(before, mode, name)
        start, grad = weight.detach().clone(), gradient(generator, is_sparse=row.is_sparse)
        exact, near = (stepped(row, seed, state, start, grad) for state in (before, after))
        group = dict(before["param_groups"][0])
        used, decay = dense(grad, group), group.get("weight_decay", 0.0)
        if decay and not is_decoupled(row, group):
            used += decay * start.double()
        rate = group["lr"] * group.get("d", 1.0)
        kept = start.double() * (1 - rate * decay if is_decoupled(row, group) else 1)
        states = doubled(before["state"][0]), doubled(after["state"][0])
        promised = row.formula(Step(group, *states, bounds, used, exact - kept))
        error = (near - exact).abs() if promised.shape == exact.shape else (near - exact).norm()
        slack = SLACK[row.dtype] * (1 + promised.abs())
        assert (error <= promised * (1 + 1e-6) + slack).all(), (seed, group, (error / (promised + slack)).max())


def dense(grad: Tensor, group: dict[str, Any]) -> Tensor:
    plain = grad.to_dense() if grad.is_sparse else grad
    return plain.double() * (-1 if group.get("maximize") else 1)


def is_decoupled(row: Row, group: dict[str, Any]) -> bool:
    """Returns whether weight decay does not go through the gradient."""
    by_setting = group.get("decoupled_weight_decay", group.get("weight_decouple", group.get("decouple", False)))
    names = ("adamw.AdamW", "Muon", "Lion", "ScheduleFree", "bitsandbytes.optim.adam.Adam")
    return bool(by_setting) or row.optimizer_class.endswith(names)


def doubled(state: dict[str, Any]) -> dict[str, Any]:
    """Returns states in double precision, all in one dict."""
    inner = state.get("__bnb_optimizer_quant_state__", {})
    return {key: each.double() if isinstance(each, Tensor) else each for key, each in {**state, **inner}.items()}


def test_every_row_of_the_table_has_a_formula() -> None:
    # These move weights as AdamW does, and are made for GPUs or have to be compiled.
    assert RULES.keys() - {row.optimizer_class for row in ROWS} == {
        "apex.optimizers.fused_adam.FusedAdam",
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        "deepspeed.ops.adam.fused_adam.FusedAdam",
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.optimizer_class)
def test_every_class_of_the_table_is_called_so(row: Row) -> None:
    pytest.importorskip(row.optimizer_class.partition(".")[0])
    optimizer = row.make(nn.Parameter(torch.zeros(2, 2)), random.Random(0))
    assert class_name(optimizer) == row.optimizer_class


class Heavy(torch.optim.Optimizer):
    """An optimizer that the table does not have: a velocity, and a step for each sign."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight in self.param_groups[0]["params"]:
            velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
            velocity.mul_(0.9).add_(weight.grad)
            weight.add_(velocity, alpha=-self.param_groups[0]["lr"])


HEAVY = f"{Heavy.__module__}.Heavy"


@pytest.fixture
def heavy() -> Any:
    weight = nn.Parameter(torch.randn(SHAPE))
    optimizer = Heavy([weight])
    weight.grad = gradient(torch.Generator().manual_seed(0))
    optimizer.step()
    yield optimizer
    RULES.pop(HEAVY, None)


def test_a_rule_that_is_registered_rounds_the_states_of_its_class(heavy: Heavy) -> None:
    state = heavy.state_dict()
    assert decoded(state, "near-lossless", HEAVY)[1] == {}
    register_update_rule(HEAVY, UpdateRule({"velocity": StateRole("momentum")}))
    back, bounds = decoded(state, "near-lossless", class_name(heavy))
    before, after = (each["state"][0]["velocity"] for each in (state, back))
    rms = before.square().mean(1, keepdim=True).sqrt()
    assert 0 < ((after - before).abs() / rms.clamp(min=1e-30)).max() <= bounds["velocity"] <= 0.26


def test_a_class_has_one_set_of_rules() -> None:
    rule = UpdateRule({"velocity": StateRole("momentum")})
    with pytest.raises(ConfigError, match="expected a class without rules, found one that has other rules already"):
        register_update_rule("torch.optim.adam.Adam", rule)
    with pytest.raises(ConfigError, match="expected at least one UpdateRule"):
        register_update_rule("elsewhere.Optimizer")


def test_a_rule_that_no_update_could_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"StateRole, role: expected one of exp_avg, .*momentum"):
        StateRole("moment")
    with pytest.raises(ConfigError, match="expected a key for exp_avg, and none elsewhere"):
        StateRole("exp_avg")
    with pytest.raises(ConfigError, match="expected a key for exp_avg, and none elsewhere"):
        StateRole("momentum", "exp_avg_sq")
    with pytest.raises(ConfigError, match="UpdateRule, square of m: expected the key of a state whose role is one of"):
        UpdateRule({"m": StateRole("exp_avg", "v")})


def test_states_in_a_dict_of_their_own_are_found() -> None:
    values = {"step": 3, "inner": {"state1": torch.randn(SHAPE), "state2": torch.rand(SHAPE)}}
    state = {"state": {0: values}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]}
    plan = Policy("near-lossless").plan_optimizer(state, optimizer="bitsandbytes.optim.adamw.AdamW")
    assert plan["state", 0, "inner", "state1"].exp_avg_sq == ("state", 0, "inner", "state2")
    assert decoded(state, "near-lossless", "bitsandbytes.optim.adamw.AdamW")[1].keys() == {"state1", "state2"}
