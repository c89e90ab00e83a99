"""Loops over several passes: what they do between passes, which pass is going on, and workers that a loader keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from hf_trainweights.checkpoint import CheckpointManager
from hf_trainweights.checkpoint.loop.progress import end_workers
from hf_trainweights.errors import ConfigError, UnsupportedError

PASSES, STEPS = 3, 2
Rates = list[tuple[int, list[float]]]


class Loop:
    """A training loop that also does something before and after each pass."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.model = nn.ModuleDict({"net": net, "average": average, "added": nn.Linear(3, 1)})
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
        self.scheduler: Any = StepLR(self.optimizer, 1, 0.5)

    def before(self, epoch: int) -> None:
        """Do nothing before a pass."""

    def after(self, epoch: int) -> None:
        """Do nothing after a pass."""

    def train(self, root: Path, passes: int = PASSES, stop: int | None = None, every_steps: int = 1) -> Rates:
        """Train until a step, and return the rates of all groups at each."""
        rates: Rates = []
        torch.manual_seed(1)
        with CheckpointManager(root, every_steps=every_steps, keep_last=None) as manager:
            for epoch in range(passes):
                self.before(epoch)
                loader = DataLoader(torch.linspace(0, 1, 4 * 4 * STEPS).view(-1, 4), batch_size=4, shuffle=True)
                for step, batch in manager.steps(loader, self.model, self.optimizer, self.scheduler):
                    self.optimizer.zero_grad()
                    self.model["added"](self.model["net"](batch)).square().mean().backward()
                    self.optimizer.step()
                    rates.append((step, [group["lr"] for group in self.optimizer.param_groups]))
                    if step == stop:
                        return rates
                self.after(epoch)
        return rates

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class StepsTheScheduler(Loop):
    def after(self, epoch: int) -> None:
        self.scheduler.step()


class Plateau(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)

    def after(self, epoch: int) -> None:
        self.scheduler.step(1.0)


class SetsTheRate(Loop):
    def before(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0 / (1 + epoch)


class HalvesTheRate(Loop):
    def after(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class AddsAGroup(StepsTheScheduler):
    def before(self, epoch: int) -> None:
        if epoch == 2:
            self.optimizer.add_param_group({"params": [*self.model["added"].parameters()], "lr": 0.25})
            self.scheduler.base_lrs.append(0.25)


class AveragesWeights(Loop):
    def after(self, epoch: int) -> None:
        self.model["average"].update_parameters(self.model["net"])


class StopsAtASmallRate(StepsTheScheduler):
    def after(self, epoch: int) -> None:
        super().after(epoch)
        assert self.optimizer.param_groups[0]["lr"] == 0.5 ** (epoch + 1)


LOOPS = [StepsTheScheduler, Plateau, SetsTheRate, HalvesTheRate, AddsAGroup, AveragesWeights, StopsAtASmallRate]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 5, *(pytest.param(stop, marks=pytest.mark.exhaustive) for stop in (1, 2, 3, 6))])
@pytest.mark.parametrize("kind", LOOPS)
def test_rates_and_weights_are_those_of_the_run_that_did_not_stop(tmp_path: Path, kind: type[Loop], stop: int) -> None:
    whole, first, second = kind(), kind(), kind()
    expected = whole.train(tmp_path / "whole", every_steps=100)
    assert [step for step, _ in expected] == [*range(1, PASSES * STEPS + 1)]
    assert first.train(tmp_path / "run", stop=stop) + second.train(tmp_path / "run") == expected
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in second.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StepsTheScheduler, Plateau, HalvesTheRate, AveragesWeights])
def test_more_passes_of_a_run_that_was_done_go_on_as_if_it_had_not_ended(tmp_path: Path, kind: type[Loop]) -> None:
    whole, first, second = kind(), kind(), kind()
    expected = whole.train(tmp_path / "whole", every_steps=100)
    assert first.train(tmp_path / "run", passes=2, every_steps=100) == expected[: 2 * STEPS]
    assert second.train(tmp_path / "run", every_steps=100) == expected[2 * STEPS :]
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in second.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_that_is_done_ends_with_its_own_state(tmp_path: Path, kind: type[Loop]) -> None:
    first, second = kind(), kind()
    first.train(tmp_path, every_steps=100)
    assert second.train(tmp_path) == []
    assert all(torch.equal(weight, first.weights[name]) for name, weight in second.weights.items())
    assert second.scheduler.state_dict() == first.scheduler.state_dict()
    assert second.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]


def test_the_model_has_its_weights_in_passes_that_are_done(tmp_path: Path) -> None:
    first = Loop()
    first.train(tmp_path)
    second, seen = Loop(), []
    with CheckpointManager(tmp_path) as manager:
        for _ in range(PASSES):
            for _ in manager.steps([], second.model, second.optimizer, second.scheduler):
                pass
            seen.append(torch.equal(second.model["net"].weight, first.model["net"].weight))
    assert seen == [True] * PASSES


def nested(steps: Callable[[], Iterator[Any]]) -> None:
    for _ in steps():
        for _ in steps():
            pass


def zipped(steps: Callable[[], Iterator[Any]]) -> None:
    for _ in zip(steps(), steps(), strict=True):
        pass


def begun_again(steps: Callable[[], Iterator[Any]]) -> None:
    first = steps()
    next(first)
    next(steps())
    next(first)


@pytest.mark.parametrize("use", [nested, zipped, begun_again])
def test_a_pass_that_another_one_has_ended_says_so(tmp_path: Path, use: Callable[[Any], None]) -> None:
    model = nn.Linear(2, 1)
    with (
        pytest.raises(ConfigError, match="expected one pass at a time, found a later call of `steps`"),
        CheckpointManager(tmp_path) as manager,
    ):
        use(lambda: manager.steps(range(4), model))


def test_a_pass_says_that_its_block_has_ended(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        steps = manager.steps(range(4), nn.Linear(2, 1))
        next(steps)
    with pytest.raises(ConfigError, match="found the `with` block has ended"):
        next(steps)


def test_a_pass_that_was_left_or_is_complete_hinders_no_other(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with CheckpointManager(tmp_path) as manager:
        for step, _ in manager.steps(range(4), model):
            if step == 2:
                break
        complete = manager.steps(range(4), model)
        assert [step for step, _ in complete] == [3, 4]
        assert [step for step, _ in manager.steps(range(1), model)] == [5]
        assert list(complete) == []


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(1)


def sums(root: Path, stop: int | None = None) -> list[float]:
    torch.manual_seed(0)
    model, seen = nn.Linear(1, 1), []
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    with CheckpointManager(root, every_steps=1, keep_last=None) as manager:
        for _ in range(3):
            for step, batch in manager.steps(loader, model):
                seen.append(batch.sum().item())
                if step == stop:
                    return seen
    return seen


@pytest.mark.slow
def test_a_loader_that_keeps_its_workers_gives_the_batches_of_the_run_that_did_not_stop(tmp_path: Path) -> None:
    expected = sums(tmp_path / "whole")
    assert len(set(expected)) == len(expected)
    assert sums(tmp_path / "run", stop=3) + sums(tmp_path / "run") == expected


def test_a_loader_that_hides_its_workers_is_refused_by_the_name_of_the_flag() -> None:
    class Hidden:
        persistent_workers = True

    with pytest.raises(UnsupportedError, match="persistent_workers=False"):
        end_workers(Hidden())
