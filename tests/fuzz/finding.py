"""A finding: an input that broke a promise, with all that is needed to try it again."""

from __future__ import annotations

import hashlib
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where findings are kept; git ignores it.
CORPUS = Path(__file__).parents[2] / "build" / "fuzz"


@dataclass(frozen=True)
class Finding:
    """An input, and which promise it broke.

    Args:
        target: Name of the target.
        seed: Seed of the run.
        index: Number of the input in the run.
        kind: `untyped error`, `silent difference`, `hang`, `memory`, `crash`, `code run` or `unsafe advice`.
        text: What happened, in a line.
        details: The traceback, or what a dead worker has printed.
        given: The input; None if it could not be kept.
    """

    target: str
    seed: int
    index: int
    kind: str
    text: str
    details: str
    given: Any

    @property
    def key(self) -> tuple[str, str, str]:
        """What findings of one cause have in common, as far as that can be told."""
        # "TypeError in reader.py:load_file: ..." is one cause, whatever the error says.
        return self.target, self.kind, re.sub(r"\d+", "#", self.text).partition(": ")[0]

    def save(self, directory: Path) -> Path:
        """Write it into a directory and return the file, for `python -m tests.fuzz --repeat FILE`."""
        directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(repr(self.key).encode()).hexdigest()[:8]
        path = directory / f"{self.target}-{self.kind.replace(' ', '-')}-{digest}.pickle"
        path.write_bytes(pickle.dumps(self))
        return path

    def __str__(self) -> str:
        tail = "\n".join(f"    {line}" for line in self.details.strip().splitlines()[-14:])
        where = f"{self.target}, seed {self.seed}, input {self.index}"
        return f"{self.kind}: {self.text}\n    {where}: {repr(self.given)[:600]}\n{tail}"


def load_finding(path: Path) -> Finding:
    """Read what `Finding.save` wrote; a pickle, so only from one's own directory."""
    return pickle.loads(path.read_bytes())
