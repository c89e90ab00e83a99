"""The demo's checkpoints: three that are small, and a run that goes on from one of them as if it had not stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hf_trainweights_cli.demo.checkpoints import SAVES
from hf_trainweights_cli.demo.corpus import Corpus
from hf_trainweights_cli.demo.run import Result
from hf_trainweights_cli.demo.training import Recipe, train_model

pytestmark = pytest.mark.slow  # a fixture of most of them trains a model


@pytest.mark.slow
def test_three_checkpoints_are_a_fraction_of_their_plain_size(result: Result, out: Path) -> None:
    found = result.checkpoints
    assert found is not None
    assert [each.step for each in found.saved] == [10, 20, 30]
    assert len(found.saved) == SAVES
    assert found.stored_bytes < found.plain_bytes / 3
    files = {file.stat().st_ino: file.stat().st_size for file in (out / "run").rglob("*") if file.is_file()}
    assert found.stored_bytes == sum(files.values())


@pytest.mark.slow
def test_a_run_that_resumes_has_the_losses_of_the_one_that_went_on(result: Result) -> None:
    found = result.checkpoints
    assert found is not None
    assert (found.resumed_at, len(found.resumed_losses)) == (20, 10)
    assert found.resumed_losses == pytest.approx(result.losses[20:30], abs=found.largest_difference + 1e-12)
    assert found.largest_difference < 0.05
    # A model that was not restored would be where the training began.
    assert found.resumed_losses[0] < result.losses[0] - 0.5


def test_a_run_of_one_save_has_nothing_to_resume_from(tmp_path: Path, corpus: Corpus, tiny: Recipe) -> None:
    recipe = dataclasses.replace(tiny, steps=1)
    training = train_model(tmp_path / "model", tmp_path / "run", corpus, recipe, lambda *report: None)
    assert len(training.checkpoints.saved) == 1
    assert training.checkpoints.resumed_at is None
