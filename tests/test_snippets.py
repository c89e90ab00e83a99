"""Every Python example in README and docs runs, in a process of its own for each page, one after the other.

Names that an example takes for granted come from a comment that readers do not see:

    <!-- python
    batch = ...
    -->

An example below `<!-- not run: REASON -->` is not run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?(?:```|<!-- )python\n(.*?)^(?:```|-->)$", re.DOTALL | re.MULTILINE)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run(page: Path, samples: Path, tmp_path: Path) -> None:
    shutil.copytree(samples, tmp_path, dirs_exist_ok=True)
    file = tmp_path / f"page_{page.stem}.py"  # peft.md must not hide the package peft
    file.write_text(program(page.read_text("utf-8")), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(file)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
