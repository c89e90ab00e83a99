"""Golden files: where they lie, how they are written once, and what a pickle among them is made of.

In each directory of golden files `recorded.json` says what they hold. Never write them anew because a test fails: later
versions read what a released version wrote.
"""

from __future__ import annotations

import json
import os
import pickletools
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "data"
RECORD = "recorded.json"
WRITE_GOLDEN = "TRAINWEIGHTS_WRITE_GOLDEN"


def integers(*shape: int, seed: int = 0, count: int = 16) -> Tensor:
    """Return whole numbers as float32, the same on every machine and for ever.

    Args:
        shape: At most three dimensions.
        seed: Other numbers for another one; those of an odd one are negated.
        count: How many different numbers, a power of two: from `-count / 2` to `count / 2 - 1`. Along every dimension,
            `count` neighbours are all of them.
    """
    numbers = torch.tensor(13 * seed)
    for dimension, (size, factor) in enumerate(zip(reversed(shape), (7, 5, 3), strict=False)):
        numbers = numbers + factor * torch.arange(size).view(-1, *[1] * dimension)
    numbers = numbers % count - count // 2
    return (-numbers if seed % 2 else numbers).float()


def golden_directory(name: str, write: Callable[[Path], None], read: Callable[[Path], Any]) -> Path:
    """Return a directory of golden files; fail with the command that writes them where there are none.

    Args:
        name: Its path below `GOLDEN`.
        write: Writes the files into a directory.
        read: Returns what they hold, as JSON.
    """
    directory = GOLDEN / name
    if not (directory / RECORD).exists():
        if os.environ.get(WRITE_GOLDEN) != "1":
            command = f"{WRITE_GOLDEN}=1 pytest tests/golden"
            pytest.fail(f"tests/golden/data/{name} is missing: run `{command}`, look at it and commit it")
        # Elsewhere first: an encoded file says where its anchor lay.
        with tempfile.TemporaryDirectory() as written:
            write(Path(written))
            shutil.copytree(written, directory)
        text = json.dumps(read(directory), indent=1) + "\n"
        (directory / RECORD).write_text(text, encoding="utf-8")
    return directory


def recorded(directory: Path) -> Any:
    """Return what the files of a golden directory held when they were written."""
    return json.loads((directory / RECORD).read_text(encoding="utf-8"))


def torch_members(file: Path) -> dict[str, bytes]:
    """Return the pickle and the storages of a file of torch.save.

    The other members, and how the zip file arranges all of them, depend on the version of torch.
    """
    with zipfile.ZipFile(file) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return {name: data for name, data in members.items() if name == "data.pkl" or name.startswith("data/")}


def called_by(file: Path) -> set[str]:
    """Return what reading a file of torch.save imports, as `module name`, without torch's own.

    Args:
        file: The file.
    """
    opcodes = list(pickletools.genops(torch_members(file)["data.pkl"]))
    assert not {"STACK_GLOBAL", "INST"} & {opcode.name for opcode, _, _ in opcodes}, "names that the next line misses"
    named = {str(argument) for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"}
    # torch pickles state dicts, and the hooks of a tensor, as ordered dicts.
    return {name for name in named if name.split(".")[0].split()[0] != "torch"} - {"collections OrderedDict"}


def texts_in(file: Path) -> list[str]:
    """Return the texts in the pickle of a file of torch.save, in order."""
    opcodes = pickletools.genops(torch_members(file)["data.pkl"])
    return [str(argument) for opcode, argument, _ in opcodes if opcode.name == "BINUNICODE"]
