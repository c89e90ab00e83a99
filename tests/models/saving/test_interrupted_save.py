"""save_pretrained over a model, stopped at every call: Transformers loads the old model, the new one, or none."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from covering import by_default
from forks import exit_code_of, fork
from simulated_disk import OUTCOMES, replay
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import TrainWeightsConfig, export_compressed_tensors, quantize_, quantize_directory, verify_model
from hf_trainweights.checkpoint import collect_garbage
from hf_trainweights.errors import SaveError
from hf_trainweights.files import disk
from hf_trainweights.files.disk import claim_directory
from hf_trainweights.files.staging import clean_up

# Each test saves and loads a model many times.
pytestmark = pytest.mark.slow

LLAMA = ARCHITECTURES["llama"]
SHARDED = {"max_shard_size": "32KB"}
BIN = {"safe_serialization": False}

Save = Callable[[Path], None]


def made(seed: int, form: str | None = "int8", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = LLAMA.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    if form is not None:
        quantize_(model, TrainWeightsConfig(form, group_size=32 if form == "int4" else None))
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def saved(model: PreTrainedModel, **options: Any) -> Save:
    return lambda directory: model.save_pretrained(directory, **options)


def exported(model: PreTrainedModel) -> Save:
    return lambda directory: export_compressed_tensors(model, directory, max_shard_size="32KB")


SAVES: dict[str, Callable[[], tuple[Save, Save]]] = {
    "one file, equal config": lambda: (saved(made(0)), saved(made(1))),
    "one file, another config": lambda: (saved(made(0)), saved(made(1, rms_norm_eps=0.5))),
    "int4 over int8": lambda: (saved(made(0)), saved(made(1, "int4"))),
    "quantized over float": lambda: (saved(made(0, None)), saved(made(1))),
    "dequantized over quantized": lambda: (saved(made(0)), saved(made(1).dequantize())),
    "shards": lambda: (saved(made(0), **SHARDED), saved(made(1), **SHARDED)),
    "bin": lambda: (saved(made(0), **BIN), saved(made(1), **BIN)),
    "bin shards over safetensors": lambda: (saved(made(0)), saved(made(1), **BIN, **SHARDED)),
    "exported shards over shards": lambda: (saved(made(0), **SHARDED), exported(made(1))),
}


# Nothing changes but weights, so that no loader meets an error in between.
WHOLE = ("one file, equal config", "shards", "bin", "bin shards over safetensors")
# Of each way to replace files, the one with the most of them.
DIFFERENT = ("one file, another config", "quantized over float", "shards", "bin shards over safetensors")


class Loader:
    """Loads what lies in a directory, once for equal contents."""

    def __init__(self, **options: Any):
        self._options = options
        self._known: dict[str, list[Tensor] | None] = {}

    def __call__(self, directory: Path) -> list[Tensor] | None:
        """Return the outputs of the model that lies there, None where loading it is an error."""
        digest = hashlib.sha256()
        for path in sorted(directory.rglob("*")):
            if path.is_file() and "_trainweights-" not in str(path.relative_to(directory)):
                digest.update(path.name.encode() + path.read_bytes())
        if digest.hexdigest() not in self._known:
            self._known[digest.hexdigest()] = self._load(directory)
        return self._known[digest.hexdigest()]

    def _load(self, directory: Path) -> list[Tensor] | None:
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, **self._options)
        except (OSError, ValueError):
            return None
        return list(outputs(model, LLAMA.make_inputs()))

    @property
    def different(self) -> int:
        """How many different contents were loaded."""
        return len(self._known)


def is_one_of(found: list[Tensor] | None, models: Iterator[list[Tensor] | None] | list[Any]) -> bool:
    return found is not None and any(all(map(torch.equal, found, model)) for model in models if model is not None)


@pytest.mark.parametrize("name", by_default(DIFFERENT, SAVES))
def test_at_every_moment_the_old_model_loads_or_the_new_one_or_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, load = tmp_path / "root", Loader()
    directory = root / "model"
    save_old, save_new = SAVES[name]()
    save_old(directory)
    old = load(directory)
    shutil.copytree(directory, tmp_path / "new")
    save_new(tmp_path / "new")
    new = load(tmp_path / "new")
    assert not is_one_of(old, [new])
    found = []
    for when in replay(root, lambda: save_new(directory), monkeypatch):
        found.append(load(directory))
        assert found[-1] is None or is_one_of(found[-1], [old, new]), when
        clean_up(directory)
        assert is_one_of(load(directory), [old, new]), when
    assert all(is_one_of(each, [new]) for each in found[-len(OUTCOMES) :])
    assert load.different > 2
    if name in WHOLE:
        assert all(each is not None for each in found)


def test_a_variant_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, load = tmp_path / "root", Loader(variant="v")
    directory = root / "model"
    made(2).save_pretrained(directory)
    made(0).save_pretrained(directory, variant="v", **SHARDED)
    old, plain = load(directory), (directory / "model.safetensors").read_bytes()
    shutil.copytree(directory, tmp_path / "new")
    made(1).save_pretrained(tmp_path / "new", variant="v", **SHARDED)
    new, changed = load(tmp_path / "new"), made(1)
    for when in replay(root, lambda: changed.save_pretrained(directory, variant="v", **SHARDED), monkeypatch):
        loaded = load(directory)
        assert loaded is None or is_one_of(loaded, [old, new]), when
        assert (directory / "model.safetensors").read_bytes() == plain, when
        clean_up(directory)
        assert is_one_of(load(directory), [old, new]), when


def test_a_quantized_copy_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    root.mkdir()
    made(0, None).save_pretrained(tmp_path / "float")
    quantize = lambda: quantize_directory(tmp_path / "float", root / "int8", TrainWeightsConfig("int8"))  # noqa: E731
    appeared = []
    for when in replay(root, quantize, monkeypatch):
        appeared.append((root / "int8").exists())
        assert not appeared[-1] or verify_model(root / "int8").ok, when
        clean_up(root)
        assert [path.name for path in root.iterdir()] == ["int8"] * appeared[-1], when
    assert appeared[-len(OUTCOMES) :] == [True] * len(OUTCOMES)


@pytest.mark.parametrize("options", [SHARDED, {**BIN, **SHARDED}], ids=["safetensors", "bin"])
def test_a_disk_that_fails_between_two_shards_mixes_no_models(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingDisk(disk.FileSystem):
        shards = 0

        def rename(self, source: Path, target: Path) -> None:
            if target.parent == tmp_path and "-of-" in target.name:
                self.shards += 1
                if self.shards == 3:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().rename(source, target)

    made(0).save_pretrained(tmp_path, **options)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(disk, "file_system", FailingDisk())
        with pytest.raises(SaveError, match="Nothing was changed there"):
            made(1).save_pretrained(tmp_path, **options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class DeadlyDisk(disk.FileSystem):
    """Kills its process at one of the calls of one name."""

    def __init__(self, call: str, number: int):
        self.call = call
        self.left = number

    def __getattribute__(self, name: str) -> Any:
        if name == super().__getattribute__("call"):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


def kill(save: Save, directory: Path, call: str, number: int) -> None:
    """Save in a process that dies at that call."""

    def work() -> None:
        disk.file_system = DeadlyDisk(call, number)
        save(directory)

    assert exit_code_of(fork(work)) == -signal.SIGKILL


def leftovers(directory: Path) -> list[Path]:
    return list(directory.rglob("_trainweights-*"))


KILLED = ["int4 over int8", "shards", "bin", "bin shards over safetensors", "exported shards over shards"]


# While the new files are forced to the disk, and while they move.
@pytest.mark.covering(1)
@pytest.mark.parametrize(("call", "number"), [("sync_file", 1), ("rename", 3)])
@pytest.mark.parametrize("name", KILLED)
def test_what_a_killed_save_leaves_is_removed_by_the_next_save_and_by_gc(
    name: str, call: str, number: int, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    save_old, save_new = SAVES[name]()
    save_old(directory)
    names = {path.name for path in directory.iterdir()}
    kill(save_new, directory, call, number)
    assert leftovers(directory)
    collect_garbage(directory)
    assert {path.name for path in directory.iterdir()} == names
    kill(save_new, directory, call, number)
    assert leftovers(directory)
    save_new(directory)
    assert not leftovers(tmp_path)
    assert name.startswith("exported") or verify_model(directory).ok


def test_a_save_leaves_alone_what_a_living_one_writes(tmp_path: Path) -> None:
    made(0).save_pretrained(tmp_path)
    kill(saved(made(1)), tmp_path, "rename", 1)
    dead = leftovers(tmp_path)
    claim = claim_directory(tmp_path)
    (claim.path / "weights").write_bytes(b"on their way")
    made(1).save_pretrained(tmp_path)
    assert dead
    assert leftovers(tmp_path) == [claim.path]
    assert (claim.path / "weights").read_bytes() == b"on their way"
    claim.release()
    made(1).save_pretrained(tmp_path)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(("call", "number"), [("mkdir", 2), ("sync_file", 1), ("rename", 1)])
def test_what_a_killed_copy_leaves_beside_its_target_is_removed_by_the_next(
    call: str, number: int, tmp_path: Path
) -> None:
    made(0, None).save_pretrained(tmp_path / "float")
    quantize = lambda out: quantize_directory(tmp_path / "float", out, TrainWeightsConfig("int8"))  # noqa: E731
    kill(quantize, tmp_path / "int8", call, number)
    assert leftovers(tmp_path)
    claim = claim_directory(tmp_path)
    quantize(tmp_path / "int8")
    assert {path.name for path in tmp_path.iterdir()} == {"float", "int8", claim.path.name}
    claim.release()


def test_kills_at_any_time_leave_one_model_or_the_other(tmp_path: Path) -> None:
    models, directory, load = [made(0), made(1)], tmp_path / "model", Loader()
    whole = []
    for model in models:
        model.save_pretrained(directory, **SHARDED)
        whole.append(load(directory))

    def save_again_and_again() -> None:
        while True:
            for model in models:
                model.save_pretrained(directory, **SHARDED)

    for number in range(0, 12, 2):
        child = fork(save_again_and_again)
        time.sleep(0.05 + 0.023 * number)
        os.kill(child, signal.SIGKILL)
        assert exit_code_of(child) == -signal.SIGKILL
        loaded = load(directory)
        assert loaded is None or is_one_of(loaded, whole)
        clean_up(directory)
        assert is_one_of(load(directory), whole)
    models[0].save_pretrained(directory, **SHARDED)
    assert not list(directory.glob("_trainweights-*"))
    assert is_one_of(load(directory), whole[:1])
