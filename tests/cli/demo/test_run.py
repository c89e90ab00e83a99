"""The demo from beginning to end, and what it says about models it cannot measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_trainweights.errors import ConfigError
from hf_trainweights.kernels import compiled
from hf_trainweights_cli.demo.run import Result, run_demo
from hf_trainweights_cli.demo.training import Recipe

pytestmark = pytest.mark.slow  # a fixture of most of them trains a model


def no_report(line: str, stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.slow
def test_the_machine_is_described_with_the_products_that_serve_on_it(result: Result) -> None:
    library = compiled.instructions() if compiled.is_available() else None
    assert result.machine.endswith(f"products compiled for {library}" if library else "no compiled products")


@pytest.mark.slow
def test_every_format_comes_back_bit_equal_after_the_baseline(formats: list[str], result: Result) -> None:
    assert [row.format for row in result.rows] == ["float32", *formats]
    assert result.failures == ()


@pytest.mark.slow
def test_reports_end_complete_and_never_go_back(
    formats: list[str], result: Result, reports: list[tuple[str, str, int, int]]
) -> None:
    for name in ("training", "float32", *formats, "speed"):
        steps = [(done, total) for line, _, done, total in reports if line == name]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]
        assert len({total for _, total in steps}) == 1


@pytest.mark.slow
def test_a_model_of_the_users_is_measured_and_its_copies_removed(
    result: Result, out: Path, tmp_path: Path, tiny: Recipe
) -> None:
    own = run_demo(tmp_path / "out", ["int8"], tiny, no_report, model=str(out / "model"), keep=False)
    assert (own.losses, own.speeds, own.checkpoints) == ((), (), None)
    assert own.failures == ()
    assert [row.format for row in own.rows] == ["float32", "int8"]
    assert [row.disk_bytes for row in own.rows] == [row.disk_bytes for row in result.rows[:2]]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_directory_with_files_is_refused_and_left_alone(tmp_path: Path, tiny: Recipe) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="--out: expected a new or empty directory"):
        run_demo(tmp_path, ["int8"], tiny, no_report)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
