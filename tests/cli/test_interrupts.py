"""Ctrl-C in the middle of a command: one line, exit code 130, and nothing half-written is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import run_json

# Runs a command that stops for good where it calls a function, once it has said so.
CHILD = """
import signal, sys, threading

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
path, _, name = sys.argv[1].rpartition(".")

def stop(*arguments, **options):
    print("reached", file=sys.stderr, flush=True)
    while True:
        threading.Event().wait(60)

from pkgutil import resolve_name
owner = resolve_name(path)
assert hasattr(owner, name)
setattr(owner, name, stop)
sys.argv[1:2] = []
from hf_trainweights_cli.main import main
main()
"""

# What each command is doing when it is interrupted: all but those that only read have written files aside by then.
MOMENTS = {
    "quantize {llama} {out} --format int8": "hf_trainweights.models.directory.sync_tree",
    "dequantize {int4} {out}": "hf_trainweights.models.directory.sync_tree",
    "export {int4} {out} --to compressed-tensors": "hf_trainweights.files.staging.sync_tree",
    "push {int4} me/model": "hf_trainweights.models.directory_push.begin_push",
    "inspect {int4}": "hf_trainweights.inspection.listing.find_parts",
    "verify {int4}": "hf_trainweights.verify_model",
    "diff {llama} {int4}": "hf_trainweights.inspection.difference._difference",
    "checkpoint compress {run}": "hf_trainweights.files.atomic._NewFile.sync",
    "checkpoint compress {run} --dry-run": "hf_trainweights.files.atomic._NewFile.sync",
    "checkpoint restore {run}": "hf_trainweights.files.atomic._NewFile.sync",
    "checkpoint verify {run}": "hf_trainweights.checkpoint.directory.verification.verify_checkpoint",
    "checkpoint diff {run}/checkpoint-1 {run}/checkpoint-2": "hf_trainweights.inspection.difference._difference",
}


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


@pytest.mark.parametrize("line", MOMENTS)
def test_an_interrupt_is_one_line_and_leaves_nothing(
    line: str, llama: Path, int4: Path, trained_run: Path, tmp_path: Path
) -> None:
    if "restore" in line or "verify {run}" in line:
        run_json("checkpoint", "compress", trained_run)
    before = files_of(tmp_path)
    paths = {"llama": llama, "int4": int4, "run": trained_run, "out": tmp_path / "out"}
    command = [sys.executable, "-c", CHILD, MOMENTS[line], *line.format(**paths).split()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert child.stderr is not None
    said = []
    while (each := child.stderr.readline()) and each != "reached\n":
        said.append(each)
    assert each == "reached\n", "".join(said)
    os.killpg(child.pid, signal.SIGINT)  # a terminal interrupts all processes of a command
    try:
        stdout, stderr = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, stdout) == (130, "")
    assert stderr == "interrupted: nothing half-written is left behind\n"
    after = files_of(tmp_path)
    assert without_manifest_of_the_interrupted(after) == without_manifest_of_the_interrupted(before)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def without_manifest_of_the_interrupted(files: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out the manifest of a checkpoint that was being rewritten: it goes first and comes back last."""
    return {path: content for path, content in files.items() if not path.endswith("checkpoint-1/trainweights.json")}
