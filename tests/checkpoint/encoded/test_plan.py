import pytest
import torch

from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.exact import PlanesDelta
from hf_trainweights.checkpoint.encoded.storage_tasks import with_steps
from hf_trainweights.checkpoint.planning.policy import Policy

W = torch.zeros(64, 64)


def planned(mode, rules=None, weight=W, **options):
    return Policy(mode, rules or {}).plan_weights({"w": weight}, {"w"}, **options)


@pytest.mark.parametrize("rms", [0.0, 2.0**-101, None])
def test_a_weight_that_did_not_move_is_exact(rms):
    steps = {} if rms is None else {"w": rms}
    assert with_steps(planned("compact"), steps)["w",].candidates == (PlanesDelta(),)


def test_steps_are_filled_in_by_name_and_leave_the_plan_as_it_was():
    plan = planned("near-lossless")
    assert with_steps(plan, {"w": 1.0})["w",].candidates == (DeltaUniform(step=0.25),)
    assert with_steps(plan, {"w": 2.0})["w",].candidates == (DeltaUniform(step=0.5),)
    assert plan["w",].candidates == (PlanesDelta(),)


def test_half_precision_is_tried_exactly_as_well():
    candidates = with_steps(planned("compact", weight=W.bfloat16()), {"w": 1.0})["w",].candidates
    assert candidates == (PlanesDelta(), DeltaUniform(step=1.0))


@pytest.mark.parametrize(
    ("mode", "rules", "uses_anchor", "is_lossless"),
    [
        ("lossless", {}, True, True),
        ("compact", {}, True, False),
        ("compact", {"weight": "lossless"}, True, True),
        ("lossless", {"weight": "raw"}, False, True),
        ("lossless", {"weight": "int8"}, False, False),
        ("lossless", {"weight": {"codec": "delta-uniform", "bound": 1e-3}}, True, False),
    ],
)
def test_the_plan_says_whether_an_anchor_is_of_use_and_whether_anything_is_rounded(
    mode, rules, uses_anchor, is_lossless
):
    plan = planned(mode, rules)["w",]
    assert (plan.uses_anchor, plan.is_lossless) == (uses_anchor, is_lossless)


def test_weights_that_the_anchor_lacks_do_not_refer_to_it():
    plan = Policy("compact").plan_weights({"w": W, "new": W}, {"w"})
    assert (plan["w",].anchor, plan["new",].anchor) == ("w", None)
    assert all(codec.lossless for codec in with_steps(plan, {"w": 1e-3})["new",].candidates)
