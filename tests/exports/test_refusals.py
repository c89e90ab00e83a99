"""A package that is not installed is an error that says what to install."""

from __future__ import annotations

import errno
import sys
from typing import Literal

import pytest
from torch import nn

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.refusals import require, tracer_errors


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


def test_the_error_of_a_disk_is_not_taken_for_one_of_the_model() -> None:
    full, no_source = OSError(errno.ENOSPC, "No space left on device"), OSError("could not get source code")
    with pytest.raises(OSError, match="No space left") as error, tracer_errors(nn.Linear(2, 2), "a tracer", "Stop."):
        raise full
    assert error.value is full
    with (
        pytest.raises(UnsupportedError, match=r"Linear: expected a module that a tracer can hold, found OSError.*Stop"),
        tracer_errors(nn.Linear(2, 2), "a tracer", "Stop."),
    ):
        raise no_source
