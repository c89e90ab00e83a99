"""Every op of PyTorch's op database gives for a quantized weight what it gives for the dequantized one, or refuses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from covering import by_default

from benchmarks.ops import RESULTS, WEIGHTS, WrongError, check_op, database
from hf_trainweights.tensor import dispatch

# The database takes seconds to import, which a quick run should not wait for.
pytestmark = pytest.mark.slow

RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


# Groups of forty ops: a test for each takes longer to collect than to run.
OPS = sorted(RECORDED["ops"])
GROUPS = {f"{group[0]} to {group[-1]}": group for group in (OPS[at : at + 40] for at in range(0, len(OPS), 40))}
SAME_TORCH = torch.__version__.split("+")[0] == RECORDED["versions"]["torch"].split("+")[0]


def in_a_thread(name: str, kind: str) -> Any:
    """Return what `check_op` does: PyTorch looks through the whole stack for each op, and a thread has a short one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(check_op, name, most_samples=1, kinds=[kind]).result()


@pytest.mark.parametrize("kind", by_default(("int8 g32",), WEIGHTS))
@pytest.mark.parametrize("group", by_default([*GROUPS][::3], GROUPS))
def test_an_op_gives_what_it_gives_for_the_float_weight(group: str, kind: str) -> None:
    for name in filter(database().__contains__, GROUPS[group]):
        found, _ = in_a_thread(name, kind)
        recorded = RECORDED["ops"][name]
        allowed = recorded if isinstance(recorded, list) else recorded.get(kind, ())
        assert set(found.get(kind, ())) <= set(allowed) or not SAME_TORCH, name


def test_the_record_is_of_all_ops_and_finds_none_wrong() -> None:
    assert RECORDED["wrong"] == []
    assert len(RECORDED["ops"]) > 500
    if SAME_TORCH:
        assert sorted(database()) == sorted([*RECORDED["ops"], *RECORDED["not_for_weights"]])


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dispatch.compute_dequantized
    monkeypatch.setattr(dispatch, "compute_dequantized", lambda func, *args, **kwargs: right(func, *args, **kwargs) + 1)
    with pytest.raises(WrongError, match="mul, int8, sample 0: other values"):
        check_op("mul", most_samples=1)
