from __future__ import annotations

import io
import json

import pytest
import torch
from trees import ADAM_SETTINGS, encoded_bytes, trained, write_anchor

from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.exact import PlanesDelta
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.checkpoint.codecs.rows import RowUniform
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import with_steps
from hf_trainweights.checkpoint.planning.policy import MODES, SIZE_FLOOR, Policy
from hf_trainweights.checkpoint.run.anchors import measure_delta_rms

LOSSY_MODES = [mode for mode in MODES if mode != "lossless"]
W = torch.zeros(64, 64)


def codecs(plan):
    return {path: [codec.codec_id for codec in each.candidates] for path, each in plan.items()}


def loaded(encoded):
    return torch.load(io.BytesIO(encoded_bytes(encoded)), weights_only=True)


@pytest.fixture
def anchored(tmp_path):
    """Weights that moved a little, the anchor they moved from, and how far they moved."""
    torch.manual_seed(0)
    old = {"w": torch.randn(80, 64), "half": torch.randn(80, 64).bfloat16(), "small": torch.randn(64)}
    new = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in old.items()}
    old["frozen"] = new["frozen"] = torch.randn(80, 64)
    old["reshaped"], new["reshaped"] = torch.randn(80, 64), torch.randn(64, 80)
    new["added"] = torch.randn(80, 64)
    new["table"] = old["table"] = torch.arange(5000)
    anchor = Anchor(write_anchor(tmp_path, old))
    return new, anchor, measure_delta_rms(new, anchor)


def test_lossless_plans_nothing_but_exact_codecs(anchored):
    weights, anchor, delta_rms = anchored
    state = trained("AdamW")[1].state_dict()
    policy = Policy()
    weight_plans = [
        with_steps(plan, delta_rms) for plan in (policy.plan_weights(weights, anchor), policy.plan_weights(weights))
    ]
    plans = [*weight_plans, policy.plan_optimizer(state)]
    assert all(codec.lossless for plan in plans for each in plan.values() for codec in each.candidates)


@pytest.mark.parametrize(("mode", "steps_per_rms"), [("near-lossless", 4), ("compact", 1)])
def test_lossy_steps_are_a_fixed_part_of_the_first_difference(mode, steps_per_rms, anchored):
    weights, anchor, delta_rms = anchored
    assert delta_rms["w"] == pytest.approx(1e-3, rel=0.05)
    for moved in (1, 5):
        now = {name: tensor * moved for name, tensor in weights.items()}
        plan = with_steps(Policy(mode).plan_weights(now, anchor), delta_rms)
        assert plan["w",].candidates == (DeltaUniform(step=delta_rms["w"] / steps_per_rms),)
        assert plan["w",].anchor == "w"


@pytest.mark.parametrize("mode", LOSSY_MODES)
def test_weights_that_lossy_modes_store_exactly(mode, anchored):
    weights, anchor, delta_rms = anchored
    plan = with_steps(Policy(mode).plan_weights(weights, anchor), delta_rms)
    assert codecs(plan) == {
        ("w",): ["delta-uniform"],
        ("half",): ["planes-delta", "delta-uniform"],
        ("small",): ["planes-delta"],
        ("frozen",): ["planes-delta"],
        ("reshaped",): ["planes-delta"],
        ("added",): ["planes"],
        ("table",): ["planes-delta"],
    }
    encoded = encode_file(weights, plan, anchor=anchor)
    report = {entry.path: entry for entry in encoded.report}
    back = loaded(encoded)
    for name, tensor in weights.items():
        assert torch.equal(back[name], tensor) is (report[name].bound is None)
    assert report["frozen"].bytes_out < 0.02 * report["frozen"].bytes_in
    assert report["reshaped"].codec == report["added"].codec == "planes"


@pytest.mark.parametrize("mode", LOSSY_MODES)
def test_every_lossy_weights_bound_holds(mode, anchored):
    weights, anchor, delta_rms = anchored
    encoded = encode_file(weights, with_steps(Policy(mode).plan_weights(weights, anchor), delta_rms), anchor=anchor)
    back = loaded(encoded)
    bounds = {entry.path: entry.bound for entry in encoded.report if entry.bound is not None}
    assert "w" in bounds
    for name, bound in bounds.items():
        assert (back[name].double() - weights[name].double()).abs().max() <= bound <= 1.1 * delta_rms[name]


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_exact_as_long_as_nothing_says_how_far_they_move(mode):
    plan = with_steps(Policy(mode).plan_weights({"w": W, "b": torch.zeros(4)}), {})
    assert all(codec.lossless for each in plan.values() for codec in each.candidates)


def test_weight_that_grew_from_nothing_or_has_no_measure_is_exact(anchored):
    weights, anchor, _ = anchored
    for delta_rms in ({}, {"w": 0.0}, {"w": 1e-40}):
        plan = with_steps(Policy("compact").plan_weights(weights, anchor), delta_rms)
        assert codecs(plan)["w",] == ["planes-delta"]


def test_measure_leaves_out_what_cannot_be_lossy(anchored):
    weights, anchor, delta_rms = anchored
    assert sorted(delta_rms) == ["frozen", "half", "w"]
    assert delta_rms["frozen"] == 0
    assert json.loads(json.dumps(delta_rms)) == delta_rms
    weights["w"][0, 0] = torch.nan
    assert "w" not in measure_delta_rms(weights, anchor)


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_exact_in_every_mode_and_size(mode, anchored):
    weights, anchor, delta_rms = anchored
    plan = with_steps(Policy(mode).plan_weights(weights, anchor, buffers={"w"}), delta_rms)
    assert (plan["w",].role, plan["w",].candidates) == ("buffer", (PlanesDelta(),))
    assert Policy(mode).plan_weights(weights, buffers={"w"})["w",].candidates == ()
    assert with_steps(Policy(mode).plan_weights(weights, buffers={"w"}), delta_rms)["w",].candidates == ()


@pytest.mark.parametrize("mode", LOSSY_MODES)
def test_anchor_is_rounded_where_the_policy_is_lossy_and_the_weight_moves(mode, anchored):
    weights, _, _ = anchored
    plan = Policy(mode, {"re:frozen": "lossless", "re:added": "int8"}).plan_weights(weights)
    steps = with_steps(plan, dict.fromkeys(weights, 1e-3) | {"reshaped": 0.0})
    assert {path for path, each in plan.items() if each.steps_per_rms} == {("w",), ("reshaped",)}
    assert codecs(steps) == {
        ("w",): ["planes", "delta-uniform"],
        ("half",): [],
        ("small",): [],
        ("frozen",): [],
        ("reshaped",): ["planes"],
        ("added",): ["grouped"],
        ("table",): [],
    }


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "exp_avg", "exp_avg_sq"), [("near-lossless", 0.25, 1), ("compact", 0.5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adam_moments_are_coded_in_their_own_domains(mode, exp_avg, exp_avg_sq, dtype):
    state = trained("AdamW", dtype=dtype)[1].state_dict()
    plan = Policy(mode).plan_optimizer(state)
    for index, values in state["state"].items():
        is_large = values["exp_avg"].numel() >= SIZE_FLOOR
        assert plan["state", index, "step"].candidates == ()
        assert plan["state", index, "exp_avg"].candidates == ((UpdateSpace(step=exp_avg),) if is_large else ())
        assert plan["state", index, "exp_avg_sq"].candidates == ((LogRank1(step=exp_avg_sq),) if is_large else ())
    back = loaded(encode_file(state, plan))
    for index, values in state["state"].items():
        assert torch.equal(back["state"][index]["step"], values["step"])
        zero, nonzero = values["exp_avg_sq"] == 0, values["exp_avg_sq"] != 0
        assert (back["state"][index]["exp_avg_sq"][nonzero] > 0).all()
        assert (back["state"][index]["exp_avg_sq"][zero] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_states_of_an_optimizer_that_no_rule_names_are_exact(mode):
    plan = Policy(mode).plan_optimizer(trained("Adafactor")[1].state_dict(), optimizer="elsewhere.Adafactor")
    assert plan
    assert all((each.role, each.candidates) == ("other", ()) for each in plan.values())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "step"), [("near-lossless", 13 / 32), ("compact", 1.0)])
def test_a_momentum_is_rounded_in_parts_of_its_rows(mode, step):
    state = trained("SGD")[1].state_dict()
    plan = Policy(mode).plan_optimizer(state)
    for index, values in state["state"].items():
        is_large = values["momentum_buffer"].numel() >= SIZE_FLOOR
        assert plan["state", index, "momentum_buffer"].role == "momentum"
        assert plan["state", index, "momentum_buffer"].candidates == ((RowUniform(step),) if is_large else ())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "step"), [("near-lossless", 1), ("compact", 2)])
def test_amsgrad_divides_by_its_maximum(mode, step):
    state = trained("AdamW-amsgrad")[1].state_dict()
    plan = Policy(mode).plan_optimizer(state)
    large = [index for index, values in state["state"].items() if values["exp_avg"].numel() >= SIZE_FLOOR]
    assert large
    for index in large:
        assert plan["state", index, "max_exp_avg_sq"].candidates == (LogRank1(step),)
        assert plan["state", index, "exp_avg"].exp_avg_sq == ("state", index, "max_exp_avg_sq")


@pytest.mark.parametrize(
    "change",
    [
        lambda values, group: values.update(extra=torch.zeros(64, 64)),
        lambda values, group: values.update(extra=3),
        lambda values, group: values.update(exp_avg_sq=torch.zeros(64)),
        lambda values, group: values.update(exp_avg_sq=torch.zeros(64, 64, dtype=torch.uint8)),
        lambda values, group: values.update(exp_avg=[1]),
        lambda values, group: values.pop("exp_avg_sq"),
        lambda values, group: group.pop("betas"),
    ],
    ids=["extra-tensor", "extra-number", "shape", "8-bit", "list", "half", "no-betas"],
)
def test_what_only_resembles_adam_is_exact(change):
    values = {"step": torch.tensor(1.0), "exp_avg": W, "exp_avg_sq": W.clone()}
    group = {"lr": 1e-3, "betas": (0.9, 0.99), **ADAM_SETTINGS, "params": [0]}
    state = {"state": {0: values}, "param_groups": [group]}
    assert Policy("compact").plan_optimizer(state)["state", 0, "exp_avg"].role == "exp_avg"
    change(values, group)
    assert all(each.candidates == () for each in Policy("compact").plan_optimizer(state).values())


@pytest.mark.parametrize("state", [{}, {"state": {}, "param_groups": []}, {"state": [], "param_groups": 3}, {"x": W}])
def test_unknown_layout_of_an_optimizer_is_exact(state):
    assert Policy("compact").plan_optimizer(state) == {}


def test_optimizers_in_a_list_are_planned_as_lightning_stores_them():
    state = trained("AdamW")[1].state_dict()
    looped = [state, ({"a": 1},)]
    looped.append(looped)
    plan = Policy("compact").plan_tree({"epoch": 1, "optimizer_states": looped})
    alone = Policy("compact").plan_optimizer(state)
    assert plan.keys() == {("optimizer_states", 0, *path) for path in alone}
    assert plan["optimizer_states", 0, "state", 0, "exp_avg"].exp_avg_sq == (
        "optimizer_states", 0, "state", 0, "exp_avg_sq",
    )  # fmt: skip


def test_a_dict_that_contains_itself_is_planned_once():
    state = trained("AdamW")[1].state_dict()
    tree = {"optimizer": state}
    tree["self"] = tree["again"] = tree
    plan = Policy("compact").plan_tree(tree)
    assert plan.keys() == {("optimizer", *path) for path in Policy("compact").plan_optimizer(state)}
    moment = plan["optimizer", "state", 0, "exp_avg"].exp_avg_sq
    assert moment == ("optimizer", "state", 0, "exp_avg_sq")
