"""Cleaning up removes what dead writers left, puts back what they took away, and touches nothing else."""

import json
import logging

import pytest

from hf_trainweights.files.disk import claim_directory, lock_directory
from hf_trainweights.files.staging import clean_up


def tree(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def interrupted(directory, content):
    """Return a staging directory as a killed save leaves it: everything of the old model is aside."""
    staging = directory / "_trainweights-a"
    for part in ("old", "new"):
        (staging / part).mkdir(parents=True)
    for name, data in content.items():
        (staging / "old" / name).write_bytes(data)
    names = list(content)
    (staging / "journal.json").write_text(json.dumps({"come": [*names, "extra.json"], "go": names}))
    (directory / "extra.json").write_bytes(b"new")
    return staging


OLD = {"model.safetensors": b"old weights", "config.json": b"old"}


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_an_interrupted_save_took_away_is_put_back(tmp_path, dry_run):
    staging = interrupted(tmp_path, OLD)
    before = tree(tmp_path)
    assert clean_up(tmp_path, dry_run=dry_run) == [staging]
    assert tree(tmp_path) == (before if dry_run else OLD)


def test_what_a_living_save_writes_stays(tmp_path):
    living = claim_directory(tmp_path)
    (living.path / "model.safetensors").write_bytes(b"half")
    assert clean_up(tmp_path) == []
    assert (living.path / "model.safetensors").read_bytes() == b"half"
    living.release()
    assert clean_up(tmp_path) == [living.path]


def test_while_a_save_runs_nothing_is_put_back_over_its_files(tmp_path):
    interrupted(tmp_path, OLD)
    before = tree(tmp_path)
    with lock_directory(tmp_path):
        assert clean_up(tmp_path) == []
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "journal",
    [
        b"",
        b"[]",
        b'{"come": []}',
        b'{"come": ["../victim"], "go": ["../victim"]}',
        b'{"come": [1], "go": []}',
        b'{"come": ["/etc/passwd"], "go": []}',
        b"[" * 100_000,
    ],
    ids=["empty", "a list", "half", "outside", "a number", "absolute", "deep"],
)
def test_a_journal_that_cannot_be_trusted_moves_nothing_and_is_named(tmp_path, caplog, journal):
    directory = tmp_path / "model"
    (tmp_path / "victim").write_bytes(b"precious")
    staging = interrupted(directory, OLD)
    (staging / "journal.json").write_bytes(journal)
    before = tree(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert clean_up(directory) == []
    assert tree(tmp_path) == before
    assert str(staging) in caplog.text


def test_a_missing_directory_has_nothing_to_clean_up(tmp_path):
    assert clean_up(tmp_path / "none") == []
