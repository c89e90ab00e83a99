"""A compiled library is used only if it is that of the Python code beside it; else the other ways serve, and say so."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_trainweights import native_library
from hf_trainweights.native_library import load_library

compiler = shutil.which(os.environ.get("CC", "cc"))
pytestmark = pytest.mark.skipif(compiler is None, reason="there is no C compiler here")

Compile = Callable[[str], Path]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Return a function from C sources to a library of them."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")

    def compile_(source: str) -> Path:
        (tmp_path / "library.c").write_text(source, encoding="utf-8")
        library = tmp_path / "library.so"
        command = [str(compiler), "-shared", "-fPIC", str(tmp_path / "library.c"), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        return library

    return compile_


def test_where_python_has_no_flags_of_posix_a_library_is_looked_for_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "RTLD_NOW")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert load_library(tmp_path / "library.so", {}, abi=7) is None


def test_a_library_of_these_sources_is_used(compiled: Compile, caplog: pytest.LogCaptureFixture) -> None:
    path = compiled("int abi(void) { return 7; } long twice(long n) { return 2 * n; }")
    library = load_library(path, {"twice": "ll"}, 7)
    assert isinstance(library, ctypes.CDLL)
    assert library.twice(1 << 40) == 1 << 41
    assert caplog.messages == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("int abi(void) { return 6; } void f(void) {}", "abi() is 6 and not 7"),
        ("void f(void) {}", "undefined symbol: abi"),
        ("int abi(void) { return 7; }", "undefined symbol: f"),
    ],
)
def test_a_library_of_other_sources_is_left_and_that_is_said(
    source: str, fault: str, compiled: Compile, caplog: pytest.LogCaptureFixture
) -> None:
    path = compiled(source)
    assert load_library(path, {"f": "-"}, 7) is None
    (message,) = caplog.messages
    assert message.startswith(f"{path} was compiled from other sources")
    assert fault in message
    assert "pip install -e ." in message


def test_a_missing_library_is_nothing_to_speak_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_library.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert load_library(tmp_path / "none.so", {}, 7) is None
    assert caplog.messages == []
