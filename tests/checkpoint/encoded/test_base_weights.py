"""The files of a base: found by digest in the run, the Hub's cache or a registered directory, and nowhere else."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from bases import COMMIT, REPOSITORY, put_into_cache, weights, write

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded import decoder, reader
from hf_trainweights.checkpoint.encoded.decoder import BaseWeights, matching_names
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.reader import find_base, identify_base, register_base, require_weights
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, TensorPlan
from hf_trainweights.checkpoint.encoded.structure import Base
from hf_trainweights.errors import ConfigError, CorruptFileError, MissingAnchorError
from hf_trainweights.files.reading import file_sha256

ELSEWHERE = Path("relative")


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_base_directories", {})


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
    monkeypatch.setattr(reader, "_base_directories", {})
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
    monkeypatch.setattr(reader, "_base_directories", {})
    victim = tmp_path / "victim"
    write(victim, weights())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(victim)
    opened: list[str] = []
    monkeypatch.setattr(reader, "sha256_once", lambda path: opened.append(str(path)) or "")
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
    monkeypatch.setattr(reader, "_base_directories", {})
    with pytest.raises(MissingAnchorError, match=f"weights of {local}.*register_base"):
        find_base(base, ELSEWHERE)
    register_base(local)
    assert find_base(base, ELSEWHERE) == {"model.safetensors": local / "model.safetensors"}


def test_kept_files_are_found_under_their_digests(local: Path, tmp_path: Path, monkeypatch) -> None:
    base = identify_base(local)
    monkeypatch.setattr(reader, "_base_directories", {})
    kept = tmp_path / f"{base.files['model.safetensors']}.anchor"
    (local / "model.safetensors").rename(kept)
    assert find_base(base, tmp_path) == {"model.safetensors": kept}


def test_a_kept_file_that_is_a_link_is_passed_over_for_a_whole_one(local: Path, tmp_path: Path) -> None:
    base = identify_base(local)
    (tmp_path / f"{base.files['model.safetensors']}.anchor").symlink_to(local / "model.safetensors")
    assert find_base(base, tmp_path) == {"model.safetensors": local / "model.safetensors"}


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
    (tmp_path / shards["b"]).unlink()
    with pytest.raises(ConfigError, match=f"expected plain files of weights.*, found no file at .*{shards['b']}"):
        require_weights(tmp_path)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"anchor.*{name}"):
        require_weights(tmp_path / name)


ELSEWHERE = Path("relative")


def open_base(directory: Path, state: dict[str, torch.Tensor], name: str = "model.safetensors") -> BaseWeights:
    write(directory / name, state, name)
    return BaseWeights(identify_base(directory), ELSEWHERE)


def stored_and_loaded(state: dict[str, torch.Tensor], base: BaseWeights) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the codecs that store weights as an exact difference where they can, and what torch.load makes of it."""
    named = base.named_as(state)
    plan = {
        (name,): TensorPlan("weight", name, (CODECS["planes-delta"](),), anchor=name if name in named else None)
        for name in state
    }
    file = io.BytesIO()
    encoded = encode_file(state, plan, file, anchor=named)
    file.seek(0)
    return [entry.codec for entry in encoded.report], torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_difference_to_either_format_is_exact(tmp_path: Path, name: str) -> None:
    codecs, loaded = stored_and_loaded(weights(1), open_base(tmp_path, weights(), name))
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], weight) for key, weight in weights(1).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_difference_to_a_base_of_another_dtype_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    base = open_base(tmp_path, {name: weight.to(dtype) for name, weight in weights().items()})
    codecs, loaded = stored_and_loaded(weights(1), base)
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], weight) for key, weight in weights(1).items())


@pytest.mark.parametrize("codec", ["planes-delta", "delta-uniform"])
def test_decoding_a_difference_leaves_the_base_as_it_is(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: each.clone() for name, each in weights().items()}
    torch.save(before, tmp_path / "pytorch_model.bin")  # mapped, so that all tensors of one name share its memory
    base = BaseWeights(identify_base(tmp_path), tmp_path).named_as(before)
    name = max(before, key=lambda each: before[each].numel())
    made = CODECS[codec](**({"step": 0.01} if codec == "delta-uniform" else {}))
    plan: Plan = {(name,): TensorPlan("weight", name, (made,), anchor=name)}
    encoded = encode_file({name: before[name] + 0.1}, plan, anchor=base)
    monkeypatch.setattr(decoder, "open_anchor", lambda _: base)
    first, second = (decoder.decode_file(encoded.payload, encoded.structure)[name] for _ in range(2))
    assert encoded.anchor_sha256 == base.sha256
    assert torch.equal(first, second)
    assert torch.equal(base.tensor(name), before[name])


def test_a_model_with_a_head_refers_to_its_base_model_and_the_other_way_round(tmp_path: Path) -> None:
    head = {**{f"model.{name}": weight for name, weight in weights(1).items()}, "score.weight": torch.randn(2, 80)}
    codecs, loaded = stored_and_loaded(head, open_base(tmp_path, weights()))
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], each) for key, each in head.items())
    (tmp_path / "with-head").mkdir()
    codecs, loaded = stored_and_loaded(weights(1), open_base(tmp_path / "with-head", head))
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], weight) for key, weight in weights(1).items())


def test_of_tied_weights_one_name_in_the_base_is_enough(tmp_path: Path) -> None:
    weight = weights(1)["layer.weight"]
    base = open_base(tmp_path, {"layer.weight": weights()["layer.weight"]})
    codecs, loaded = stored_and_loaded({"head.weight": weight, "layer.weight": weight}, base)
    assert codecs == ["planes-delta"]
    assert loaded["head.weight"].data_ptr() == loaded["layer.weight"].data_ptr()


def test_names_match_by_one_prefix_and_only_in_equal_shapes() -> None:
    stored = {"a.weight": (2, 2), "a.bias": (2,), "b.weight": (2, 2), "score.weight": (3, 2)}
    given = {"m.a.weight": (2, 2), "m.a.bias": (2,), "m.b.weight": (2, 1), "x.b.weight": (2, 2), "score.weight": (4, 2)}
    assert matching_names(given, stored) == {"m.a.weight": "a.weight", "m.a.bias": "a.bias"}


def test_a_name_that_is_in_both_goes_before_one_with_a_prefix() -> None:
    stored = {"a.weight": (2,), "m.a.weight": (2,), "b.weight": (2,)}
    assert matching_names({"m.a.weight": (2,), "m.b.weight": (2,)}, stored) == {
        "m.a.weight": "m.a.weight",
        "m.b.weight": "b.weight",
    }


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path, monkeypatch, name: str) -> None:
    snapshot = put_into_cache(tmp_path, monkeypatch, weights(), name)
    torch.save([1, 2], snapshot / name)
    with pytest.raises(CorruptFileError, match=r"tester/tiny"):
        BaseWeights(identify_base(snapshot), ELSEWHERE)


def test_a_weight_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="a base that holds other"):
        open_base(tmp_path, weights()).tensor("other")
