"""Every way to save training with every optimizer: only states that have a rule are rounded, and no weight is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from checkpoint.optimizers import ADAMS, AMBIGUOUS, OTHERS, RULED, Signs, moments, trained
from checkpoint.trainers import build, trainer_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint import (
    CheckpointManager,
    build_checkpoint,
    compress_directory,
    load_checkpoint,
    restore_directory,
    save_checkpoint,
)
from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan, with_steps
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.planning import optimizers
from hf_trainweights.checkpoint.planning.optimizers import STATES_KEY
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.distributed import TrainWeightsReader, TrainWeightsWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")

# A state dict of the optimizer and one of the model, as they come back.
Saved = tuple[dict[str, Any], dict[str, Tensor]]


def by_save_checkpoint(path: Path, model: nn.Module, optimizer: Any) -> Saved:
    save_checkpoint(build_checkpoint(model, optimizer, step=6), path, mode="near-lossless")
    loaded = load_checkpoint(path)
    return loaded["optimizer"], loaded["model"]


def by_manager(path: Path, model: nn.Module, optimizer: Any) -> Saved:
    with CheckpointManager(path.parent, mode="near-lossless") as manager:
        for _ in manager.steps(range(int(path.name.removeprefix("checkpoint-"))), model, optimizer):
            for hook in optimizer._optimizer_step_post_hooks.values():  # as after a step that changes nothing
                hook(optimizer, (), {})
    loaded = load_checkpoint(path)
    return loaded["optimizer"], loaded["model"]


def by_compress_directory(path: Path, model: nn.Module, optimizer: Any, named: Any = None) -> Saved:
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    names = dict(enumerate(dict(model.named_parameters())))
    compress_directory(path, mode="near-lossless", optimizer_names=names, buffers=(), optimizer=named)
    return tuple(torch.load(path / name, weights_only=True) for name in ("optimizer.pt", "pytorch_model.bin"))


def by_compress_directory_with_the_optimizer(path: Path, model: nn.Module, optimizer: Any) -> Saved:
    return by_compress_directory(path, model, optimizer, named=optimizer)


def by_dcp(path: Path, model: nn.Module, optimizer: Any, named: Any = None) -> Saved:
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states}
    dcp.save(state, storage_writer=TrainWeightsWriter(path, "near-lossless", optimizer=named), no_dist=True)
    blank = torch.utils._pytree.tree_map(lambda value: value * 0 if isinstance(value, Tensor) else value, state)
    dcp.load(blank, storage_reader=TrainWeightsReader(path), no_dist=True)
    indices = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    by_index = {indices[name]: values for name, values in blank["optim"]["state"].items()}
    return {"state": by_index}, blank["model"]


def by_dcp_with_the_optimizer(path: Path, model: nn.Module, optimizer: Any) -> Saved:
    return by_dcp(path, model, optimizer, named=optimizer)


SEES_THE_OPTIMIZER = [
    by_save_checkpoint,
    by_manager,
    by_compress_directory_with_the_optimizer,
    by_dcp_with_the_optimizer,
]
SEES_ITS_STATE = [by_compress_directory, by_dcp]
Way = Callable[[Path, nn.Module, Any], Saved]


def assert_no_weight_is_lost(path: Path, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    rows = [row for entry in read_manifest(path).files.values() for row in entry.report.get("tensors", ())]
    bounds = {row["name"].removeprefix("model."): row["bound"] or 0.0 for row in rows if row["role"] == "weight"}
    for name, weight in before.items():
        assert bounds.get(name, 0.0) <= 0.5 * weight.square().mean().sqrt()
        assert (after[name] - weight).abs().max() <= bounds.get(name, 0.0)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("way", SEES_THE_OPTIMIZER + SEES_ITS_STATE, ids=lambda way: way.__name__)
def test_states_of_other_optimizers_stay_exact_and_no_weight_is_lost(tmp_path: Path, way: Way, kind: str) -> None:
    if way in SEES_ITS_STATE and kind == "Signs":
        pytest.skip("the settings are those of AdamW, and nothing else is there")
    path = tmp_path / "checkpoint-6"
    model, optimizer = trained(OTHERS[kind])
    before = moments(optimizer.state_dict())
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    state, after = way(path, model, optimizer)
    assert {key: torch.equal(each, before[key]) for key, each in moments(state).items()} == dict.fromkeys(before, True)
    assert_no_weight_is_lost(path, weights, after)
    assert read_manifest(path).metadata[STATES_KEY]["rounded"] == []


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("way", SEES_THE_OPTIMIZER + SEES_ITS_STATE, ids=lambda way: way.__name__)
def test_states_of_adam_are_rounded_by_every_way(tmp_path: Path, way: Way, kind: str) -> None:
    path = tmp_path / "checkpoint-6"
    model, optimizer = trained(ADAMS[kind])
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    _, after = way(path, model, optimizer)
    assert_no_weight_is_lost(path, weights, after)
    assert read_manifest(path).metadata[STATES_KEY]["rounded"] == ["exp_avg", "exp_avg_sq"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", RULED)
@pytest.mark.parametrize("way", [*SEES_THE_OPTIMIZER, by_compress_directory], ids=lambda way: way.__name__)
def test_states_of_optimizers_that_have_a_rule_are_rounded_by_every_way(tmp_path: Path, way: Way, kind: str) -> None:
    if way is by_dcp_with_the_optimizer and kind == "Muon":
        pytest.skip("get_state_dict wants every parameter of the model in the optimizer")
    path = tmp_path / "checkpoint-6"
    make, roles = RULED[kind]
    model, optimizer = trained(make)
    before = moments(optimizer.state_dict())
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    state, after = way(path, model, optimizer)
    assert_no_weight_is_lost(path, weights, after)
    is_known = way is not by_compress_directory or kind not in AMBIGUOUS
    assert read_manifest(path).metadata[STATES_KEY]["rounded"] == (roles if is_known else [])
    changed = [key for key, each in moments(state).items() if not torch.equal(each, before[key])]
    assert bool(changed) == is_known


@pytest.mark.parametrize("kind", ["Prodigy", "Signs"])
def test_a_trainer_keeps_other_states_exact_and_says_whose_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    optimizers._say_that_states_stay_exact.cache_clear()
    model = build()
    optimizer = OTHERS[kind](model.parameters())
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback("near-lossless"), model=model, max_steps=4)
    trainer.optimizer = optimizer
    with caplog.at_level(logging.WARNING, "hf_trainweights.checkpoint.planning.optimizers"):
        trainer.train()
    name = f"checkpoint.optimizers.{kind}"
    assert [message for message in caplog.messages if "stay exact" in message] == [
        f"The states of {name} stay exact: no rule says how they move weights (see register_update_rule)."
    ]
    manifest = read_manifest(tmp_path / "checkpoint-4")
    assert manifest.metadata[STATES_KEY] == {"class": name, "rounded": []}
    saved = torch.load(tmp_path / "checkpoint-4/optimizer.pt", weights_only=True)
    before = moments(optimizer.state_dict())
    assert all(torch.equal(each, before[key]) for key, each in moments(saved).items())
    rows = manifest.files["pytorch_model.bin"].report["tensors"]
    rms = {key: each.float().square().mean().sqrt() for key, each in model.state_dict().items()}
    assert all(row["bound"] is None or row["bound"] <= 0.5 * rms[row["name"]] for row in rows)


def test_states_of_a_known_class_that_its_rule_does_not_fit_are_said_to_stay_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizers._say_that_states_stay_exact.cache_clear()
    weight = torch.nn.Parameter(torch.randn(96, 96, dtype=torch.complex64))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    plan = Policy("near-lossless").plan_optimizer(optimizer.state_dict(), optimizer="AdamW")
    rows = [{"role": each.role, "bound": None} for each in plan.values()]
    with caplog.at_level(logging.WARNING, "hf_trainweights.checkpoint.planning.optimizers"):
        optimizers.states_entry(optimizers.class_name("AdamW"), rows, is_lossy=True)
    assert caplog.messages == [
        "The states of torch.optim.adamw.AdamW stay exact: they have other keys, shapes or dtypes than its rule."
    ]


def test_the_class_is_remembered_from_the_first_save_to_every_rewriting(tmp_path: Path) -> None:
    model, optimizer = trained(Signs)
    before = moments(optimizer.state_dict())
    save_checkpoint(build_checkpoint(model, optimizer, step=6), tmp_path / "checkpoint-6")
    restore_directory(tmp_path / "checkpoint-6")
    compress_directory(tmp_path / "checkpoint-6", mode="compact")
    after = load_checkpoint(tmp_path / "checkpoint-6")
    assert all(torch.equal(each, before[key]) for key, each in moments(after["optimizer"]).items())
    save_checkpoint(after, tmp_path / "again", mode="compact")
    after = load_checkpoint(tmp_path / "again")
    assert all(torch.equal(each, before[key]) for key, each in moments(after["optimizer"]).items())


def test_whoever_names_the_optimizer_of_a_directory_is_believed(tmp_path: Path) -> None:
    state = trained(torch.optim.AdamW)[1].state_dict()
    state["param_groups"][0] = {key: state["param_groups"][0][key] for key in ("lr", "betas", "params")}
    torch.save(state, tmp_path / "optimizer.pt")
    assert compress_directory(tmp_path, mode="compact").metadata[STATES_KEY] == {"class": None, "rounded": []}
    named = compress_directory(tmp_path, mode="compact", optimizer="AdamW").metadata[STATES_KEY]
    assert named == {"class": "torch.optim.adamw.AdamW", "rounded": ["exp_avg", "exp_avg_sq"]}


def test_an_accelerated_optimizer_is_the_one_in_it() -> None:
    for make, expected in ((torch.optim.AdamW, "torch.optim.adamw.AdamW"), (Signs, "checkpoint.optimizers.Signs")):
        optimizer = make([nn.Parameter(torch.ones(1))])
        assert optimizers.class_name(Accelerator(cpu=True).prepare_optimizer(optimizer)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bound_of_a_weight_exceeds_half_of_its_rms(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        scale, drift = (10.0 ** float(4 * torch.rand((), generator=generator) - 3) for _ in range(2))
        weight = (scale * torch.randn(64, 64 + number, generator=generator)).to(dtype)
        weight[: number % 60] = 0
        plan = {("w",): TensorPlan("weight", "w", (), steps_per_rms=1 + 3 * (number % 2))}
        written = encode_file({"w": weight}, with_steps(plan, {"w": drift}))
        bound, rms = written.report[0].bound, weight.double().square().mean().sqrt()
        assert bound is None or bound <= 0.5 * rms
        back = decode_file(written.payload, written.structure)["w"]
        assert torch.equal(back, weight) if bound is None else (back - weight).abs().max() <= bound
        assert (bound is None) == (drift / plan["w",].steps_per_rms > 1.0001 * rms) or drift == pytest.approx(rms)


def test_a_rule_for_smaller_weights_leaves_one_exact() -> None:
    weight = torch.randn(64, 64) * 1e-4
    plan = Policy(rules={"weight": {"codec": "delta-uniform", "bound": 1e-2}}).plan_weights({"w": weight})
    written = encode_file({"w": weight}, plan)
    assert torch.equal(decode_file(written.payload, written.structure)["w"], weight)
