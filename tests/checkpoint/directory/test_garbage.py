import errno
import os
import random
import shutil

import pytest
import torch
from covering import by_default

from hf_trainweights.checkpoint import directory as checkpoint_directory
from hf_trainweights.checkpoint.directory import collect_garbage, remove_checkpoint
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.in_place import rewriting
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.run.weights import Weights
from hf_trainweights.checkpoint.whole import rewriting as whole_rewriting
from hf_trainweights.checkpoint.whole.writer import save_new_directory
from hf_trainweights.files.disk import claim_directory


def save(path, state=None, trees=None, **fields):
    weights = Weights({"w": torch.arange(5000.0)} if state is None else state)
    return save_new_directory(SaveJob(path, Policy()), weights, trees or {}, **fields)


def test_a_removed_checkpoint_leaves_nothing(tmp_path):
    save(tmp_path / "checkpoint-1")
    remove_checkpoint(tmp_path / "checkpoint-1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_garbage_is_what_dead_processes_left_and_anchors_nobody_needs(tmp_path, dry_run):
    save(tmp_path / "checkpoint-1")
    before = sorted(tmp_path.rglob("*"))
    left = [
        tmp_path / "_trainweights-aa",
        tmp_path / "checkpoint-1" / "_trainweights-bb",
        tmp_path / "checkpoint-1" / ("0" * 64 + ".anchor"),
        tmp_path / "_trainweights-of-nobody",
    ]
    left[0].mkdir()
    for path in (left[0] / "file", *left[1:]):
        path.write_bytes(b"x")
    assert collect_garbage(tmp_path, dry_run=dry_run) == sorted(left)
    assert left[0].exists() == dry_run
    assert (sorted(tmp_path.rglob("*")) == before) != dry_run


def test_what_a_living_process_writes_is_no_garbage(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    claims = [claim_directory(tmp_path), claim_directory(tmp_path / "checkpoint-1")]
    assert collect_garbage(tmp_path) == []
    for claim in claims:
        claim.release()
    assert collect_garbage(tmp_path) == sorted(claim.path for claim in claims)


def test_beside_a_file_of_a_newer_version_no_anchor_is_garbage(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint-1")
    anchor = tmp_path / "checkpoint-1" / ("0" * 64 + ".anchor")
    anchor.write_bytes(b"x")
    monkeypatch.setattr("hf_trainweights.checkpoint.encoded.structure.VERSION", 99)
    assert collect_garbage(tmp_path) == []
    monkeypatch.undo()
    assert collect_garbage(tmp_path) == [anchor]


def test_garbage_that_is_a_link_goes_without_its_target(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"precious")
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "_trainweights-aa"
    link.symlink_to(tmp_path / "outside")
    assert collect_garbage(tmp_path / "run") == [link]
    assert (tmp_path / "outside" / "file").read_bytes() == b"precious"


def test_an_anchor_that_a_save_in_place_has_just_linked_is_no_garbage(tmp_path):
    save(tmp_path / "checkpoint-1")
    with rewriting(tmp_path / "checkpoint-1"):
        anchor = tmp_path / "checkpoint-1" / ("0" * 64 + ".anchor")
        anchor.write_bytes(b"x")
        assert collect_garbage(tmp_path) == []
        assert anchor.exists()
    assert collect_garbage(tmp_path) == [anchor]


@pytest.mark.parametrize(
    ("module", "moment"), [(whole_rewriting, "unused_anchors"), (checkpoint_directory, "remove_abandoned")]
)
def test_a_checkpoint_that_goes_while_garbage_is_collected_is_left_to_whoever_removes_it(
    tmp_path, monkeypatch, module, moment
):
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}")
        (tmp_path / f"checkpoint-{step}" / ("0" * 64 + ".anchor")).write_bytes(b"x")
    original = getattr(module, moment)

    def slow(directory, **options):
        if directory.name == "checkpoint-2":
            shutil.rmtree(directory)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        return original(directory, **options)

    monkeypatch.setattr(module, moment, slow)
    assert collect_garbage(tmp_path) == [tmp_path / "checkpoint-1" / ("0" * 64 + ".anchor")]


def chain(path):
    """A run of three rounded checkpoints, the last of which takes the weights of both others; without manifests."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(200, 200, generator=generator)
    for step in (1, 2, 3):
        state = state + 1e-3 * torch.randn(200, 200, generator=generator)
        weights = Weights({"w": state})
        job = SaveJob(path / f"checkpoint-{step}", Policy("compact"), anchor_every=10)
        save_new_directory(job, weights, {}, step=step)
        (path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    return sorted((path / "checkpoint-3").glob("*.anchor"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_default(range(4), range(20)))
@pytest.mark.parametrize("has_manifest", [True, False])
def test_no_anchor_of_a_run_goes_while_any_file_of_it_is_damaged(tmp_path, seed, has_manifest):
    anchors = chain(tmp_path)
    assert len(anchors) == 2
    rng = random.Random(seed)
    if not has_manifest:
        for step in (2, 3):
            (tmp_path / f"checkpoint-{step}" / "trainweights.json").unlink()
    orphan = tmp_path / "checkpoint-1" / ("0" * 64 + ".anchor")
    orphan.write_bytes(b"x")
    damaged = rng.choice([*anchors, tmp_path / "checkpoint-3" / "pytorch_model.bin"])
    content = bytearray(damaged.read_bytes())
    place = rng.randrange(min(len(content), 1400))
    if rng.random() < 0.5:
        content[place] ^= 1 << rng.randrange(8)
    else:
        del content[place]
    damaged.unlink()  # other checkpoints may have the same file
    damaged.write_bytes(content)
    with pytest.warns(UserWarning, match="All anchors stay.*checkpoint-3"):
        assert collect_garbage(tmp_path) == []
    assert sorted((tmp_path / "checkpoint-3").glob("*.anchor")) == anchors
    shutil.rmtree(tmp_path / "checkpoint-3")
    assert collect_garbage(tmp_path) == [orphan]
