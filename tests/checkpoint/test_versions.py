import copy
import json
import os
from dataclasses import dataclass, replace

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from helpers import flip_a_bit
from torch import nn

from hf_trainweights import TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.loop.module_state import adopt_quantized_weights
from hf_trainweights.checkpoint.manifest import FileEntry, read_manifest, write_manifest
from hf_trainweights.checkpoint.versions import VersionedModelSaver
from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError
from hf_trainweights.files.reading import file_sha256

CONFIG = {"width": 8}


class Net(nn.Module):
    def __init__(self, width, bias=True, tied=False):
        super().__init__()
        self.first = nn.Linear(width, width, bias=bias)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width, bias=bias)
        if tied:
            self.last.weight = self.first.weight


@pytest.fixture
def saver(tmp_path):
    return VersionedModelSaver(tmp_path / "models")


def trained(**options):
    torch.manual_seed(0)
    model = Net(8, **options)
    model.norm(torch.randn(5, 8))
    return model


def equal(first, second):
    return all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_a_version_comes_back_exactly_and_in_eval_mode(saver):
    model = trained()
    saver.save(model, "1.0.0", CONFIG, {"accuracy": 0.9, "per_class": [1, 2]}, "the first")
    loaded, metadata = saver.load("1.0.0", Net)
    assert equal(loaded, model)
    assert loaded.norm.num_batches_tracked == 1
    assert not loaded.training
    assert model.training
    expected = {
        "version": "1.0.0",
        "description": "the first",
        "config": CONFIG,
        "metrics": {"accuracy": 0.9, "per_class": [1, 2]},
        "torch_version": torch.__version__,
    }
    assert expected.items() <= metadata.items()
    own = {"model_class", "model_hash", "has_torchscript", "package_version", "timestamp", "files"}
    assert set(metadata) - set(expected) == own
    assert metadata["model_class"].endswith("Net")
    assert metadata["files"]["pytorch_model.bin"]["size_bytes"] > 0


def test_saving_returns_the_metadata_that_loading_gives(saver):
    assert saver.save(trained(), "1.0.0", CONFIG) == saver.load("1.0.0", Net)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_that_which_was_saved(saver, dtype):
    model = trained().to(dtype)
    saver.save(model, "1.0.0", CONFIG)
    loaded, _ = saver.load("1.0.0", Net)
    assert loaded.first.weight.dtype == dtype
    assert equal(loaded, model)


def test_tied_weights_are_tied_again(saver):
    saver.save(trained(tied=True).bfloat16(), "1.0.0", CONFIG)
    loaded, _ = saver.load("1.0.0", Net, tied=True)
    assert loaded.first.weight is loaded.last.weight
    assert loaded.first.weight.dtype == torch.bfloat16


class Sharing(Net):
    def __init__(self, width):
        super().__init__(width)
        self.last.weight.data = self.first.weight.data


def test_weights_that_share_their_memory_do_so_again(saver):
    saver.save(Sharing(8).bfloat16(), "1.0.0", CONFIG)
    loaded, _ = saver.load("1.0.0", Sharing)
    assert loaded.first.weight.data_ptr() == loaded.last.weight.data_ptr()


class WithTransient(Net):
    def __init__(self, width):
        super().__init__(width)
        self.first.register_buffer("frequencies", torch.arange(5.0), persistent=False)


def test_buffers_that_are_in_no_state_dict_come_back_as_well(saver):
    model = WithTransient(8).bfloat16()
    model.first.frequencies[1] = 9
    metadata = saver.save(model, "1.0.0", CONFIG)
    loaded, _ = saver.load("1.0.0", WithTransient)
    assert loaded.first.frequencies.dtype == torch.bfloat16
    assert torch.equal(loaded.first.frequencies, model.first.frequencies)
    assert "first.frequencies" not in loaded.state_dict()
    model.first.frequencies[1] = 8
    assert saver.save(model, "1.1.0", CONFIG)["model_hash"] != metadata["model_hash"]


def test_a_model_without_the_buffers_that_were_saved_is_refused(saver):
    saver.save(WithTransient(8), "1.0.0", CONFIG)
    with pytest.raises(CorruptFileError, match=r"first\.frequencies"):
        saver.load("1.0.0", Net)


def test_arguments_of_load_go_before_the_config(saver):
    model = trained(bias=False)
    saver.save(model, "1.0.0", {**CONFIG, "bias": True})
    assert equal(saver.load("1.0.0", Net, bias=False)[0], model)


def test_the_device_may_be_chosen(saver):
    saver.save(trained(), "1.0.0", CONFIG)
    model, _ = saver.load("1.0.0", Net, device="cpu")
    assert model.first.weight.device.type == "cpu"


@dataclass
class DataConfig:
    width: int = 8


class ObjectConfig:
    def __init__(self, width):
        self.width = width

    def to_dict(self):
        return {"width": self.width}

    @classmethod
    def from_dict(cls, value):
        return cls(**value)


@pytest.mark.parametrize("config", [DataConfig(), ObjectConfig(8), {"width": 8}])
def test_a_config_may_be_a_dict_a_dataclass_or_have_to_dict(saver, config):
    assert saver.save(trained(), "1.0.0", config)["config"] == {"width": 8}


def test_a_class_with_a_config_class_gets_an_instance_of_it(saver):
    class WithConfig(Net):
        config_class = ObjectConfig

        def __init__(self, config, bias=True):
            super().__init__(config.width, bias=bias)

    model = trained()
    saver.save(model, "1.0.0", ObjectConfig(8))
    assert equal(saver.load("1.0.0", WithConfig)[0], model)


def test_integer_keys_of_a_config_object_become_strings(saver):
    class WithLabels(ObjectConfig):
        def to_dict(self):
            return {"width": 8, "id2label": {0: "no", 1: "yes"}}

    assert saver.save(trained(), "1.0.0", WithLabels(8))["config"]["id2label"] == {"0": "no", "1": "yes"}


def test_versions_are_listed_in_semantic_order(saver):
    order = ["v0.9", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0-rc.1"]
    order += ["1.0", "1.0.0", "1.2.0", "1.10.0", "1.10.0+build.5", "2.0.0", "10.0.0"]
    for version in sorted(order, key=lambda version: version[::-1]):
        saver.save(nn.Linear(1, 1), version, {})
    assert saver.list_versions() == order


def test_what_is_no_version_is_not_listed(saver, tmp_path):
    assert saver.list_versions() == []
    saver.save(trained(), "1.0.0", CONFIG)
    for name in ("1.1.0", "_trainweights-1-a", "notes"):
        (tmp_path / "models" / name).mkdir()
    (tmp_path / "models" / "2.0.0").write_bytes(b"")
    assert saver.list_versions() == ["1.0.0"]


def test_a_version_is_never_overwritten(saver):
    model = trained()
    saver.save(model, "1.0.0", CONFIG)
    with pytest.raises(SaveError, match="not empty"):
        saver.save(Net(8), "1.0.0", CONFIG)
    assert equal(saver.load("1.0.0", Net)[0], model)


@pytest.mark.parametrize(
    "version", ["", "latest", "../1.0.0", "1.0.0/..", "/1.0.0", "1.0.0\n", "1..0", "1.0.0 ", 1.0, None]
)
def test_what_is_no_version_is_refused(saver, tmp_path, version):
    with pytest.raises(ConfigError, match="version"):
        saver.save(trained(), version, CONFIG)
    with pytest.raises(ConfigError, match="version"):
        saver.load(version, Net)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "key"),
    [({"width": {8}}, r"config\['width'\]"), ({"dtype": torch.float32}, r"config\['dtype'\]"), (8, "config")],
)
def test_a_config_that_is_no_json_is_refused(saver, tmp_path, config, key):
    with pytest.raises(ConfigError, match=key):
        saver.save(trained(), "1.0.0", config)
    assert os.listdir(tmp_path) == []


def test_metrics_that_are_no_json_leave_nothing_behind(saver, tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\['loss'\]"):
        saver.save(trained(), "1.0.0", CONFIG, {"loss": torch.ones(1)})
    assert os.listdir(tmp_path / "models") == []


def test_a_version_that_is_not_there_is_named_with_those_that_are(saver):
    saver.save(trained(), "1.0.0", CONFIG)
    with pytest.raises(ConfigError, match=r"1\.0\.0, found 2\.0\.0"):
        saver.load("2.0.0", Net)


def test_the_model_class_is_asked_for_by_name(saver):
    saver.save(trained(), "1.0.0", CONFIG)
    with pytest.raises(ConfigError, match=r"model_class: .*None\. Pass it: the model was a .*Net"):
        saver.load("1.0.0")


def test_a_model_of_another_shape_is_refused(saver):
    saver.save(trained(), "1.0.0", CONFIG)
    with pytest.raises(CorruptFileError, match="the same shapes"):
        saver.load("1.0.0", Net, width=9)


def test_a_flipped_bit_is_refused(saver, tmp_path):
    saver.save(trained(), "1.0.0", CONFIG)
    path = tmp_path / "models" / "1.0.0" / "pytorch_model.bin"
    flip_a_bit(path)
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin.*other content"):
        saver.load("1.0.0", Net)


def list_anew(path, name):
    """Put a file that was written again into the manifest, as it is now."""
    manifest = read_manifest(path)
    manifest.files[name] = FileEntry((path / name).stat().st_size, file_sha256(path / name))
    write_manifest(path, manifest)


def test_weights_that_are_not_those_of_the_hash_are_refused(saver, tmp_path):
    saver.save(trained(), "1.0.0", CONFIG)
    path = tmp_path / "models" / "1.0.0"
    with open(path / "pytorch_model.bin", "wb") as file:
        encode_file(Net(8).state_dict(), {}, file)
    list_anew(path, "pytorch_model.bin")
    with pytest.raises(CorruptFileError, match="a model with hash"):
        saver.load("1.0.0", Net)


def test_no_class_is_written(saver, tmp_path):
    saver.save(trained(), "1.0.0", CONFIG)
    content = (tmp_path / "models" / "1.0.0" / "pytorch_model.bin").read_bytes()
    assert b"test_versions" not in content
    assert json.loads((tmp_path / "models" / "1.0.0" / "trainweights.json").read_text())["metadata"]["config"] == CONFIG


@pytest.mark.parametrize("change", [{"config": [1]}, {"model_hash": None}, {"model_class": 5}])
def test_a_manifest_that_is_not_of_a_version_is_refused(saver, tmp_path, change):
    saver.save(trained(), "1.0.0", CONFIG)
    path = tmp_path / "models" / "1.0.0"
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, metadata={**manifest.metadata, **change}))
    with pytest.raises(CorruptFileError, match=r"trainweights\.json: expected what VersionedModelSaver\.save wrote"):
        saver.load("1.0.0", Net)


def test_weights_that_are_no_state_dict_are_refused(saver, tmp_path):
    saver.save(trained(), "1.0.0", CONFIG)
    path = tmp_path / "models" / "1.0.0"
    torch.save([1], path / "pytorch_model.bin")
    list_anew(path, "pytorch_model.bin")
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin: expected what VersionedModelSaver\.save wrote"):
        saver.load("1.0.0", Net)


class Scores(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scores = nn.Linear(width, width)

    def forward(self, x):
        return self.scores(x).relu()


class Refusing(Scores):
    def forward(self, x):
        raise RuntimeError("not today")


@pytest.mark.slow
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("example_inputs", [None, torch.ones(1, 64)], ids=["compiled", "traced"])
def test_a_torchscript_copy_computes_what_the_model_computes(saver, tmp_path, is_quantized, example_inputs):
    torch.manual_seed(0)
    model = Scores(64).requires_grad_()
    if is_quantized:
        quantize_(model, TrainWeightsConfig("int8"))
    metadata = saver.save(model, "1.0", {"width": 64}, torchscript=True, example_inputs=example_inputs)
    assert metadata["has_torchscript"] is True
    path = tmp_path / "models" / "1.0" / "model.torchscript.pt"
    assert metadata["files"][path.name]["size_bytes"] == path.stat().st_size
    script = torch.jit.load(path)
    x = torch.randn(3, 64)
    float_model = copy.deepcopy(model)
    dequantize_(float_model)
    torch.testing.assert_close(script(x), float_model(x), rtol=1e-6, atol=1e-6)
    if not is_quantized:
        loaded, metadata = saver.load("1.0", Scores)
        assert equal(loaded, model)
        assert metadata["has_torchscript"] is True


def test_a_damaged_torchscript_copy_is_found(saver, tmp_path):
    saver.save(Scores(8), "1.0", CONFIG, torchscript=True)
    path = tmp_path / "models" / "1.0" / "model.torchscript.pt"
    flip_a_bit(path)
    with pytest.raises(CorruptFileError, match=r"model\.torchscript\.pt"):
        saver.load("1.0", Scores)


def test_a_model_that_torchscript_cannot_hold_is_saved_without_a_copy(saver):
    with pytest.warns(UserWarning, match="saved without a TorchScript copy: Refusing: .*not today"):
        metadata = saver.save(Refusing(8), "1.0", CONFIG, torchscript=True, example_inputs=torch.ones(1, 8))
    assert metadata["has_torchscript"] is False
    loaded, metadata = saver.load("1.0", Refusing)
    assert isinstance(loaded, Refusing)
    assert metadata["has_torchscript"] is False
    assert "model.torchscript.pt" not in metadata["files"]


def test_a_version_has_no_torchscript_copy_unless_it_is_asked_for(saver):
    assert saver.save(Scores(8), "1.0", CONFIG)["has_torchscript"] is False


def quantized_model(name, **config):
    model = ARCHITECTURES[name].build()
    quantize_(model, TrainWeightsConfig(**config))
    return model


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(
    "config",
    [{"format": "int8", "include_embeddings": True}, {"format": "int4", "group_size": 32}, {"format": "float8_e4m3"}],
    ids=["int8", "int4", "float8"],
)
def test_a_quantized_model_of_transformers_is_loaded_by_its_class_and_saves_itself(saver, tmp_path, name, config):
    architecture = ARCHITECTURES[name]
    model = quantized_model(name, **config)
    saver.save(model, "1.0.0", model.config)
    loaded, _ = saver.load("1.0.0", type(model))
    expected = outputs(model.eval(), architecture.inputs(model))
    assert all(map(torch.equal, outputs(loaded, architecture.inputs(loaded)), expected))
    assert str(loaded.hf_quantizer.summary()) == str(model.hf_quantizer.summary())
    loaded.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert all(map(torch.equal, outputs(again, architecture.inputs(again)), expected))


def test_any_quantized_module_is_loaded_by_its_float_class(saver):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    quantize_(model, TrainWeightsConfig("int8"))
    saver.save(model, "1", {})
    loaded, metadata = saver.load("1", lambda: nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)))
    x = torch.ones(2, 64)
    assert torch.equal(loaded(x), model(x))
    assert metadata["quantized"]["0.weight"]["dtype"] == "float32"
    with pytest.raises(CorruptFileError, match=r"0\.weight of shape \[32, 64\], found \[64, 64\]"):
        saver.load("1", lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))


@pytest.mark.parametrize(
    "description",
    [None, {}, {"format": "int8"}, {"format": {"format": "int9"}}, {"format": {"format": "int8"}, "dtype": "load"}],
)
def test_a_description_of_weights_that_is_none_is_refused(description):
    state = {"weight": {"qdata": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1)}}
    with pytest.raises((CorruptFileError, ConfigError), match=r"expected .*, found "):
        adopt_quantized_weights(nn.Linear(8, 4, bias=False), state, {"weight": description})


def test_versions_stay_where_they_are_for_a_program_that_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saver = VersionedModelSaver("versions")
    monkeypatch.chdir(tmp_path / "elsewhere")
    saver.save(nn.Linear(2, 1), "1.0.0", {})
    assert (tmp_path / "versions" / "1.0.0").is_dir()
