from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from trees import encoded_bytes, trained, write_anchor
from weights import QUANTIZABLE

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ROLES
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.exact import PlanesDelta
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import with_steps
from hf_trainweights.checkpoint.planning.policy import MODES, SIZE_FLOOR, Policy
from hf_trainweights.checkpoint.run.anchors import measure_delta_rms
from hf_trainweights.errors import ConfigError

RAW, PLANES = CODECS["raw"](), CODECS["planes"]()
W = torch.zeros(64, 64)


def loaded(encoded):
    return torch.load(io.BytesIO(encoded_bytes(encoded)), weights_only=True)


def chosen(policy, name="layers.0.embed.weight", **options):
    return policy.plan_weights({name: W}, **options)[name,].candidates


def test_first_matching_rule_wins_over_later_ones_and_the_mode():
    rules = {"re:.*norm.*": "raw", "re:.*embed.*": "planes", "weight": {"codec": "delta-uniform", "bound": 1e-3}}
    policy = Policy("compact", rules)
    assert chosen(policy, "layers.0.norm.weight") == (RAW,)
    assert chosen(policy) == (PLANES,)
    assert chosen(policy, "head.weight") == (DeltaUniform.within(1e-3),)
    assert chosen(Policy("compact", dict(reversed(rules.items())))) == (DeltaUniform.within(1e-3),)


def test_pattern_must_match_the_whole_name():
    assert chosen(Policy(rules={"re:embed": "raw"})) == ()
    assert chosen(Policy(rules={"re:.*embed.*": "raw"})) == (RAW,)


def test_plain_pattern_selects_weights_only():
    policy = Policy(rules={"re:.*": "raw"})
    state = trained("AdamW")[1].state_dict()
    assert RAW not in {codec for each in policy.plan_optimizer(state).values() for codec in each.candidates}
    assert policy.plan_weights({"w": W}, buffers={"w"})["w",].candidates == ()
    assert Policy(rules={"buffer/re:w": "raw"}).plan_weights({"w": W}, buffers={"w"})["w",].candidates == (RAW,)


def test_mode_as_a_rule_stands_for_its_codecs(tmp_path):
    weights = {name: torch.randn(80, 64) for name in "ab"}
    anchor = Anchor(write_anchor(tmp_path, {name: tensor + 1e-3 for name, tensor in weights.items()}))
    delta_rms = measure_delta_rms(weights, anchor)
    by_rule = Policy("compact", {"re:a": "near-lossless", "weight": "lossless"}).plan_weights(weights, anchor)
    by_mode = Policy("near-lossless").plan_weights(weights, anchor)
    assert with_steps(by_rule, delta_rms)["a",] == with_steps(by_mode, delta_rms)["a",]
    assert with_steps(by_rule, delta_rms)["b",].candidates == (PlanesDelta(),)


def test_optimizer_selects_every_state_and_no_weight():
    state = trained("AdamW")[1].state_dict()
    policy = Policy("compact", {"optimizer": "raw"})
    assert {each.candidates for each in policy.plan_optimizer(state).values()} == {(RAW,)}
    assert chosen(policy) == (PLANES,)
    lossless = Policy("compact", {"optimizer": "lossless"})
    candidates = {codec for each in lossless.plan_optimizer(state).values() for codec in each.candidates}
    assert all(codec.lossless for codec in candidates)


def test_role_and_pattern_select_states_of_named_parameters():
    state = trained("AdamW")[1].state_dict()
    policy = Policy("compact", {"exp_avg/re:.*embed.*": "lossless", "optimizer/re:.*head.*": "planes"})
    plan = policy.plan_optimizer(state)
    by_name = {(each.name, path[-1]): [codec.codec_id for codec in each.candidates] for path, each in plan.items()}
    assert by_name["embed.weight", "exp_avg"] == ["planes-magnitudes"]
    assert by_name["embed.weight", "exp_avg_sq"] == ["log-rank1"]
    assert by_name["conv.weight", "exp_avg"] == ["update-space"]
    assert by_name["head.weight", "exp_avg_sq"] == ["planes"]
    assert by_name["head.weight", "step"] == ["planes"]


def test_names_are_given_or_read_from_the_optimizer_or_missed_loudly():
    model, _, _ = trained("AdamW")
    optimizer = torch.optim.AdamW(model.parameters())
    model.conv(torch.ones(1, 64, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    policy = Policy("compact", {"exp_avg/re:conv.*": "raw"})
    with pytest.raises(
        ConfigError, match=r"rules\['exp_avg/re:conv\.\*'\]: expected names of the optimizer's parameters"
    ):
        policy.plan_optimizer(state)
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    index = list(names.values()).index("conv.weight")
    assert policy.plan_optimizer(state, names=names)["state", index, "exp_avg"].candidates == (RAW,)
    assert Policy("compact", {"exp_avg": "raw", "re:conv.*": "raw"}).plan_optimizer(state)


@pytest.mark.parametrize("choice", ["int8", {"codec": "delta-uniform", "bound": 1e-3}], ids=str)
def test_size_floor_holds_against_lossy_rules_but_not_against_exact_ones(choice):
    small, large = {"w": torch.zeros(SIZE_FLOOR - 1)}, {"w": torch.zeros(64, SIZE_FLOOR // 64)}
    assert Policy(rules={"weight": choice}).plan_weights(small)["w",].candidates == ()
    assert len(Policy(rules={"weight": choice}).plan_weights(large)["w",].candidates) == 1
    assert Policy(rules={"weight": "raw"}).plan_weights(small)["w",].candidates == (RAW,)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUANTIZABLE))
def test_format_name_stands_for_groups_of_it(name):
    torch.manual_seed(0)
    weights = {"w": torch.randn(64, 128)}
    for choice in (name, {"format": name}):
        plan = Policy(rules={"weight": choice}).plan_weights(weights)
        encoded = encode_file(weights, plan)
        assert encoded.report[0].codec == "grouped"
        assert 0 < (loaded(encoded)["w"] - weights["w"]).abs().max() <= encoded.report[0].bound


def test_format_takes_options():
    weights = {"w": torch.randn(64, 128)}
    sizes = []
    for group_size in (32, 128):
        policy = Policy(rules={"weight": {"format": "int4", "group_size": group_size}})
        sizes.append(encode_file(weights, policy.plan_weights(weights)).report[0].bytes_out)
    assert sizes[0] > sizes[1]


def test_codec_takes_options():
    state = trained("AdamW")[1].state_dict()
    rules = {"exp_avg": {"codec": "update-space", "step": 0.125}, "exp_avg_sq": {"codec": "log-rank1", "step": 3}}
    plan = Policy("lossless", rules).plan_optimizer(state)
    assert plan["state", 0, "exp_avg"].candidates == (UpdateSpace(step=0.125),)
    assert plan["state", 0, "exp_avg_sq"].candidates == (LogRank1(step=3),)


# What is refused


@pytest.mark.parametrize("mode", ["zstd", "", None, 3, ["compact"]])
def test_unknown_mode_lists_the_known_ones(mode):
    with pytest.raises(ConfigError, match=r"^mode: expected one of lossless, near-lossless, compact, found"):
        Policy(mode)


@pytest.mark.parametrize(
    "selector", ["weights", "weigth", "", "weight/", "optimizer/", "/re:x", "x/re:y", "x/y", 3, None]
)
def test_unknown_selector_lists_the_known_ones(selector):
    with pytest.raises(
        ConfigError, match=r"expected a selector: weight, exp_avg, exp_avg_sq, .*, buffer, other, optimizer, the n"
    ):
        Policy(rules={selector: "raw"})


def test_a_role_that_is_misspelt_is_told_the_nearest():
    with pytest.raises(ConfigError, match=r'Did you mean "weight"\? Weights of that name are weight/weigth\.$'):
        Policy(rules={"weigth": "raw"})


LAYERS = {f"layers.{index}.{leaf}": W for index in (0, 1) for leaf in ("up.weight", "down.weight")}


@pytest.mark.parametrize(
    ("rules", "raw"),
    [
        ({"down": "raw"}, ["layers.0.down.weight", "layers.1.down.weight"]),
        ({"weight/down": "raw"}, ["layers.0.down.weight", "layers.1.down.weight"]),
        ({"layers.0": "raw"}, ["layers.0.up.weight", "layers.0.down.weight"]),
        ({"layers.0.up.weight": "raw"}, ["layers.0.up.weight"]),
        ({"re:.*down": "raw"}, ["layers.0.down.weight", "layers.1.down.weight"]),
        ({"weight": "planes", "down": "raw"}, ["layers.0.down.weight", "layers.1.down.weight"]),
        ({"re:.*": "planes", "down": "raw", "layers.0.down": "planes"}, ["layers.1.down.weight"]),
        ({"weight": "planes", "re:.*down.*": "raw"}, []),
        ({"buffer/down": "raw", "exp_avg/up": "raw"}, []),
    ],
)
def test_names_are_selected_as_in_a_configuration_and_the_most_exact_wins(rules, raw):
    plan = Policy(rules=rules).plan_weights(LAYERS)
    assert [name for (name,), each in plan.items() if each.candidates == (RAW,)] == raw


@pytest.mark.parametrize("selector", ["dwon", "weight/dwon", "exp_avg/re:.*dwon"])
def test_a_rule_that_names_nothing_is_refused_with_the_nearest_name(selector):
    policy = Policy(rules={"weight": "raw", "re:.*up.*": "raw", selector: "raw"})
    with pytest.raises(ConfigError, match=r"rules\['.*dwon'\]: .* found nothing that it selects\. .*"):
        policy.require_used(LAYERS)
    Policy(rules={"weight": "raw", "re:.*up.*": "raw", "exp_avg/down": "raw"}).require_used(LAYERS)


def test_names_need_not_be_strings():
    assert Policy(rules={"weight": "raw"}).plan_weights({0: W})[0,].candidates == (RAW,)
    assert Policy(rules={"down": "raw"}).plan_weights({0: W, "down": W})["down",].candidates == (RAW,)


def test_expression_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"rules\['re:\*'\]: expected a regular expression after re:"):
        Policy(rules={"re:*": "raw"})


@pytest.mark.parametrize("rules", [[("weight", "raw")], "weight", None])
def test_rules_are_a_dict(rules):
    with pytest.raises(ConfigError, match=r"^rules: expected a dict from selector to choice"):
        Policy(rules=rules)


@pytest.mark.parametrize(
    "choice",
    ["zip", "", None, 8, {}, {"codec": "zip"}, {"format": "int9"}, {"step": 1}, ["raw"], {"codec": []}, {"format": []}],
    ids=repr,
)
def test_unknown_choice_lists_the_known_ones(choice):
    with pytest.raises(ConfigError, match=r"rules\['weight'\]: expected one of lossless, .*planes.*int8"):
        Policy(rules={"weight": choice})


@pytest.mark.parametrize(
    "choice",
    [
        {"codec": "planes", "level": 3},
        {"codec": "delta-uniform"},
        "delta-uniform",
        {"codec": "delta-uniform", "bound": 1e-3, "step": 1},
        {"codec": "delta-uniform", "bound": "small"},
        {"codec": "delta-uniform", "step": -1.0},
        {"codec": "delta-uniform", "step": None},
        {"codec": "grouped", "config": "int8"},
        {"format": "int4", "group_size": 7},
        {"format": "int4", "groups": 7},
    ],
    ids=str,
)
def test_wrong_options_are_refused_when_the_policy_is_made(choice):
    with pytest.raises(ConfigError, match="expected"):
        Policy(rules={"weight": choice})


@pytest.mark.parametrize("selector", ["exp_avg_sq", "exp_avg_sq/re:.*", "optimizer"])
@pytest.mark.parametrize("choice", ["int8", "int4", {"format": "int8"}, "update-space"], ids=str)
def test_linear_format_on_the_second_moment_is_refused(selector, choice):
    with pytest.raises(
        ConfigError, match=r"expected for exp_avg_sq one of .*log-rank1.* the next update divides by them"
    ):
        Policy(rules={selector: choice})


@pytest.mark.parametrize(
    ("selector", "choice"),
    [
        ("buffer", "int8"), ("other", "int8"), ("other", "log-rank1"),
        ("buffer", {"codec": "delta-uniform", "bound": 1.0}),
        ("weight", "update-space"), ("weight", "log-rank1"), ("re:.*", "log-rank1"), ("exp_avg", "log-rank1"),
        ("exp_avg", {"codec": "delta-uniform", "bound": 1.0}), ("exp_avg", "planes-delta"), ("optimizer", "log-rank1"),
    ],
    ids=str,
)  # fmt: skip
def test_codec_that_does_not_suit_a_role_is_refused(selector, choice):
    with pytest.raises(ConfigError, match=r"expected for \w+ one of lossless, near-lossless, compact, raw, planes"):
        Policy(rules={selector: choice})


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("choice", [*MODES, "raw", "planes"])
def test_modes_and_exact_codecs_suit_every_role(role, choice):
    assert Policy(rules={role: choice}).rules == {role: choice}


# The value


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(
            "compact", {"re:.*embed.*": "int8", "optimizer": "lossless", "re:x": {"format": "int4", "group_size": 32}}
        ),
        Policy("near-lossless", {"weight": {"codec": "delta-uniform", "bound": 1e-5}}),
    ],
    ids=str,
)
def test_policy_survives_json_with_the_order_of_its_rules(policy):
    back = Policy.from_dict(json.loads(json.dumps(policy.to_dict())))
    assert back == policy
    assert list(back.rules) == list(policy.rules)


def test_policy_is_frozen_and_keeps_its_own_rules():
    rules = {"weight": "raw"}
    policy = Policy(rules=rules)
    rules["weight"] = "planes"
    assert chosen(policy) == (RAW,)
    with pytest.raises(dataclasses.FrozenInstanceError, match="mode"):
        policy.mode = "compact"


@pytest.mark.parametrize("value", [{}, {"mode": "compact"}, {"mode": "compact", "rules": {}, "level": 3}])
def test_dict_that_describes_no_policy_is_refused(value):
    with pytest.raises(ConfigError, match=r"^policy: expected mode and rules"):
        Policy.from_dict(value)


def test_every_codec_suits_some_role():
    allowed = set()
    for codec_id in CODECS:
        for role in ROLES:
            try:
                Policy(rules={role: codec_id})
            except ConfigError as error:
                if "expected the options of" in str(error):
                    allowed.add(codec_id)
            else:
                allowed.add(codec_id)
    assert allowed == set(CODECS)


def test_the_first_expression_of_a_role_wins_whatever_rules_other_roles_have():
    rules = {"buffer": "planes", "re:.*down": "raw", "weight": "planes"}
    plan = Policy(rules=rules).plan_weights({"down": torch.zeros(80, 80), "up": torch.zeros(80, 80)})
    assert {name: each.candidates for (name,), each in plan.items()} == {"down": (RAW,), "up": (PLANES,)}
