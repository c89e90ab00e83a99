"""A marked run: checkpoints whose weights a Trainer would leave at their starting values are not resumed from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_trainweights.checkpoint.directory import collect_garbage, compress_directory, find_checkpoints, latest
from hf_trainweights.checkpoint.run.checkpoints import MARK_NAME, converted_weights_problem, mark_run
from hf_trainweights.errors import SaveError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint-2"
    path.mkdir()
    save_file({"embed_out.weight": torch.zeros(4, 4), "body.weight": torch.ones(4, 4)}, path / "model.safetensors")
    (path / "trainer_state.json").write_text('{"global_step": 2, "epoch": 0.5}')
    return path


def test_without_a_mark_any_names_are_resumed_from(checkpoint: Path) -> None:
    assert converted_weights_problem(checkpoint) is None
    assert latest(checkpoint.parent) == str(checkpoint)


def test_a_marked_name_in_a_trainers_files_is_passed_over_with_the_reason(checkpoint: Path) -> None:
    mark_run(checkpoint.parent, "embed_out.weight")
    with pytest.warns(UserWarning, match=r"passed over: .*embed_out\.weight.*starting values"):
        assert latest(checkpoint.parent) is None


def test_a_model_without_marked_names_is_resumed_from_in_a_marked_run(checkpoint: Path) -> None:
    mark_run(checkpoint.parent, "experts.0.weight")
    assert latest(checkpoint.parent) == str(checkpoint)


def test_weights_that_replace_the_trainers_files_are_resumed_from(checkpoint: Path) -> None:
    mark_run(checkpoint.parent, "embed_out.weight")
    (checkpoint / "model.safetensors").unlink()
    torch.save({"lm_head.weight": torch.zeros(4, 4)}, checkpoint / "pytorch_model.bin")
    assert latest(checkpoint.parent) == str(checkpoint)


def test_a_mark_keeps_the_names_of_earlier_models(tmp_path: Path) -> None:
    for name in ("b", "a", "b"):
        mark_run(tmp_path, name)
    assert json.loads((tmp_path / MARK_NAME).read_bytes()) == {"converted_names": ["a", "b"]}


def test_compressing_by_hand_does_not_hide_the_trainers_names(checkpoint: Path) -> None:
    mark_run(checkpoint.parent, "embed_out.weight")
    with pytest.warns(UserWarning, match="the weights stay as they are"):
        compress_directory(checkpoint)
    assert (checkpoint / "model.safetensors").exists()
    assert [found.problem is None for found in find_checkpoints(checkpoint.parent)] == [False]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"converted_names": 3}', b"\xff"])
def test_a_damaged_mark_passes_over_and_is_written_anew(checkpoint: Path, content: bytes) -> None:
    (checkpoint.parent / MARK_NAME).write_bytes(content)
    assert str(converted_weights_problem(checkpoint)).startswith(f"{MARK_NAME} or the weights cannot be read")
    mark_run(checkpoint.parent, "embed_out.weight")
    assert "starting values" in str(converted_weights_problem(checkpoint))


def test_garbage_collection_leaves_the_mark(checkpoint: Path) -> None:
    mark_run(checkpoint.parent, "embed_out.weight")
    collect_garbage(checkpoint.parent)
    assert (checkpoint.parent / MARK_NAME).is_file()


def test_a_mark_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="No checkpoint was changed"):
        mark_run(tmp_path / "missing", "embed_out.weight")
