"""`save_file` and `load_file`: any module's weights in one safetensors file, and what is wrong with such a file."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from architectures import ARCHITECTURES, outputs
from simulated_disk import FailingDisk
from torch import Tensor, nn
from weights import same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, load_file, quantize_, save_file
from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError
from hf_trainweights.files import disk
from hf_trainweights.formats import get_format
from hf_trainweights.tensor.guards import make_guard
from hf_trainweights.tensor.stored_names import FORMAT_SUFFIX, stored_name

FORMATS = {
    "int8": {"format": "int8"},
    "int8_g32": {"format": "int8", "group_size": 32},
    "int4": {"format": "int4", "group_size": 32},
    "float8": {"format": "float8_e4m3"},
    "mixed": {"format": "int8", "overrides": {"0": {"format": "int4", "group_size": 32}}},
}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 32))
    layers[3].weight = layers[2].weight
    return layers.to(dtype).eval()


def assert_same(loaded: dict[str, Tensor], state: dict[str, Any]) -> None:
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert type(loaded[name]) is (QuantizedTensor if isinstance(tensor, QuantizedTensor) else Tensor)
        assert loaded[name].dtype == tensor.dtype
        same = same_stored if isinstance(tensor, QuantizedTensor) else torch.equal
        assert same(loaded[name], tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_comes_back_exactly_onto_the_meta_device(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    module = net(dtype)
    quantize_(module, TrainWeightsConfig(**FORMATS[name]))
    x = torch.randn(3, 64, dtype=dtype)
    expected = module(x)
    save_file(module, tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    assert_same(state, module.state_dict())
    with torch.device("meta"):
        loaded = net(dtype)
    loaded.load_state_dict(state, assign=True)
    assert torch.equal(loaded(x), expected)


def test_the_file_is_plain_safetensors_in_which_a_tied_weight_lies_once(tmp_path: Path) -> None:
    module = net()
    quantize_(module, TrainWeightsConfig("int8"))
    save_file(module.state_dict(), tmp_path / "a.safetensors")
    save_file(module, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    plain = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert {"0._weight_qdata", "0._weight_scale", "0._weight_format", "0.bias", "2._weight_qdata"} <= plain.keys()
    assert not [name for name in plain if name.startswith("3._weight")]
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded["3.weight"] is loaded["2.weight"]


def test_float_modules_and_views_are_saved_as_safetensors_itself_saves_them(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {
        "whole": base,
        "same": base,
        "column": base[:, 1],
        "empty": torch.empty(0, 3),
        "format": base,
        "scalar": torch.tensor(2),
    }
    save_file(state, tmp_path / "model.safetensors")
    assert_same(load_file(tmp_path / "model.safetensors"), state)
    safetensors.torch.save_file({"a": base}, tmp_path / "theirs.safetensors")
    assert_same(load_file(tmp_path / "theirs.safetensors"), {"a": base})


def test_a_weight_keeps_the_dtype_that_it_shows(tmp_path: Path) -> None:
    module = net()
    quantize_(module, TrainWeightsConfig("int8"))
    module.to(torch.bfloat16)
    save_file(module, tmp_path / "model.safetensors")
    assert_same(load_file(tmp_path / "model.safetensors"), module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3_moe"])
def test_a_file_of_save_pretrained_is_read_with_its_config_beside_it(tmp_path: Path, name: str) -> None:
    model = ARCHITECTURES[name].build().eval()
    quantize_(model, TrainWeightsConfig("int4", group_size=32, overrides={"re:.*(k_proj|c_proj).*": "int8"}))
    model.save_pretrained(tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    own = model.state_dict()
    quantized = {key: value for key, value in loaded.items() if isinstance(value, QuantizedTensor)}
    assert quantized
    assert loaded.keys() <= own.keys() or name == "qwen3_moe"
    if name != "qwen3_moe":  # whose experts lie in the file one by one
        assert all(same_stored(value, own[key]) for key, value in quantized.items())
    (tmp_path / "config.json").unlink()
    if name == "gpt2":  # whose weights are transposed, which each says in the file, beside its format
        assert all(same_stored(load_file(tmp_path / "model.safetensors")[key], own[key]) for key in quantized)
        return
    with pytest.raises(CorruptFileError, match=r"its format in the file or in a config\.json, found neither\. Keep"):
        load_file(tmp_path / "model.safetensors")


def test_a_transformers_model_is_saved_without_its_own_save(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama_tied"]
    model, other = architecture.build().eval(), architecture.build().eval()
    quantize_(model, TrainWeightsConfig("int8", include_embeddings=True))
    save_file(model, tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    expected = outputs(model, architecture.inputs(model))
    assert all(map(torch.equal, outputs(other, architecture.inputs(other)), expected))


# Wrong calls, and damaged files


def written(tmp_path: Path) -> Path:
    module = net()
    quantize_(module, TrainWeightsConfig("int8"))
    save_file(module, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(file).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, file)


def as_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


FORMAT = stored_name("0.weight", FORMAT_SUFFIX)
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scale": (lambda t: t.pop("0._weight_scale"), "0._weight_scale beside the other tensors"),
    "no format": (lambda t: t.pop(FORMAT), "expected its format in the file or in a config"),
    "unknown format": (
        lambda t: t.update({FORMAT: as_bytes({"format": "int3"})}),
        "JSON that names one of the formats",
    ),
    "dtype": (lambda t: t.update({FORMAT: as_bytes({"format": "int8", "dtype": "load"})}), "JSON that names one of"),
    "dtype list": (lambda t: t.update({FORMAT: as_bytes({"format": "int8", "dtype": [1]})}), "JSON that names one of"),
    "shape": (lambda t: t.update({"0._weight_scale": torch.ones(3, 1)}), "scale to be torch.float32 of shape"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    file = written(tmp_path)
    change, message = DAMAGES[name]
    rewrite(file, change)
    with pytest.raises(CorruptFileError, match=message):
        load_file(file)


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a safetensors file, found nothing there"):
        load_file(tmp_path / "none.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=r"bytes, as its header says"):
        load_file(file)


def test_a_guard_under_the_name_of_a_quantized_weight_is_not_read(tmp_path: Path) -> None:
    file = written(tmp_path)
    expected = load_file(file)["0.weight"].clone()
    rewrite(file, lambda tensors: tensors.update({"0.weight": make_guard()}))
    assert same_stored(load_file(file)["0.weight"], expected)


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path)
    rewrite(file, lambda tensors: tensors.update({"0.weight": torch.zeros(1)}))
    with pytest.raises(CorruptFileError, match=r"expected 0\.weight once, quantized or not, found both"):
        load_file(file)


@pytest.mark.parametrize("content", ["{", "[]", '{"quantization_config": 3}'])
def test_a_config_beside_the_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    file = written(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"config\.json(, quantization_config)?: expected an? (JSON )?object"):
        load_file(file)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 3}, "a: expected a tensor with values, found int"),
        ({"a": torch.empty(2, device="meta")}, "on the meta"),
        ({"a": torch.eye(2).to_sparse()}, r"a: expected a tensor with values, found one of layout torch\.sparse_coo"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, r"a: expected a dtype .*, found torch\.complex128"),
        ({0: torch.zeros(2)}, "weights: expected names that a safetensors file can hold, found 0"),
        ({b"a": torch.zeros(2)}, "weights: expected names .*, found b'a'"),
        ({"a\ud800": torch.zeros(2)}, "weights: expected names .*, found"),
        ({"__metadata__": torch.zeros(2)}, "weights: expected names .*, found '__metadata__'"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_what_is_there_stays(tmp_path: Path, weights: Any, message: str) -> None:
    file = written(tmp_path)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=message):
        save_file(weights, file)
    with pytest.raises(SaveError, match=r"Nothing was changed there"):
        save_file({"a": torch.zeros(2)}, file / "below.safetensors")
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.safetensors"):
        save_file({"a": torch.zeros(2)}, tmp_path / "model.bin")
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def quantized(**config: Any) -> QuantizedTensor:
    layer = nn.Linear(64, 64, bias=False)
    quantize_(layer, TrainWeightsConfig("int8", **config))
    return layer.weight.detach()


def _of_shared_codes(weight: QuantizedTensor, **changed: Any) -> QuantizedTensor:
    tensors = {**weight.tensors, **changed.pop("tensors", {})}
    parts = {"tensors": tensors, "format": weight.format, "shape": weight.stored_shape, "dtype": weight.dtype}
    return QuantizedTensor(**{**parts, **changed})


SHARING = {
    "transposed": lambda weight: weight.t(),
    "another dtype": lambda weight: weight.bfloat16(),
    "another scale": lambda weight: _of_shared_codes(weight, tensors={"scale": weight.scale * 2}),
    "another format": lambda weight: _of_shared_codes(
        weight, format=get_format({"format": "int8", "activations": "int8"})
    ),
}


@pytest.mark.parametrize("change", SHARING)
def test_weights_that_share_codes_alone_are_two_weights(tmp_path: Path, change: str) -> None:
    weight = quantized()
    state = {"a": weight, "b": SHARING[change](weight), "c": weight}
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].dequantize(), tensor.dequantize())
    assert loaded["a"] is loaded["c"]


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view, torch.Tensor.t])
def test_a_view_that_shows_other_values_is_a_tensor_of_its_own(
    tmp_path: Path, view: Callable[[Tensor], Tensor]
) -> None:
    tensor = torch.randn(4, 4, dtype=torch.complex64)
    save_file({"a": tensor, "b": view(tensor)}, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["a"], tensor)
    assert torch.equal(loaded["b"], view(tensor))


def _load_as_diffusers_does(module: nn.Module, path: Path) -> None:
    """Take what a module has by name, and leave the rest as it is; only another shape is an error."""
    own = module.state_dict()
    for name, tensor in safetensors.torch.load_file(path).items():
        if name in own and own[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}")
        if name in own:
            own[name].copy_(tensor)


@pytest.mark.parametrize("part", ["0", "blocks.1", "head"])
def test_a_reader_of_plain_names_takes_no_quantized_weight_for_a_missing_one(tmp_path: Path, part: str) -> None:
    def build() -> nn.Module:
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(3))
        return nn.ModuleDict({"0": nn.Linear(64, 64), "blocks": blocks, "head": nn.Linear(64, 64)})

    module = build()
    others = {name for name in ("0", "blocks.1", "head") if name != part}
    quantize_(module, TrainWeightsConfig("int8", modules_to_not_convert=sorted(others)))
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file(module, path)
    with pytest.raises(ValueError, match=r"weight has shape \(1,\)"):
        _load_as_diffusers_does(build(), path)
    assert_same(load_file(path), module.state_dict())
    assert "import_hf_trainweights_before_loading" in safetensors.torch.load_file(path)


def test_a_file_of_float_weights_has_no_guards(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert safetensors.torch.load_file(tmp_path / "model.safetensors").keys() == {"weight"}


def test_a_plain_tensor_that_a_reader_would_take_for_a_part_of_a_weight_is_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 32))
    quantize_(module, TrainWeightsConfig("int8"))
    with pytest.raises(ConfigError, match=r"^0\._weight_qdata: expected another name"):
        save_file({**module.state_dict(), "0._weight_qdata": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_whichever_call_is_the_last_one_the_old_file_or_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, state = tmp_path / "model.safetensors", {"a": quantized()}
    save_file(state, file)
    new, old, fail_at, reached = file.read_bytes(), b"what was there before", 0, True
    while reached:
        file.write_bytes(old)
        fail_at += 1
        failing = FailingDisk(fail_at, errno.EIO, for_good=True)
        with monkeypatch.context() as patch, contextlib.suppress(SaveError):
            patch.setattr(disk, "file_system", failing)
            save_file(state, file)
        assert file.read_bytes() in (old, new), fail_at
        reached = failing.count >= fail_at
    assert file.read_bytes() == new
    assert fail_at > 4
