import copy

import numpy as np
import pytest
import torch
from checkpoint.loops import OPTIMIZERS, SCHEDULERS, Net, everything, seed, state_of, train
from torch import nn
from trees import fingerprint

from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.checkpoint.loop.training_state import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError, UnstorableError


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


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_exactly_for_every_optimizer(tmp_path, optimizer):
    assert_resumes(tmp_path, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of torch 2.8 about itself
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_training_goes_on_exactly_for_every_scheduler(tmp_path, scheduler):
    assert_resumes(tmp_path, scheduler=scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD-momentum", "Adafactor"])
def test_training_goes_on_exactly_in_bfloat16(tmp_path, optimizer):
    assert_resumes(tmp_path, optimizer=optimizer, dtype=torch.bfloat16)


@pytest.mark.slow
def test_training_goes_on_exactly_with_gradient_accumulation(tmp_path):
    assert_resumes(tmp_path, accumulate=3)


@pytest.mark.slow
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


def test_loading_gives_back_the_dict_that_was_saved(tmp_path):
    model, optimizer, scheduler, scaler = everything()
    train(model, optimizer, scheduler, scaler, 2)
    shared = torch.arange(12.0)
    extra = {
        "list": [1, 2.5, None, True, "text", (3, [torch.tensor(4, dtype=torch.int8)])],
        "views": [shared[:6], shared[3:], shared.view(3, 4).t()],
        5: {"inf": float("-inf"), "dtype": torch.bfloat16, "size": torch.Size([1, 2])},
        "parameter": nn.Parameter(torch.ones(2)),
    }
    checkpoint = build_checkpoint(model, optimizer, scheduler, scaler, epoch=3, step=7, extra=extra)
    save_checkpoint(checkpoint, tmp_path / "a")
    loaded = load_checkpoint(tmp_path / "a")
    assert loaded.keys() == checkpoint.keys()
    assert {key: fingerprint(value) for key, value in loaded.items()} == {
        key: fingerprint(value) for key, value in checkpoint.items()
    }
    loaded["extra"]["views"][0][4] = 99
    assert loaded["extra"]["views"][1][1] == 99
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embed.weight"].data_ptr()
    assert verify_checkpoint(tmp_path / "a").ok


@pytest.mark.parametrize("exists", [False, True])
def test_a_missing_or_empty_directory_is_filled(tmp_path, exists):
    path = tmp_path / "parent" / "a"
    if exists:
        path.mkdir(parents=True)
    save_checkpoint(build_checkpoint(nn.Linear(2, 2)), str(path))
    assert verify_checkpoint(path).ok


def test_a_directory_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(SaveError, match="not empty"):
        save_checkpoint(build_checkpoint(nn.Linear(2, 2)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"a": {"b": [0, {1, 2}]}}, r"trainweights_state\.pt: extra\.a\.b\.1"),
        ({"f": print}, r"trainweights_state\.pt: extra\.f"),
        ({"array": np.ones(2)}, r"extra\.array"),
        ({("tuple", "key"): 1}, "extra"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_key(tmp_path, extra, key):
    with pytest.raises(UnstorableError, match=key):
        save_checkpoint(build_checkpoint(nn.Linear(2, 2), extra=extra), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checkpoint", [{}, {"optimizer": {}}, {"model": {}, "mine": 1}])
def test_a_dict_that_is_no_checkpoint_is_refused(tmp_path, checkpoint):
    with pytest.raises(ConfigError, match="a model and any of"):
        save_checkpoint(checkpoint, tmp_path / "a")


@pytest.mark.parametrize("part", ["step", "epoch"])
@pytest.mark.parametrize("value", [torch.tensor(3), "3", True, np.int64(3)], ids=lambda value: type(value).__name__)
def test_a_count_that_no_reader_would_take_is_refused_before_anything_is_written(tmp_path, part, value):
    with pytest.raises(ConfigError) as caught:
        save_checkpoint({"model": {"w": torch.ones(3)}, part: value}, tmp_path / "a")
    assert caught.value.where == part
    assert [*tmp_path.iterdir()] == []


def test_a_dict_made_by_hand_is_a_checkpoint(tmp_path):
    model, optimizer, *_ = source = everything()
    train(*source, 1)
    save_checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "a")
    other, restored, *_ = everything()
    assert restore_checkpoint(load_checkpoint(tmp_path / "a"), other, restored) == (None, 1)
    assert fingerprint(restored.state_dict()) == fingerprint(optimizer.state_dict())


def test_quantize_i8_is_int8_for_weights_and_exact_for_all_else(tmp_path):
    model, *_ = source = everything()
    train(*source, 2)
    checkpoint = build_checkpoint(*source)
    save_checkpoint(checkpoint, tmp_path / "a", quantize_i8=True)
    save_checkpoint(checkpoint, tmp_path / "b", quantize_i8=False)
    loaded, exact = load_checkpoint(tmp_path / "a"), load_checkpoint(tmp_path / "b")
    for part in ("optimizer", "scheduler", "rng"):
        assert fingerprint(loaded[part]) == fingerprint(exact[part])
    report = {each["name"]: each for each in read_manifest(tmp_path / "a").files["pytorch_model.bin"].report["tensors"]}
    for name, tensor in model.state_dict().items():
        error = (loaded["model"][name].double() - tensor.double()).abs().max().item()
        bound = report[name]["bound"] if name in report else report["embed.weight"]["bound"]
        assert error <= (bound or 0.0), name
    assert report["embed.weight"]["codec"] == "grouped"
    assert report["embed.weight"]["bytes_out"] < 0.3 * report["embed.weight"]["bytes_in"]
    assert report["norm.running_mean"]["bound"] is None
    assert torch.equal(loaded["model"]["head.weight"], loaded["model"]["embed.weight"])


def test_quantize_i8_yields_to_the_users_rules_and_refuses_a_lossy_mode(tmp_path):
    checkpoint = build_checkpoint(Net())
    for name, selector in (("a", "re:embed.*"), ("b", "weight")):
        save_checkpoint(checkpoint, tmp_path / name, quantize_i8=True, rules={selector: "lossless"})
        loaded = load_checkpoint(tmp_path / name)["model"]["embed.weight"]
        assert torch.equal(loaded, checkpoint["model"]["embed.weight"])
    with pytest.raises(ConfigError, match="quantize_i8"):
        save_checkpoint(checkpoint, tmp_path / "c", mode="compact", quantize_i8=True)


def test_rules_by_name_reach_the_optimizer(tmp_path):
    model, optimizer, *_ = source = everything()
    train(*source, 2)
    rules = {"exp_avg/re:conv.*": "lossless"}
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a", mode="compact", rules=rules)
    report = read_manifest(tmp_path / "a").files["optimizer.pt"].report["tensors"]
    codecs = {(each["role"], each["name"]): each["codec"] for each in report}
    assert codecs["exp_avg", "conv.weight"] == "planes-magnitudes"
    assert codecs["exp_avg", "embed.weight"] == "update-space"


def test_a_rule_that_names_nothing_is_refused_before_anything_is_written(tmp_path):
    model, optimizer, *_ = everything()
    with pytest.raises(ConfigError, match=r"rules\['cnov'\]: .*Did you mean \"conv\"\?"):
        save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a", rules={"conv": "raw", "cnov": "raw"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rules", ["raw", [("weight", "raw")], 3], ids=lambda rules: type(rules).__name__)
def test_rules_that_are_no_dict_are_refused(tmp_path, rules):
    with pytest.raises(ConfigError, match="rules: expected a dict from selector to choice"):
        save_checkpoint({"model": {"w": torch.ones(3)}}, tmp_path / "a", rules=rules)


def test_a_missing_file_is_named(tmp_path):
    model, optimizer, *_ = everything()
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a")
    (tmp_path / "a" / "optimizer.pt").unlink()
    with pytest.raises(CorruptFileError, match=r"optimizer\.pt.*is missing"):
        load_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "trainweights.json").unlink()
    with pytest.raises(CorruptFileError, match=r"expected the file optimizer\.pt"):
        load_checkpoint(tmp_path / "a")


def test_a_trainers_directory_is_referred_to_the_trainer(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="Trainer"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "state",
    [[], {}, {"parts": None}, {"parts": ["optimizer"]}, {"parts": ["model", "other"]}, {"parts": ["model", []]}],
)
def test_a_state_that_names_no_parts_is_refused(state, tmp_path):
    torch.save(state, tmp_path / "trainweights_state.pt")
    with pytest.raises(CorruptFileError, match=r"trainweights_state\.pt: expected the parts of a checkpoint"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("state", [[], {}, {"names": 1}, {"names": {"buffers": 1}}, {"names": {"buffers": [[1]]}}])
def test_a_state_without_names_of_buffers_does_not_stop_compression(state, tmp_path):
    torch.save(state, tmp_path / "trainweights_state.pt")
    torch.save({"w": torch.ones(64, 64)}, tmp_path / "pytorch_model.bin")
    assert compress_directory(tmp_path).mode == "lossless"


class Float32Moments(torch.optim.Optimizer):
    """Keeps float32 moments for bfloat16 weights, and leaves loading to torch."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            moment = state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
            moment.mul_(0.9).add_(parameter.grad.float())
            parameter.data.sub_(1e-3 * moment)


def test_float32_moments_of_bfloat16_weights_are_not_rounded(tmp_path):
    def build():
        model = nn.Linear(70, 70).bfloat16()
        return model, Float32Moments(model.parameters())

    model, optimizer = build()
    for _ in range(3):
        model(torch.randn(4, 70).bfloat16()).sum().backward()
        optimizer.step()
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a")
    other, restored = build()
    restore_checkpoint(load_checkpoint(tmp_path / "a"), other, restored)
    assert restored.state[other.weight]["moment"].dtype == torch.float32
    assert torch.equal(restored.state[other.weight]["moment"], optimizer.state[model.weight]["moment"])


def test_a_model_of_another_dtype_gets_moments_of_its_own(tmp_path):
    model, optimizer, *_ = source = everything()
    train(*source, 1)
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a")
    half, restored, *_ = everything(dtype=torch.bfloat16)
    restore_checkpoint(load_checkpoint(tmp_path / "a"), half, restored)
    assert restored.state[half.conv.weight]["exp_avg"].dtype == torch.bfloat16


def compiled_whole(model):
    return torch.compile(model)


def compiled_in_part(model):
    model.conv = torch.compile(model.conv)
    return model


@pytest.mark.parametrize("reads", [Net, lambda: compiled_whole(Net()), lambda: compiled_in_part(Net())])
@pytest.mark.parametrize("writes", [Net, lambda: compiled_whole(Net()), lambda: compiled_in_part(Net())])
def test_a_model_may_be_compiled_or_not_when_it_resumes(tmp_path, writes, reads):
    def made(make, value):
        model = make().to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.data.fill_(value)
            # moments of more precision than their weights, which torch's own loading would round
            optimizer.state[parameter] = {
                "step": torch.tensor(value),
                "exp_avg": torch.full_like(parameter, value).float(),
            }
        return model, optimizer

    (source, old), (target, new) = made(writes, 1 / 3), made(reads, 0.0)
    save_checkpoint(build_checkpoint(source, old), tmp_path)
    restore_checkpoint(load_checkpoint(tmp_path), target, new)
    assert all(map(torch.equal, target.state_dict().values(), source.state_dict().values()))
    assert fingerprint(new.state_dict()["state"]) == fingerprint(old.state_dict()["state"])
