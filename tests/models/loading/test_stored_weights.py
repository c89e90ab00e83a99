"""No weight file that is damaged, incomplete or malicious gets past the check."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.safetensors_file import read_safetensors_header
from hf_trainweights.models.loading.stored_weights import check_weight_files
from hf_trainweights.tensor.quantized_tensor import rebuild_quantized_tensor

TENSORS = {
    "layer._weight_qdata": torch.arange(12, dtype=torch.int8).reshape(3, 4),
    "layer._weight_scale": torch.ones(3, 1),
    "layer.bias": torch.zeros(3),
}


def write(directory: Path, name: str, tensors: dict[str, Tensor] = TENSORS) -> Path:
    file = directory / name
    if name.endswith(".safetensors"):
        save_file(tensors, file)
    else:
        torch.save(tensors, file)
    return file


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


class Touch:
    """Pickles as a call that leaves a file behind, which tells whether it ran."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_whole_files_give_every_weight_with_its_file_and_bytes(tmp_path: Path, suffix: str) -> None:
    first = write(tmp_path, f"1{suffix}", {name: TENSORS[name] for name in ("layer._weight_scale", "layer.bias")})
    second = write(tmp_path, f"2{suffix}", {"layer._weight_qdata": TENSORS["layer._weight_qdata"]})
    weights = check_weight_files([first, second])
    assert {name: weight.stored_bytes for name, weight in weights.items()} == {"layer.weight": 24, "layer.bias": 12}
    assert weights["layer.bias"].file == first
    assert weights["layer.weight"].file in (first, second)


def test_a_pickled_quantized_state_dict_is_whole(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(32, 32))
    quantize_(module, TrainWeightsConfig("int8"))
    file = tmp_path / "pytorch_model.bin"
    torch.save(module.state_dict(), file)
    assert set(check_weight_files([file])) == {"0.weight", "0.bias"}


def test_a_legacy_file_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, file, _use_new_zipfile_serialization=False)
    assert set(check_weight_files([file])) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_a_truncated_safetensors_file_is_named(tmp_path: Path, kept: int) -> None:
    file = write(tmp_path, "model.safetensors")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: expected .* Download it again"):
        check_weight_files([file])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(header({}) + b"\0", id="longer than its header says"),
        pytest.param(struct.pack("<Q", 1 << 60) + b"{}", id="header beyond the file"),
        pytest.param(struct.pack("<Q", 4) + b"\xff\xfe\x00\x01", id="no JSON"),
        pytest.param(header(["a list"]), id="no dict"),
        pytest.param(header({"x": {"dtype": "F32", "shape": [1]}}), id="no offsets"),
        pytest.param(header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}), id="one offset"),
        pytest.param(header({"x": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}), id="text offsets"),
        pytest.param(header({"x": 3}), id="no entry"),
    ],
)
def test_a_safetensors_header_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: expected"):
        read_safetensors_header(file)


@pytest.mark.parametrize("kept", [0, 3, 100, 1 / 2, -1])
def test_a_truncated_bin_file_is_named(tmp_path: Path, kept: float) -> None:
    file = write(tmp_path, "pytorch_model.bin", {**TENSORS, "layer.bias": torch.zeros(1000)})
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin: expected .* Download it again|weights_only"):
        check_weight_files([file])


@pytest.mark.parametrize(
    "write_other",
    [
        pytest.param(lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), id="LFS pointer"),
        pytest.param(lambda file: file.write_bytes(b"PK\x03\x04" + bytes(200)), id="zip magic only"),
        pytest.param(lambda file: torch.save([torch.ones(2)], file), id="a list"),
        pytest.param(lambda file: torch.jit.save(torch.jit.script(nn.ReLU()), file), id="TorchScript"),
    ],
)
# To write a TorchScript file, and to hand one to torch.load, is what one case is about.
@pytest.mark.filterwarnings("ignore:.*TorchScript archive:UserWarning")
def test_a_bin_that_is_no_dict_of_tensors_is_refused(tmp_path: Path, write_other: Callable[[Path], object]) -> None:
    file = tmp_path / "pytorch_model.bin"
    write_other(file)
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin: expected"):
        check_weight_files([file])


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_a_foreign_global_is_refused_and_runs_nothing(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, witness = tmp_path / "pytorch_model.bin", tmp_path / "it ran"
    torch.save({**TENSORS, "x": Touch(witness)}, file, _use_new_zipfile_serialization=zipped)
    real_load, allowed = torch.load, []

    def load(*args: Any, **kwargs: Any) -> Any:
        allowed.append(kwargs["weights_only"])
        return real_load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CorruptFileError, match=r"Unsupported global.*not loaded with weights_only=False") as raised:
        check_weight_files([file])
    assert str(file) in str(raised.value)
    assert "add_safe_globals" not in str(raised.value)
    assert allowed == [True]
    assert not witness.exists()
    pickle.loads(pickle.dumps(Touch(witness)))
    assert witness.exists(), "the pickle would not have done anything"


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("missing", ["qdata", "scale"])
def test_a_missing_stored_tensor_is_named_with_its_weight_and_file(tmp_path: Path, suffix: str, missing: str) -> None:
    tensors = {name: tensor for name, tensor in TENSORS.items() if not name.endswith(missing)}
    file = write(tmp_path, f"model{suffix}", tensors)
    with pytest.raises(CorruptFileError, match=rf"layer\._weight_{missing} beside .*layer\.weight.*shard is") as raised:
        check_weight_files([file])
    assert str(file) in str(raised.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"model-00002-of-00002\.safetensors: expected a shard.*no such file"):
        check_weight_files([tmp_path / "model-00002-of-00002.safetensors"])


def test_another_kind_of_file_is_left_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not for us to judge")
    assert check_weight_files([tmp_path / "model.gguf"]) == {}


@pytest.mark.parametrize("outside", ["model/../outside.safetensors", "outside.safetensors", "modelled/a.safetensors"])
def test_a_path_out_of_the_directory_is_refused_before_a_file_is_opened(tmp_path: Path, outside: str) -> None:
    directory = tmp_path / "model"
    files = [directory / "1.safetensors", tmp_path / outside]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"not to be read")
    with pytest.raises(CorruptFileError, match=rf"{outside}: expected a file in {directory}, found a path out of it"):
        check_weight_files(files[::-1], directory)


def test_a_subfolder_and_the_working_directory_are_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "model.safetensors")
    monkeypatch.chdir(tmp_path / "sub")
    names = {"layer.weight", "layer.bias"}
    assert set(check_weight_files([tmp_path / "sub" / "model.safetensors"], tmp_path)) == names
    assert set(check_weight_files(["./model.safetensors"], ".")) == names
    assert set(check_weight_files([tmp_path / "sub" / "model.safetensors"], "an/id")) == names
    assert set(check_weight_files(["../sub/model.safetensors"], "../sub")) == names


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_fifo_among_the_files_is_refused_before_one_is_opened(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"1{suffix}").write_bytes(b"not to be read")
    os.mkfifo(tmp_path / f"2{suffix}")
    with pytest.raises(CorruptFileError, match=rf"2\{suffix}: expected a regular file, found a FIFO"):
        check_weight_files([tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"])


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        pytest.param("layer.bias", {"dtype": "F99"}, id="unknown dtype"),
        pytest.param("layer.bias", {"dtype": 5}, id="no dtype"),
        pytest.param("layer.bias", {"shape": [-1]}, id="negative shape"),
        pytest.param("layer.bias", {"shape": [4]}, id="shape of other bytes"),
        pytest.param("layer.bias", {"shape": [2**40, 2**40, 0]}, id="overflow"),
    ],
)
def test_a_header_that_safetensors_refuses_is_refused_with_the_file(
    tmp_path: Path, entry: str, change: dict[str, Any]
) -> None:
    file = write(tmp_path, "model.safetensors")
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8 : 8 + length])
    entries[entry] |= change
    file.write_bytes(header(entries) + content[8 + length :])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: expected a safetensors header"):
        check_weight_files([file])


class Damage:
    """Pickles as a call of an allowed function with arguments that it does not take."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        Damage(rebuild_quantized_tensor, 1),
        Damage(rebuild_quantized_tensor, {"qdata": torch.ones(2)}, {"format": "int8"}, (1, 2), torch.float32, False),
        Damage(decode_file),
        Damage(decode_file, b"", {}),
        Damage(torch._utils._rebuild_tensor_v2, 1, 2, 3, 4, 5, 6),
        Damage(torch._utils._rebuild_parameter, "no tensor", True, None),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_allowed_functions_called_with_anything_are_a_typed_error(tmp_path: Path, damage: Damage, zipped: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({**TENSORS, "x": damage}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CorruptFileError, match=r"expected") as raised:
        check_weight_files([file])
    assert "weights_only=True" not in str(raised.value)
    assert "add_safe_globals" not in str(raised.value)


def test_a_legacy_file_that_claims_more_than_there_is_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + b"\x80\x02B\xff\xff\xff\xff")
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin: expected") as raised:
        check_weight_files([file])
    assert "In PyTorch 2.6" not in str(raised.value)
