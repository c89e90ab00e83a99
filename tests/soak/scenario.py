"""What a kind of work has to provide to be soaked, and checks that several kinds share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trainweights.checkpoint.directory import check_checkpoint
from hf_trainweights.checkpoint.encoded.reader import is_encoded, read_report
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.run.checkpoints import MARK_NAME, checkpoint_directories, verify_checkpoint
from hf_trainweights.files.disk import TEMPORARY_PREFIX


class Finding(AssertionError):  # noqa: N818 (it is no mistake of the caller)
    """What lies on the disk is not what was promised."""


def require(condition: bool, finding: str) -> None:
    """Raise a finding where a promise is not kept."""
    if not condition:
        raise Finding(finding)


class Scenario(ABC):
    """One kind of work that is killed and taken up again.

    Args:
        folder: A folder of its own, which outlives its runs.
    """

    kind: ClassVar[str]

    def __init__(self, folder: Path):
        self.folder = folder
        self.run = folder / "run"

    def prepare(self) -> None:  # noqa: B027 (not every kind has to)
        """Make what all runs need, once."""

    def begin(self) -> None:  # noqa: B027
        """Make what one run starts from, in the empty folder `self.run`."""

    def learn(self) -> None:  # noqa: B027
        """Keep what the checks compare with, once, from what an undisturbed run has left in `self.run`."""

    @abstractmethod
    def work(self, rng: random.Random) -> None:
        """Do the work in a child, from the beginning or from where a kill left it.

        Args:
            rng: For choices of the work; equal for equal seeds, runs and attempts.
        """

    @abstractmethod
    def check_kill(self) -> None:
        """Check what a kill has left; raises `Finding`."""

    @abstractmethod
    def check_end(self) -> None:
        """Check what the work has left at its end; raises `Finding`."""


def require_tidy(root: Path, *, keep: int) -> None:
    """Check that a run takes no more of the disk than its checkpoints need, and that these are whole.

    Args:
        root: Where the run keeps its checkpoints.
        keep: The most that it may keep.
    """
    require_no_leftovers(root)
    directories = checkpoint_directories(root)
    foreign = {path.name for path in root.iterdir()} - {path.name for path in directories} - {MARK_NAME}
    require(not foreign, f"beside the checkpoints lies {sorted(foreign)}")
    require(len(directories) <= keep, f"{len(directories)} checkpoints instead of {keep}")
    for path in directories:
        if (path / MANIFEST_NAME).exists():
            report = verify_checkpoint(path)
            require(report.ok, f"{path.name}: {dict(report.problems)}, foreign {report.foreign}")
        else:
            problem = check_checkpoint(path).problem
            require(problem is None or "name weights otherwise" in problem, f"{path.name}: {problem}")


def require_no_leftovers(root: Path) -> None:
    """Check that nothing with a temporary name is left anywhere below a folder."""
    left = sorted(str(path.relative_to(root)) for path in root.rglob(f"{TEMPORARY_PREFIX}*"))
    require(not left, f"left over: {left}")


def require_equal(found: Any, expected: Any, where: str) -> None:
    """Check that two trees hold tensors and numbers of equal bits."""
    if isinstance(expected, Tensor):
        same = isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
        require(same, f"{where} differs")
    elif isinstance(expected, dict):
        require(found.keys() == expected.keys(), f"{where} has {sorted(map(str, found))}")
        for key in expected:
            require_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        require(len(found) == len(expected), f"{where} has {len(found)} elements")
        for index, element in enumerate(expected):
            require_equal(found[index], element, f"{where}.{index}")
    else:
        require(found == expected, f"{where} is {found!r} instead of {expected!r}")


def require_within_bounds(file: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that the weights in a file are off by no more than the file says; where it says nothing they are exact."""
    where = f"{file.parent.name}/{file.name}"
    require(found.keys() == expected.keys(), f"{where} has weights {sorted(found)}")
    tensors = read_report(file)["tensors"] if file.suffix == ".bin" and is_encoded(file) else []
    bounds = {each["name"]: each["bound"] or 0.0 for each in tensors}
    for name, tensor in expected.items():
        error = (found[name].double() - tensor.double()).abs().max().item()
        require(error <= bounds.get(name, 0.0), f"{where}: {name} is off by {error}, not {bounds.get(name)}")
