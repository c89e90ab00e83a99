import errno
import os
import shutil
import warnings
from pathlib import Path

import pytest
from checkpoint.runs import cut, save

from hf_trainweights.checkpoint import directory
from hf_trainweights.checkpoint.directory import collect_garbage, compress_directory, find_checkpoints, latest
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories, verify_checkpoint
from hf_trainweights.checkpoint.run.file_checks import weights_problem
from hf_trainweights.checkpoint.whole import rewriting


def test_a_missing_or_empty_root_has_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


@pytest.mark.parametrize("ask", [latest, collect_garbage])
@pytest.mark.parametrize("name", ["file", "file/inside"])
def test_a_root_that_is_a_file_is_an_error_and_no_run_without_checkpoints(tmp_path, name, ask):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=name):
        ask(tmp_path / name)


@pytest.mark.parametrize("manifest", [False, True])
def test_the_newest_by_step_is_found(tmp_path, manifest):
    for step in (9, 100, 20):
        save(tmp_path, step, manifest=manifest)
    assert latest(tmp_path) == str(tmp_path / "checkpoint-100")


def test_of_two_names_for_one_step_the_later_one_is_found(tmp_path):
    save(tmp_path, "007", manifest=False)
    save(tmp_path, "7", manifest=False)
    os.utime(tmp_path / "checkpoint-7", (1, 1))
    assert latest(tmp_path) == str(tmp_path / "checkpoint-007")


def test_only_directories_of_the_right_name_count(tmp_path):
    good = save(tmp_path, 1, manifest=False)
    for name in ("checkpoint-3.tmp", "checkpoint-", "checkpoint-x", "_trainweights-1-checkpoint-4", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_bytes(b"")
    (tmp_path / "checkpoint-6").symlink_to(good)
    (tmp_path / "checkpoint-7").symlink_to(tmp_path / "a disk that is not mounted")
    assert checkpoint_directories(tmp_path) == [good]
    with pytest.warns(UserWarning, match="it is a link, not a directory") as record:
        assert latest(tmp_path) == str(good)
    assert ["checkpoint-7" in str(each.message) for each in record] == [True, False]


def test_a_damaged_newest_is_passed_over_with_the_reason(tmp_path):
    save(tmp_path, 1, manifest=True)
    cut(save(tmp_path, 2, manifest=True) / "optimizer.pt")
    with pytest.warns(UserWarning, match=r"checkpoint-2 is passed over: optimizer\.pt has \d+ bytes instead of"):
        assert latest(tmp_path) == str(tmp_path / "checkpoint-1")


def test_a_damaged_manifest_disqualifies(tmp_path):
    save(tmp_path, 1, manifest=False)
    cut(save(tmp_path, 2, manifest=True) / "trainweights.json")
    with pytest.warns(UserWarning, match="checkpoint-2 is passed over: trainweights"):
        assert latest(tmp_path) == str(tmp_path / "checkpoint-1")


def test_every_directory_passed_over_has_its_own_warning(tmp_path):
    for step in (1, 2):
        cut(save(tmp_path, step, manifest=True) / "optimizer.pt")
    with pytest.warns(UserWarning, match="checkpoint-") as record:
        assert latest(tmp_path) is None
    assert [f"checkpoint-{step}" in str(each.message) for step, each in zip((2, 1), record, strict=True)] == [
        True,
        True,
    ]


def test_a_foreign_file_does_not_disqualify(tmp_path):
    path = save(tmp_path, 1, manifest=True)
    (path / "rng_state_3.pth").write_bytes(b"another rank was late")
    assert latest(tmp_path) == str(path)


def test_a_plain_directory_is_marked_unverified(tmp_path):
    save(tmp_path, 1, manifest=False)
    save(tmp_path, 2, manifest=True)
    assert [
        (checkpoint.step, checkpoint.verified, checkpoint.problem) for checkpoint in find_checkpoints(tmp_path)
    ] == [
        (2, True, None),
        (1, False, None),
    ]


def test_finding_the_newest_does_not_warn(tmp_path):
    save(tmp_path, 1, manifest=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path) is not None


def test_a_checkpoint_that_the_disk_refuses_to_read_is_passed_over(tmp_path, monkeypatch):
    older, newer = save(tmp_path, 1, manifest=True), save(tmp_path, 2, manifest=True)

    def verify(path):
        if path == newer:
            raise OSError(errno.EIO, "Input/output error")
        return verify_checkpoint(path)

    monkeypatch.setattr(directory, "verify_checkpoint", verify)
    with pytest.warns(UserWarning, match=r"checkpoint-2 is passed over: cannot be read: .*Input/output error"):
        assert latest(tmp_path) == str(older)


def test_a_checkpoint_that_goes_while_a_run_is_listed_does_not_count(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step, manifest=False)
    lstat = Path.lstat

    def late(path):
        if path.name == "checkpoint-2":
            shutil.rmtree(path, ignore_errors=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", late)
    assert [path.name for path in checkpoint_directories(tmp_path)] == ["checkpoint-3", "checkpoint-1"]


def test_a_checkpoint_that_is_made_small_while_it_is_checked_is_found(tmp_path, monkeypatch):
    path = save(tmp_path, 1, manifest=False)

    def late(file):
        compress_directory(path)  # as the thread of a run that was interrupted does
        return weights_problem(file)

    monkeypatch.setattr(rewriting, "weights_problem", late)
    assert latest(tmp_path) == str(path)
