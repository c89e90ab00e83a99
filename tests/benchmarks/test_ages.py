"""The commit of a table is that of the result files that it shows, among all that it reads."""

from __future__ import annotations

import pytest

from benchmarks.ages import results_of


@pytest.mark.slow
@pytest.mark.parametrize(("table", "kind"), [("quality", "quality"), ("fuzz-sanitized", "fuzz_sanitized")])
def test_a_table_of_one_file_is_as_old_as_that(table: str, kind: str) -> None:
    assert [path.stem for path in results_of(table)] == [kind]


@pytest.mark.slow
def test_a_table_of_the_newest_of_several_files_is_as_old_as_that() -> None:
    assert [path.stem.split("-")[0] for path in results_of("speed-casting")] == ["speed"]
