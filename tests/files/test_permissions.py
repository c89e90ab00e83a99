"""What a writer replaces keeps its permissions, whichever writer it is; what is new has those of the process."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoint.sharded_states import sample_state, save_plain
from safetensors.torch import save_file as save_plain_file
from torch import nn
from trees import trained

from hf_trainweights import quantize_, quantize_directory, save_file
from hf_trainweights.checkpoint import compress_directory, restore_directory
from hf_trainweights.checkpoint.whole.rewriting import replace_weights
from hf_trainweights.exports import export_compressed_tensors
from hf_trainweights.files import atomic, disk
from hf_trainweights.files.staging import staged_files
from hf_trainweights.report.write import write_report

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no such permissions")


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes_of(directory: Path) -> dict[str, int]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in files}


def set_modes(directory: Path, mode: int) -> None:
    for name in modes_of(directory):
        (directory / name).chmod(mode)


def quantized_llama() -> Any:
    model = ARCHITECTURES["llama"].build()
    quantize_(model, "int8")
    return model


def save_linear(directory: Path) -> None:
    save_file(nn.Linear(4, 4), directory / "layer.safetensors")


def save_training_state(directory: Path) -> None:
    model, optimizer, _ = trained("AdamW")
    save_plain_file(model.state_dict(), directory / "model.safetensors")
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    (directory / "trainer_state.json").write_text('{"global_step": 5, "epoch": 1.0}')


# What is there at first, and what is called then.
WRITERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "save_file": (save_linear, save_linear),
    "save_pretrained": (lambda d: quantized_llama().save_pretrained(d), lambda d: quantized_llama().save_pretrained(d)),
    "shards": (
        lambda d: quantized_llama().save_pretrained(d, max_shard_size="50KB"),
        lambda d: quantized_llama().save_pretrained(d),
    ),
    "bin": (
        lambda d: quantized_llama().save_pretrained(d, safe_serialization=False),
        lambda d: quantized_llama().save_pretrained(d, safe_serialization=False),
    ),
    "bin-by-shards": (
        lambda d: quantized_llama().save_pretrained(d, safe_serialization=False),
        lambda d: quantized_llama().save_pretrained(d, max_shard_size="50KB"),
    ),
    "compressed-tensors": (
        lambda d: quantized_llama().save_pretrained(d),
        lambda d: export_compressed_tensors(quantized_llama(), d),
    ),
    "report": (
        lambda d: (d / "report.html").touch(),
        lambda d: write_report(quantized_llama(), d / "report.html"),
    ),
    "compress": (save_training_state, compress_directory),
    "compress-again": (
        lambda d: (save_training_state(d), compress_directory(d)),
        lambda d: compress_directory(d, mode="near-lossless"),
    ),
    "restore": (lambda d: (save_training_state(d), compress_directory(d)), restore_directory),
    "replace-weights": (save_training_state, lambda d: replace_weights(d, {"weight": torch.ones(2)})),
    "compress-dcp": (lambda d: save_plain(sample_state(), d), compress_directory),
    "restore-dcp": (lambda d: (save_plain(sample_state(), d), compress_directory(d)), restore_directory),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", [0o600, 0o664], ids=oct)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_replaced_keeps_its_permissions(name: str, mode: int, tmp_path: Path) -> None:
    before, write = WRITERS[name]
    # DCP removes and makes the directory itself.
    directory = tmp_path / "model"
    if name not in ("compress-dcp", "restore-dcp"):
        directory.mkdir()
    before(directory)
    set_modes(directory, mode)
    names = modes_of(directory).keys()
    write(directory)
    modes = modes_of(directory)
    weights = {name for name in modes if Path(name).suffix in (".safetensors", ".bin", ".distcp")}
    assert {name: oct(modes[name]) for name in modes if name in {*names, *weights} and modes[name] != mode} == {}
    # Such as a manifest where none was.
    assert {oct(modes[name]) for name in modes.keys() - names - weights} <= {oct(0o644), oct(mode)}


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o640], ids=oct)
def test_a_file_has_the_permissions_of_the_one_before_from_its_first_byte_on(mode: int, tmp_path: Path) -> None:
    (tmp_path / "old").touch(mode)
    (tmp_path / "old").chmod(mode)
    for name, also in (("old", []), ("new", [tmp_path / "old", tmp_path / "gone"])):
        with atomic.replace_file(tmp_path / name, also) as file:
            file.write(b"secret")
            file.flush()
            (temporary,) = tmp_path.glob("_trainweights-*")
            assert stat.S_IMODE(temporary.stat().st_mode) == mode
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_file_in_place_of_several_grants_what_all_of_them_granted(tmp_path: Path) -> None:
    for name, mode in (("a", 0o640), ("b", 0o604)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    with atomic.replace_file(tmp_path / "new", [tmp_path / "a", tmp_path / "b"]):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_that_the_process_gives(mask: int, tmp_path: Path) -> None:
    os.umask(mask)
    with staged_files(tmp_path, lambda _: True) as staged:
        (staged.path / "new").touch()
    with atomic.replace_file(tmp_path / "alone"):
        pass
    assert set(modes_of(tmp_path).values()) == {0o666 & ~mask}


@pytest.mark.parametrize(("mode", "open_to"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o664, 0o755)])
def test_nobody_who_may_not_read_the_old_files_reads_the_new_ones_meanwhile(
    mode: int, open_to: int, tmp_path: Path
) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(mode)
    with staged_files(tmp_path, lambda _: True) as staged:
        assert stat.S_IMODE(staged.path.stat().st_mode) == open_to
        (staged.path / "new").touch()
    assert modes_of(tmp_path) == {"new": mode}


def test_a_copy_in_place_of_a_link_has_the_permissions_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Path) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(disk.file_system, "link", refuse)
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o600)
    atomic.link_or_copy(tmp_path / "file", tmp_path / "copy")
    assert modes_of(tmp_path) == {"file": 0o600, "copy": 0o600}


@pytest.mark.slow
def test_a_directory_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path / "float")
    for mode in (0o700, 0o775, 0o2770):
        out = tmp_path / f"{mode}"
        out.mkdir()
        out.chmod(mode)
        quantize_directory(tmp_path / "float", out, "int8")
        assert stat.S_IMODE(out.stat().st_mode) == mode
    quantize_directory(tmp_path / "float", tmp_path / "new", "int8")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o755
