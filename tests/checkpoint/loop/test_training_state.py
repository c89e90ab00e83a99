import copy

import pytest
import torch
from checkpoint.loops import OPTIMIZERS, SCHEDULERS, everything, seed, state_of, train
from torch import nn
from trees import fingerprint

from hf_trainweights.checkpoint.loop.training_files import load_checkpoint, save_checkpoint
from hf_trainweights.checkpoint.loop.training_state import build_checkpoint, restore_checkpoint


def assert_resumes(tmp_path, *, accumulate=1, **options):
    """Ten steps and ten steps after a way through the disk are twenty steps, to the last bit."""
    seed()
    straight = everything(**options)
    losses = train(*straight, 20, accumulate=accumulate)
    end = state_of(*straight)

    seed()
    first = everything(**options)
    before = train(*first, 10, accumulate=accumulate)
    save_checkpoint(build_checkpoint(*first, epoch=0.5, step=10), tmp_path / "a")

    seed()
    second = everything(**options)
    assert restore_checkpoint(load_checkpoint(tmp_path / "a"), *second) == (0.5, 10)
    after = train(*second, 10, accumulate=accumulate)
    assert before + after == losses
    assert state_of(*second) == end


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_exactly_for_every_optimizer(tmp_path, optimizer):
    assert_resumes(tmp_path, optimizer=optimizer)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of torch 2.8 about itself
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_training_goes_on_exactly_for_every_scheduler(tmp_path, scheduler):
    assert_resumes(tmp_path, scheduler=scheduler)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD-momentum", "Adafactor"])
def test_training_goes_on_exactly_in_bfloat16(tmp_path, optimizer):
    assert_resumes(tmp_path, optimizer=optimizer, dtype=torch.bfloat16)


def test_training_goes_on_exactly_with_gradient_accumulation(tmp_path):
    assert_resumes(tmp_path, accumulate=3)


def test_training_goes_on_exactly_with_a_gradient_scaler(tmp_path):
    assert_resumes(tmp_path, enabled=True)


def test_a_model_alone_is_a_checkpoint(tmp_path):
    model = nn.Linear(3, 3)
    save_checkpoint(build_checkpoint(model, rng=False), tmp_path / "a")
    other = nn.Linear(3, 3)
    assert restore_checkpoint(load_checkpoint(tmp_path / "a"), other) == (None, None)
    assert torch.equal(other.weight, model.weight)
    assert not (tmp_path / "a" / "optimizer.pt").exists()


def test_a_fresh_optimizer_stays_fresh(tmp_path):
    model, optimizer, scheduler, scaler = everything()
    save_checkpoint(build_checkpoint(model, optimizer, scheduler, scaler), tmp_path / "a")
    other = everything()
    restore_checkpoint(load_checkpoint(tmp_path / "a"), *other)
    assert other[1].state_dict()["state"] == {}
    assert state_of(*other) == state_of(model, optimizer, scheduler, scaler)


def test_a_disabled_scaler_is_an_empty_dict_that_anyone_takes(tmp_path):
    model, optimizer, scheduler, disabled = everything(enabled=False)
    save_checkpoint(build_checkpoint(model, optimizer, scheduler, disabled), tmp_path / "a")
    checkpoint = load_checkpoint(tmp_path / "a")
    assert checkpoint["scaler"] == {}
    enabled = torch.amp.GradScaler("cpu", init_scale=4.0)
    for scaler in (disabled, enabled):
        restore_checkpoint(checkpoint, model, optimizer, scheduler, scaler)
    assert enabled.get_scale() == 4.0


def test_a_part_the_checkpoint_lacks_keeps_its_state_with_a_warning():
    model, optimizer, scheduler, scaler = everything()
    train(model, optimizer, scheduler, scaler, 2)
    before = fingerprint(optimizer.state_dict())
    with pytest.warns(UserWarning, match="no optimizer"):
        restore_checkpoint(build_checkpoint(model), model, optimizer)
    assert fingerprint(optimizer.state_dict()) == before


def test_what_was_restored_shares_nothing_with_the_checkpoint():
    source, target = everything(), everything()
    train(*source, 2)
    checkpoint = build_checkpoint(*source)
    before = fingerprint(copy.deepcopy(checkpoint["optimizer"])), fingerprint(copy.deepcopy(checkpoint["model"]))
    restore_checkpoint(checkpoint, *target)
    train(*target, 2)
    assert (fingerprint(checkpoint["optimizer"]), fingerprint(checkpoint["model"])) == before
