"""Runs whose files were changed: manifests, discovery, resuming, garbage collection and the commands."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from typer.testing import CliRunner

from hf_trainweights import latest
from hf_trainweights.checkpoint.directory import check_checkpoint, collect_garbage
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights_cli.checkpoint_rows import summary_row, verification_row
from hf_trainweights_cli.main import app
from tests.fuzz.directories import Content, write_tree
from tests.fuzz.mutate_bytes import damage
from tests.fuzz.run_corpus import STEPS, change_manifest, change_run, saved_runs, train
from tests.fuzz.target import BrokenPromiseError, Outcome, Target
from tests.trees import fingerprint

_WEIGHTS = "pytorch_model.bin"


class Manifests(Target):
    """A manifest is what was written, or is refused by name, whatever a right digest covers."""

    name = "manifests"
    share = 2.0
    inputs_in_suite = 3000
    readers = ("read_manifest", "verify_checkpoint", "check_checkpoint", "summary_row", "verification_row")

    def prepare(self, directory: Path) -> None:
        saved_runs()

    def mutate(self, rng: random.Random) -> tuple[str, str, bytes, bool]:
        mode = rng.choice(sorted(saved_runs()))
        manifest = saved_runs()[mode][f"checkpoint-2/{MANIFEST_NAME}"]
        is_sealed = rng.random() < 0.7
        assert isinstance(manifest, bytes)
        changed = change_manifest(rng, manifest) if is_sealed else damage(rng, manifest, manifest)
        return rng.choice(self.readers), mode, changed, is_sealed

    def run(self, given: tuple[str, str, bytes, bool]) -> Outcome:
        reader, mode, manifest, is_sealed = given
        checkpoint = self.directory / mode / "checkpoint-2"
        if not checkpoint.exists():
            write_tree(self.directory / mode, saved_runs()[mode])
        (checkpoint / MANIFEST_NAME).write_bytes(manifest)
        if reader == "read_manifest":
            read_manifest(checkpoint)
            accepted = True
        elif reader == "verify_checkpoint":
            accepted = verify_checkpoint(checkpoint).intact
        elif reader == "check_checkpoint":
            accepted = check_checkpoint(checkpoint).problem is None
        elif reader == "summary_row":
            accepted = not summary_row(checkpoint, set())["problem"]
        else:
            accepted = not verification_row(checkpoint)["problems"]
        if accepted and not is_sealed and manifest != saved_runs()[mode][f"checkpoint-2/{MANIFEST_NAME}"]:
            raise BrokenPromiseError(f"{reader} took a damaged manifest for a whole one")
        return Outcome.ACCEPTED if accepted else Outcome.REFUSED


@dataclass(frozen=True)
class ChangedRun:
    """A run of which some files are others.

    Args:
        mode: Name of the saved run.
        changes: What was done to it.
        files: Those that are others.
        command: What is done with it: a function's name or a command line, in which CHECKPOINT and RUN are paths.
    """

    mode: str
    changes: tuple[str, ...]
    files: dict[str, Content]
    command: tuple[str, ...]

    @property
    def is_damage(self) -> bool:
        """Whether digests cover all that was changed."""
        return not {"manifest", "without manifest"} & set(self.changes)


_COMMANDS = [
    *(("latest",), ("latest",), ("manager",), ("manager",), ("collect_garbage",), ("collect_garbage",)),
    *(("ls", "RUN"), ("ls", "RUN", "--json"), ("inspect", "CHECKPOINT"), ("inspect", "CHECKPOINT", "--tensors")),
    *(("inspect", "CHECKPOINT", "--json"), ("verify", "RUN"), ("verify", "CHECKPOINT"), ("verify", "RUN", "--json")),
    *(("diff", "CHECKPOINT", "OTHER"), ("restore", "CHECKPOINT"), ("restore", "RUN"), ("compress", "CHECKPOINT")),
    *(("compress", "RUN", "--mode", "compact"), ("gc", "RUN")),
]


class RunDirectories(Target):
    """Nothing that happens to one checkpoint stops a run, costs another checkpoint, or shows as a traceback."""

    name = "run-directories"
    share = 5.0
    limit_seconds = 20.0
    inputs_in_suite = 300

    def prepare(self, directory: Path) -> None:
        self.prints: dict[str, Any] = {}
        for mode, tree in saved_runs().items():
            write_tree(directory / mode, tree)
            for name in (name for name in tree if name.endswith(_WEIGHTS)):
                self.prints[f"{mode}/{name}"] = _print(directory / mode / name)
        self.trained = train(directory / "reference", "lossless", STEPS + 2)

    def mutate(self, rng: random.Random) -> ChangedRun:
        mode = rng.choice(sorted(saved_runs()))
        saved = saved_runs()[mode]
        tree = dict(saved)
        changes = tuple(change_run(rng, saved, tree) for _ in range(rng.choice((1, 1, 2))))
        files = {name: content for name, content in tree.items() if content != saved[name]}
        paths = {"CHECKPOINT": f"checkpoint-{rng.randint(1, STEPS)}", "OTHER": "checkpoint-2", "RUN": "."}
        command = rng.choice(_COMMANDS)
        return ChangedRun(mode, changes, files, tuple(paths.get(word, word) for word in command))

    def run(self, given: ChangedRun) -> Outcome:
        root = write_tree(self.directory / "run", {**saved_runs()[given.mode], **given.files})
        # As in a new process: no directory is known to hold anchors.
        with patch.dict(reader._directories, clear=True):
            if given.command == ("latest",):
                return self._latest(given, root)
            if given.command == ("manager",):
                return self._resume(given, root)
            outcome = Outcome.ACCEPTED
            if given.command == ("collect_garbage",):
                collect_garbage(root)
                self._require_anchors(given, root)
            else:
                outcome = self._command(given, root)
        self._require_others(given, root)
        return outcome

    def _latest(self, given: ChangedRun, root: Path) -> Outcome:
        newest = latest(root)
        if newest is None:
            return Outcome.REFUSED
        name = f"{Path(newest).name}/{_WEIGHTS}"
        if given.is_damage and _print(root / name) != self.prints[f"{given.mode}/{name}"]:
            raise BrokenPromiseError("latest returned a checkpoint that holds other weights than were saved")
        return Outcome.ACCEPTED

    def _resume(self, given: ChangedRun, root: Path) -> Outcome:
        weights = train(root, given.mode, STEPS + 2)
        same = all(map(torch.equal, weights, self.trained))
        if given.mode == "lossless" and given.is_damage and not same:
            raise BrokenPromiseError("a run that resumed from a damaged directory ended with other weights")
        return Outcome.ACCEPTED

    def _command(self, given: ChangedRun, root: Path) -> Outcome:
        is_path = {word: word == "." or word.startswith("checkpoint-") for word in given.command}
        arguments = [str(root / word) if is_path[word] else word for word in given.command]
        result = CliRunner().invoke(app, ["checkpoint", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code not in (0, 1) or "Traceback" in result.stderr:
            raise BrokenPromiseError(f"{given.command[0]} ended with {result.exit_code}: {result.stderr[-500:]}")
        says_why = given.command[0] == "diff" or "error:" in result.stderr or "problem:" in result.stderr
        if result.exit_code == 1 and not says_why:
            raise BrokenPromiseError(f"{given.command[0]} failed and did not say why: {result.output[-500:]}")
        if "\x1b" in result.output:
            raise BrokenPromiseError(f"{given.command[0]} printed what a file holds as it is: {result.output[-500:]!r}")
        return Outcome.ACCEPTED if result.exit_code == 0 else Outcome.REFUSED

    def _require_anchors(self, given: ChangedRun, root: Path) -> None:
        """Check that no anchor is gone: a damaged file can come back from a copy, and needs its anchor then."""
        anchors = [name for name in saved_runs()[given.mode] if name.endswith(".anchor") and name not in given.files]
        if gone := [name for name in anchors if "special" not in given.changes and not (root / name).exists()]:
            raise BrokenPromiseError(f"garbage collection removed {len(gone)} anchors of damaged checkpoints")

    def _require_others(self, given: ChangedRun, root: Path) -> None:
        """Check that checkpoints whose files were not changed still hold what they held."""
        changed = {name.partition("/")[0] for name in given.files}
        for key, expected in self.prints.items():
            mode, checkpoint, name = key.split("/")
            if mode != given.mode or checkpoint in changed or "compact" in given.command:
                continue
            if _print(root / checkpoint / name) != expected:
                raise BrokenPromiseError(f"{given.command[0]} changed a checkpoint that was whole")


def _print(weights: Path) -> Any:
    """Return the fingerprint of a file of weights, whose anchor lies beside it."""
    with patch.dict(reader._directories, {weights.parent: None}):
        return fingerprint(dict(load_file(weights)))  # whatever kind of dict it is in
