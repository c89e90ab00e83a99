"""The files of a base: found by digest in the run, the Hub's cache or a registered directory, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bases import COMMIT, REPOSITORY, put_into_cache, weights, write

from hf_trainweights.checkpoint.encoded import base_files
from hf_trainweights.checkpoint.encoded.anchor_files import MissingAnchorError
from hf_trainweights.checkpoint.encoded.base_files import find_base, identify_base, register_base, require_weights
from hf_trainweights.checkpoint.encoded.base_identity import Base
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.sha256 import file_sha256

ELSEWHERE = Path("relative")


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_files, "_directories", {})


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return put_into_cache(tmp_path / "cache", monkeypatch, weights())


@pytest.fixture
def local(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    write(directory / "model.safetensors", weights())
    return directory


def test_a_snapshot_is_identified_by_repository_and_commit_and_found_again(snapshot: Path, monkeypatch) -> None:
    base = identify_base(snapshot)
    sha256 = file_sha256((snapshot / "model.safetensors").resolve())
    assert base == Base({"model.safetensors": sha256}, REPOSITORY, COMMIT)
    monkeypatch.setattr(base_files, "_directories", {})
    assert find_base(base, ELSEWHERE) == {"model.safetensors": (snapshot / "model.safetensors").resolve()}


def test_a_vanished_base_is_an_error_that_says_how_to_get_it(snapshot: Path) -> None:
    base = identify_base(snapshot)
    (snapshot / "model.safetensors").unlink()
    command = f"hf download {REPOSITORY} --revision {COMMIT}"
    with pytest.raises(MissingAnchorError, match=f"base {REPOSITORY} at commit {COMMIT}.*{command}"):
        find_base(base, ELSEWHERE)


def test_another_commit_in_the_cache_does_not_serve(snapshot: Path) -> None:
    base = identify_base(snapshot)
    snapshot.rename(snapshot.with_name("f" * 40))
    with pytest.raises(MissingAnchorError, match=COMMIT):
        find_base(base, ELSEWHERE)


def test_a_changed_base_is_an_error_that_names_commit_and_digest(snapshot: Path) -> None:
    base = identify_base(snapshot)
    write((snapshot / "model.safetensors").resolve(), weights(1))
    expected = f"{REPOSITORY} at commit {COMMIT}, SHA-256 {base.files['model.safetensors']}"
    with pytest.raises(CorruptFileError, match=expected):
        find_base(base, ELSEWHERE)


def test_a_link_out_of_the_cache_is_refused_before_it_is_opened(snapshot: Path, tmp_path: Path, monkeypatch) -> None:
    base = identify_base(snapshot)
    monkeypatch.setattr(base_files, "_directories", {})
    victim = tmp_path / "victim"
    write(victim, weights())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(victim)
    opened: list[str] = []
    monkeypatch.setattr(base_files, "sha256_once", lambda path: opened.append(str(path)) or "")
    with pytest.raises(CorruptFileError, match="a link to"):
        find_base(base, ELSEWHERE)
    assert opened == []


def test_a_fifo_in_the_place_of_a_base_is_not_waited_for(snapshot: Path) -> None:
    base = identify_base(snapshot)
    blob = (snapshot / "model.safetensors").resolve()
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(CorruptFileError, match="FIFO"):
        find_base(base, ELSEWHERE)


def test_a_local_base_is_found_only_where_the_caller_has_named_its_directory(local: Path, monkeypatch) -> None:
    base = identify_base(local)
    assert base.path == str(local)
    monkeypatch.setattr(base_files, "_directories", {})
    with pytest.raises(MissingAnchorError, match=f"weights of {local}.*register_base"):
        find_base(base, ELSEWHERE)
    register_base(local)
    assert find_base(base, ELSEWHERE) == {"model.safetensors": local / "model.safetensors"}


def test_kept_files_are_found_under_their_digests(local: Path, tmp_path: Path, monkeypatch) -> None:
    base = identify_base(local)
    monkeypatch.setattr(base_files, "_directories", {})
    kept = tmp_path / f"{base.files['model.safetensors']}.anchor"
    (local / "model.safetensors").rename(kept)
    assert find_base(base, tmp_path) == {"model.safetensors": kept}


def test_shards_are_listed_by_their_index_or_not_at_all(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(weights().items(), 1):
        write(tmp_path / f"model-0000{number}-of-00002.safetensors", {name: tensor})
    with pytest.raises(ConfigError, match=r"anchor: expected a directory with model\.safetensors"):
        require_weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shards = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate("ab", 1)}
    index.write_text(json.dumps({"weight_map": shards}))
    assert list(identify_base(tmp_path).files) == list(identify_base(index).files)
    assert len(identify_base(tmp_path).files) == 2


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"anchor.*{name}"):
        require_weights(tmp_path / name)
