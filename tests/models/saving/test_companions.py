"""The files beside the weights are copied, and nothing that lies elsewhere on the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.models.saving.new_directories import companions, copy_companions


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a snapshot as the Hub's cache has it: links to what all snapshots of a repository share."""
    repository = tmp_path / "models--us--model"
    snapshot = repository / "snapshots" / "0123"
    for folder in (snapshot / "1_Pooling", repository / "blobs"):
        folder.mkdir(parents=True)
    for number, name in enumerate(("config.json", "tokenizer.json", "1_Pooling/config.json")):
        (repository / "blobs" / f"{number}").write_text(name)
        (snapshot / name).symlink_to(repository / "blobs" / f"{number}")
    return snapshot


def test_links_of_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    copy_companions(model, tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*.json")}
    assert {name: path.read_text() for name, path in found.items()} == {
        name: name for name in ("tokenizer.json", "1_Pooling/config.json")
    }
    assert not any(path.is_symlink() for path in found.values())


def test_a_link_to_another_file_of_the_model_is_followed(model: Path, tmp_path: Path) -> None:
    (model / "notes.txt").symlink_to("tokenizer.json")
    copy_companions(model, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "tokenizer.json"


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "1_Pooling/modules.json", "2_Dense"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_out_of_the_model_is_refused(model: Path, tmp_path: Path, name: str, absolute: bool) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    target = secret if name == "2_Dense" else secret / "key"
    up = Path(*[".."] * (len(model.relative_to(tmp_path).parts) + name.count("/")))
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target if absolute else up / target.relative_to(tmp_path))
    for call in (companions, lambda folder: copy_companions(folder, tmp_path / "out")):
        with pytest.raises(CorruptFileError, match=r"expected a file in .*, found a link to .*secret/key"):
            call(model)
    assert not (tmp_path / "out").exists()
