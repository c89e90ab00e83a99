import errno
import json
import os
import shutil
from dataclasses import asdict

import pytest
import torch
from trees import ADAM_SETTINGS

from hf_trainweights.checkpoint.directory import collect_garbage, latest
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.loop.training_state import load_checkpoint, save_training_state
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run import anchors as run_anchors
from hf_trainweights.checkpoint.run.anchors import (
    AnchorRecord,
    expected_drift_rms,
    second_moments,
)
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.whole.writer import find_anchor_candidate
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk

WEIGHTS = "pytorch_model.bin"
SHAPE = (96, 64)


def moved(base, distance, seed):
    return base + distance * torch.randn(base.shape, generator=torch.Generator().manual_seed(seed))


def base_weight(seed=0):
    return 0.05 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def save(root, step, model, *, policy=None, optimizer=None, anchor_every=8):
    path = root / f"checkpoint-{step}"
    checkpoint = {"model": model, "step": step, "names": {"buffers": ["mean"], "optimizer": {0: "w"}}}
    if optimizer is not None:
        checkpoint["optimizer"] = optimizer
    return save_training_state(checkpoint, path, policy or Policy(), anchor_every=anchor_every)


def save_run(root, policy, *, steps=4, distance=1e-4):
    """Saves weights that stay `distance` from where they began; returns what was saved by step."""
    models = {step: {"w": moved(base_weight(), distance * (step > 1), step)} for step in range(1, steps + 1)}
    for step, model in models.items():
        save(root, step, model, policy=policy)
    return models


def report_of(manifest, name="w"):
    return next(tensor for tensor in manifest.files[WEIGHTS].report["tensors"] if tensor["name"] == name)


def adam(lr, *, steps=50, seed=1):
    moment = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    state = {"step": torch.tensor(float(steps)), "exp_avg": 0.1 * moment, "exp_avg_sq": moment.square()}
    return {"state": {0: state}, "param_groups": [{"lr": lr, "betas": (0.9, 0.999), **ADAM_SETTINGS, "params": [0]}]}


@pytest.mark.slow
@pytest.mark.parametrize("removed", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["lossless", "compact"])
def test_any_directory_can_go_and_the_others_still_restore(tmp_path, mode, removed):
    root = tmp_path / "run"
    save_run(root, Policy(mode))
    loaded = {step: load_checkpoint(root / f"checkpoint-{step}") for step in range(1, 5)}
    shutil.rmtree(root / f"checkpoint-{removed}")
    for step in set(loaded) - {removed}:
        assert verify_checkpoint(root / f"checkpoint-{step}").ok
        assert torch.equal(load_checkpoint(root / f"checkpoint-{step}")["model"]["w"], loaded[step]["model"]["w"])


def test_checkpoints_of_one_star_share_one_anchor_file(tmp_path):
    save_run(tmp_path, Policy())
    anchors = list(tmp_path.glob("*/*.anchor"))
    assert len(anchors) == 3
    assert all(anchor.samefile(tmp_path / "checkpoint-1" / WEIGHTS) for anchor in anchors)


def anchors(directory):
    return sorted(directory.glob("*.anchor"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "files"), [("lossless", [1, 2, 2, 2, 2, 2, 2, 2]), ("near-lossless", [1, 2, 3, 4, 5, 5, 5, 5])]
)
def test_reading_takes_two_files_or_at_most_five_where_weights_are_rounded(tmp_path, mode, files):
    save_run(tmp_path, Policy(mode), steps=8)
    found = [tmp_path / f"checkpoint-{step}" for step in range(1, 9)]
    assert [1 + len(anchors(path)) for path in found] == files
    assert all(verify_checkpoint(path).ok for path in found)
    first = (tmp_path / "checkpoint-1" / WEIGHTS).stat()
    assert first.st_nlink == 8


def test_weights_of_a_chain_that_did_not_move_far_take_fewer_bits_than_those_of_a_star(tmp_path):
    """A random walk: each save is near the one before it and far from the first."""
    weight, sizes = base_weight(), {}
    for step in range(1, 6):
        weight = moved(weight, 1e-4, step)
        sizes[step] = report_of(save(tmp_path, step, {"w": weight}, policy=Policy("near-lossless")))["bytes_out"]
    assert max(sizes[step] for step in (3, 4, 5)) < 1.05 * sizes[2]


def test_an_exact_checkpoint_in_a_chain_is_no_link_of_it(tmp_path):
    """The best one keeps exact weights, and the others go on from where they were."""
    for step, policy in enumerate([Policy("compact"), Policy("compact"), Policy(), Policy("compact")], start=1):
        save(tmp_path, step, {"w": moved(base_weight(), 1e-4 * (step > 1), step)}, policy=policy)
    digests = [[path.stem for path in anchors(tmp_path / f"checkpoint-{step}")] for step in (2, 3, 4)]
    assert [len(digest) for digest in digests] == [1, 2, 2]
    assert digests[1] == digests[2]
    assert torch.equal(load_checkpoint(tmp_path / "checkpoint-3")["model"]["w"], moved(base_weight(), 1e-4, 3))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_chain_that_lacks_a_link_is_not_gone_on_with(tmp_path, lost):
    models = save_run(tmp_path, Policy("compact"), steps=4)
    newest = tmp_path / "checkpoint-4"
    found = Anchor(newest / (read_manifest(newest).files[WEIGHTS].report["anchor"] + ANCHOR_SUFFIX))
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    found.files[lost].unlink()
    with pytest.warns(UserWarning, match="stored without reference"):
        manifest = save(tmp_path, 5, models[4], policy=Policy("compact"))
    assert manifest.anchor["saves"] == 1
    assert anchors(tmp_path / "checkpoint-5") == []
    assert verify_checkpoint(tmp_path / "checkpoint-5").ok


def test_no_anchor_of_a_chain_is_garbage_even_without_a_manifest(tmp_path):
    save_run(tmp_path, Policy("compact"), steps=4)
    (tmp_path / "checkpoint-4" / "trainweights.json").unlink()
    assert len(anchors(tmp_path / "checkpoint-4")) == 3
    assert collect_garbage(tmp_path) == []


def test_where_links_fail_each_checkpoint_has_a_copy(tmp_path, monkeypatch):
    class NoLinks(disk.FileSystem):
        def link(self, source, target):
            raise OSError(errno.ENOTSUP, "no links here")

    monkeypatch.setattr(disk, "file_system", NoLinks())
    with pytest.warns(UserWarning, match="has no hard links"):
        models = save_run(tmp_path, Policy(), steps=3)
    assert [path.stat().st_nlink for path in tmp_path.glob("*/*.anchor")] == [1, 1]
    shutil.rmtree(tmp_path / "checkpoint-1")
    for step in (2, 3):
        assert torch.equal(load_checkpoint(tmp_path / f"checkpoint-{step}")["model"]["w"], models[step]["w"])


def test_weights_are_exact_in_lossless_mode(tmp_path):
    for step, model in save_run(tmp_path, Policy()).items():
        assert torch.equal(load_checkpoint(tmp_path / f"checkpoint-{step}")["model"]["w"], model["w"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_the_bound_in_the_manifest_holds_at_every_save(tmp_path, mode):
    for step, model in save_run(tmp_path, Policy(mode), steps=8).items():
        path = tmp_path / f"checkpoint-{step}"
        error = (load_checkpoint(path)["model"]["w"] - model["w"]).abs().max().item()
        report = report_of(read_manifest(path))
        assert error <= (report["bound"] or 0.0)
        assert report["codec"] == ("planes" if step == 1 else "delta-uniform")


def test_the_step_of_a_lossy_mode_is_fixed_per_anchor(tmp_path):
    for step, distance in ((1, 0.0), (2, 1e-4), (3, 1.5e-4), (4, 1.9e-4)):
        save(tmp_path, step, {"w": moved(base_weight(), distance, step)}, policy=Policy("compact"))
    steps = [report_of(read_manifest(tmp_path / f"checkpoint-{step}"))["params"]["step"] for step in (2, 3, 4)]
    assert steps == [pytest.approx(1e-4, rel=0.05)] * 3
    assert len(set(steps)) == 1


def test_the_step_is_measured_at_the_first_delta_that_has_one(tmp_path):
    policies = [Policy(), Policy(), Policy("compact"), Policy("compact")]
    for step, policy in enumerate(policies, start=1):
        save(tmp_path, step, {"w": moved(base_weight(), 1e-4 * (step - 1), step)}, policy=policy)
    measured = [read_manifest(tmp_path / f"checkpoint-{step}").anchor["delta_rms"] for step in (2, 3, 4)]
    assert measured == [{}, {"w": pytest.approx(2e-4, rel=0.05)}, measured[1]]


def anchor_saves(root):
    steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in root.iterdir())
    return [read_manifest(root / f"checkpoint-{step}").anchor["saves"] for step in steps]


def test_an_anchor_serves_a_fixed_number_of_checkpoints(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, {"w": moved(base_weight(), 1e-4, step)}, anchor_every=3)
    assert anchor_saves(tmp_path) == [1, 2, 3, 1, 2, 3, 1]


def test_an_anchor_is_refreshed_when_deltas_cost_a_bit_more(tmp_path):
    for step, distance in enumerate((0.0, 1e-5, 1e-5, 3e-5, 3e-5), start=1):
        save(tmp_path, step, {"w": moved(base_weight(), distance, step)})
    assert anchor_saves(tmp_path) == [1, 2, 3, 4, 1]


def test_the_star_goes_on_when_only_its_newest_checkpoint_is_left(tmp_path):
    save_run(tmp_path, Policy(), steps=3)
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    manifest = save(tmp_path, 4, {"w": moved(base_weight(), 1e-4, 4)})
    assert manifest.anchor["saves"] == 4
    assert report_of(manifest)["codec"] == "planes-delta"


def test_frozen_weights_are_stored_once(tmp_path):
    save(tmp_path, 1, {"w": base_weight(), "v": base_weight(1)})
    manifest = save(tmp_path, 2, {"w": base_weight(), "v": moved(base_weight(1), 1e-4, 2)})
    assert report_of(manifest)["bytes_out"] < 0.01 * report_of(manifest)["bytes_in"]


def test_weights_of_another_shape_stand_alone(tmp_path):
    save(tmp_path, 1, {"w": base_weight(), "v": base_weight(1)})
    model = {"w": torch.cat([base_weight(), base_weight()]), "v": base_weight(1), "new": base_weight(2)}
    manifest = save(tmp_path, 2, model, policy=Policy("compact"))
    loaded = load_checkpoint(tmp_path / "checkpoint-2")["model"]
    assert all(torch.equal(loaded[name], model[name]) for name in model)
    assert report_of(manifest)["codec"] != "delta-uniform"


def test_a_policy_without_use_for_an_anchor_links_none(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, {"w": moved(base_weight(), 1e-4, step)}, policy=Policy(rules={"weight": "raw"}))
    assert anchor_saves(tmp_path) == [1, 1, 1]
    assert not list(tmp_path.glob("*/*.anchor"))


def test_weights_with_more_than_tensors_are_no_anchor(tmp_path):
    manifest = save(tmp_path, 1, {"w": base_weight(), "_extra_state": {"scale": 2.0}})
    assert manifest.anchor is None
    save(tmp_path, 2, {"w": base_weight(), "_extra_state": {"scale": 3.0}})
    assert load_checkpoint(tmp_path / "checkpoint-2")["model"]["_extra_state"] == {"scale": 3.0}


def test_a_moved_run_restores_and_goes_on(tmp_path):
    models = save_run(tmp_path / "run", Policy(), steps=3)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert torch.equal(load_checkpoint(tmp_path / "moved" / "checkpoint-2")["model"]["w"], models[2]["w"])
    assert torch.equal(load_checkpoint(latest(tmp_path / "moved"))["model"]["w"], models[3]["w"])
    assert save(tmp_path / "moved", 4, {"w": moved(base_weight(), 1e-4, 4)}).anchor["saves"] == 4


def test_one_copied_checkpoint_restores_alone(tmp_path):
    models = save_run(tmp_path / "run", Policy(), steps=3)
    shutil.copytree(tmp_path / "run" / "checkpoint-3", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    assert torch.equal(load_checkpoint(tmp_path / "copy")["model"]["w"], models[3]["w"])


def test_training_from_scratch_rounds_the_anchor_within_the_stated_bound(tmp_path):
    manifest = save(tmp_path, 1, {"w": base_weight()}, policy=Policy("near-lossless"), optimizer=adam(lr=1e-2))
    report = report_of(manifest)
    loaded = load_checkpoint(tmp_path / "checkpoint-1")["model"]["w"]
    assert 0 < (loaded - base_weight()).abs().max().item() <= report["bound"]
    assert report["bound"] == pytest.approx(report["params"]["step"] / 2, rel=1e-3)
    assert report["bytes_out"] < 0.4 * report["bytes_in"]


def test_a_later_weight_is_off_by_half_a_step_of_its_own_whatever_the_anchor_was_off(tmp_path):
    models = {step: {"w": moved(base_weight(), 1e-3, step)} for step in (1, 2)}
    for step, model in models.items():
        manifest = save(tmp_path, step, model, policy=Policy("near-lossless"), optimizer=adam(lr=1e-2))
    assert report_of(manifest)["params"]["anchor"]
    loaded = load_checkpoint(tmp_path / "checkpoint-2")["model"]["w"]
    assert (loaded - models[2]["w"]).abs().max() <= report_of(manifest)["params"]["step"] * 0.5001


def test_an_anchor_after_others_has_the_steps_that_were_measured(tmp_path):
    policy = Policy("near-lossless")
    for step in (1, 2, 3):
        model = {"w": moved(base_weight(), 1e-4, step)}
        manifest = save(tmp_path, step, model, policy=policy, anchor_every=2)
        if step == 2:
            measured = manifest.anchor["delta_rms"]["w"]
    assert report_of(manifest)["params"] == {**report_of(manifest)["params"], "step": pytest.approx(measured / 4)}
    assert report_of(manifest)["params"]["anchor"] is False


@pytest.mark.parametrize(
    ("policy", "lr"),
    [
        (Policy("near-lossless"), 0.0),
        (Policy("lossless"), 1e-2),
        (Policy("near-lossless", {"weight": "lossless"}), 1e-2),
        (Policy("compact", {"re:w": "raw"}), 1e-2),
    ],
    ids=["no drift", "lossless", "rule for weights", "rule by name"],
)
def test_elsewhere_the_anchor_is_exact(tmp_path, policy, lr):
    save(tmp_path, 1, {"w": base_weight()}, policy=policy, optimizer=adam(lr=lr))
    assert torch.equal(load_checkpoint(tmp_path / "checkpoint-1")["model"]["w"], base_weight())


def test_buffers_are_exact_in_every_mode(tmp_path):
    policy = Policy("compact")
    for step, distance in ((1, 0.0), (2, 1e-2)):
        model = {"w": moved(base_weight(), distance, step), "mean": moved(base_weight(7), distance, step)}
        save(tmp_path, step, model, policy=policy, optimizer=adam(lr=1e-2))
        assert torch.equal(load_checkpoint(tmp_path / f"checkpoint-{step}")["model"]["mean"], model["mean"])


def test_the_record_of_an_anchor_survives_json():
    state = AnchorRecord("a" * 64, 3, 4.5, 5.0, {"w": 1e-4})
    assert AnchorRecord.from_dict(json.loads(json.dumps(asdict(state)))) == state


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"sha256": "a"},
        {"sha256": "a" * 64, "saves": 0},
        {"sha256": "a" * 64, "saves": "3"},
        {"sha256": "a" * 64, "other": 1},
        {"sha256": "a" * 64, "delta_rms": [1]},
        {"sha256": "a" * 64, "first_bits": "4"},
        {"sha256": 5},
        {"sha256": "../" * 20 + "abcd"},
        {"sha256": ["a"] * 64},
        {"sha256": "a" * 64, "saves": True},
        {"sha256": "a" * 64, "last_bits": float("nan")},
        {"sha256": "a" * 64, "delta_rms": {"w": float("inf")}},
        {"sha256": "a" * 64, "delta_rms": {"w": -1.0}},
        {"sha256": "a" * 64, "delta_rms": {"w": 10**400}},
        {"sha256": "a" * 64, "interval_steps": 0},
    ],
)
def test_what_is_no_record_is_refused(value):
    with pytest.raises(CorruptFileError, match="anchor"):
        AnchorRecord.from_dict(value)


def candidate_for(path):
    return find_anchor_candidate(SaveJob(path, Policy(), 8), WEIGHTS)


def test_an_anchor_that_is_gone_or_a_link_is_not_used(tmp_path):
    save_run(tmp_path, Policy(), steps=2)
    anchor = next((tmp_path / "checkpoint-2").glob("*.anchor"))
    content = anchor.read_bytes()
    shutil.rmtree(tmp_path / "checkpoint-1")
    anchor.unlink()
    assert candidate_for(tmp_path / "checkpoint-3") is None
    (tmp_path / "outside").write_bytes(content)
    anchor.symlink_to(tmp_path / "outside")
    assert candidate_for(tmp_path / "checkpoint-3") is None
    os.unlink(anchor)


def test_saves_that_follow_each_other_more_closely_get_finer_steps(tmp_path):
    """Resumed at each of them, a run takes up no more error over as many training steps."""
    base = base_weight()
    steps = {}
    for number in (100, 200, 210, 235, 335, 535):
        manifest = save(tmp_path, number, {"w": moved(base, 1e-4, number)}, policy=Policy("near-lossless"))
        steps[number] = report_of(manifest)["params"].get("step")
    assert steps[210] == pytest.approx(steps[200] * 0.1**0.5, rel=1e-6)
    assert steps[235] == pytest.approx(steps[200] * 0.5, rel=1e-6)
    assert steps[335] == steps[535] == steps[200]  # all against one anchor: what finer steps cost does not age it


def test_a_save_is_as_far_from_the_last_one_before_it_as_their_names_say(tmp_path):
    for number in (100, 200, 900):
        save(tmp_path, number, {"w": base_weight(number)})
    found = {n: candidate_for(tmp_path / f"checkpoint-{n}") for n in (150, 220, 1000)}
    assert {number: source and source.interval_steps for number, source in found.items()} == {
        150: 50,
        220: 20,
        1000: 100,
    }
    elsewhere = candidate_for(tmp_path / "best")
    assert elsewhere is not None
    assert elsewhere.interval_steps is None
    assert elsewhere.record.fineness(elsewhere.interval_steps) == 1


def test_drift_is_how_far_adam_moves_weights_whose_gradients_are_independent():
    torch.manual_seed(0)
    weight = torch.zeros(SHAPE, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    for _ in range(80):
        weight.grad = torch.randn(SHAPE)
        optimizer.step()
        if optimizer.state[weight]["step"] == 40:
            before = weight.detach().clone()
    drift = expected_drift_rms(optimizer.state_dict(), {0: "w"}, 40)
    assert drift == {"w": pytest.approx((weight - before).square().mean().sqrt().item(), rel=0.15)}


@pytest.mark.parametrize("workers", [1, 3])
def test_each_weight_has_its_own_drift_whatever_the_number_of_workers(monkeypatch, workers):
    monkeypatch.setattr(run_anchors, "worker_count", lambda _: workers)
    states = {index: adam(lr=1e-3, steps=10 + index)["state"][0] for index in range(6)}
    optimizer = adam(lr=1e-3) | {"state": states}
    optimizer["param_groups"][0]["params"] = [*states]
    alone = {f"w{index}": expected_drift_rms(adam(lr=1e-3, steps=10 + index), {0: "w"})["w"] for index in states}
    assert len(set(alone.values())) == 6
    assert expected_drift_rms(optimizer, {index: f"w{index}" for index in states}) == alone


@pytest.mark.parametrize(
    ("steps", "interval_steps", "counted"),
    [(64, None, 64), (64, 16, 16), (16, 64, 16), (400, None, 100), (400, 300, 100)],
)
def test_no_more_steps_count_than_lie_between_two_saves(steps, interval_steps, counted):
    def drift(interval):
        return expected_drift_rms(adam(lr=1e-3, steps=steps), {0: "w"}, interval)["w"]

    assert drift(interval_steps) == pytest.approx(drift(counted))
    assert drift(counted) > drift(counted - 8)


def test_second_moments_are_found_by_name_and_only_those_of_adam():
    optimizer = adam(lr=1e-3)
    optimizer["state"] |= {1: {"momentum_buffer": torch.ones(2)}, 2: optimizer["state"][0]}
    assert list(second_moments(optimizer, {0: "w", 1: "v"})) == ["w"]
    assert second_moments({}, {}) == {}


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {
            "state": {0: {"exp_avg": torch.ones(2) * 1j, "exp_avg_sq": torch.ones(2) * 1j, "step": 1}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), **ADAM_SETTINGS, "params": [0]}],
        },
    ],
)
def test_without_adams_moments_there_is_no_drift_to_expect(optimizer):
    assert expected_drift_rms(optimizer, {0: "w"}) == {}


def test_moments_that_are_all_zero_mean_no_drift():
    optimizer = adam(lr=1e-2)
    optimizer["state"][0]["exp_avg"].zero_()
    optimizer["state"][0]["exp_avg_sq"].zero_()
    assert expected_drift_rms(optimizer, {0: "w"}) == {"w": 0.0}


@pytest.mark.parametrize("options", [{"eps": 1.0}, {"eps": 1e-3}, {"amsgrad": True}], ids=str)
def test_drift_is_that_of_the_optimizers_own_settings(options):
    torch.manual_seed(0)
    weight = torch.zeros(SHAPE, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, betas=(0.9, 0.9), **options)
    for step in range(140):
        # The first gradients are so large that with amsgrad they decide the divisor of all later steps.
        weight.grad = torch.randn(SHAPE) * (1e-2 if step >= 5 else 1.0)
        optimizer.step()
        if step == 99:
            before = weight.detach().clone()
    drift = expected_drift_rms(optimizer.state_dict(), {0: "w"}, 40)
    assert drift == {"w": pytest.approx((weight - before).square().mean().sqrt().item(), rel=0.25)}
