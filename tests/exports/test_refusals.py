"""A package that is not installed is an error that says what to install."""

from __future__ import annotations

import sys
from typing import Literal

import pytest

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.refusals import require


@pytest.mark.parametrize(("name", "extra"), [("onnxruntime", "onnx"), ("gguf", "gguf")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: Literal["onnx", "gguf"]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = (
        rf'^{extra.upper()}: expected the package {name}, found .*{name}.*pip install "hf_trainweights\[{extra}\]"'
    )
    with pytest.raises(UnsupportedError, match=message):
        require(name, extra)
