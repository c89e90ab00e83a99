"""Quantized models in other people's packages: the light flows of `benchmarks/ecosystem.py`, and its record."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from benchmarks.ecosystem import FLOWS, RESULTS, run

LIGHT = (
    "sentence_transformers_load_save_reload",
    "sentence_transformers_quantize_save_reload",
    "pipeline_text_generation",
    "pipeline_feature_extraction",
    "accelerate_dispatch",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT)
def test_a_quantized_model_works_in(name: str) -> None:
    if name.startswith(("sentence", "pipeline_feature")) and find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    assert run(name)["outcome"] == "works"


def test_the_record_has_every_flow_with_the_version_it_was_tried_with() -> None:
    flows = json.loads(RESULTS.read_text())["flows"]
    assert flows.keys() == FLOWS.keys()
    assert [name for name, row in flows.items() if not row["version"]] == []
