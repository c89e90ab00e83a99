"""What lies in weight files is listed, and nothing in them is executed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoint.sharded_states import save_alone
from safetensors.torch import load_file, save_file
from torch import nn

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.checkpoint.dcp.reader import ShardedContents
from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.inspection.difference import compare_checkpoints
from hf_trainweights.inspection.listing import Entry, inspect_weights, total_bytes
from hf_trainweights.models.directory import quantize_directory
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.tensor.guards import is_guard


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


class Stateful:
    """Remembers which states were set when it was unpickled."""

    states: ClassVar[list[object]] = []

    def __getstate__(self) -> object:
        return {"attribute": 1}

    def __setstate__(self, state: object) -> None:
        self.states.append(state)


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    ARCHITECTURES["gpt2"].build(torch.bfloat16).save_pretrained(tmp_path / "float")
    config = TrainWeightsConfig("int4", group_size=32, overrides={"re:.*mlp.c_proj": "int8"})
    quantize_directory(tmp_path / "float", tmp_path / "int4", config)
    return tmp_path / "int4"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"max_shard_size": "30KB"}, {"safe_serialization": False}])
def test_a_quantized_weight_is_one_entry(arguments: dict[str, object], quantized: Path, tmp_path: Path) -> None:
    model = load_saved(quantized)
    model.save_pretrained(tmp_path / "saved", **arguments)
    inspection = inspect_weights(tmp_path / "saved")
    entries = {entry.name: entry for entry in inspection.entries}
    stored = load_file(quantized / "model.safetensors")
    weight = entries["transformer.h.0.attn.c_attn.weight"]
    assert (weight.format, weight.shape) == ("int4 g32", (64, 192))
    assert weight.stored_bytes == sum(
        tensor.nbytes for name, tensor in stored.items() if name.startswith("transformer.h.0.attn.c_attn._weight_")
    )
    assert entries["transformer.h.1.mlp.c_proj.weight"].format == "int8"
    assert entries["transformer.ln_f.weight"].format == "bfloat16"
    stored_bytes = sum(tensor.nbytes for tensor in stored.values() if not is_guard(tensor))
    assert total_bytes(entry.stored_bytes for entry in inspection.entries) == stored_bytes
    assert inspection.unsafe == {}
    if "max_shard_size" in arguments:
        assert len({entry.file for entry in inspection.entries}) > 1


def test_without_a_configuration_stored_tensors_are_listed_as_they_are(quantized: Path, tmp_path: Path) -> None:
    alone = (quantized / "model.safetensors").rename(tmp_path / "alone.safetensors")
    entries = {entry.name: entry for entry in inspect_weights(alone).entries}
    assert entries["transformer.h.0.attn.c_attn._weight_qdata"].format == "int32"
    assert entries["transformer.h.0.attn.c_attn._weight_scale"].format == "bfloat16"


def test_nested_state_is_listed_by_key_path(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2, 3)}, "steps": [torch.ones(1)]}, tmp_path / "state.pt")
    assert [(entry.name, entry.shape) for entry in inspect_weights(tmp_path / "state.pt").entries] == [
        ("model.w", (2, 3)),
        ("steps.0", (1,)),
    ]


def test_files_of_old_versions_of_torch_are_read(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert inspect_weights(tmp_path / "old.bin").entries == (Entry("w", "float32", (2,), 8, "old.bin"),)


def test_a_small_checkpoint_is_listed_without_decoding_it(tmp_path: Path) -> None:
    torch.save(nn.Linear(64, 64).state_dict(), tmp_path / "pytorch_model.bin")
    (plain,) = [entry for entry in inspect_weights(tmp_path).entries if entry.name == "weight"]
    compress_directory(tmp_path)
    (small,) = [entry for entry in inspect_weights(tmp_path).entries if entry.name == "weight"]
    assert (small.format, small.shape) == (plain.format, plain.shape)
    assert small.stored_bytes is not None
    assert plain.stored_bytes is not None
    assert small.stored_bytes < plain.stored_bytes


@pytest.mark.slow
def test_quantized_weights_in_a_small_checkpoint_are_entries_too(quantized: Path) -> None:
    load_saved(quantized).save_pretrained(quantized, safe_serialization=False)
    before = [(entry.name, entry.format, entry.shape) for entry in inspect_weights(quantized).entries]
    compress_directory(quantized, weights_only=True)
    after = [(entry.name, entry.format, entry.shape) for entry in inspect_weights(quantized).entries]
    assert after == before
    assert "int4 g32" in {shown for _, shown, _ in after}


def test_of_a_file_that_would_run_code_the_members_are_listed(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(5), "x": Bomb(tmp_path / "touched")}, tmp_path / "bomb.pt")
    inspection = inspect_weights(tmp_path / "bomb.pt")
    entries = {entry.name: entry for entry in inspection.entries}
    assert entries["data/0"] == Entry("data/0", "zip member", None, 20, "bomb.pt")
    assert "builtins.getattr" in inspection.unsafe["bomb.pt"]
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["bomb.bin", "bomb.pt"])
def test_a_pickle_that_would_run_code_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "touched")))
    with pytest.raises(CorruptFileError, match=r"expected a file that torch\.load reads"):
        inspect_weights(tmp_path / name)
    assert not (tmp_path / "touched").exists()


def test_a_sparse_tensor_is_listed_without_its_bytes(tmp_path: Path) -> None:
    torch.save({"dense": torch.ones(2), "sparse": torch.eye(3).to_sparse()}, tmp_path / "model.pt")
    assert inspect_weights(tmp_path / "model.pt").entries == (
        Entry("dense", "float32", (2,), 8, "model.pt"),
        Entry("sparse", "float32", (3, 3), None, "model.pt"),
    )


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_files_of_pickle_protocols_that_torch_does_not_read_are_listed(protocol: int, tmp_path: Path) -> None:
    tree = {
        "model": nn.Linear(3, 4).half().state_dict(),
        "parameter": nn.Parameter(torch.ones(2, 2).t()),
        "rare": [torch.zeros(4).to(torch.float8_e4m3fn), torch.zeros(3, dtype=torch.uint16)],
        "others": (torch.float32, torch.Size([2]), {1, 2}, None, 1.5, b"bytes", torch.device("cpu")),
    }
    torch.save(tree, tmp_path / "new.pt", pickle_protocol=protocol)
    torch.save(tree, tmp_path / "old.pt")
    new, old = (inspect_weights(tmp_path / name) for name in ("new.pt", "old.pt"))
    assert [replace(entry, file="") for entry in new.entries] == [replace(entry, file="") for entry in old.entries]
    assert len(new.entries) == 5
    assert new.unsafe == {}


def test_values_of_such_a_file_are_asked_for_in_vain(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "new.pt", pickle_protocol=4)
    with pytest.raises(CorruptFileError, match=r"new\.pt: expected a pickle of protocol 2.*without pickle_protocol"):
        compare_checkpoints(tmp_path / "new.pt", tmp_path / "new.pt")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_of_a_newer_pickle_that_would_run_code_the_members_are_listed(protocol: int, tmp_path: Path) -> None:
    tree = {"w": torch.zeros(5), "x": [Bomb(tmp_path / "touched"), Stateful()]}
    torch.save(tree, tmp_path / "bomb.pt", pickle_protocol=protocol)
    inspection = inspect_weights(tmp_path / "bomb.pt")
    assert Entry("data/0", "zip member", None, 20, "bomb.pt") in inspection.entries
    path = type(tmp_path)  # of `pathlib`, or of `pathlib._local` in Python 3.13
    assert {f"{path.__module__}.{path.__name__}", f"{__name__}.Stateful"} <= set(inspection.unsafe["bomb.pt"])
    assert Stateful.states == []
    assert not (tmp_path / "touched").exists()


HOSTILE_PICKLES = {
    "huge memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "huge text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\x00\x00abc.",
    "cut": b"\x80\x04}\x94(",
    "state of a dtype": b"\x80\x04\x8c\x05torch\x8c\x07float32\x93}b.",
    "negative shape": (
        b"\x80\x04\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93"
        b"(\x8c\x05torch\x8c\x07float32\x93K\x00J\xff\xff\xff\xff\x85K\x01\x85\x89NtR."
    ),
}


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_a_hostile_newer_pickle_is_listed_or_refused_within_little_memory(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "odd.pt", "w") as archive:
        archive.writestr("odd/data.pkl", HOSTILE_PICKLES[name])
    tracemalloc.start()
    try:
        with contextlib.suppress(CorruptFileError):
            assert inspect_weights(tmp_path / "odd.pt").entries == ()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "content"), [("vocab.txt", b"hello world\n"), ("model.gguf", b"GGUF\x03"), ("empty", b"")]
)
def test_a_file_that_is_none_of_weights_is_said_to_be_none(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        CorruptFileError, match=rf"{name}: expected a weight file \(\.safetensors, \.bin, \.pt"
    ) as caught:
        inspect_weights(tmp_path / name)
    assert "weights_only" not in str(caught.value)


def test_a_torch_file_is_known_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "weights.v1")
    assert inspect_weights(tmp_path / "weights.v1").entries[0].name == "w"


NO_WEIGHTS = {
    "empty.bin": b"",
    "archive.pt": b"PK\x05\x06" + bytes(18),
    "objects.pt": pickle.dumps(slice(1)),
    "cut.pt": b"PK\x03\x04\x00\x00",
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_file_without_weights_is_said_to_be_none_and_nobody_is_told_to_load_it_all_the_same(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(NO_WEIGHTS[name])
    with pytest.raises(CorruptFileError, match=rf"{name}: expected a file that torch\.load reads") as caught:
        inspect_weights(tmp_path / name)
    assert "weights_only" not in str(caught.value)
    assert "arbitrary code" not in str(caught.value)


def test_a_fifo_is_no_weight_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CorruptFileError, match="expected a regular file, found a FIFO"):
        inspect_weights(tmp_path / "model.safetensors")


def test_a_fifo_in_place_of_the_configuration_is_not_waited_for(quantized: Path) -> None:
    (quantized / "config.json").unlink()
    os.mkfifo(quantized / "config.json")
    with pytest.raises(CorruptFileError, match=r"config\.json.*found a FIFO"):
        inspect_weights(quantized)


@pytest.mark.slow
def test_a_missing_scale_is_an_error(quantized: Path) -> None:
    tensors = load_file(quantized / "model.safetensors")
    del tensors["transformer.h.0.attn.c_attn._weight_scale"]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(CorruptFileError, match=r"transformer\.h\.0\.attn\.c_attn\.weight: expected scale"):
        inspect_weights(quantized)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, {}, {"quant_method": "another"}])
def test_a_configuration_without_our_method_leaves_stored_tensors_as_they_are(
    quantization: dict[str, str] | None, quantized: Path
) -> None:
    (quantized / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert {entry.format for entry in inspect_weights(quantized).entries} == {"bfloat16", "int32", "int8", "uint8"}


def test_a_configuration_of_a_newer_version_is_refused(quantized: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["version"] = 3
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=r"version: expected 1 or 2, found 3"):
        inspect_weights(quantized)


def test_activations_are_no_part_of_what_is_stored(tmp_path: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path / "float")
    quantize_directory(tmp_path / "float", tmp_path / "int8", TrainWeightsConfig("int8", activations="int8"))
    assert {entry.format for entry in inspect_weights(tmp_path / "int8").entries} == {"int8", "float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["[]", "{", '{"quantization_config": {"quant_method": "trainweights", "format": "int3"}}']
)
def test_a_damaged_configuration_is_an_error(text: str, quantized: Path) -> None:
    (quantized / "config.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"expected a (JSON object|model's configuration)"):
        inspect_weights(quantized)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a checkpoint with weights"):
        inspect_weights(tmp_path)


def test_a_sum_with_an_unknown_size_is_unknown() -> None:
    assert (total_bytes([1, 2]), total_bytes([1, None]), total_bytes([])) == (3, None, 0)


def test_a_notebook_shows_a_listing_folded_and_escaped(tmp_path: Path) -> None:
    save_file({"<script>": torch.zeros(2)}, tmp_path / "model.safetensors")
    html = inspect_weights(tmp_path)._repr_html_()
    assert html.startswith("<details><summary>1 tensors</summary><table>")
    assert "<td>&lt;script&gt;</td><td>float32</td><td>(2,)</td><td>8</td>" in html


def test_of_a_sharded_checkpoint_only_what_tells_formats_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"l._weight_format": torch.zeros(4, dtype=torch.uint8), "l._weight_qdata": torch.zeros(2, 2)}
    save_alone({"model": tensors}, tmp_path)
    read, real = [], ShardedContents.read_tensor
    monkeypatch.setattr(ShardedContents, "read_tensor", lambda *each: read.append(each[1]) or real(*each))
    assert [entry.name for entry in inspect_weights(tmp_path).entries] == [*tensors]
    assert read == ["model.l._weight_format"]
