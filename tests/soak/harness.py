"""Runs scenarios in turn, kills their work again and again, and keeps a record of what was found."""

from __future__ import annotations

import gc
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak.directories import CompressesAndRestores
from soak.garbage import ManagerBesideCollector, TrainerBesideCollector
from soak.kills import Kill, Outcome, run_in_child
from soak.models import QuantizesDirectory, SavesOfBin, SavesOfShards, SavesOverAnother
from soak.scenario import Scenario
from soak.training import (
    ManagerCompact,
    ManagerLossless,
    ManagerNearLossless,
    TrainerCompact,
    TrainerLossless,
    TrainerNearLossless,
    TrainerRenamed,
)
from soak.versions import SavesVersions

SCENARIOS: dict[str, type[Scenario]] = {
    scenario.kind: scenario
    for scenario in (
        *(TrainerLossless, TrainerNearLossless, TrainerCompact, TrainerRenamed),
        *(ManagerLossless, ManagerNearLossless, ManagerCompact),
        *(SavesOverAnother, SavesOfShards, SavesOfBin, QuantizesDirectory),
        *(CompressesAndRestores, ManagerBesideCollector, TrainerBesideCollector, SavesVersions),
    )
}
PROGRESS_SECONDS = 30.0

# A run is killed up to so many times before it may reach its end.
_MOST_KILLS = 8
_TEXT_CHARACTERS = 3000


@dataclass
class Row:
    """What became of one kind.

    Args:
        kind: Its name.
        runs: Runs that reached their end.
        kills: How often one was killed on the way.
        findings: What was wrong, each with what is needed to repeat it.
    """

    kind: str
    runs: int = 0
    kills: int = 0
    findings: list[str] = field(default_factory=list)


class Soak:
    """One scenario that is soaked.

    Args:
        scenario: Its class.
        folder: An empty folder.
        seed: Decides when its work is killed, and what the work chooses.
        timed: Whether some kills come after a time; else all come at calls to the file system, which can be repeated.

    Raises:
        RuntimeError: Its work fails even if nobody disturbs it.
    """

    def __init__(self, scenario: type[Scenario], folder: Path, seed: str, *, timed: bool = True):
        self.row = Row(scenario.kind)
        self._seed, self._timed = seed, timed
        self._folder = folder
        self._scenario = scenario(folder / "scenario")
        self._log = folder / "log.txt"
        self._runs = 0
        self._scenario.folder.mkdir(parents=True)
        self._undisturbed = self._measure()

    def run_once(self, kills: int | None = None) -> None:
        """Let the work come to its end, killed on the way.

        Args:
            kills: How often. Default: at random.
        """
        self._runs += 1
        rng = random.Random(f"{self._seed} {self.row.kind} {self._runs}")
        kills = rng.randint(2, _MOST_KILLS) if kills is None else kills
        plan = [self._draw(rng) for _ in range(kills)] + [Kill()]
        self._begin()
        for attempt, kill in enumerate(plan):
            outcome = self._attempt(attempt, kill)
            self.row.kills += outcome.killed
            checked = self._check(self._scenario.check_kill if outcome.killed else self._scenario.check_end, outcome)
            if checked is not None:
                self._note(plan[: attempt + 1], checked)
                return
            if not outcome.killed:
                break
        self.row.runs += 1

    def _measure(self) -> Outcome:
        self._scenario.prepare()
        self._begin()
        outcome = self._attempt(0, Kill())
        self._scenario.learn()
        wrong = self._check(self._scenario.check_end, outcome)
        if wrong is not None:
            raise RuntimeError(f"{self.row.kind} fails undisturbed: {wrong}")
        return outcome

    def _begin(self) -> None:
        shutil.rmtree(self._scenario.run, ignore_errors=True)
        self._scenario.run.mkdir(parents=True)
        self._scenario.begin()

    def _attempt(self, attempt: int, kill: Kill) -> Outcome:
        rng = random.Random(f"{self._seed} {self.row.kind} {self._runs} {attempt}")
        return run_in_child(lambda: self._scenario.work(rng), self._log, kill)

    def _check(self, check: Callable[[], None], outcome: Outcome) -> str | None:
        """Return what is wrong after an attempt, if anything is."""
        if not outcome.killed and outcome.code != 0:
            what = "hung" if outcome.code is None else f"failed with exit code {outcome.code}"
            return f"the work {what}: {outcome.text[-_TEXT_CHARACTERS:]}"
        checked = run_in_child(check, self._folder / "check.txt")
        return None if checked.code == 0 else checked.text[-_TEXT_CHARACTERS:] or "the check hung or died"

    def _draw(self, rng: random.Random) -> Kill:
        # What goes on from a kill has less to do, so every other kill comes early.
        reach = rng.choice((0.3, 1.0))
        if self._timed and rng.random() < 0.5:
            return Kill(seconds=rng.uniform(0, reach * self._undisturbed.seconds))
        return Kill(call=rng.randint(1, max(1, int(reach * self._undisturbed.calls))))

    def _note(self, kills: Sequence[Kill], text: str) -> None:
        kept = self._folder / f"finding-{len(self.row.findings) + 1}"
        shutil.copytree(self._scenario.run, kept, ignore_dangling_symlinks=True)
        times = ", ".join(map(str, kills))
        self.row.findings.append(f"seed {self._seed!r}, run {self._runs}, killed {times}; kept in {kept}\n{text}")


def soak_for(seconds: float, kinds: Sequence[str], folder: Path, seed: str, tell: Callable[[str], None]) -> list[Row]:
    """Soak kinds in turn until the time is over.

    Args:
        seconds: The time; the last run comes to its end.
        kinds: Keys of `SCENARIOS`.
        folder: An empty folder.
        seed: Likewise.
        tell: Takes lines that say how far it is.

    Returns:
        One row for each kind.
    """
    started = told = time.monotonic()
    gc.freeze()  # a Trainer collects garbage, and each child would go through all that this process has imported
    soaks = [Soak(SCENARIOS[kind], folder / kind.replace(" ", "-"), seed) for kind in kinds]
    while time.monotonic() - started < seconds:
        for soak in soaks:
            soak.run_once()
            now = time.monotonic()
            if now - told >= PROGRESS_SECONDS:
                told = now
                kills = sum(each.row.kills for each in soaks)
                findings = sum(len(each.row.findings) for each in soaks)
                tell(f"{now - started:4.0f} s, {kills} kills, {findings} findings")
            if now - started >= seconds:
                break
    return [soak.row for soak in soaks]
