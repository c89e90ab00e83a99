"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_trainweights

FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL  # an error is shown with its module
# Importing the command starts it, and the worker of the regular expressions waits for its parent.
PROGRAMS = ("hf_trainweights.__main__", "hf_trainweights.files.expression_worker")
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(hf_trainweights.__path__, "hf_trainweights.")
    if name not in PROGRAMS and re.search(r">>> (?!.*\+SKIP)", Path(str(find_spec(name).origin)).read_text("utf-8"))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in samples.iterdir():
        (tmp_path / directory.name).symlink_to(directory)
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert results.attempted > 0
    assert results.failed == 0
