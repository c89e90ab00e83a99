"""What is left when the process is killed, the power fails or the disk is full, at every single call."""

import contextlib
import errno
import json
import os
import shutil
import signal
import time

import pytest
import torch
from covering import by_default
from forks import exit_code_of, fork
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file
from simulated_disk import OUTCOMES, FailingDisk, replay
from trees import ADAM_SETTINGS

from hf_trainweights.checkpoint.directory import compress_directory, latest, remove_checkpoint, restore_directory
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.loop.manager import CheckpointManager
from hf_trainweights.checkpoint.loop.training_state import load_checkpoint, save_checkpoint, save_training_state
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.checkpoints import mark_run, verify_checkpoint
from hf_trainweights.checkpoint.whole.rewriting import replace_weights
from hf_trainweights.errors import CorruptFileError, SaveError
from hf_trainweights.files import atomic, disk
from hf_trainweights.files.disk import claim_directory

pytestmark = pytest.mark.slow  # each replays a save at every call to the file system


@pytest.mark.parametrize("opener", [atomic.create_file, atomic.replace_file])
def test_a_directory_has_all_its_files_as_soon_as_it_appears(tmp_path, monkeypatch, opener):
    root = tmp_path / "root"
    root.mkdir()

    def action():
        with atomic.create_directory(root / "a") as temporary, opener(temporary / "file") as file:
            file.write(b"x" * 3_000_000)

    for when in replay(root, action, monkeypatch):
        present = (root / "a").exists()
        assert not present or (root / "a" / "file").read_bytes() == b"x" * 3_000_000, when
    assert present


def example(step):
    """A checkpoint whose weights move a little with every step."""
    noise = torch.randn(64, 80, generator=torch.Generator().manual_seed(step))
    base = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    weight = base + 1e-3 * noise
    moments = {"step": torch.tensor(float(step)), "exp_avg": noise, "exp_avg_sq": noise.square()}
    optimizer = {
        "state": {0: moments},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), **ADAM_SETTINGS, "params": [0]}],
    }
    return {
        "model": {"w": weight},
        "optimizer": optimizer,
        "step": step,
        "names": {"buffers": [], "optimizer": {0: "w"}},
    }


def is_example(checkpoint, step):
    expected = example(step)
    return (
        checkpoint["step"] == step
        and torch.equal(checkpoint["model"]["w"], expected["model"]["w"])
        and torch.equal(checkpoint["optimizer"]["state"][0]["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"])
    )


def write_example(root, step, *, anchor_every=8):
    path = root / f"checkpoint-{step}"
    save_training_state(example(step), path, Policy("lossless"), anchor_every=anchor_every)


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints, the second stored against the first."""
    root = tmp_path / "run"
    for step in (1, 2):
        write_example(root, step)
    assert len(list((root / "checkpoint-2").glob("*.anchor"))) == 1
    return root


@pytest.mark.filterwarnings("ignore:.*is passed over")
@pytest.mark.parametrize("anchor_every", [8, 2], ids=["delta", "new anchor"])
def test_a_save_leaves_the_old_or_the_new_checkpoint(run, monkeypatch, anchor_every):
    steps, killed = [], []
    for when in replay(run, lambda: write_example(run, 3, anchor_every=anchor_every), monkeypatch):
        loaded = load_checkpoint(latest(run))
        steps.append(loaded["step"])
        killed += [loaded["step"]] * (", killed:" in when)
        assert is_example(loaded, loaded["step"]), when
    assert set(steps) == {2, 3}
    assert set(steps[-len(OUTCOMES) :]) == {3}
    assert killed == sorted(killed)
    assert set(killed) == {2, 3}


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_a_save_that_needs_several_anchors_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    root = tmp_path / "run"

    def write(step):
        checkpoint = example(step)
        checkpoint["optimizer"]["param_groups"][0]["lr"] = 1e-3
        save_training_state(checkpoint, root / f"checkpoint-{step}", Policy("near-lossless"), anchor_every=8)

    for step in (1, 2, 3):
        write(step)
    steps = []
    for when in replay(root, lambda: write(4), monkeypatch):
        loaded = load_checkpoint(latest(root))
        steps.append(loaded["step"])
        assert (loaded["model"]["w"] - example(loaded["step"])["model"]["w"]).abs().max() < 1e-3, when
        assert len(list((root / f"checkpoint-{loaded['step']}").glob("*.anchor"))) == loaded["step"] - 1, when
    assert set(steps) == {3, 4}


def test_removing_a_checkpoint_leaves_it_whole_or_gone(run, monkeypatch):
    steps = []
    for when in replay(run, lambda: remove_checkpoint(run / "checkpoint-2"), monkeypatch):
        loaded = load_checkpoint(latest(run))
        steps.append(loaded["step"])
        assert is_example(loaded, loaded["step"]), when
    assert set(steps) == {1, 2}


def test_removing_the_checkpoint_with_the_anchor_leaves_the_other_whole(run, monkeypatch):
    for when in replay(run, lambda: remove_checkpoint(run / "checkpoint-1"), monkeypatch):
        assert is_example(load_checkpoint(latest(run)), 2), when


def trainer_directory(root, step, *, shards):
    """A checkpoint as a Trainer leaves it."""
    path = root / f"checkpoint-{step}"
    path.mkdir(parents=True)
    checkpoint = example(step)
    weights = {**checkpoint["model"], "b": torch.arange(5.0)}
    if shards:
        index = {"weight_map": {}}
        for number, (name, tensor) in enumerate(weights.items()):
            file_name = f"model-0000{number}-of-00002.safetensors"
            save_file({name: tensor}, path / file_name)
            index["weight_map"][name] = file_name
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(weights, path / "model.safetensors")
    torch.save(checkpoint["optimizer"], path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5}))
    return path


def loaded_by_transformers(path):
    """Weights from the file that Transformers and its Trainer would open, in their order."""
    if (path / "model.safetensors").exists():
        return load_safetensors(path / "model.safetensors")
    if (path / "model.safetensors.index.json").exists():
        names = set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].values())
        return {key: tensor for name in names for key, tensor in load_safetensors(path / name).items()}
    return load_file(path / "pytorch_model.bin")


def is_whole(path, step):
    expected = example(step)
    weights, optimizer = loaded_by_transformers(path), load_file(path / "optimizer.pt")
    moments = expected["optimizer"]["state"][0]
    return (
        torch.equal(weights["w"], expected["model"]["w"])
        and torch.equal(weights["b"], torch.arange(5.0))
        and all(torch.equal(optimizer["state"][0][key], moments[key]) for key in moments)
    )


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_compressing_in_place_can_be_loaded_at_every_moment(tmp_path, monkeypatch, shards):
    root = tmp_path / "run"
    compress_directory(trainer_directory(root, 1, shards=False))
    trainer_directory(root, 2, shards=shards)
    verified = []
    for when in replay(root, lambda: compress_directory(root / "checkpoint-2"), monkeypatch):
        assert latest(root) == str(root / "checkpoint-2"), when
        assert is_whole(root / "checkpoint-2", 2), when
        verified.append(verify_checkpoint(root / "checkpoint-2").ok)
    assert all(verified[-len(OUTCOMES) :])
    assert not verified[0]


def renamed(weights):
    return {f"module.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.filterwarnings("ignore:.*is passed over")
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_weights_under_other_names_are_all_there_or_their_checkpoint_is_passed_over(tmp_path, monkeypatch, shards):
    root = tmp_path / "run"
    path = trainer_directory(root, 2, shards=shards)
    stored = loaded_by_transformers(path)
    mark_run(root, "w")

    def action():
        replace_weights(path, renamed(stored))
        compress_directory(path)

    actual, killed = [], []
    for when in replay(root, action, monkeypatch):
        is_offered = latest(root) == str(path)
        loaded = loaded_by_transformers(path)
        expected = renamed(stored) if is_offered or "module.w" in loaded else stored
        assert loaded.keys() == expected.keys(), when
        assert all(torch.equal(loaded[name], expected[name]) for name in expected), when
        actual.append((is_offered, verify_checkpoint(path).ok))
        killed += actual[-1:] * (", killed:" in when)
    assert killed == sorted(killed)
    # From the module's names a Trainer resumes exactly: they are there before anything is encoded.
    assert {(False, False), (True, False)} < set(killed)
    assert set(actual[-len(OUTCOMES) :]) == {(True, True)}


def test_restoring_in_place_can_be_loaded_at_every_moment(tmp_path, monkeypatch):
    root = tmp_path / "run"
    for step in (1, 2):
        compress_directory(trainer_directory(root, step, shards=False))
    for when in replay(root, lambda: restore_directory(root / "checkpoint-2"), monkeypatch):
        assert latest(root) == str(root / "checkpoint-2"), when
        assert is_whole(root / "checkpoint-2", 2), when


def test_a_plain_loops_checkpoint_survives_a_change_of_mode_at_every_moment(run, monkeypatch):
    change = lambda: compress_directory(run / "checkpoint-2", rules={"optimizer": "raw"})  # noqa: E731
    for when in replay(run, change, monkeypatch):
        assert is_example(load_checkpoint(latest(run)), 2), when


def save_error(action):
    """What the SaveError of an action says; None if it succeeds."""
    try:
        action()
    except SaveError as error:
        return str(error)
    return None


def listing(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.filterwarnings("ignore:.*stored without reference")
@pytest.mark.covering(1)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
def test_a_failing_disk_costs_nothing_but_the_save(run, monkeypatch, number, for_good):
    before = listing(run)
    for fail_at in range(1, 1000):
        failing = FailingDisk(fail_at, number, for_good=for_good)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "file_system", failing)
            message = save_error(lambda: write_example(run, 3))
        assert message is None or os.strerror(number) in message
        if failing.count < fail_at:
            break
        if (run / "checkpoint-3").exists():  # an older manifest could not be read, or the parent's fsync failed
            assert is_example(load_checkpoint(latest(run)), 3)
            remove_checkpoint(run / "checkpoint-3")
        elif not for_good:
            assert listing(run) == before
        assert is_example(load_checkpoint(latest(run)), 2)
        shutil.rmtree(next(run.glob("_trainweights-*"), run / "none"), ignore_errors=True)
    assert fail_at > 20
    assert is_example(load_checkpoint(latest(run)), 3)


def compress(path):
    compress_directory(path)


def replace_and_compress(path):
    replace_weights(path, loaded_by_transformers(path))
    compress_directory(path)


@pytest.mark.filterwarnings("ignore:.*stored without reference")
@pytest.mark.covering(1)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
@pytest.mark.parametrize("action", [compress, replace_and_compress])
def test_a_failing_disk_leaves_a_trainers_checkpoint_loadable(tmp_path, monkeypatch, number, action):
    root, source = tmp_path / "run", tmp_path / "source"
    trainer_directory(source, 2, shards=False)
    for fail_at in range(1, 1000):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(source, root)
        failing = FailingDisk(fail_at, number, for_good=True)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "file_system", failing)
            message = save_error(lambda: action(root / "checkpoint-2"))
        assert message is None or os.strerror(number) in message
        if failing.count < fail_at:
            break
        assert latest(root) == str(root / "checkpoint-2")
        assert is_whole(root / "checkpoint-2", 2)
    assert fail_at > 10
    assert verify_checkpoint(root / "checkpoint-2").ok


REWRITES = {
    "raw weights": lambda path: compress_directory(path, rules={"weight": "raw"}, buffers=[]),
    "int8 weights": lambda path: compress_directory(path, rules={"weight": "int8"}, buffers=[]),
    "near-lossless": lambda path: compress_directory(path, mode="near-lossless"),
    "restore": restore_directory,
}


def is_nearly_whole(path, step):
    optimizer = load_file(path / "optimizer.pt")
    is_near = torch.allclose(loaded_by_transformers(path)["w"], example(step)["model"]["w"], atol=0.05)
    return is_near and optimizer["state"].keys() == {0}


@pytest.mark.filterwarnings("ignore:.*stored without reference")
@pytest.mark.parametrize("rewrite", by_default(("int8 weights", "restore"), REWRITES))
def test_a_failing_disk_leaves_a_small_checkpoint_loadable(tmp_path, monkeypatch, rewrite):
    root, source = tmp_path / "run", tmp_path / "source"
    for step in (1, 2):
        compress_directory(trainer_directory(root, step, shards=False))
    assert list((root / "checkpoint-2").glob("*.anchor"))
    root.rename(source)
    for fail_at in range(1, 1000):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(source, root)
        failing = FailingDisk(fail_at, errno.EIO, for_good=False)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "file_system", failing)
            with contextlib.suppress(SaveError, CorruptFileError):  # what it writes, and what it reads first
                REWRITES[rewrite](root / "checkpoint-2")
        if failing.count < fail_at:
            break
        shutil.rmtree(root / "checkpoint-1")  # the other must not need it
        assert latest(root) == str(root / "checkpoint-2")
        assert is_nearly_whole(root / "checkpoint-2", 2)
    assert fail_at > 10
    assert verify_checkpoint(root / "checkpoint-2").ok


def train_until_killed(root):
    """A loop that saves at every step; its weights are a function of the step."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    torch.nn.init.zeros_(model.weight)
    with CheckpointManager(root, every_steps=1, keep_last=2) as manager:
        for step, _ in manager.steps(range(10**6), model):
            model.weight.data.fill_(float(step))


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_sigkill_at_any_time_leaves_a_whole_checkpoint_to_go_on_from(tmp_path):
    reached = kills = 0
    while kills < 5 or (reached < 3 and kills < 40):
        delay_seconds = 0.05 + 0.06 * (kills % 5)
        kills += 1
        child = fork(lambda: train_until_killed(tmp_path / "run"))
        deadline = time.monotonic() + 60
        while latest(tmp_path / "run") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay_seconds)
        os.kill(child, signal.SIGKILL)
        assert exit_code_of(child) == -signal.SIGKILL
        loaded = load_checkpoint(latest(tmp_path / "run"))
        assert torch.equal(loaded["model"]["weight"], torch.full((64, 64), float(loaded["step"])))
        assert loaded["step"] >= reached
        reached = loaded["step"]
    assert reached >= 3


def test_the_debris_of_a_killed_process_goes_when_the_run_is_taken_up_again(run):
    assert exit_code_of(fork(lambda: claim_directory(run))) == 0
    (abandoned,) = run.glob("_trainweights-*")
    (abandoned / "pytorch_model.bin").write_bytes(b"half")
    mine = claim_directory(run)
    with CheckpointManager(run):
        pass
    assert not abandoned.exists()
    assert mine.path.exists()
    mine.release()


def test_a_save_into_a_run_whose_anchor_is_damaged_stands_alone(run):
    anchor = next((run / "checkpoint-2").glob("*.anchor"))
    content = bytearray(anchor.read_bytes())
    content[len(content) // 2] ^= 1
    for path in run.rglob("*"):
        if path.is_file() and path.samefile(anchor):
            path.unlink()
            path.write_bytes(content)
    with pytest.warns(UserWarning, match="stored without reference: .*anchor"):
        write_example(run, 3)
    assert not list((run / "checkpoint-3").glob("*.anchor"))
    assert is_example(load_checkpoint(run / "checkpoint-3"), 3)


def test_save_checkpoint_does_not_touch_what_is_there(run):
    before = listing(run)
    with pytest.raises(SaveError, match="missing or empty directory"):
        save_checkpoint(example(2), run / "checkpoint-2")
    assert listing(run) == before
