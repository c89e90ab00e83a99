"""Every op of PyTorch's op database gives for a quantized weight what it gives for the dequantized one, or refuses."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.ops import RESULTS, WrongError, check_op, database
from hf_trainweights.tensor import dispatch

# The database takes seconds to import, which a quick run should not wait for.
pytestmark = pytest.mark.slow

RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECORDED["ops"])
def test_an_op_gives_what_it_gives_for_the_float_weight(name: str) -> None:
    if name not in database():
        pytest.skip(f"torch {torch.__version__} has no such op")
    found, _ = check_op(name, most_samples=1)
    if torch.__version__.split("+")[0] == RECORDED["versions"]["torch"].split("+")[0]:
        recorded = RECORDED["ops"][name]
        for kind, results in found.items():
            assert set(results) <= set(recorded if isinstance(recorded, list) else recorded.get(kind, ()))


def test_the_record_is_of_all_ops_and_finds_none_wrong() -> None:
    assert RECORDED["wrong"] == []
    assert len(RECORDED["ops"]) > 500
    if torch.__version__.split("+")[0] == RECORDED["versions"]["torch"].split("+")[0]:
        assert sorted(database()) == sorted([*RECORDED["ops"], *RECORDED["not_for_weights"]])


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dispatch.compute_dequantized
    monkeypatch.setattr(dispatch, "compute_dequantized", lambda func, *args, **kwargs: right(func, *args, **kwargs) + 1)
    with pytest.raises(WrongError, match="mul, int8, sample 0: other values"):
        check_op("mul", most_samples=1)
