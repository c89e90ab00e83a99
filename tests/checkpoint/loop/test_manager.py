import math
import os
import random
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
from checkpoint.loops import everything
from forks import exit_code_of, fork
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trees import fingerprint

from hf_trainweights.checkpoint.directory import latest
from hf_trainweights.checkpoint.loop import training_state
from hf_trainweights.checkpoint.loop.manager import CheckpointManager, scaler_update_hook
from hf_trainweights.checkpoint.loop.progress import rng_state
from hf_trainweights.checkpoint.loop.training_state import build_checkpoint, load_checkpoint, save_checkpoint
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.run import checkpoints
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories
from hf_trainweights.errors import ConfigError, SaveError
from hf_trainweights.files.reading import file_sha256

BATCHES = 6  # in one pass


def data():
    return TensorDataset(torch.arange(4.0 * BATCHES).view(-1, 1) / 100)


def loader(kind="shuffled"):
    generator = torch.Generator().manual_seed(5) if kind == "own generator" else None
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    if kind == "list":
        return [(torch.full((4, 1), float(i)),) for i in range(BATCHES)]
    return DataLoader(data(), batch_size=4, shuffle=kind != "in order", generator=generator)


class Stream(IterableDataset):
    """Draws from three generators: the order of its numbers depends on all of them."""

    def __iter__(self):
        for index in range(4 * BATCHES):
            yield (torch.tensor([index + random.random() + np.random.rand() + torch.rand(()).item()]) / 10,)


class Run:
    """A small training that notes what it sees."""

    def __init__(self, *, optimizer=torch.optim.AdamW, accumulate=1, dtype=torch.float32, autocast=False):
        torch.manual_seed(0)
        random.seed(1)
        np.random.seed(2)
        self.model = nn.Sequential(nn.Linear(1, 70), nn.Dropout(0.3), nn.Linear(70, 70)).to(dtype)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.accumulate = accumulate
        self.dtype = dtype
        self.autocast = autocast
        self.seen = []

    def __call__(self, root, *, stop=math.inf, passes=3, kind="shuffled", **options):
        batches = loader(kind)
        with CheckpointManager(root, **options) as manager:
            for _ in range(passes):
                for step, (x,) in manager.steps(batches, self.model, self.optimizer, self.scheduler, self.scaler):
                    self.step(step, x, manager)
                    if step == stop:
                        return self
                torch.rand(())  # as an evaluation may, also after a pass that was skipped
        return self

    def step(self, step, x, manager):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(x.to(self.dtype)).square().mean()
        self.scaler.scale(loss).backward()
        if step % self.accumulate == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
        self.seen.append((step, x.tolist(), loss.item()))
        manager.log(loss=loss)

    def state(self):
        parts = [self.model, self.optimizer, self.scheduler, self.scaler]
        return fingerprint([*(part.state_dict() for part in parts), rng_state()])


def interrupted(root, stops, **options):
    """The same training in several pieces, each in new objects; returns what they saw and the last of them."""
    seen, run = [], None
    run_options = {key: options.pop(key) for key in ("optimizer", "accumulate", "dtype", "autocast") if key in options}
    for stop in stops:
        run = Run(**run_options)(root, stop=stop, **options)
        seen += run.seen
    return seen, run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "in order", "stream", "list"])
def test_pieces_of_a_training_are_the_training(tmp_path, kind):
    straight = Run()(tmp_path / "a", kind=kind)
    seen, last = interrupted(tmp_path / "b", [4, 10, math.inf], kind=kind)
    assert [step for step, *_ in seen] == list(range(1, 3 * BATCHES + 1))
    assert seen == straight.seen
    assert last.state() == straight.state()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [BATCHES, BATCHES + 1, 2 * BATCHES])
def test_stopping_where_a_pass_ends_is_exact_as_well(tmp_path, stop):
    straight = Run()(tmp_path / "a")
    seen, last = interrupted(tmp_path / "b", [stop, math.inf])
    assert seen == straight.seen
    assert last.state() == straight.state()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": torch.optim.SGD},
        {"optimizer": torch.optim.Adafactor},
        {"dtype": torch.bfloat16},
        {"autocast": True},
    ],
    ids=["SGD", "Adafactor", "bf16 weights", "bf16 autocast"],
)
def test_other_trainings_go_on_exactly(tmp_path, options):
    straight = Run(**options)(tmp_path / "a")
    seen, last = interrupted(tmp_path / "b", [7, math.inf], **options)
    assert seen == straight.seen
    assert last.state() == straight.state()


@pytest.mark.slow
def test_with_gradient_accumulation_a_checkpoint_waits_for_the_optimizer(tmp_path):
    Run(accumulate=4)(tmp_path, every_steps=5, passes=3, keep_last=None)
    assert [path.name for path in reversed(checkpoint_directories(tmp_path))] == [
        "checkpoint-8",
        "checkpoint-12",
        "checkpoint-16",
        "checkpoint-18",
    ]


@pytest.mark.slow
def test_gradient_accumulation_goes_on_exactly(tmp_path):
    straight = Run(accumulate=4)(tmp_path / "a", every_steps=5)
    Run(accumulate=4)(tmp_path / "b", every_steps=5)
    for step in (16, 18):  # as if it had been killed in the middle of the second sum
        shutil.rmtree(tmp_path / "b" / f"checkpoint-{step}")
    resumed = Run(accumulate=4)(tmp_path / "b", every_steps=5)
    assert resumed.seen == straight.seen[12:]
    assert resumed.state() == straight.state()


class Accumulating:
    """A training whose forward passes draw random numbers and change buffers."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self, root, *, stop=None, every=4):
        with CheckpointManager(root, every_steps=100) as manager:
            for step, (x,) in manager.steps(loader(), self.model, self.optimizer):
                self.model(x).square().mean().backward()
                if step % every == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if step == stop:
                    break
        return fingerprint([self.model.state_dict(), rng_state()])


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "every", "saved"), [(2, 2, 2), (3, 2, 2), (4, 2, 4), (5, 2, 4), (5, 3, 3)])
def test_a_loop_that_is_left_within_a_gradient_goes_on_exactly(tmp_path, stop, every, saved):
    straight = Accumulating()(tmp_path / "a", every=every)
    Accumulating()(tmp_path / "b", stop=stop, every=every)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [f"checkpoint-{saved}"]
    metadata = load_checkpoint(tmp_path / "b" / f"checkpoint-{saved}")["model"]._metadata
    assert metadata == Accumulating().model.state_dict()._metadata
    assert Accumulating()(tmp_path / "b", every=every) == straight


def test_a_loop_that_is_left_within_its_first_gradient_saves_nothing_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"No checkpoint of step 1: .*There is none yet"):
        Accumulating()(tmp_path, stop=2)
    assert not list(tmp_path.iterdir())
    Accumulating()(tmp_path, stop=4)
    with pytest.warns(UserWarning, match=r"No checkpoint of step 5: .*The newest one is of step 4"):
        Accumulating()(tmp_path, stop=6)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


@pytest.mark.slow
def test_checkpoints_are_saved_when_due_and_the_last_are_kept(tmp_path):
    Run()(tmp_path, every_steps=4, keep_last=2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-16", "checkpoint-18"}


@pytest.mark.slow
def test_a_loop_that_goes_elsewhere_saves_where_it_began(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run", every_steps=1) as manager:
        for _step, _batch in manager.steps([1, 2], nn.Linear(2, 1)):
            monkeypatch.chdir(tmp_path / "elsewhere")
    assert [path.name for path in checkpoint_directories(tmp_path / "run")] == ["checkpoint-2", "checkpoint-1"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_checkpoints_that_a_killed_process_had_still_to_remove_go_at_the_next_start(tmp_path):
    Run()(tmp_path, every_steps=4, keep_last=None)
    directories = [path.name for path in checkpoint_directories(tmp_path)]
    Run()(tmp_path, every_steps=4, keep_last=2)  # there is nothing left to train, so it saves nothing
    assert [path.name for path in checkpoint_directories(tmp_path)] == directories[:2]
    assert len(directories) > 2


@pytest.mark.slow
def test_the_newest_checkpoint_is_kept_beside_a_broken_newer_one(tmp_path):
    Run()(tmp_path, every_steps=4, keep_last=1, stop=8)
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-12")
    (tmp_path / "checkpoint-12" / "optimizer.pt").write_bytes(b"broken")
    with pytest.warns(UserWarning, match="checkpoint-12 is passed over"):
        run = Run()(tmp_path, every_steps=4, keep_last=1, stop=13)
    assert [step for step, *_ in run.seen] == [9, 10, 11, 12, 13]
    assert latest(tmp_path) == str(tmp_path / "checkpoint-13")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_in_the_place_of_a_checkpoint_is_said_and_never_renamed(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    Run()(run, every_steps=2, stop=4)
    (run / "checkpoint-4").rename(elsewhere)
    (run / "checkpoint-4").symlink_to(elsewhere)
    with (
        pytest.warns(UserWarning, match="checkpoint-4 is passed over: it is a link"),
        pytest.raises(SaveError, match="expected a missing or empty directory, found a file or a link"),
    ):
        Run()(run, every_steps=2)
    assert (run / "checkpoint-4").readlink() == elsewhere
    assert load_checkpoint(elsewhere)["step"] == 4


def test_a_resume_reads_each_file_once_to_verify_it_and_copies_no_state(tmp_path, monkeypatch):
    Run()(tmp_path, stop=2)
    read = []
    monkeypatch.setattr(checkpoints, "file_sha256", lambda path: read.append(path.name) or file_sha256(path))
    monkeypatch.setattr(training_state, "copy", None)
    Run()(tmp_path, stop=3, every_steps=100)
    assert sorted(read) == sorted({*read, "pytorch_model.bin", "optimizer.pt"})


def test_a_run_that_is_complete_does_nothing(tmp_path):
    Run()(tmp_path, every_steps=100)
    before = (tmp_path / "checkpoint-18").stat()
    assert Run()(tmp_path).seen == []
    after = (tmp_path / "checkpoint-18").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
def test_more_passes_go_on_after_the_last_one(tmp_path):
    straight = Run()(tmp_path / "a", passes=3)
    first = Run()(tmp_path / "b", passes=2)
    second = Run()(tmp_path / "b", passes=3)
    assert first.seen + second.seen == straight.seen
    assert second.state() == straight.state()


def test_a_pass_may_be_left_and_taken_up_in_the_same_process(tmp_path):
    straight = Run()(tmp_path / "a", passes=1)
    run = Run()
    with CheckpointManager(tmp_path / "b") as manager:
        parts = (run.model, run.optimizer, run.scheduler, run.scaler)
        left = manager.steps(loader(), *parts)
        for step, (x,) in left:
            run.step(step, x, manager)
            if step == 3:
                break
        for step, (x,) in manager.steps(loader(), *parts):
            run.step(step, x, manager)
    assert run.seen == straight.seen
    assert run.state() == straight.state()


def test_an_iterator_goes_on_where_it_stands_and_starts_over_in_a_new_process(tmp_path):
    model = nn.Linear(1, 1)
    seen = []
    with CheckpointManager(tmp_path) as manager:
        batches = iter(range(10))
        for _ in range(2):
            for _, batch in manager.steps(batches, model):
                seen.append(batch)
                if batch in (2, 4):
                    break
    assert seen == [0, 1, 2, 3, 4]
    with CheckpointManager(tmp_path) as manager:
        assert [batch for _, batch in manager.steps(iter(range(10)), model)] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("trained", [True, False])
def test_a_step_left_by_break_counts_if_the_optimizer_ran_in_it(tmp_path, trained):
    run = Run()
    with CheckpointManager(tmp_path) as manager:
        for step, (x,) in manager.steps(loader(), run.model, run.optimizer, run.scheduler, run.scaler):
            if step == 3 and not trained:
                break
            run.step(step, x, manager)
            if step == 3:
                break
    assert load_checkpoint(latest(tmp_path))["step"] == (3 if trained else 2)


def test_an_exception_saves_nothing_and_comes_through(tmp_path):
    class Diverging(Run):
        def step(self, step, *arguments):
            super().step(step, *arguments)
            if step == 5:
                raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        Diverging()(tmp_path, every_steps=2)
    assert latest(tmp_path) == str(tmp_path / "checkpoint-4")


def test_without_an_optimizer_every_batch_is_a_step(tmp_path):
    model = nn.Linear(1, 1)
    with CheckpointManager(tmp_path, every_steps=2, keep_last=None) as manager:
        assert [step for step, _ in manager.steps(range(5), model)] == [1, 2, 3, 4, 5]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4", "checkpoint-5"}


class Wrapped:
    """An optimizer as wrappers present it: with the real one in an attribute."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        if name == "register_step_post_hook":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def test_a_wrapped_optimizer_is_watched_as_well(tmp_path):
    run = Run(accumulate=3)
    run.optimizer = Wrapped(run.optimizer)
    with CheckpointManager(tmp_path, every_steps=2, keep_last=None) as manager:
        for step, (x,) in manager.steps(loader(), run.model, run.optimizer):
            run.model(x).sum().backward()
            if step % 3 == 0:
                run.optimizer.step()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-6"}


def test_metrics_are_those_of_the_last_step(tmp_path):
    run = Run()(tmp_path, passes=1)
    manifest = read_manifest(tmp_path / f"checkpoint-{BATCHES}")
    assert manifest.metrics == {"loss": run.seen[-1][2]}
    assert manifest.step == BATCHES


def test_a_metric_may_be_any_number_and_nothing_else(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.log(a=1, b=np.float32(0.5), c=math.nan, d=torch.tensor([[2.0]]), e=True)
        for name, value in {"text": "x", "many": torch.ones(2), "none": None, "complex": torch.tensor(1j)}.items():
            with pytest.raises(ConfigError, match=name):
                manager.log(**{name: value})
        list(manager.steps(range(1), nn.Linear(1, 1)))
    metrics = read_manifest(tmp_path / "checkpoint-1").metrics
    assert math.isnan(metrics.pop("c"))
    assert metrics == {"a": 1, "b": 0.5, "d": 2.0, "e": True}


def test_a_logged_tensor_is_what_it_was_when_it_was_logged(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        value = torch.tensor(1.0)
        manager.log(loss=value)
        value.zero_()
        list(manager.steps(range(1), nn.Linear(1, 1)))
    assert read_manifest(tmp_path / "checkpoint-1").metrics == {"loss": 1.0}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"every_steps": 0}, "every_steps"),
        ({"every_steps": 1.5}, "every_steps"),
        ({"every_steps": None}, "every_steps"),
        ({"keep_last": 0}, "keep_last"),
        ({"anchor_every": True}, "anchor_every"),
        ({"mode": "tiny"}, "mode"),
        ({"rules": {"weigth": "raw"}}, "weigth"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(tmp_path, options, name):
    with pytest.raises(ConfigError, match=name):
        CheckpointManager(tmp_path / "a", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", ["file", "file/run"])
def test_a_root_that_cannot_be_a_directory_is_refused_as_the_block_begins(tmp_path, root):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SaveError, match="No checkpoint can be written there"), CheckpointManager(tmp_path / root):
        pytest.fail("the block began")


def test_steps_outside_the_with_block_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="with"):
        CheckpointManager(tmp_path).steps(range(3), nn.Linear(1, 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extra": {"position": 3}},
        {"extra": {"position": {"passes": 0}}},
        {"extra": {"position": {"passes": 0, "consumed": 0, "start": None}}, "rng": False},
    ],
)
def test_a_checkpoint_of_someone_else_is_refused(tmp_path, options):
    model = nn.Linear(1, 1)
    save_checkpoint(build_checkpoint(model, step=1, **options), tmp_path / "checkpoint-1")
    with CheckpointManager(tmp_path) as manager, pytest.raises(ConfigError, match="CheckpointManager"):
        manager.steps(range(3), model)


def test_a_loader_with_other_generators_than_its_pass_began_with_is_refused(tmp_path):
    Run()(tmp_path, stop=2, kind="own generator")
    with pytest.raises(ConfigError, match=r"the loader: expected 1 random number generators of its own.*, found 0"):
        Run()(tmp_path)


def test_a_save_that_fails_stops_the_loop(tmp_path):
    class InTheWay(Run):
        def step(self, step, *arguments):
            super().step(step, *arguments)
            if step == 3:
                shutil.rmtree(tmp_path / "a")
                (tmp_path / "a").write_bytes(b"in the way")

    run = InTheWay()
    with pytest.raises(SaveError, match="checkpoint-4"):
        run(tmp_path / "a", every_steps=2)
    assert [step for step, *_ in run.seen] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["near-lossless", "compact"])
def test_a_lossy_run_goes_on_close_by(tmp_path, mode):
    straight = Run()(tmp_path / "a", every_steps=4)
    seen, _ = interrupted(tmp_path / "b", [9, math.inf], every_steps=4, mode=mode)
    assert [x for _, x, _ in seen] == [x for _, x, _ in straight.seen]
    for (_, _, loss), (_, _, expected) in zip(seen, straight.seen, strict=True):
        assert loss == pytest.approx(expected, rel=0.2, abs=0.01)


def in_a_child(function):
    """Runs a function on one thread in a fork, and returns its process id."""

    def work():
        torch.set_num_threads(1)
        function()

    return fork(work)


@pytest.mark.slow
def test_ten_steps_and_kill_and_ten_steps_are_twenty(tmp_path):
    straight = Run()(tmp_path / "a", every_steps=5, passes=3, stop=17)

    class Killed(Run):
        def step(self, *arguments):
            super().step(*arguments)
            if arguments[0] == 12:  # two steps after the save: they are done again
                os.kill(os.getpid(), signal.SIGKILL)

    child = in_a_child(lambda: Killed()(tmp_path / "b", every_steps=5))
    assert exit_code_of(child) == -signal.SIGKILL
    assert latest(tmp_path / "b") == str(tmp_path / "b" / "checkpoint-10")
    resumed = Run()(tmp_path / "b", every_steps=5, stop=17)
    assert resumed.seen == straight.seen[10:]
    assert resumed.state() == straight.state()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the loop", "after the loop"])
def test_sigterm_saves_and_exits(tmp_path, where):
    def run():
        with CheckpointManager(tmp_path, every_steps=10**9) as manager:
            for step, _ in manager.steps(range(10**9), nn.Linear(1, 1)):
                if step == 3 and where == "in the loop":
                    os.kill(os.getpid(), signal.SIGTERM)
                if step == 5:
                    break
            os.kill(os.getpid(), signal.SIGTERM)

    child = in_a_child(run)
    assert exit_code_of(child) == 128 + signal.SIGTERM
    assert load_checkpoint(latest(tmp_path))["step"] == (3 if where == "in the loop" else 5)


@pytest.mark.slow
def test_sigterm_waits_until_no_gradient_is_half_summed(tmp_path):
    class Terminated(Run):
        def step(self, *arguments):
            super().step(*arguments)
            if arguments[0] == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    child = in_a_child(lambda: Terminated(accumulate=4)(tmp_path, every_steps=10**9))
    assert exit_code_of(child) == 128 + signal.SIGTERM
    assert load_checkpoint(latest(tmp_path))["step"] == 8


def test_the_handler_of_sigterm_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(RuntimeError, match="stop"), CheckpointManager(tmp_path):
        raise RuntimeError("stop")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_manager_may_be_entered_again_where_python_allows_no_handlers(tmp_path):
    before, errors = signal.getsignal(signal.SIGTERM), []

    def enter():
        try:
            with manager:
                pass
        except ValueError as error:
            errors.append(error)

    manager = CheckpointManager(tmp_path)
    with manager:
        pass
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_scaler_tells_of_updates_only_within_the_block():
    calls = []
    model, optimizer, _, scaler = everything(enabled=True)
    with scaler_update_hook(scaler, lambda: calls.append(scaler.get_scale())):
        for _ in range(2):
            scaler.scale(torch.tensor(torch.inf) * model.unused.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert calls == [4.0, 2.0]  # both steps were skipped
    assert optimizer.state_dict()["state"] == {}
    scaler.scale(model.unused.sum()).backward()
    optimizer.zero_grad()
    scaler.scale(model.unused.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert len(calls) == 2
