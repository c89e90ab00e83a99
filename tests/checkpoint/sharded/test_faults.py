"""Damaged, incomplete and hostile sharded checkpoints: typed errors on every rank, and no code from a file runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded.states import (
    differing,
    empty_state,
    failures,
    load,
    save,
    sharded,
    whole_state,
    without_process_group,
)
from helpers import flip_a_bit
from ranks import run_ranks
from torch.distributed.checkpoint.planner import SavePlan

from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, FileEntry, read_manifest, write_manifest
from hf_trainweights.distributed import TrainWeightsReader, TrainWeightsWriter
from hf_trainweights.errors import (
    ConfigError,
    CorruptFileError,
    MissingAnchorError,
    SaveError,
    TrainWeightsError,
    UnstorableError,
    UnsupportedError,
)
from hf_trainweights.files.reading import sign_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]

MODE = "near-lossless"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint against an anchor, which lies in no other directory any more."""
    directory = tmp_path_factory.mktemp("sound")
    with without_process_group():
        save(directory / "0", whole_state(0), MODE)
        save(directory / "1", whole_state(1), MODE, anchor=directory / "0")
    shutil.rmtree(directory / "0")
    return directory / "1"


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy, beside which no anchor is found elsewhere."""
    monkeypatch.setattr(reader, "_directories", {})
    path = Path(shutil.copytree(sound, tmp_path / "checkpoint"))
    monkeypatch.setattr(
        reader,
        "anchor_paths",
        lambda sha256, _: [directory / f"{sha256}{ANCHOR_SUFFIX}" for directory in reader._directories],
    )
    return path


def error_of(path: Path) -> BaseException:
    """Return what a load raises, as its caller finds it in DCP's exception."""
    return failures(lambda: load(path, state=empty_state()))[0]


def resigned(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it a right digest."""
    content = json.loads((path / MANIFEST_NAME).read_text())
    change(content)
    (path / MANIFEST_NAME).write_bytes(sign_json(content))


def row_of(manifest: dict[str, Any], ending: str) -> dict[str, Any]:
    rows = [row for entry in manifest["files"].values() for row in entry["report"].get("tensors", ())]
    return next(row for row in rows if row["path"].endswith(ending))


def unlink(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def truncate(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 100)


def change(**fields: Any) -> Callable[[Path], None]:
    return lambda path: resigned(path, lambda manifest: manifest.update(fields))


def change_sharded(key: str, value: Any) -> Callable[[Path], None]:
    return lambda path: resigned(path, lambda manifest: manifest["sharded"].update({key: value}))


def change_row(ending: str, **fields: Any) -> Callable[[Path], None]:
    return lambda path: resigned(path, lambda manifest: row_of(manifest, ending).update(fields))


def change_tensor(name: str, text: Any) -> Callable[[Path], None]:
    return lambda path: resigned(path, lambda manifest: manifest["sharded"]["tensors"].update({name: text}))


def rename_file(path: Path) -> None:
    def escape(manifest: dict[str, Any]) -> None:
        manifest["files"]["../x.distcp"] = manifest["files"].pop("__0_0.distcp")

    resigned(path, escape)


def damage_anchor(path: Path) -> None:
    (anchor,) = path.glob("*.anchor")
    flip_a_bit(anchor)


def put_link(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.rename(path / "elsewhere")
    file.symlink_to(path / "elsewhere")


def lay_over(path: Path) -> None:
    """Say that two tensors are the upper half of one, whose lower half is missing."""

    def change(manifest: dict[str, Any]) -> None:
        for ending in ("up.weight", "gate.weight"):
            row_of(manifest, f"model.{ending}").update(path="model.w", shard="0:2,0:2")
            del manifest["sharded"]["tensors"][f"model.{ending}"]
        manifest["sharded"]["tensors"]["model.w"] = "float32[4,2]"

    resigned(path, change)


def take_bytes_of_another(path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        other = row_of(manifest, "model.norm.weight")
        row_of(manifest, "model.up.weight").update(bytes=other["bytes"], crc32=other["crc32"])

    resigned(path, change)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no metadata": (unlink(".metadata"), r"complete checkpoint, found no \.metadata. Its save was interrupted"),
    "no manifest": (unlink(MANIFEST_NAME), "FileSystemReader reads it"),
    "no shard": (unlink("__0_0.distcp"), "__0_0.distcp: expected a file of .* bytes, found no file"),
    "no file of states": (unlink("__0_1.distcp"), "__0_1.distcp: expected a file of .* bytes, found no file"),
    "truncated shard": (truncate("__0_1.distcp"), "__0_1.distcp: expected a file of .* bytes, found .* bytes"),
    "truncated manifest": (truncate(MANIFEST_NAME), "a manifest"),
    "link instead of a file": (put_link, "__0_0.distcp"),
    "damaged anchor": (damage_anchor, "an anchor named by its SHA-256"),
    "newer manifest": (change(format_version=2), "version 2"),
    "newer sharding": (change_sharded("version", 2), r"sharded\.version: expected version 1, found 2. Upgrade"),
    "of one process": (change(sharded={}), "not sharded.* FileSystemReader reads a plain one"),
    "file outside": (rename_file, "relative file names inside the directory"),
    "no tensors": (change_sharded("tensors", []), "tensors and keys"),
    "unknown dtype": (change_tensor("model.embed.weight", "float33[2]"), "a dtype and a shape"),
    "another shape": (change_tensor("model.embed.weight", "float32[131,96]"), r"shards that together are"),
    "smaller shape": (change_tensor("model.embed.weight", "float32[129,96]"), r"shards that together are"),
    "shape of fewer dimensions": (change_tensor("model.embed.weight", "float32[12480]"), r"shards that together are"),
    "shards one over another": (lay_over, r"model\.w'\]: expected shards that together are float32\[4,2\], none over"),
    "tensor without shards": (change_tensor("model.more", "float32[5]"), r"shards that together are"),
    "object without an item": (change_tensor("more", "object"), "one item of that object"),
    "item of an unknown tensor": (change_row("model.up.weight", path="unknown"), "shards that together are"),
    "object of an unknown name": (change_row("progress.save", path="unknown"), "an entry that fits the item unknown"),
    "range beyond the file": (change_row("model.up.weight", bytes="0:99999999"), "a range within"),
    "range that is none": (change_row("model.up.weight", bytes="5:3"), "a range such as"),
    "no range": (change_row("model.up.weight", bytes=None), "a range of bytes"),
    "wrong checksum": (change_row("model.up.weight", crc32=1), "crc32 1"),
    "bytes of another item": (
        take_bytes_of_another,
        r"the shard that the manifest names, .* found one of shape \(96,\)",
    ),
    "shard that is none": (change_row("model.up.weight", shard="0:96,x"), "a range such as"),
    "shard of a number": (change_row("model.up.weight", shard=3), "a slice such as"),
    "keys that are none": (change_sharded("keys", {"model.embed.weight": "[1.5]"}), "strings and integers"),
    "deep keys": (change_sharded("keys", {"model.embed.weight": "[" * 100_000}), "strings and integers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_a_typed_error_that_says_where(checkpoint: Path, fault: str) -> None:
    damage, text = FAULTS[fault]
    damage(checkpoint)
    with pytest.raises(CorruptFileError, match=text):
        raise error_of(checkpoint)


def test_the_undamaged_checkpoint_loads(checkpoint: Path) -> None:
    loaded = load(checkpoint, state=empty_state())
    assert loaded["progress"] == whole_state(1)["progress"]


def test_a_missing_anchor_is_a_typed_error_and_found_in_another_checkpoint_of_the_run(checkpoint: Path) -> None:
    (anchor,) = checkpoint.glob("*.anchor")
    elsewhere = checkpoint.parent / "other"
    elsewhere.mkdir()
    anchor.rename(elsewhere / anchor.name)
    with pytest.raises(MissingAnchorError, match=anchor.name):
        raise error_of(checkpoint)
    reader.register_anchor_directory(elsewhere)
    assert load(checkpoint, state=empty_state())["progress"]["save"] == 1


def test_no_flipped_bit_changes_what_is_loaded(checkpoint: Path) -> None:
    expected = load(checkpoint, state=empty_state())
    pick = random.Random(0)
    files = [checkpoint / "__0_0.distcp", checkpoint / "__0_1.distcp", checkpoint / MANIFEST_NAME]
    errors = 0
    for turn in range(60):
        file = files[turn % 3]
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[pick.randrange(len(damaged))] ^= 1 << pick.randrange(8)
        file.write_bytes(damaged)
        found: dict[str, Any] = {}
        raised = failures(lambda found=found: found.update(load(checkpoint, state=empty_state())))
        assert all(isinstance(error, CorruptFileError) for error in raised.values())
        assert raised or differing(found, expected) == []
        errors += len(raised)
        file.write_bytes(content)
    assert errors >= 55


def test_shards_of_another_save_are_refused_even_if_their_sizes_fit(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other, whole_state(2), MODE)
    content = (other / "__0_1.distcp").read_bytes()
    size_bytes = (checkpoint / "__0_1.distcp").stat().st_size
    (checkpoint / "__0_1.distcp").write_bytes(content[:size_bytes].ljust(size_bytes, b"\0"))
    with pytest.raises(CorruptFileError, match=r"__0_1\.distcp, from byte 0 on: expected crc32"):
        raise error_of(checkpoint)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_digest_with_a_path_in_it_puts_no_anchor_outside_of_the_next_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    (anchor,) = checkpoint.glob("*.anchor")
    outside = anchor.rename(tmp_path / anchor.name)

    def escape(manifest: dict[str, Any]) -> None:
        files = manifest["sharded"]["anchor"]["files"]
        (own,) = files  # a rounded checkpoint is itself the anchor of the next one
        files[f"../{outside.stem}"] = files.pop(own)

    resigned(checkpoint, escape)
    save(tmp_path / "run" / "2", whole_state(2), MODE, anchor=checkpoint)
    assert not list((tmp_path / "run").rglob("*.anchor"))


def test_a_hostile_metadata_pickle_is_not_executed(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    assert load(checkpoint, state=empty_state())["progress"]["save"] == 1
    assert not mark.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert mark.exists()  # so the check above can fail


@pytest.mark.parametrize("name", ["progress.save", "model.embed.weight", "optim.state.embed.weight.exp_avg"])
def test_a_hostile_item_is_not_executed_though_all_digests_fit(checkpoint: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    buffer = io.BytesIO()
    torch.save(Hostile(mark), buffer)
    manifest = read_manifest(checkpoint)
    file_name, row = next(
        (file_name, row)
        for file_name, entry in manifest.files.items()
        for row in entry.report.get("tensors", ())
        if row["path"] == name
    )
    content = (checkpoint / file_name).read_bytes() + buffer.getvalue()
    (checkpoint / file_name).write_bytes(content)
    row["bytes"] = f"{len(content) - len(buffer.getvalue())}:{len(content)}"
    row["crc32"] = zlib.crc32(buffer.getvalue())
    entry = FileEntry(len(content), hashlib.sha256(content).hexdigest(), manifest.files[file_name].report)
    files = {**manifest.files, file_name: entry}
    write_manifest(checkpoint, replace(manifest, files=files))
    with pytest.raises(CorruptFileError, match=f"{name}: expected a file that torch.load reads"):
        raise error_of(checkpoint)
    assert not mark.exists()


def test_metadata_that_cannot_be_read_raises_when_it_is_used(tmp_path: Path) -> None:
    metadata = TrainWeightsReader(tmp_path / "missing").read_metadata()
    with pytest.raises(CorruptFileError, match="a complete checkpoint"):
        _ = metadata.state_dict_metadata


def saves_what_is_wrong(rank: int, path: Path) -> list[str]:
    texts = []
    wrong: list[dict[str, Any]] = [
        {"rules": {"layers.7": "raw"}},
        {"metadata": {"key": object()}},
        {"overwrite": False},
    ]
    for options in wrong:
        texts.append(typed(lambda options=options: save(path, sharded(whole_state()), **options)))
    state = {**sharded(whole_state()), "object": Hostile(path)}
    texts.append(typed(lambda: save(path, state)))
    return texts


def typed(action: Callable[[], object]) -> str:
    """Return the errors that DCP's exception holds on this rank, each with the rank that failed."""
    errors = failures(action)
    assert all(isinstance(error, TrainWeightsError) for error in errors.values())
    return "\n".join(f"rank {rank}, {type(error).__name__}: {error}" for rank, error in errors.items())


def test_what_cannot_be_saved_is_the_same_typed_error_on_every_rank(tmp_path: Path) -> None:
    with without_process_group():
        save(tmp_path / "checkpoint", whole_state())
    first, second = run_ranks(2, saves_what_is_wrong, tmp_path / "checkpoint")
    assert first == second
    kinds = [ConfigError, ConfigError, SaveError, UnstorableError]
    assert [kind.__name__ in text for kind, text in zip(kinds, first, strict=True)] == [True] * 4
    assert "layers.7" in first[0]
    assert "overwrite" in first[2]
    assert "object: expected plain data, found a call of " in first[3]
    assert "pathlib" in first[3]  # and not torch's advice to load it without trust
    assert load(tmp_path / "checkpoint", state=empty_state())["progress"]["save"] == 0


def loads_what_is_wrong(rank: int, path: Path) -> str:
    return typed(lambda: load(path))


def saves_for_two(rank: int, path: Path) -> None:
    save(path, sharded(whole_state()))


@pytest.mark.parametrize("fault", ["no metadata", "no shard", "truncated shard", "truncated manifest"])
def test_damage_is_the_same_typed_error_on_every_rank(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(2, saves_for_two, path)
    damage, _ = FAULTS[fault]
    damage(path)
    first, second = run_ranks(2, loads_what_is_wrong, path)
    assert first == second
    assert "CorruptFileError" in first


def test_damage_that_one_rank_reads_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(2, saves_for_two, path)
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    for at in range(0, len(content), 50):
        content[at] ^= 1
    file.write_bytes(content)
    first, second = run_ranks(2, loads_what_is_wrong, path)
    assert first == second
    assert "rank 1, CorruptFileError" in first
    assert "__1_0.distcp" in first


def test_a_save_without_collectives_or_with_kept_plans_is_refused(tmp_path: Path) -> None:
    writer = TrainWeightsWriter(tmp_path / "checkpoint")
    writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(UnsupportedError, match="one manifest lists the files of all ranks"):
        writer.prepare_local_plan(SavePlan([]))
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    with pytest.raises(UnsupportedError, match="enable_plan_caching"):
        writer.prepare_local_plan(SavePlan([], usable=False))


@pytest.mark.parametrize("step", [torch.tensor(3), "3", 3.0, True], ids=lambda step: type(step).__name__)
def test_a_step_that_no_reader_would_take_is_refused_before_the_save(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ConfigError, match="step: expected an integer, or None"):
        TrainWeightsWriter(tmp_path / "checkpoint", step=step)
