"""One demo of a tiny model, run once for all tests of this folder; with every format in the exhaustive run."""

from __future__ import annotations

from pathlib import Path

import pytest
from covering import exhaustive
from weights import QUANTIZABLE

from hf_trainweights_cli.demo import measurement, speed
from hf_trainweights_cli.demo.corpus import Corpus, read_corpus
from hf_trainweights_cli.demo.run import Result, run_demo
from hf_trainweights_cli.demo.speed import Shape
from hf_trainweights_cli.demo.training import Recipe


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    return Recipe(hidden_size=128, num_layers=1, vocab_size=320, steps=30, batch_size=8, window_tokens=32)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return read_corpus()


@pytest.fixture(scope="session", params=[["int8", "int4"], *exhaustive(QUANTIZABLE)], ids=["two", "all"])
def formats(request: pytest.FixtureRequest) -> list[str]:
    return request.param


@pytest.fixture(scope="session")
def out(formats: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "out"


@pytest.fixture(scope="session")
def reports(formats: list[str]) -> list[tuple[str, str, int, int]]:
    return []


@pytest.fixture(scope="session")
def result(formats: list[str], out: Path, reports: list[tuple[str, str, int, int]], tiny: Recipe) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        # Nothing here asks how precise a time is, so the least number of rounds serves.
        patch.setattr(speed, "_SECONDS_PER_FORMAT", 0.0)
        patch.setattr(measurement, "_GENERATION_SECONDS", 1e-9)
        return run_demo(out, formats, tiny, lambda *report: reports.append(report), shape=Shape(256, 1, 64))
