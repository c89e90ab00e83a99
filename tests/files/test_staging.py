"""Files that replace a model in its directory: at every moment a loader finds the old one, the new one, or none."""

import errno
import hashlib
import json
import os
import shutil
import signal
import time

import pytest
from covering import by_default, exhaustive
from forks import exit_code_of, fork
from simulated_disk import OUTCOMES, FailingDisk, replay

from hf_trainweights.errors import SaveError
from hf_trainweights.files import disk
from hf_trainweights.files.staging import clean_up, staged_files
from hf_trainweights.files.weight_files import ENTRY_POINTS, bin_name, is_weight_file, shard_names


def model(letter, *, shards=0, is_bin=False, variant=None, config=None):
    """Return the files of a model, each of which says whose it is."""
    stem = f"model.{variant}" if variant else "model"
    index = f"model.safetensors.index.{variant}.json" if variant else "model.safetensors.index.json"
    files = {"trainweights_files.json": letter} | dict.fromkeys(["config.json", "templates/chat.txt"], config or letter)
    own = hashlib.sha256(letter.encode()).hexdigest()[:8]
    names = [f"{stem}-{own}-{number:05}-of-{shards:05}.safetensors" for number in range(shards)]
    names = names or [f"{stem}.safetensors"]
    if is_bin:
        names, index = [bin_name(name) for name in names], bin_name(index)
    files |= {name: f"{letter} {name}" for name in names}
    if shards:
        files[index] = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}, "of": letter})
    return {name: text.encode() for name, text in files.items()}


def write(directory, files):
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def save(directory, files, variant=None):
    with staged_files(directory, lambda name: is_weight_file(name, variant)) as staged:
        write(staged.path, files)
    return staged.names


def seen(directory, variant=None):
    """Return what a loader reads, by name, in Transformers' order; None where it finds no model or misses a shard."""
    entries = [name.replace("model.", f"model.{variant}.", 1) if variant else name for name in ENTRY_POINTS]
    if variant:
        entries[1::2] = [name.replace(".json", f".{variant}.json") for name in ENTRY_POINTS[1::2]]
    entry = next((directory / name for name in entries if (directory / name).exists()), None)
    if entry is None:
        return None
    names = [entry.name, *(shard_names(entry) if entry.suffix == ".json" else []), "config.json", "templates/chat.txt"]
    if not all((directory / name).exists() for name in names):
        return None
    return {name: (directory / name).read_bytes() for name in names}


def tree(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


# No loader meets an error in between: nothing changes but weights.
WHOLE = {
    "one file over one, equal config": (model("A", config="C"), model("B", config="C")),
    "shards over as many, equal config": (model("A", shards=3, config="C"), model("B", shards=3, config="C")),
    "shards over one file, equal config": (model("A", config="C"), model("B", shards=2, config="C")),
    "one file over shards, equal config": (model("A", shards=2, config="C"), model("B", config="C")),
    "bin shards over safetensors, equal config": (
        model("A", shards=2, config="C"),
        model("B", shards=2, is_bin=True, config="C"),
    ),
    "one over two families, equal config": (
        model("X", shards=2, is_bin=True, config="C") | model("A", config="C"),
        model("B", shards=2, config="C"),
    ),
}
SAVES = WHOLE | {
    "one file over one": (model("A"), model("B")),
    "shards over as many": (model("A", shards=3), model("B", shards=3)),
    "fewer shards": (model("A", shards=3), model("B", shards=2)),
    "more shards": (model("A", shards=2), model("B", shards=3)),
    "shards over one file": (model("A"), model("B", shards=2)),
    "one file over shards": (model("A", shards=2), model("B")),
    "bin over safetensors": (model("A", shards=2), model("B", is_bin=True)),
    "safetensors over bin": (model("A", is_bin=True), model("B", shards=2)),
    "bin over bin": (model("A", shards=2, is_bin=True), model("B", shards=2, is_bin=True)),
    "one over two families": (model("X", shards=2, is_bin=True) | model("A"), model("B", shards=2)),
    "into an empty directory": ({}, model("B", shards=2)),
}


# Of each way to replace files, the one with the most of them.
DIFFERENT = (
    *("shards over as many, equal config", "bin shards over safetensors, equal config", "fewer shards"),
    *("one over two families", "into an empty directory"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(DIFFERENT, SAVES))
def test_a_loader_finds_the_old_model_the_new_one_or_none_at_every_moment(tmp_path, monkeypatch, name):
    old, new = SAVES[name]
    root, expected = tmp_path / "root", tmp_path / "expected"
    directory = root / "model"
    write(directory, old)
    directory.mkdir(parents=True, exist_ok=True)
    write(expected, {key: content for key, content in old.items() if not is_weight_file(key)} | new)
    models = [seen(directory), seen(expected)]
    actual, mended = [], []
    for when in replay(root, lambda: save(directory, new), monkeypatch):
        now = seen(directory)
        assert now is None or now in models, when
        actual.append(now)
        clean_up(directory)
        assert not list(directory.glob("_trainweights-*")), when
        assert seen(directory) in models, when
        mended.append(seen(directory))
    assert actual[-len(OUTCOMES) :] == [models[1]] * len(OUTCOMES)
    assert mended[-len(OUTCOMES) :] == [models[1]] * len(OUTCOMES)
    assert name not in WHOLE or None not in actual


@pytest.mark.slow
def test_a_variant_is_replaced_at_every_moment_as_a_whole(tmp_path, monkeypatch):
    old, new = (model(letter, shards=2, variant="fp16", config="C") for letter in "AB")
    root, directory = tmp_path / "root", tmp_path / "root" / "model"
    write(directory, model("P", config="C") | old)
    write(tmp_path / "expected", new)
    plain = (directory / "model.safetensors").read_bytes()
    models = [seen(directory, "fp16"), seen(tmp_path / "expected", "fp16")]
    for when in replay(root, lambda: save(directory, new, "fp16"), monkeypatch):
        assert seen(directory, "fp16") in models, when
        assert (directory / "model.safetensors").read_bytes() == plain, when
        clean_up(directory)
        last = seen(directory, "fp16")
        assert last in models, when
    assert last == models[1]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
@pytest.mark.parametrize(
    "name",
    [
        *exhaustive("one file over one, equal config"),
        "bin shards over safetensors, equal config",
        *exhaustive("one file over one"),
        "fewer shards",
    ],
)
def test_a_failing_disk_leaves_the_old_model(tmp_path, monkeypatch, name, number, for_good):
    old, new = SAVES[name]
    directory = tmp_path / "model"
    write(directory, new)
    after = seen(directory)
    for fail_at in range(1, 1000):
        shutil.rmtree(directory, ignore_errors=True)
        write(directory, old)
        before, failing, message = seen(directory), FailingDisk(fail_at, number, for_good=for_good), None
        with monkeypatch.context() as patch:
            patch.setattr(disk, "file_system", failing)
            try:
                save(directory, new)
            except SaveError as error:
                message = str(error)
        if failing.count < fail_at:
            break
        assert message is None or os.strerror(number) in message
        now = tree(directory)
        if message is None:  # nothing but the removal of the staging directory failed
            assert seen(directory) != before
        elif "Nothing was changed there" in message:
            assert {name: content for name, content in now.items() if not name.startswith("_trainweights-")} == old
        else:
            assert "They are kept in" in message
            assert seen(directory) in (None, before, after)
        clean_up(directory)
        assert tree(directory) == (new if message is None else old)
    assert message is None
    assert fail_at > 20
    assert tree(directory) == new


def test_a_damaged_shard_is_replaced_by_the_whole_one_of_its_name(tmp_path):
    files = model("A", shards=2)
    write(tmp_path, files)
    shard = next(name for name in files if "-of-" in name)
    (tmp_path / shard).write_bytes(files[shard][:-1] + b"?")
    save(tmp_path, files)
    assert tree(tmp_path) == files


def test_an_error_in_the_block_leaves_everything_as_it_was(tmp_path):
    write(tmp_path, model("A"))
    before = tree(tmp_path)

    def interrupt():
        with staged_files(tmp_path, is_weight_file) as staged:
            write(staged.path, model("B"))
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        interrupt()
    assert tree(tmp_path) == before


def test_files_of_an_earlier_save_go_only_where_new_ones_of_their_kind_come(tmp_path):
    write(tmp_path, model("A", shards=2))
    assert save(tmp_path, {"adapter_model.safetensors": b"adapter"}) == ["adapter_model.safetensors"]
    assert tree(tmp_path) == model("A", shards=2) | {"adapter_model.safetensors": b"adapter"}
    assert save(tmp_path, model("B")) == sorted(model("B"))
    assert tree(tmp_path) == model("B") | {"adapter_model.safetensors": b"adapter"}


@pytest.mark.slow
def test_the_next_save_puts_back_and_removes_what_a_killed_one_left(tmp_path):
    def die_in_a_save():
        with staged_files(tmp_path, is_weight_file) as staged:
            write(staged.path, model("A"))
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_of(fork(die_in_a_save)) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    save(tmp_path, model("B"))
    assert tree(tmp_path) == model("B")


def test_a_living_save_is_not_disturbed_and_a_second_one_is_refused(tmp_path):
    with staged_files(tmp_path, is_weight_file) as staged:
        write(staged.path, model("A"))
        assert clean_up(tmp_path) == []
        with pytest.raises(SaveError, match=r"one save at a time.*another save into it running"):
            save(tmp_path, model("B"))
    assert tree(tmp_path) == model("A")


@pytest.mark.slow
def test_kills_at_any_time_leave_a_whole_model_after_the_next_clean_up(tmp_path):
    models = [SAVES["fewer shards"][0], SAVES["fewer shards"][1]]
    directory = tmp_path / "model"
    save(directory, models[0])
    whole = [seen(directory)]
    save(directory, models[1])
    whole.append(seen(directory))
    results = []

    def save_again_and_again():
        while True:
            for files in models:
                save(directory, files)

    # Ten kills at least, and more where a busy machine lets only one of the models be finished in them.
    while len(results) < 10 or not all(each in results for each in whole):
        child = fork(save_again_and_again)
        time.sleep(0.02 + 0.011 * (len(results) % 10))
        os.kill(child, signal.SIGKILL)
        assert exit_code_of(child) == -signal.SIGKILL
        assert seen(directory) in [None, *whole]
        clean_up(directory)
        assert seen(directory) in whole
        assert not list(directory.glob("_trainweights-*"))
        results.append(seen(directory))


def test_one_file_of_any_name_is_replaced_in_one_step(tmp_path, monkeypatch):
    def write(content):
        with staged_files(tmp_path / "root", lambda name: name == "unet.pt") as staged:
            (staged.path / "unet.pt").write_bytes(content)

    write(b"old")
    found = []
    for _ in replay(tmp_path / "root", lambda: write(b"new"), monkeypatch):
        found.append((tmp_path / "root" / "unet.pt").read_bytes())
    assert set(found) == {b"old", b"new"}
