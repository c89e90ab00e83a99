"""Ctrl-C in the middle of a command: one line, exit code 130, and nothing half-written is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from command_line import fork_command, run_json
from covering import by_default
from forks import exit_code_of

pytestmark = pytest.mark.slow  # each runs a command as a process


def stop_at(place: str) -> None:
    """Let a function say on stderr that it was reached, and go no further."""
    owner_path, _, name = place.rpartition(".")
    owner = resolve_name(owner_path)
    assert hasattr(owner, name)

    def stop(*_: object, **__: object) -> None:
        print("reached", file=sys.stderr, flush=True)
        while True:
            threading.Event().wait(60)

    setattr(owner, name, stop)


# What each command is doing when it is interrupted: all but those that only read have written files aside by then.
MOMENTS = {
    "quantize {llama} {out} --format int8": "hf_trainweights.models.saving.new_directories.sync_tree",
    "dequantize {int4} {out}": "hf_trainweights.models.saving.new_directories.sync_tree",
    "export {int4} {out} --to compressed-tensors": "hf_trainweights.files.staging.sync_tree",
    "push {int4} me/model": "hf_trainweights.models.directory.begin_push",
    "inspect {int4}": "hf_trainweights.inspection.listing.find_parts",
    "verify {int4}": "hf_trainweights.verify_model",
    "diff {llama} {int4}": "hf_trainweights.inspection.difference._difference",
    "checkpoint compress {run}": "hf_trainweights.files.atomic._NewFile.sync",
    "checkpoint compress {run} --dry-run": "hf_trainweights.files.atomic._NewFile.sync",
    "checkpoint restore {run}": "hf_trainweights.files.atomic._NewFile.sync",
    "checkpoint verify {run}": "hf_trainweights.checkpoint.run.checkpoints.verify_checkpoint",
    "checkpoint diff {run}/checkpoint-1 {run}/checkpoint-2": "hf_trainweights.inspection.difference._difference",
}
FEW = {moment: line for line, moment in MOMENTS.items()}.values()  # one for each moment


@pytest.fixture
def trained_run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for step in (1, 2):
        checkpoint = root / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        generator = torch.Generator().manual_seed(step)
        torch.save({"w": torch.randn(64, 64, generator=generator)}, checkpoint / "pytorch_model.bin")
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return root


@pytest.mark.parametrize("line", by_default(FEW, MOMENTS))
def test_an_interrupt_is_one_line_and_leaves_nothing(
    line: str, llama: Path, int4: Path, trained_run: Path, tmp_path: Path
) -> None:
    if "restore" in line or "verify {run}" in line:
        run_json("checkpoint", "compress", trained_run)
    before = files_of(tmp_path)
    paths = {"llama": llama, "int4": int4, "run": trained_run, "out": tmp_path / "out"}
    arguments = line.format(**paths).split()
    with open(os.devnull) as stdin, (tmp_path / "stdout").open("w+") as stdout:
        reader, stderr = os.pipe()
        prepare = partial(stop_at, MOMENTS[line])
        child = fork_command(*arguments, stdin=stdin.fileno(), stdout=stdout.fileno(), stderr=stderr, prepare=prepare)
        os.close(stderr)
        with open(reader) as said:
            first = said.readline()
            while first.startswith(("compressing ", "restoring ", "verifying ")):  # one line for each directory
                first = said.readline()
            os.killpg(child, signal.SIGINT)  # a terminal interrupts all processes of a command
            rest = said.read()
        assert first == "reached\n", first + rest
        assert (exit_code_of(child), stdout.read()) == (130, "")
    assert rest == "interrupted: nothing half-written is left behind\n"
    (tmp_path / "stdout").unlink()
    after = files_of(tmp_path)
    assert without_manifest_of_the_interrupted(after) == without_manifest_of_the_interrupted(before)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def without_manifest_of_the_interrupted(files: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out the manifest of a checkpoint that was being rewritten: it goes first and comes back last."""
    return {path: content for path, content in files.items() if not path.endswith("checkpoint-1/trainweights.json")}
