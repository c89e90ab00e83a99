import errno
import json
import os
import tracemalloc
import warnings

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from trees import fingerprint, trained

from hf_trainweights.checkpoint.directory import compress_directory, latest, restore_directory
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file
from hf_trainweights.checkpoint.loop.training_state import build_checkpoint, save_checkpoint
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.run.checkpoints import size_bytes, verify_checkpoint
from hf_trainweights.checkpoint.whole.rewriting import replace_weights
from hf_trainweights.errors import ConfigError, CorruptFileError, MissingAnchorError, SaveError, UnsupportedError
from hf_trainweights.files import disk


def trainer_directory(path, *, safetensors="model.safetensors", seed=0):
    """A checkpoint with the files of a Trainer; returns what its weights and its optimizer hold."""
    model, optimizer, scheduler = trained("AdamW")
    path.mkdir(parents=True)
    weights = {name: (tensor + 1e-4 * seed * tensor.sign()).contiguous() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    if safetensors:
        save_file(weights, path / safetensors)
    torch.save(state, path / "optimizer.pt")
    torch.save(scheduler.state_dict(), path / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None)}, path / "rng_state.pth")
    (path / "config.json").write_text("{}")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 500, "epoch": 1.25}))
    return weights, state


def total_bytes(path):
    return sum(file.stat().st_size for file in path.iterdir())


def names(path):
    return {file.name for file in path.iterdir()}


def test_a_trainers_checkpoint_becomes_small_under_the_same_names(tmp_path):
    path = tmp_path / "checkpoint-500"
    weights, optimizer = trainer_directory(path)
    before, before_bytes = names(path), total_bytes(path)
    manifest = compress_directory(path)
    assert names(path) == before - {"model.safetensors"} | {"pytorch_model.bin", MANIFEST_NAME}
    assert total_bytes(path) < before_bytes
    assert fingerprint(torch.load(path / "optimizer.pt", weights_only=True)) == fingerprint(optimizer)
    loaded = torch.load(path / "pytorch_model.bin", weights_only=True)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert (manifest.step, manifest.epoch, manifest.mode) == (500, 1.25, "lossless")
    assert set(manifest.files) == names(path) - {MANIFEST_NAME}
    assert verify_checkpoint(path).ok


def test_small_files_stay_byte_for_byte(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    small = ("scheduler.pt", "rng_state.pth", "config.json", "trainer_state.json")
    before = {name: (path / name).read_bytes() for name in small}
    compress_directory(path)
    assert {name: (path / name).read_bytes() for name in small} == before


def test_the_rng_files_of_several_ranks_stay_and_are_verified(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    (path / "rng_state.pth").unlink()
    ranks = [f"rng_state_{rank}.pth" for rank in range(3)]
    for rank, name in enumerate(ranks):
        torch.save({"cpu": torch.full([5056], rank, dtype=torch.uint8)}, path / name)
    before = {name: (path / name).read_bytes() for name in ranks}
    manifest = compress_directory(path)
    assert {name: (path / name).read_bytes() for name in ranks} == before
    assert set(ranks) <= manifest.files.keys()
    (path / ranks[1]).write_bytes(before[ranks[0]])
    assert set(verify_checkpoint(path).problems) == {ranks[1]}


def test_a_file_that_another_rank_is_still_writing_is_not_in_the_manifest(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    torch.save({"cpu": torch.ones(9)}, path / "rng_state_1.pth")
    content = (path / "rng_state_1.pth").read_bytes()
    (path / "rng_state_1.pth").write_bytes(content[:-5])
    manifest = compress_directory(path)
    assert {name for name in manifest.files if name.startswith("rng")} == {"rng_state.pth"}
    (path / "rng_state_1.pth").write_bytes(content)
    assert latest(tmp_path) == str(path)


def test_weights_of_the_caller_need_no_weight_file(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path, safetensors=None)
    replace_weights(path, {"module.name": torch.arange(6000.0)})
    compress_directory(path)
    assert list(load_file(path / "pytorch_model.bin")) == ["module.name"]


def test_the_time_of_the_directory_stays(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    os.utime(path, ns=(10**18, 10**18 + 1))
    compress_directory(path)
    assert path.stat().st_mtime_ns == 10**18 + 1
    restore_directory(path)
    assert path.stat().st_mtime_ns == 10**18 + 1


@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_in_a_lossy_mode_every_bound_is_stated(tmp_path, mode):
    path = tmp_path / "checkpoint-500"
    weights, _ = trainer_directory(path)
    manifest = compress_directory(path, mode=mode)
    by_role = {each["role"]: each for each in manifest.files["optimizer.pt"].report["tensors"] if each["bound"]}
    assert set(by_role) == {"exp_avg", "exp_avg_sq"}
    loaded = load_file(path / "pytorch_model.bin")
    bounds = {each["name"]: each["bound"] for each in manifest.files["pytorch_model.bin"].report["tensors"]}
    assert any(bounds.values())
    for name, weight in weights.items():
        assert (loaded[name].double() - weight.double()).abs().max() <= (bounds[name] or 0)


@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_without_the_moments_of_adam_the_first_weights_are_exact(tmp_path, mode):
    path = tmp_path / "checkpoint-500"
    weights, optimizer = trainer_directory(path)
    torch.save({**optimizer, "state": {}}, path / "optimizer.pt")
    compress_directory(path, mode=mode)
    loaded = load_file(path / "pytorch_model.bin")
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_the_next_checkpoint_is_stored_against_the_first(tmp_path):
    for number in (1, 2):
        weights, _ = trainer_directory(tmp_path / f"checkpoint-{number}", seed=number)
        manifest = compress_directory(tmp_path / f"checkpoint-{number}")
    assert manifest.files["pytorch_model.bin"].report["anchor"] == manifest.anchor["sha256"]
    assert manifest.anchor["saves"] == 2
    loaded = load_file(tmp_path / "checkpoint-2" / "pytorch_model.bin")
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_shards_become_one_file(tmp_path):
    path = tmp_path / "checkpoint-500"
    weights, _ = trainer_directory(path, safetensors=None)
    index = {"weight_map": {}}
    for number, name in enumerate(weights):
        index["weight_map"][name] = f"model-{number}.safetensors"
        save_file({name: weights[name]}, path / f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    compress_directory(path)
    assert not list(path.glob("model*"))
    loaded = load_file(path / "pytorch_model.bin")
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_sharded_torch_files_become_one_file(tmp_path):
    path = tmp_path / "checkpoint-500"
    weights, _ = trainer_directory(path, safetensors=None)
    index = {"weight_map": {}}
    for number, name in enumerate(weights):
        index["weight_map"][name] = f"pytorch_model-{number}.bin"
        torch.save({name: weights[name]}, path / f"pytorch_model-{number}.bin")
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    compress_directory(path)
    assert [file.name for file in path.glob("pytorch_model*")] == ["pytorch_model.bin"]
    loaded = load_file(path / "pytorch_model.bin")
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_weight_file_of_torch_stays_under_its_name(tmp_path):
    path = tmp_path / "checkpoint-500"
    weights, _ = trainer_directory(path, safetensors=None)
    torch.save(weights, path / "pytorch_model.bin")
    compress_directory(path)
    assert is_encoded(path / "pytorch_model.bin")
    assert all(torch.equal(load_file(path / "pytorch_model.bin")[name], weights[name]) for name in weights)


def test_adapters_keep_their_family_of_names(tmp_path):
    path = tmp_path / "checkpoint-500"
    weights, _ = trainer_directory(path, safetensors="adapter_model.safetensors")
    compress_directory(path)
    assert "adapter_model.safetensors" not in names(path)
    assert "pytorch_model.bin" not in names(path)
    assert all(torch.equal(load_file(path / "adapter_model.bin")[name], weights[name]) for name in weights)
    assert verify_checkpoint(path).ok


def test_weights_given_by_the_caller_replace_those_of_the_file(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    replace_weights(path, {"module.name": torch.arange(6000.0)})
    compress_directory(path)
    assert list(load_file(path / "pytorch_model.bin")) == ["module.name"]
    assert "model.safetensors" not in names(path)


def test_weights_given_by_the_caller_keep_their_ties_and_may_change_afterwards(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    weight = torch.arange(6000.0)
    replace_weights(path, {"embed": weight, "head": weight, "rows": weight.view(60, 100).T})
    weight.zero_()
    compress_directory(path)
    loaded = load_file(path / "pytorch_model.bin")
    assert torch.equal(loaded["embed"], torch.arange(6000.0))
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr() == loaded["rows"].data_ptr()
    assert loaded["rows"].stride() == (1, 100)


def test_replacing_weights_keeps_the_time_of_the_directory_and_takes_the_digests_of_the_old_files_away(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    (path / "trainweights_files.json").write_text("{}")
    os.utime(path, ns=(10**18, 10**18 + 1))
    replace_weights(path, {"w": torch.ones(3)})
    assert path.stat().st_mtime_ns == 10**18 + 1
    assert not names(path) & {"trainweights_files.json", "model.safetensors"}
    assert not any(name.startswith("_trainweights") for name in names(path))


def test_weights_may_stay_plain(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    content = (path / "model.safetensors").read_bytes()
    compress_directory(path, keep_weights=True)
    assert (path / "model.safetensors").read_bytes() == content
    assert "pytorch_model.bin" not in names(path)
    assert is_encoded(path / "optimizer.pt")
    assert verify_checkpoint(path).ok


def test_buffers_and_rules_reach_the_policy(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    name = "embed.weight"
    rules = {"re:.*": "raw", "exp_avg/re:embed.*": "raw"}
    optimizer_names = {0: name, **{index: str(index) for index in range(1, 9)}}
    manifest = compress_directory(path, rules=rules, buffers=[name], optimizer_names=optimizer_names)
    weights = {each["name"]: each for each in manifest.files["pytorch_model.bin"].report["tensors"]}
    assert weights[name]["role"] == "buffer"
    assert weights["conv.weight"]["codec"] == "raw"
    moments = {each["path"]: each for each in manifest.files["optimizer.pt"].report["tensors"]}
    assert moments["state.0.exp_avg"]["codec"] == "raw"
    assert moments["state.0.exp_avg"]["name"] == name
    assert moments["state.0.exp_avg_sq"]["codec"] == "planes-magnitudes"


def test_a_rule_that_names_nothing_changes_nothing(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ConfigError, match=r"rules\['embde'\]: .*Did you mean \"embed\"\?"):
        compress_directory(path, rules={"embde": "raw"})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def normed_directories(root, optimizer_of):
    """Two checkpoints of a module whose buffers are large and move; returns it as it is in the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5000), torch.nn.Linear(5000, 2))
    model[1].register_buffer("average", torch.zeros(3, 5000))
    optimizer = optimizer_of(model)
    for step in (1, 2):
        model(torch.rand(8, 5000)).square().sum().backward()
        optimizer.step()
        model[1].average += torch.rand(3, 5000)
        path = root / f"checkpoint-{step}"
        path.mkdir(parents=True)
        torch.save(model.state_dict(), path / "pytorch_model.bin")
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: torch.optim.AdamW(list(model.parameters())),
        lambda model: torch.optim.AdamW(model.named_parameters()),
        lambda model: torch.optim.SGD(list(model.parameters()), lr=1e-3, momentum=0.9),
    ],
    ids=["AdamW", "AdamW with names", "SGD"],
)
@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_buffers_are_exact_without_a_module_that_names_them(tmp_path, mode, optimizer_of):
    model = normed_directories(tmp_path, optimizer_of)
    for step in (1, 2):
        manifest = compress_directory(tmp_path / f"checkpoint-{step}", mode=mode)
    loaded = load_file(tmp_path / "checkpoint-2" / "pytorch_model.bin")
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded[name], buffer), name
    bounds = {each["name"]: each["bound"] for each in manifest.files["pytorch_model.bin"].report["tensors"]}
    assert bounds["1.weight"] is not None


def test_a_second_mode_knows_the_buffers_of_the_first(tmp_path):
    model = normed_directories(tmp_path, lambda model: torch.optim.AdamW(list(model.parameters())))
    for mode in ("lossless", "compact"):
        for step in (1, 2):
            path = tmp_path / f"checkpoint-{step}"
            (path / "optimizer.pt").unlink(missing_ok=True)
            named = ["1.average"] if mode == "lossless" else None
            manifest = compress_directory(path, mode=mode, buffers=named)
    reports = {each["name"]: each for each in manifest.files["pytorch_model.bin"].report["tensors"]}
    assert {name for name, each in reports.items() if each["role"] == "buffer"} == {"1.average"}
    assert torch.equal(load_file(path / "pytorch_model.bin")["1.average"], model[1].average)
    assert reports["0.running_mean"]["bound"] is not None


def test_a_plain_loops_checkpoint_names_its_buffers_itself(tmp_path):
    for step in (1, 2):
        model = torch.nn.BatchNorm1d(5000)
        model.register_buffer(
            "average", torch.full((2, 5000), 1.0).normal_(generator=torch.Generator().manual_seed(step))
        )
        save_checkpoint(build_checkpoint(model, step=step, rng=False), tmp_path / f"checkpoint-{step}")
        manifest = compress_directory(tmp_path / f"checkpoint-{step}", mode="compact")
    assert manifest.anchor["saves"] == 2
    assert torch.equal(load_file(tmp_path / "checkpoint-2" / "pytorch_model.bin")["average"], model.average)


def test_a_file_of_torch_save_with_everything_in_it_is_planned_part_by_part(tmp_path):
    model, optimizer, _ = trained("AdamW")
    tree = {"epoch": 3, "net": {"state": model.state_dict()}, "optimizer": optimizer.state_dict()}
    (tmp_path / "run").mkdir()
    torch.save(tree, tmp_path / "run" / "last.ckpt")
    manifest = compress_directory(tmp_path / "run", mode="compact")
    roles = {each["path"]: each["role"] for each in manifest.files["last.ckpt"].report["tensors"]}
    assert roles["optimizer.state.0.exp_avg"] == "exp_avg"
    assert roles["net.state.embed.weight"] == "weight"
    codecs = {each["path"]: each["codec"] for each in manifest.files["last.ckpt"].report["tensors"]}
    assert codecs["optimizer.state.0.exp_avg"] == "update-space"
    loaded = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert fingerprint(loaded["net"]) == fingerprint(tree["net"])


@pytest.mark.parametrize("name", ["optimizer.pt", "notes.pt"])
def test_what_cannot_be_encoded_stays_as_it_is_with_a_warning(tmp_path, name):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    if name == "optimizer.pt":
        torch.save({"state": {}, "object": slice(1, 2), "t": torch.ones(4)}, path / name)
    else:
        (path / name).write_bytes(b"not a torch file" * 5000)
    before = (path / name).read_bytes()
    with pytest.warns(UserWarning, match=f"{name} stays as it is: it holds more than plain data"):
        compress_directory(path)
    assert (path / name).read_bytes() == before
    assert is_encoded(path / "pytorch_model.bin")
    assert verify_checkpoint(path).ok


def test_a_file_of_a_pytorch_before_zip_files_is_made_small_too(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    state = torch.load(path / "optimizer.pt", weights_only=True)
    torch.save(state, path / "optimizer.pt", _use_new_zipfile_serialization=False)
    compress_directory(path)
    assert is_encoded(path / "optimizer.pt")
    assert fingerprint(load_file(path / "optimizer.pt")) == fingerprint(state)


@pytest.mark.parametrize("name", ["optimizer_1.pt", "optimizer_1.bin"])
def test_the_file_of_a_second_optimizer_is_made_small_too(tmp_path, name):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    state = {"state": {0: {"momentum_buffer": torch.ones(256, 256)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, path / name)
    compress_directory(path)
    assert is_encoded(path / name)
    assert fingerprint(load_file(path / name)) == fingerprint(state)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "optimizer_0", "global_step500", "zero_to_fp32.py"])
def test_sharded_state_is_left_untouched(tmp_path, name):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    (path / name).mkdir()
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    with pytest.raises(UnsupportedError, match=name):
        compress_directory(path)
    assert {file.name: file.stat().st_ino for file in path.iterdir()} == before


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"w": "../../x.safetensors"}}'])
def test_an_index_that_lists_no_shards_of_its_own_is_refused(tmp_path, index):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path, safetensors=None)
    (path / "model.safetensors.index.json").write_text(index)
    before = names(path)
    with pytest.raises(CorruptFileError, match=r"index\.json"):
        compress_directory(path)
    assert names(path) == before


@pytest.mark.parametrize("damage", ["cut", "header"])
def test_unreadable_weights_change_nothing(tmp_path, damage):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    if damage == "cut":
        os.truncate(path / "model.safetensors", 1000)
    else:
        (path / "model.safetensors").write_bytes(b"\xff" * 100)
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        compress_directory(path)
    assert {file.name: file.stat().st_ino for file in path.iterdir()} == before


@pytest.mark.parametrize("verb", [compress_directory, restore_directory])
def test_a_damaged_small_checkpoint_is_not_touched(tmp_path, verb):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    compress_directory(path, mode="near-lossless")
    (path / "scheduler.pt").write_bytes(b"damaged")
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    with pytest.raises(CorruptFileError, match=r"scheduler\.pt"):
        verb(path)
    assert {file.name: file.stat().st_ino for file in path.iterdir()} == before


@pytest.mark.parametrize("verb", [compress_directory, restore_directory])
def test_what_is_no_checkpoint_is_refused(tmp_path, verb):
    trainer_directory(tmp_path / "run" / "checkpoint-500")
    with pytest.raises(ConfigError, match=r"directory with weights .*found a directory without any"):
        verb(tmp_path / "run")
    with pytest.raises(ConfigError, match="found no directory"):
        verb(tmp_path / "missing")
    assert names(tmp_path / "run") == {"checkpoint-500"}


def test_a_wrong_mode_changes_nothing(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    before = names(path)
    with pytest.raises(ConfigError, match="mode"):
        compress_directory(path, mode="tiny")
    assert names(path) == before


def test_a_rule_that_lacks_names_changes_nothing(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    state = torch.load(path / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        del group["param_names"]
    torch.save(state, path / "optimizer.pt")
    compress_directory(path)
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    with pytest.raises(ConfigError, match="names"):
        compress_directory(path, rules={"exp_avg/re:embed.*": "raw"})
    assert {file.name: file.stat().st_ino for file in path.iterdir()} == before


def drifting_directory(path):
    """A checkpoint whose weights move far between two saves."""
    _, optimizer = trainer_directory(path)
    for state in optimizer["state"].values():
        state["exp_avg_sq"] *= 1e-4
    torch.save(optimizer, path / "optimizer.pt")
    return dict(enumerate(optimizer["param_groups"][0]["param_names"]))


def test_an_anchor_of_no_use_is_not_linked(tmp_path):
    for step, rules in ((1, {}), (2, {"re:.*": "raw"})):
        trainer_directory(tmp_path / f"checkpoint-{step}", seed=step)
        manifest = compress_directory(tmp_path / f"checkpoint-{step}", rules=rules, buffers=[])
        assert not [*(tmp_path / f"checkpoint-{step}").glob("*.anchor")]
        assert not [name for name in manifest.files if name.endswith(".anchor")]


def test_a_rounded_anchor_keeps_its_stated_bound(tmp_path):
    path = tmp_path / "checkpoint-500"
    optimizer_names = drifting_directory(path)
    near = compress_directory(path, mode="near-lossless", optimizer_names=optimizer_names)
    assert any(each["bound"] for each in near.files["pytorch_model.bin"].report["tensors"])
    compact = compress_directory(path, mode="compact", optimizer_names=optimizer_names)
    assert compact.files["pytorch_model.bin"] == near.files["pytorch_model.bin"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["near-lossless", "lossless"])
def test_bounds_outlive_an_interrupted_conversion(tmp_path, mode):
    path = tmp_path / "checkpoint-500"
    optimizer_names = drifting_directory(path)
    whole = compress_directory(path, mode="near-lossless", optimizer_names=optimizer_names)
    (path / MANIFEST_NAME).unlink()
    resumed = compress_directory(path, mode=mode, optimizer_names=optimizer_names)
    for name in ("pytorch_model.bin", "optimizer.pt"):
        assert resumed.files[name].sha256 == whole.files[name].sha256
        known, found = (entry.files[name].report["tensors"] for entry in (whole, resumed))
        for key in ("path", "codec", "params", "bound", "bytes_in", "bytes_out"):
            assert [each[key] for each in found] == [each[key] for each in known]
        assert any(each["bound"] for each in found)


def test_another_mode_may_follow_a_lossless_one(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    compress_directory(path, metrics={"loss": 1.0})
    size = (path / "optimizer.pt").stat().st_size
    manifest = compress_directory(path, mode="compact")
    assert (path / "optimizer.pt").stat().st_size < size / 2
    assert (manifest.mode, manifest.metrics, manifest.step) == ("compact", {"loss": 1.0}, 500)
    assert verify_checkpoint(path).ok


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
def test_restoring_gives_plain_files_that_need_nobody(tmp_path, moved):
    root = tmp_path / "run"
    for number in (1, 2):
        weights, optimizer = trainer_directory(root / f"checkpoint-{number}", seed=number)
        compress_directory(root / f"checkpoint-{number}")
    if moved:
        root.rename(tmp_path / "moved")
        root = tmp_path / "moved"
    path = root / "checkpoint-2"
    manifest = restore_directory(path)
    assert not list(path.glob("*.anchor"))
    assert not any(is_encoded(file) for file in path.iterdir())
    assert b"hf_trainweights" not in (path / "optimizer.pt").read_bytes()
    assert fingerprint(torch.load(path / "optimizer.pt", weights_only=True)) == fingerprint(optimizer)
    loaded = torch.load(path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert (manifest.mode, manifest.step) == ("plain", 500)
    assert verify_checkpoint(path).ok
    assert latest(root) == str(path)


@pytest.mark.slow
def test_a_moved_run_is_readable_after_the_call_that_the_error_names(tmp_path):
    for step, seed in ((1, 71), (2, 72)):  # seeds of no other test, whose anchors would be found in its directory
        weights, _ = trainer_directory(tmp_path / "here" / f"checkpoint-{step}", seed=seed)
        compress_directory(tmp_path / "here" / f"checkpoint-{step}")
    moved = (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(MissingAnchorError, match=r"latest\(run\)"):
        torch.load(moved / "checkpoint-2" / "pytorch_model.bin")
    assert latest(moved) == str(moved / "checkpoint-2")
    loaded = torch.load(moved / "checkpoint-2" / "pytorch_model.bin")
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_checkpoint_moved_without_its_anchor_is_refused_and_untouched(tmp_path):
    for number in (1, 2):
        trainer_directory(tmp_path / f"checkpoint-{number}", seed=number)
        compress_directory(tmp_path / f"checkpoint-{number}")
    path = tmp_path / "checkpoint-2"
    next(path.glob("*.anchor")).unlink()
    before = names(path)
    with pytest.raises(CorruptFileError, match=r"\.anchor.*is missing"):
        restore_directory(path)
    assert names(path) == before


def flip(path, needle):
    """Flip a bit in the middle of some bytes that a file holds."""
    content = bytearray(path.read_bytes())
    content[content.index(needle) + len(needle) // 2] ^= 0x40
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit in a moment": lambda path, state: flip(
        path / "optimizer.pt", state["state"][0]["exp_avg"].numpy().tobytes()
    ),
    "half an optimizer": lambda path, _: os.truncate(path / "optimizer.pt", 20_000),
    "no optimizer": lambda path, _: (path / "optimizer.pt").write_bytes(b"not a torch file"),
    "a small file cut off": lambda path, _: os.truncate(path / "scheduler.pt", 500),
    "a small file without its beginning": lambda path, _: flip(path / "scheduler.pt", b"PK\x03\x04"),
    "weights in a folder": lambda path, _: (path / "other" / "adapter_model.safetensors").write_bytes(b"\0" * 99),
    "half a state": lambda path, _: os.truncate(path / "trainer_state.json", 9),
}


@pytest.mark.slow
@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_damaged_gets_a_digest(tmp_path, damage, keep_weights):
    path = tmp_path / "checkpoint-500"
    _, state = trainer_directory(path)
    (path / "other").mkdir()
    save_file({"w": torch.ones(2)}, path / "other" / "adapter_model.safetensors")
    DAMAGE[damage](path, state)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for verb in (lambda: compress_directory(path, keep_weights=keep_weights), lambda: restore_directory(path)):
        with pytest.raises(CorruptFileError, match=r"expected a whole file, found .*cannot be read"):
            verb()
        assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_damaged_anchor_beside_weights_that_stay_gets_no_digest(tmp_path):
    for step in (1, 2):
        trainer_directory(tmp_path / f"checkpoint-{step}", seed=step)
        compress_directory(tmp_path / f"checkpoint-{step}")
    path = tmp_path / "checkpoint-2"
    (path / MANIFEST_NAME).unlink()
    anchor = next(path.glob("*.anchor"))
    content = anchor.read_bytes()
    anchor.unlink()
    anchor.write_bytes(content[:-1] + b"?")
    with pytest.raises(CorruptFileError, match="an anchor named by its SHA-256"):
        compress_directory(path, keep_weights=True)
    assert not (path / MANIFEST_NAME).exists()


def test_a_file_keeps_its_own_report_beside_a_namesake_in_a_folder(tmp_path):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    (path / "sub").mkdir()
    torch.save({"x": torch.ones(64, 64)}, path / "sub" / "pytorch_model.bin")
    compress_directory(path)
    manifest = compress_directory(path, metrics={"loss": 1.0}, rules={"optimizer": "raw"})
    assert manifest.files["pytorch_model.bin"].report
    assert not manifest.files["sub/pytorch_model.bin"].report


def test_the_error_of_a_rewrite_is_the_first_one(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)

    class Refuses(disk.FileSystem):
        def write(self, descriptor, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def set_times(self, path, accessed_ns, modified_ns):
            raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(disk, "file_system", Refuses())
    with pytest.raises(SaveError, match="No space left on device"):
        compress_directory(path)


@pytest.mark.slow
def test_without_hard_links_the_size_counts_copies_and_one_warning_says_so(tmp_path, monkeypatch):
    class NoLinks(disk.FileSystem):
        def link(self, source, target):
            raise OSError(errno.EPERM, "Operation not permitted")

    for step in (1, 2, 3):
        trainer_directory(tmp_path / f"checkpoint-{step}", seed=step)
    monkeypatch.setattr(disk, "file_system", NoLinks())
    compress_directory(tmp_path / "checkpoint-1")
    with pytest.warns(UserWarning, match="has no hard links: each checkpoint has its own copies"):
        compress_directory(tmp_path / "checkpoint-2")
    with warnings.catch_warnings(action="error"):
        compress_directory(tmp_path / "checkpoint-3")
    for step in (1, 2, 3):
        assert size_bytes(tmp_path / f"checkpoint-{step}") == total_bytes(tmp_path / f"checkpoint-{step}")
    assert list((tmp_path / "checkpoint-3").glob("*.anchor"))


@pytest.mark.parametrize("prefix", ["", "adapter_"])
def test_a_model_without_training_state_is_refused_unless_asked_for_and_comes_back_as_safetensors(tmp_path, prefix):
    state = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    file = tmp_path / f"{prefix or ''}model.safetensors"
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    content = file.read_bytes()
    (tmp_path / f"{prefix}config.json").write_text("{}")
    torch.save({}, tmp_path / "training_args.bin")
    with pytest.raises(ConfigError, match=r"a model .* and no training state.*--weights-only"):
        compress_directory(tmp_path)
    assert file.read_bytes() == content
    compress_directory(tmp_path, weights_only=True)
    assert not file.exists()
    compress_directory(tmp_path)  # it is a checkpoint by now
    assert restore_directory(tmp_path).mode == "plain"
    assert file.read_bytes() == content
    assert not list(tmp_path.glob("*_model.bin"))


def test_weights_become_safetensors_again_in_little_more_memory_than_they_take(tmp_path):
    state = {str(number): torch.full((512, 512), float(number)) for number in range(8)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    content = (tmp_path / "model.safetensors").read_bytes()
    compress_directory(tmp_path, weights_only=True)
    tracemalloc.start()
    try:
        restore_directory(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "model.safetensors").read_bytes() == content
    assert peak_bytes < 1.5 * len(content)
