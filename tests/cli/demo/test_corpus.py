"""The demo's text: which files are trained on, and which are held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_trainweights.errors import UnsupportedError
from hf_trainweights_cli.demo.corpus import read_corpus


def test_corpus_is_in_the_order_of_names_with_every_20th_file_held_out(tmp_path: Path) -> None:
    for i in range(40):
        directory = tmp_path / f"{i // 10}"
        directory.mkdir(exist_ok=True)
        (directory / f"{i:02}.py").write_text(f"{i}")
    for other in ("site-packages", "test"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "a.py").write_text("not the library")
    corpus = read_corpus(tmp_path)
    assert corpus.held_out == ("0", "20")
    assert corpus.train == tuple(f"{i}" for i in range(40) if i not in (0, 20))


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"found 0 files\. Use a Python that has them, or .* --model"):
        read_corpus(tmp_path)
