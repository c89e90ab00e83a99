"""The contracts of a format and its products as a third party runs them: on a format that this package lacks."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from hf_trainweights.formats import FORMATS, Format
from hf_trainweights.testing import FormatContract, ProductContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_format.py"


def ternary() -> Any:
    """Return the format of the example, registered under its name while tests run."""
    spec = spec_from_file_location("own_format", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    registered = dict(FORMATS)
    try:
        sys.modules["own_format"] = module
        spec.loader.exec_module(module)
    finally:
        FORMATS.clear()
        FORMATS.update(registered)
    return module.Ternary


Ternary = ternary()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "ternary", Ternary)


class TestOwnFormat(FormatContract):
    formats = (Ternary(),)

    def bound_of(self, subject: Format) -> float:
        return 1.0  # the largest code is the mean magnitude of a row


@pytest.mark.slow
class TestProductsOfOwnFormat(ProductContract):
    formats = (Ternary(),)
