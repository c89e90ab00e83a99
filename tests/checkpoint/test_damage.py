"""One damaged file of a checkpoint: every reader says which file, or gives the right values, and the run goes on."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import by_default, exhaustive
from helpers import flip_a_bit
from torch import nn
from trees import fingerprint

from hf_trainweights.checkpoint.directory import collect_garbage, latest
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_report, read_structure
from hf_trainweights.checkpoint.loop.manager import CheckpointManager
from hf_trainweights.checkpoint.loop.training_state import load_checkpoint
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.errors import CorruptFileError, TrainWeightsError

pytestmark = pytest.mark.slow  # each goes through many places of a file

WEIGHTS = "pytorch_model.bin"
LAST_STEP = 3


def train(root: Path, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(80, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with CheckpointManager(root, every_steps=1) as manager:
        for _, batch in manager.steps(torch.randn(steps, 2, 80), model, optimizer):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    train(root, LAST_STEP)
    return root


@pytest.fixture
def root(trained_run: Path, tmp_path: Path) -> Path:
    """A run whose newest checkpoint is stored against an anchor."""
    return shutil.copytree(trained_run, tmp_path / "run")


@pytest.fixture
def newest(root: Path) -> Path:
    directory = root / f"checkpoint-{LAST_STEP}"
    assert len(anchors(directory)) == 1
    return directory


def anchors(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.anchor")}


def critical_bytes(content: bytes) -> Iterator[int]:
    """Yield the places of the zip archive's directory, at the end, and of the headers of its members."""
    yield from range(len(content) - 300, len(content))
    start = content.find(b"PK\x03\x04")
    while start >= 0:
        yield from range(start, min(start + 64, len(content) - 300))
        start = content.find(b"PK\x03\x04", start + 4)


def flips(file: Path, stride: int = 1) -> Iterator[int]:
    """Flip one critical bit of a file at a time, and put it back."""
    content = file.read_bytes()
    bits = [8 * place + bit for place in critical_bytes(content) for bit in range(8)]
    for position in bits[::stride]:
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(damaged)
        yield position
    file.write_bytes(content)


READERS: dict[str, Callable[[Path], Any]] = {
    "is_encoded": is_encoded,
    "read_structure": read_structure,
    "read_report": read_report,
    "load_file": lambda file: fingerprint(load_file(file)),
}


@pytest.mark.parametrize("name", by_default(("load_file", "read_structure"), READERS))
def test_a_flipped_bit_in_a_zip_header_is_an_error_that_names_the_file_or_harmless(newest: Path, name: str) -> None:
    read, file = READERS[name], newest / WEIGHTS
    expected = read(file)
    messages, different = [], []
    for position in flips(file, stride=1 if name == "is_encoded" else 5):
        try:
            actual = read(file)
        except TrainWeightsError as error:
            messages.append(str(error))
        else:
            different += [] if actual in (expected, False) else [position]
    assert different == []
    assert [message for message in messages if str(file) not in message] == []
    assert len(messages) > 100 or name == "is_encoded"


@pytest.mark.parametrize("stride", [31, *exhaustive(7)])
def test_a_flipped_bit_in_a_zip_header_costs_no_anchor_even_without_a_manifest(newest: Path, stride: int) -> None:
    (newest / MANIFEST_NAME).unlink()
    needed = anchors(newest)
    lost = []
    for position in flips(newest / WEIGHTS, stride):
        removed = collect_garbage(newest)
        lost += [position] if removed else []
    assert (lost, anchors(newest)) == ([], needed)


@pytest.mark.parametrize("stride", [163, *exhaustive(41)])
def test_a_run_goes_on_from_its_newest_whole_checkpoint_whatever_bit_has_flipped(
    root: Path, newest: Path, stride: int
) -> None:
    before = {path: path.read_bytes() for path in newest.iterdir()}
    expected = fingerprint(load_checkpoint(root / f"checkpoint-{LAST_STEP - 1}")["model"])
    for _ in flips(newest / WEIGHTS, stride):
        report = verify_checkpoint(newest)
        assert report.problems == {WEIGHTS: "has other content than when it was saved"}
        with pytest.warns(UserWarning, match=f"checkpoint-{LAST_STEP} is passed over: {WEIGHTS} has other content"):
            actual = latest(root)
        assert actual is not None
        assert fingerprint(load_checkpoint(actual)["model"]) == expected
        assert collect_garbage(root) == []
    assert {path: path.read_bytes() for path in newest.iterdir()} == before


def test_a_manager_starts_and_trains_on_where_a_checkpoint_is_damaged(root: Path, newest: Path, tmp_path: Path) -> None:
    expected = fingerprint(train(tmp_path / "undisturbed", LAST_STEP + 2))
    for number, _ in enumerate(flips(newest / WEIGHTS, stride=601)):
        copy = shutil.copytree(root, tmp_path / f"copy-{number}")
        with pytest.warns(UserWarning, match="is passed over"):
            assert fingerprint(train(copy, LAST_STEP + 2)) == expected


def unreadable_header(directory: Path) -> None:
    os.truncate(directory / WEIGHTS, 30)


def unreadable_manifest(directory: Path) -> None:
    flip_a_bit(directory / MANIFEST_NAME)


def fifo_in_place_of_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    os.mkfifo(directory / WEIGHTS)


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("damage", [unreadable_header, unreadable_manifest, fifo_in_place_of_weights])
def test_no_anchor_is_garbage_beside_a_file_that_cannot_be_read(
    newest: Path, damage: Callable[[Path], None], with_manifest: bool
) -> None:
    damage(newest)
    if not with_manifest and damage is not unreadable_manifest:
        (newest / MANIFEST_NAME).unlink()
    unknown = newest / ("0" * 64 + ".anchor")
    unknown.write_bytes(b"perhaps needed")
    before = anchors(newest)
    assert collect_garbage(newest) == []
    assert anchors(newest) == before


NOT_REGULAR: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": os.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link in a circle": lambda path: path.symlink_to(path.name),
}


FILES = (WEIGHTS, "optimizer.pt", "trainweights_state.pt", MANIFEST_NAME, "anchor")
# A manifest that is a link to nowhere is no manifest: the other files are whole.
CASES = [
    (name, kind) for name in FILES for kind in NOT_REGULAR if name != MANIFEST_NAME or not kind.startswith("a link")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_is_no_file_neither_blocks_a_reader_nor_the_run(root: Path, newest: Path, name: str, kind: str) -> None:
    file = newest / (anchors(newest).pop() if name == "anchor" else name)
    file.unlink()
    NOT_REGULAR[kind](file)
    for read in (load_file, read_structure, read_report):
        with pytest.raises(CorruptFileError, match=rf"{file.name}: expected a regular file, found a"):
            read(file)
    assert not is_encoded(file)
    assert verify_checkpoint(newest).problems
    with pytest.raises(CorruptFileError, match=f"checkpoint-{LAST_STEP}"):
        load_checkpoint(newest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert latest(root) == str(root / f"checkpoint-{LAST_STEP - 1}")
        train(root, LAST_STEP + 1)
