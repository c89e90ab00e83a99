import json
import math
import os
import re

import pytest
from trees import each_flipped_bit

from hf_trainweights.checkpoint.manifest.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    is_safe_name,
    read_manifest,
    require_json,
    write_manifest,
)
from hf_trainweights.checkpoint.run.verification import verify_checkpoint
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.signed_json import sign_json

SHA256 = "0" * 64


def tensor(**changes):
    """A tensor as a manifest reports it."""
    sizes = {"bytes_in": 8, "bytes_out": 4}
    return {"path": "w", "name": "w", "role": "weight", "codec": "raw", "params": {}, "bound": None, **sizes} | changes


def signed(**changes):
    """A manifest whose digest is right and whose content is `changes`."""
    manifest = Manifest({"a": FileEntry(1, SHA256)}, "lossless")
    for name, value in changes.items():
        object.__setattr__(manifest, name, value)
    return manifest.to_bytes()


def test_manifest_comes_back_as_it_was_written(tmp_path):
    report = {"tensors": [tensor(bound=1e-7, params={"step": 0.1})], "anchor": SHA256}
    manifest = Manifest(
        files={"pytorch_model.bin": FileEntry(12, SHA256, report), "sub/ä.bin": FileEntry(0, SHA256)},
        mode="compact",
        step=10**12,
        epoch=1.1,
        metrics={"loss": -math.inf, "ok": True, "text": "\u2028"},
        metadata={"nested": [1, [None, {"a": 0.1}]]},
        anchor={"sha256": SHA256, "saves": 3},
        rounded_before={"pytorch_model.bin": {"weight": 1e-3}},
    )
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_metrics_may_be_nan(tmp_path):
    write_manifest(tmp_path, Manifest({}, "lossless", metrics={"loss": math.nan}))
    assert math.isnan(read_manifest(tmp_path).metrics["loss"])


def test_versions_and_time_are_recorded(tmp_path):
    write_manifest(tmp_path, Manifest({}, "lossless"))
    written = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert written["torch_version"]
    assert written["package_version"]
    assert written["created"].endswith("+00:00")


def manifest_is_refused(directory):
    try:
        read_manifest(directory)
    except CorruptFileError as error:
        return MANIFEST_NAME in str(error)
    return False


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(signed(metrics={"loss": 2.5}))
    for position in each_flipped_bit(tmp_path / MANIFEST_NAME):
        assert manifest_is_refused(tmp_path), position
    assert read_manifest(tmp_path).metrics == {"loss": 2.5}


def test_any_truncation_of_the_manifest_is_found(tmp_path):
    content = signed()
    for length in range(0, len(content), 7):
        (tmp_path / MANIFEST_NAME).write_bytes(content[:length])
        assert manifest_is_refused(tmp_path), length


HOSTILE_NAMES = [
    "../x",
    "/etc/passwd",
    "a/../../x",
    "",
    ".",
    "..",
    "a//b",
    "a/",
    "a\\b",
    "c:x",
    "a\x00b",
    "a\nb",
    "a\ud800b",
    "./a",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_leaves_the_directory_is_refused(tmp_path, name):
    assert not is_safe_name(name)
    (tmp_path / MANIFEST_NAME).write_bytes(signed(files={name: FileEntry(1, SHA256)}))
    with pytest.raises(CorruptFileError, match="relative file names"):
        read_manifest(tmp_path)


def entry(**changes):
    return {"a": {"size_bytes": 1, "sha256": SHA256, "report": {}} | changes}


def report(**changes):
    return entry(report={"anchor": None, "tensors": [tensor()]} | changes)


def tensors(**changes):
    return report(tensors=[tensor(), tensor(**changes)])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"files": entry(size_bytes=-1)}, "files['a'].size_bytes"),
        ({"files": entry(size_bytes=True)}, "files['a'].size_bytes"),
        ({"files": entry(size_bytes=1.0)}, "files['a'].size_bytes"),
        ({"files": entry(size_bytes=2**63)}, "files['a'].size_bytes"),
        ({"files": entry(sha256="f" * 63)}, "files['a'].sha256"),
        ({"files": entry(sha256="F" * 64)}, "files['a'].sha256"),
        ({"files": entry(sha256=None)}, "files['a'].sha256"),
        ({"files": entry(report=[])}, "files['a'].report"),
        ({"files": {"a": 1}}, "files['a']: expected an object"),
        ({"files": [1]}, "the manifest.files"),
        ({"files": report(anchor="../x")}, "files['a'].report.anchor"),
        ({"files": report(tensors=None)}, "files['a'].report.tensors: expected a list"),
        ({"files": report(tensors=["x"])}, "files['a'].report.tensors[0]: expected an object"),
        ({"files": report(tensors=[{}])}, "files['a'].report.tensors[0].path: expected a text, found nothing"),
        ({"files": tensors(bytes_in=-1)}, "files['a'].report.tensors[1].bytes_in"),
        ({"files": tensors(bytes_out=10**30)}, "files['a'].report.tensors[1].bytes_out"),
        ({"files": tensors(bound=math.nan)}, "files['a'].report.tensors[1].bound"),
        ({"files": tensors(bound=-1.0)}, "files['a'].report.tensors[1].bound"),
        ({"files": tensors(bound=10**400)}, "files['a'].report.tensors[1].bound"),
        ({"files": tensors(role=["weight"])}, "files['a'].report.tensors[1].role"),
        ({"files": tensors(codec=None)}, "files['a'].report.tensors[1].codec"),
        ({"files": {"x" * 5000: 1}}, "files['xxx"),
        ({"mode": None}, "the manifest.mode"),
        ({"step": "7"}, "the manifest.step"),
        ({"step": True}, "the manifest.step"),
        ({"epoch": [1]}, "the manifest.epoch"),
        ({"metrics": []}, "the manifest.metrics"),
        ({"metadata": 1}, "the manifest.metadata"),
        ({"anchor": []}, "the manifest.anchor"),
        ({"created": 5}, "the manifest.created"),
        ({"rounded_before": []}, "rounded_before: expected an object"),
        ({"rounded_before": {"a": 1}}, "rounded_before['a']: expected an object"),
        ({"rounded_before": {"a": {"weight": math.nan}}}, "rounded_before['a']['weight']"),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_or_range_is_refused_with_its_key(tmp_path, changes, key):
    fields = {**json.loads(signed()), **changes}
    (tmp_path / MANIFEST_NAME).write_bytes(sign_json(fields))
    with pytest.raises(CorruptFileError, match=re.escape(f"{tmp_path / MANIFEST_NAME}, {key}")) as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"sha256": {}}\n',
        b"1" * 10_000,
        b"PK\x03\x04",
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CorruptFileError, match=MANIFEST_NAME):
        read_manifest(tmp_path)


def test_a_key_twice_is_refused(tmp_path):
    content = signed().replace(b'  "mode": "lossless",\n', b'  "mode": "lossless",\n  "mode": "lossless",\n')
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CorruptFileError, match="digest"):
        read_manifest(tmp_path)


def test_a_newer_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_trainweights.checkpoint.manifest.manifest._FORMAT_VERSION", 99)
    write_manifest(tmp_path, Manifest({}, "lossless"))
    monkeypatch.undo()
    with pytest.raises(CorruptFileError, match=r"expected 'trainweights-checkpoint' version 1, found .* version 99"):
        read_manifest(tmp_path)


def test_an_enormous_manifest_is_refused_before_it_is_read(tmp_path):
    (tmp_path / MANIFEST_NAME).touch()
    os.truncate(tmp_path / MANIFEST_NAME, 1 << 40)
    with pytest.raises(CorruptFileError, match="at most 268435456 bytes"):
        read_manifest(tmp_path)


def test_a_linked_manifest_is_not_followed(checkpoint):
    (checkpoint / MANIFEST_NAME).rename(checkpoint.parent / "outside")
    (checkpoint / MANIFEST_NAME).symlink_to(checkpoint.parent / "outside")
    assert list(verify_checkpoint(checkpoint).problems) == [MANIFEST_NAME]


@pytest.mark.parametrize(
    ("value", "key"),
    [({"a": {1: 2}}, r"config\['a'\]"), ({"a": [0, {1, 2}]}, r"config\['a'\]\[1\]"), ({"a": b"x"}, r"config\['a'\]")],
)
def test_what_json_cannot_hold_is_named_by_its_key(value, key):
    with pytest.raises(ConfigError, match=key):
        require_json(value, "config")
