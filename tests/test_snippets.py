"""Every Python example in README and docs runs, in a process of its own for each page, one after the other.

Names that an example takes for granted come from a comment that readers do not see:

    <!-- python
    batch = ...
    -->

An example below `<!-- not run: REASON -->` is not run. The commands of README run where its examples ran.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from command_line import run
from covering import exhaustive
from fork_server import CONTEXT

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?(?:```|<!-- )python\n(.*?)^(?:```|-->)$", re.DOTALL | re.MULTILINE)

# `run` would start a server.
COMMAND = re.compile(r"^trainweights (?!run )(.+)$", re.MULTILINE)


def program(text: str) -> str:
    """Return the examples of a page as one program, in which each line has the number that it has in the page."""
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if block[1] is None:
            first = text.count("\n", 0, block.start(2))
            found = block[2].splitlines()
            lines[first : first + len(found)] = found
    return "\n".join(lines)


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in DOCUMENTS if program(path.read_text("utf-8")).strip()]


# These pages export by every function, which takes longer than all others; tests of these functions run by default.
EXPORTS = [page for page in PAGES if page.parent.name == "export"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [*(page for page in PAGES if page not in EXPORTS), *exhaustive(*EXPORTS)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_examples_of_a_page_run(page: Path, samples: Path, tmp_path: Path) -> None:
    shutil.copytree(samples, tmp_path, dirs_exist_ok=True)
    file = tmp_path / f"page_{page.stem}.py"  # peft.md must not hide the package peft
    file.write_text(program(page.read_text("utf-8")), encoding="utf-8")
    commands = COMMAND.findall(page.read_text("utf-8")) if page.parent == ROOT else []
    process = CONTEXT.Process(target=run_program, args=(file, tmp_path / "said", commands))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "said").read_text("utf-8")[-4000:]


def run_program(file: Path, said: Path, commands: Sequence[str]) -> None:
    """Run a file in its directory as an interpreter does, then commands; what is printed goes to another file."""
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    descriptor = os.open(said, os.O_CREAT | os.O_WRONLY)
    for own in (1, 2):
        os.dup2(descriptor, own)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runpy.run_path(str(file), run_name="__main__")
    for command in commands:
        result = run(*shlex.split(command))
        assert result.exit_code == 0, f"{command}: {result.output}"
