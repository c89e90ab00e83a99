"""Runs that save while another process removes garbage from the same run all the time."""

from __future__ import annotations

import os
import random
import traceback

from soak.scenario import require
from soak.training import ManagerLossless, TrainerLossless, Training

from hf_trainweights.checkpoint.directory import collect_garbage
from hf_trainweights.files import disk


class _BesideCollector(Training):
    """The collector must never touch what the run needs or is writing, nor stumble over what the run removes."""

    def work(self, rng: random.Random) -> None:
        """Train beside a collector, which ends when this process does, however it does."""
        parent = os.getpid()
        if os.fork() == 0:
            self._collect_while(parent)
        super().work(rng)

    def _collect_while(self, parent: int) -> None:
        try:
            disk.file_system = disk.FileSystem()  # the kill is meant for the run
            while os.getppid() == parent:
                collect_garbage(self.run / "out")
        except BaseException:
            if self.run.is_dir():
                (self.run / "collector.txt").write_text(traceback.format_exc())
        finally:
            os._exit(0)

    def check_kill(self) -> None:
        """The collector has not failed either."""
        error = self.run / "collector.txt"
        require(not error.exists(), f"the collector failed: {error.read_text() if error.exists() else ''}")
        super().check_kill()


class ManagerBesideCollector(_BesideCollector, ManagerLossless):
    """Saves that appear whole."""

    kind = "gc beside manager"


class TrainerBesideCollector(_BesideCollector, TrainerLossless):
    """Checkpoints that are made small where they lie."""

    kind = "gc beside trainer"
