"""What a mode makes of a sharded state, in one process: bounds, anchors, rules, roles, ties."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded.states import BETAS, TRAINED, differing, leaves, load, save, whole_state, without_process_group
from covering import exhaustive
from helpers import flip_a_bit
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from trees import ADAM_SETTINGS

from hf_trainweights.checkpoint import verify_checkpoint
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES, MODES, SIZE_FLOOR
from hf_trainweights.distributed import TrainWeightsReader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


@pytest.fixture(scope="module", params=MODES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return a mode, and a run of three checkpoints, the first of which is the anchor."""
    directory = tmp_path_factory.mktemp("run")
    with without_process_group():
        for number in range(3):
            anchor = directory / str(number - 1) if number else None
            save(directory / str(number), whole_state(number), request.param, anchor=anchor)
    return request.param, directory


def rows(path: Path) -> dict[str, dict[str, Any]]:
    entries = read_manifest(path).files.values()
    return {row["path"]: row for entry in entries for row in entry.report.get("tensors", ())}


@pytest.mark.parametrize("number", range(3))
def test_both_readers_find_the_same_within_the_bounds_of_the_manifest(run: tuple[str, Path], number: int) -> None:
    mode, directory = run
    actual = load(directory / str(number), TrainWeightsReader, whole_state(9))
    assert differing(load(directory / str(number), FileSystemReader, whole_state(9)), actual) == []
    rounded, expected = differing(actual, whole_state(number)), dict(leaves(whole_state(number)))
    reported = rows(directory / str(number))
    assert {name for name, row in reported.items() if row["bound"] is not None} >= set(rounded)
    assert (mode == "lossless") == (rounded == [])
    assert all(expected[name].numel() >= SIZE_FLOOR and expected[name].is_floating_point() for name in rounded)
    for name, value in leaves(actual):
        if name in rounded and reported[name]["role"] == "weight":
            error = (value.double() - expected[name].double()).abs().max().item()
            assert error <= reported[name]["bound"] * 1.0001


def test_every_parameter_is_rounded_in_a_lossy_mode_and_nothing_else(run: tuple[str, Path]) -> None:
    mode, directory = run
    roles = {name: row["role"] for name, row in rows(directory / "2").items()}
    assert {name for name, role in roles.items() if role == "weight"} == {f"model.{name}" for name in TRAINED}
    assert {name for name, role in roles.items() if role == "buffer"} == {"model.steps"}
    lossy = {name for name, row in rows(directory / "2").items() if row["bound"] is not None}
    large = {name for name in TRAINED if whole_state()["model"][name].numel() >= SIZE_FLOOR}
    expected = {f"model.{name}" for name in large if name != "down.weight"}  # bf16 is exact where that is smaller
    expected |= {f"optim.state.{name}.{key}" for name in large for key in ("exp_avg", "exp_avg_sq")}
    assert lossy - {"model.down.weight"} == (expected if mode in LOSSY_MODES else set())


def test_any_checkpoint_of_a_run_may_be_deleted(
    run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_directories", {})
    _, directory = run
    expected = load(directory / "2", state=whole_state(9))
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    shutil.rmtree(copy / "0")
    shutil.rmtree(copy / "1")
    copy.rename(tmp_path / "moved")
    assert differing(load(tmp_path / "moved" / "2", state=whole_state(9)), expected) == []


def anchors_of(path: Path) -> set[str]:
    """Return the names of the saves beside a checkpoint to whose weights it links."""
    links = path.glob("*.anchor")
    return {save.name for link in links for save in path.parent.iterdir() if link.samefile(save / "__0_0.distcp")}


def test_exact_weights_go_back_to_the_first_save_and_rounded_ones_to_the_one_before(run: tuple[str, Path]) -> None:
    mode, directory = run
    found = [anchors_of(directory / str(number)) for number in range(3)]
    assert found == [set(), {"0"}, {"0"} if mode == "lossless" else {"0", "1"}]


def test_a_chain_of_rounded_saves_ends_where_reading_takes_five_files(tmp_path: Path) -> None:
    weights = [torch.randn(64, 80, generator=torch.Generator().manual_seed(0))]
    for number in range(8):
        anchor = tmp_path / str(number - 1) if number else None
        # The best checkpoint of a run is exact, and no other one refers to it.
        rules = {"weight": "lossless"} if number == 2 else {}
        save(tmp_path / str(number), {"model": {"w": weights[-1]}}, "near-lossless", anchor=anchor, rules=rules)
        weights.append(weights[-1] + 1e-3 * torch.randn(64, 80, generator=torch.Generator().manual_seed(number)))
    assert [len(anchors_of(tmp_path / str(number))) for number in range(8)] == [0, 1, 2, 2, 3, 4, 4, 4]
    assert "2" not in anchors_of(tmp_path / "7")
    loaded = load(tmp_path / "7", state={"model": {"w": torch.zeros(64, 80)}})["model"]["w"]
    assert 0 < (loaded - weights[7]).abs().max() <= rows(tmp_path / "7")["model.w"]["bound"] * 1.0001


def test_the_weights_of_a_rounded_difference_are_one_state_dict(run: tuple[str, Path]) -> None:
    mode, directory = run
    if mode == "lossless":
        pytest.skip("only rounded differences become anchors")
    weights = torch.load(directory / "1" / "__0_0.distcp", weights_only=True)
    loaded = load(directory / "1", state=whole_state(9))
    assert torch.equal(weights["model.up.weight[0:96,0:128]"], loaded["model"]["up.weight"])


def test_the_weights_of_a_full_checkpoint_are_one_state_dict(run: tuple[str, Path]) -> None:
    _, directory = run
    weights = torch.load(directory / "0" / "__0_0.distcp", weights_only=True)
    error = (weights["model.up.weight[0:96,0:128]"] - whole_state(0)["model"]["up.weight"]).abs().max()
    assert error <= (rows(directory / "0")["model.up.weight"]["bound"] or 0)


def test_a_new_anchor_begins_after_as_many_saves_as_asked_for(tmp_path: Path) -> None:
    saves = [tmp_path / str(number) for number in range(5)]
    for number, path in enumerate(saves):
        anchor = saves[number - 1] if number else None
        save(path, whole_state(number), "near-lossless", anchor=anchor, anchor_every=2)
    assert [bool(list(path.glob("*.anchor"))) for path in saves] == [False, True, False, True, False]


def test_steps_stay_the_same_until_the_next_anchor(run: tuple[str, Path]) -> None:
    mode, directory = run
    steps = [rows(directory / str(number))["model.up.weight"]["params"].get("step") for number in (1, 2)]
    assert steps[0] == steps[1]
    assert (steps[0] is None) == (mode == "lossless")


def test_an_exact_checkpoint_says_nothing_about_the_differences_of_rounded_ones(tmp_path: Path) -> None:
    weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    saves = [tmp_path / str(number) for number in range(4)]
    for number, path in enumerate(saves):
        noise = torch.randn(64, 80, generator=torch.Generator().manual_seed(number))
        rules = {"weight": "lossless"} if number == 2 else {}
        anchor = saves[number - 1] if number else None
        save(path, {"model": {"w": weight + 1e-4 * noise}}, "near-lossless", anchor=anchor, rules=rules)
    records = [read_manifest(path).sharded["anchor"] for path in saves]
    assert [record["saves"] for record in records] == [1, 2, 3, 4]
    assert records[2]["last_bits"] == records[1]["last_bits"]
    assert rows(saves[2])["model.w"]["bound"] is None
    assert rows(saves[3])["model.w"]["codec"] == "delta-uniform"


def test_elements_that_never_had_a_gradient_keep_the_value_that_they_have_in_the_anchor(tmp_path: Path) -> None:
    def table(number: int) -> dict[str, Any]:
        noise = torch.randn(64, 80, generator=torch.Generator().manual_seed(number))
        noise[8:] = 0
        weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(9)) + 1e-3 * number * noise
        states = {"w": {"exp_avg": noise, "exp_avg_sq": noise.square(), "step": torch.tensor(1000.0)}}
        groups = [{"lr": 1e-5, "betas": list(BETAS), **ADAM_SETTINGS, "params": ["w"]}]
        return {"model": {"w": weight}, "optim": {"state": states, "param_groups": groups}}

    found = []
    for number in range(3):
        anchor = tmp_path / "0" if number else None
        save(tmp_path / str(number), table(number), "near-lossless", anchor=anchor)
        found.append(load(tmp_path / str(number), state=table(9))["model"]["w"])
    assert not torch.equal(found[0], table(0)["model"]["w"])
    assert not torch.equal(found[2][:8], found[0][:8])
    assert torch.equal(found[2][8:], found[0][8:])


def many(weights: int) -> dict[str, Any]:
    """Return a state of so many weights."""
    model = {f"{number}.weight": torch.full((64, 64), float(number)) for number in range(weights)}
    step = torch.tensor(9.0)
    states = {name: {"exp_avg": each * 1e-3, "exp_avg_sq": each, "step": step} for name, each in model.items()}
    groups = [{"lr": 1e-3, "betas": list(BETAS), **ADAM_SETTINGS, "params": list(model)}]
    return {"model": model, "optim": {"state": states, "param_groups": groups}}


def calls_of(action: Callable[[], Any]) -> int:
    """Return how many functions Python calls while it does something."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(previous)
    return count


@pytest.mark.parametrize("kind", exhaustive("full, near-lossless", "delta, near-lossless", "delta, lossless"))
def test_work_of_a_save_grows_with_the_number_of_weights_and_not_with_its_square(tmp_path: Path, kind: str) -> None:
    is_delta, mode = kind.startswith("delta"), kind.split(", ")[1]
    save(tmp_path / "first", many(10), mode)  # what a process does once does not count
    counts = []
    for weights in (10, 20, 40):
        anchor = tmp_path / f"anchor of {weights}" if is_delta else None
        if anchor is not None:
            save(anchor, many(weights), mode)
        counts.append(calls_of(partial(save, tmp_path / f"{weights}", many(weights), mode, anchor=anchor)))
    assert counts[2] - counts[1] < 2.1 * (counts[1] - counts[0])


@pytest.mark.parametrize("reader", [TrainWeightsReader, FileSystemReader])
def test_work_of_a_load_grows_with_the_number_of_weights_and_not_with_its_square(tmp_path: Path, reader: type) -> None:
    counts = []
    for weights in (10, 20, 40):
        state = {"model": many(weights)["model"]}
        save(tmp_path / f"{weights}", state)
        save(tmp_path / f"{weights} delta", state, anchor=tmp_path / f"{weights}")
        os.utime(next((tmp_path / f"{weights} delta").glob("*.anchor")), (0, 0))  # as if it was not just written
        counts.append(calls_of(partial(load, tmp_path / f"{weights} delta", reader, state)))
    assert counts[2] - counts[1] < 2.5 * (counts[1] - counts[0])


def test_steps_become_finer_if_saves_follow_each_other_more_closely(tmp_path: Path) -> None:
    previous = None
    steps = []
    for number, step in enumerate((0, 100, 200, 225)):
        path = tmp_path / str(number)
        save(path, whole_state(number), "near-lossless", anchor=previous, step=step)
        steps.append(rows(path)["model.up.weight"]["params"].get("step"))
        previous = path
    assert steps[1] == steps[2]
    assert steps[3] == pytest.approx(steps[1] / 2)
    assert read_manifest(tmp_path / "3").step == 225


def test_a_shard_that_has_not_moved_stays_exact(tmp_path: Path) -> None:
    state = whole_state(1)
    state["model"]["embed.weight"] = whole_state(0)["model"]["embed.weight"]
    save(tmp_path / "0", whole_state(0), "compact", rules={"weight": "lossless"})
    save(tmp_path / "1", state, "compact", anchor=tmp_path / "0")
    loaded = load(tmp_path / "1", state=whole_state(9))
    assert torch.equal(loaded["model"]["embed.weight"], state["model"]["embed.weight"])
    assert rows(tmp_path / "1")["model.embed.weight"]["bytes_out"] < 100


def test_a_full_checkpoint_rounds_weights_by_how_far_they_move(tmp_path: Path) -> None:
    state = whole_state(0)
    for values in state["optim"]["state"].values():
        values["step"] = torch.tensor(1000.0)
    save(tmp_path / "far", state, "near-lossless")
    state["optim"]["param_groups"][0]["lr"] /= 10
    save(tmp_path / "near", state, "near-lossless")
    state["optim"]["param_groups"][0]["lr"] = 0.0
    save(tmp_path / "nowhere", state, "near-lossless")
    far, near, nowhere = (rows(tmp_path / name)["model.up.weight"]["bound"] for name in ("far", "near", "nowhere"))
    assert near == pytest.approx(far / 10, rel=1e-2)
    assert nowhere is None


def with_own_optimizer(lr: float) -> dict[str, Any]:
    """Return a model of one weight and its optimizer."""
    state = whole_state(0)
    values = {**state["optim"]["state"]["up.weight"], "step": torch.tensor(1000.0)}
    groups = [{**state["optim"]["param_groups"][0], "lr": lr, "params": ["up.weight"]}]
    optimizer = {"state": {"up.weight": values}, "param_groups": groups}
    return {"model": {"up.weight": state["model"]["up.weight"] + lr}, "optim": optimizer}


def test_of_models_with_the_same_names_each_is_rounded_by_its_own_optimizer(tmp_path: Path) -> None:
    slow, fast = with_own_optimizer(1e-6), with_own_optimizer(1e-3)
    frozen = {name: weight + 1 for name, weight in slow["model"].items()}
    save(tmp_path / "alone", {"slow": slow}, "compact")
    save(tmp_path / "both", {"slow": slow, "fast": fast, "frozen": {"model": frozen}}, "compact")
    found = rows(tmp_path / "both")
    bounds = [found[f"{name}.model.up.weight"]["bound"] for name in ("slow", "fast")]
    assert bounds[0] == pytest.approx(rows(tmp_path / "alone")["slow.model.up.weight"]["bound"], rel=1e-2)
    assert bounds[1] == pytest.approx(1000 * bounds[0], rel=1e-2)
    assert found["frozen.model.up.weight"]["bound"] is None


def test_weights_are_exact_where_nothing_tells_which_optimizer_is_theirs(tmp_path: Path) -> None:
    first, second = with_own_optimizer(1e-6), with_own_optimizer(1e-3)
    names = {"a": first["model"], "b": second["model"], "optim_a": first["optim"], "optim_b": second["optim"]}
    save(tmp_path / "0", names, "compact")
    assert [rows(tmp_path / "0")[f"{name}.up.weight"]["bound"] for name in ("a", "b")] == [None, None]


@pytest.mark.parametrize("mode", ["lossless", "near-lossless"])
def test_moments_in_one_memory_are_stored_as_if_each_had_its_own(tmp_path: Path, mode: str) -> None:
    state = {"optim": with_own_optimizer(1e-3)["optim"]}
    values = state["optim"]["state"]["up.weight"]
    save(tmp_path / "apart", state, mode)
    values["exp_avg"], values["exp_avg_sq"] = torch.stack([values["exp_avg"], values["exp_avg_sq"]])
    save(tmp_path / "together", state, mode)
    assert (tmp_path / "apart" / "__0_1.distcp").read_bytes() == (tmp_path / "together" / "__0_1.distcp").read_bytes()


def test_rules_select_by_the_names_of_the_model(tmp_path: Path) -> None:
    rules = {"embed": "raw", "optimizer": "lossless", "weight/re:up.*": "int8", "exp_avg/gate": "compact"}
    save(tmp_path / "0", whole_state(0), "compact", rules=rules)
    found = rows(tmp_path / "0")
    assert found["model.embed.weight"]["codec"] == "raw"
    assert found["model.up.weight"]["codec"] == "grouped"
    lossy = [name for name, row in found.items() if name.startswith("optim") and row["bound"] is not None]
    assert lossy == ["optim.state.gate.weight.exp_avg"]


def test_buffers_that_the_caller_names_are_exact(tmp_path: Path) -> None:
    for number in range(2):
        anchor = tmp_path / "0" if number else None
        save(tmp_path / str(number), whole_state(number), "compact", anchor=anchor, buffers=["up.weight"])
    loaded = load(tmp_path / "1", state=whole_state(9))
    assert torch.equal(loaded["model"]["up.weight"], whole_state(1)["model"]["up.weight"])
    assert rows(tmp_path / "1")["model.up.weight"]["role"] == "buffer"
    assert not torch.equal(loaded["model"]["embed.weight"], whole_state(1)["model"]["embed.weight"])


@pytest.mark.parametrize("kind", ["tied", "copied as for a save in the background"])
def test_tied_weights_are_stored_once(tmp_path: Path, kind: str) -> None:
    def tied(number: int) -> dict[str, Any]:
        weights = whole_state(number)["model"]
        head = weights["embed.weight"]
        return {"model": {**weights, "head.weight": head if kind == "tied" else head.clone()}}

    for number in range(2):
        save(tmp_path / str(number), tied(number), anchor=tmp_path / "0" if number else None)
        loaded = load(tmp_path / str(number), state=tied(9))
        assert differing(loaded, tied(number)) == []
        assert rows(tmp_path / str(number))["model.head.weight"]["bytes_out"] == 0
        places = [rows(tmp_path / str(number))[f"model.{name}.weight"]["bytes"] for name in ("embed", "head")]
        assert places[0] == places[1]


def test_weights_that_are_no_longer_tied_are_not_confused(tmp_path: Path) -> None:
    weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    save(tmp_path / "0", {"model": {"a": weight, "b": weight}})
    apart = {"model": {"a": weight, "b": weight + 1}}
    save(tmp_path / "1", apart, anchor=tmp_path / "0")
    assert differing(load(tmp_path / "1", state={"model": {"a": weight * 0, "b": weight * 0}}), apart) == []


def test_bits_that_compare_equal_or_unequal_to_themselves_come_back(tmp_path: Path) -> None:
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, -1e-45] * 1000)
    payload = (odd.view(torch.int32) + (odd.isnan().int() << 3)).view(torch.float32)
    state = {"model": {"a": odd.clone(), "b": payload, "empty": torch.empty(0, 3), "t": odd.view(60, 100).t()}}
    save(tmp_path / "0", state)
    assert differing(load(tmp_path / "0", state={"model": {k: v * 0 for k, v in state["model"].items()}}), state) == []


def test_equal_states_give_equal_items(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, whole_state(0), "near-lossless")
    items = [[file.read_bytes() for file in sorted((tmp_path / name).glob("__*"))] for name in ("a", "b")]
    assert items[0] == items[1]


def test_a_part_of_a_checkpoint_is_loaded_without_reading_the_rest(run: tuple[str, Path], tmp_path: Path) -> None:
    _, directory = run
    copy = Path(shutil.copytree(directory / "0", tmp_path / "copy"))
    place = rows(copy)["model.embed.weight"]["bytes"].split(":")
    with (copy / "__0_0.distcp").open("r+b") as file:
        file.seek(int(place[0]) + 50)
        file.write(b"damage")
    wanted: dict[str, Any] = {"model": {"up.weight": torch.zeros(96, 128)}, "progress": {"save": None}}
    loaded = load(copy, state=wanted)
    error = (loaded["model"]["up.weight"] - whole_state(0)["model"]["up.weight"]).abs().max()
    assert error <= (rows(copy)["model.up.weight"]["bound"] or 0)
    assert loaded["progress"] == {"save": 0}


def test_an_optimizer_and_a_model_without_its_mate_keep_their_roles(tmp_path: Path) -> None:
    state = whole_state(0)
    save(tmp_path / "model", {"model": state["model"]}, "compact")
    save(tmp_path / "optimizer", {"optimizer": state["optim"]}, "compact")
    weights = {name: row["role"] for name, row in rows(tmp_path / "model").items()}
    assert {name for name, role in weights.items() if role == "buffer"} == {
        "model.steps",
        "model.scale",
        "model.norm.weight",
    }
    states = rows(tmp_path / "optimizer")
    assert states["optimizer.state.up.weight.exp_avg"]["codec"] == "update-space"
    assert states["optimizer.state.up.weight.exp_avg_sq"]["codec"] == "log-rank1"


@pytest.mark.parametrize("missing", ["never saved", "plain", "damaged"])
def test_an_anchor_that_cannot_be_used_costs_a_warning_and_a_full_checkpoint(tmp_path: Path, missing: str) -> None:
    previous, path = tmp_path / "previous", tmp_path / "next"
    if missing == "damaged":
        save(previous, whole_state(0))
        flip_a_bit(previous / "__0_0.distcp")
    elif missing == "plain":
        previous.mkdir()
        (previous / ".metadata").write_bytes(b"")
    with pytest.warns(UserWarning, match="stored without reference"):
        save(path, whole_state(1), anchor=previous)
    assert list(path.glob("*.anchor")) == []
    assert differing(load(path, state=whole_state(9)), whole_state(1)) == []
    save(tmp_path / "after", whole_state(2), anchor=path)
    assert len(list((tmp_path / "after").glob("*.anchor"))) == 1
    assert verify_checkpoint(path).intact


def test_new_weights_begin_a_new_anchor(tmp_path: Path) -> None:
    state = whole_state(1)
    save(tmp_path / "0", whole_state(0))
    state["model"]["new.weight"] = torch.ones(80, 80)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(tmp_path / "1", state, anchor=tmp_path / "0")
    assert list((tmp_path / "1").glob("*.anchor")) == []


def test_a_flat_state_dict_of_an_optimizer_is_known_as_one(tmp_path: Path) -> None:
    state = whole_state(0)
    flat: dict[str, Any] = {}
    for name, values in state["optim"]["state"].items():
        flat |= {f"state.{name}.{key}": value for key, value in values.items()}
        flat[f"state.{name}.step"] = torch.tensor(1000.0)
        group = {"lr": 1e-3, "betas": (0.9, 0.95), **ADAM_SETTINGS}
        flat |= {f"param_groups.{name}.{key}": value for key, value in group.items()}
    save(tmp_path / "0", {"model": state["model"], "optim": flat}, "compact")
    found = rows(tmp_path / "0")
    assert found["optim.state.up.weight.exp_avg"]["codec"] == "update-space"
    assert found["model.up.weight"]["role"] == "weight"
    assert found["model.up.weight"]["bound"] is not None  # far from a fine-tune: the group was found
    blank = {"model": state["model"], "optim": {k: v * 0 if isinstance(v, Tensor) else None for k, v in flat.items()}}
    assert load(tmp_path / "0", state=blank)["optim"]["param_groups.up.weight.betas"] == (0.9, 0.95)
