"""A quantized model is saved whole or not at all, in either serialization, and nothing of an earlier save survives."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, computes_the_same
from fork_server import exit_code_of_fork
from helpers import contents
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MobileBertConfig, MobileBertModel, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import SaveError, UnsupportedError
from hf_trainweights.files import disk
from hf_trainweights.files.weight_files import ENTRY_POINTS, is_weight_file
from hf_trainweights.tensor.guards import NOTICE_NAME, is_guard
from hf_trainweights.tensor.stored_names import parse_stored_name

LLAMA = ARCHITECTURES["llama"]
STORED = "model.layers.0.mlp.up_proj._weight_"
SERIALIZATIONS = {
    "safetensors": {},
    "bin": {"safe_serialization": False},
    "sharded": {"max_shard_size": "32KB"},
    "sharded_bin": {"safe_serialization": False, "max_shard_size": "32KB"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return quantize_on_load(tmp_path_factory.mktemp("float"), "llama", TrainWeightsConfig("int8"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    config = TrainWeightsConfig("int8", include_embeddings=True)
    return quantize_on_load(tmp_path_factory.mktemp("tied"), "llama_tied", config)


def quantize_on_load(directory: Path, name: str, config: TrainWeightsConfig) -> PreTrainedModel:
    ARCHITECTURES[name].build().save_pretrained(directory)
    return load(directory, quantization_config=config)


def load(directory: Path, **options: Any) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert {problem: keys for problem, keys in info.items() if keys} == {}
    return model


def weight_files(directory: Path) -> set[str]:
    return {
        path.name for path in directory.iterdir() if path.suffix in {".safetensors", ".bin"} or "index" in path.name
    }


def zeroed(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose weights are all zero, quantized ones by their scales."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            (parameter.scale if isinstance(parameter, QuantizedTensor) else parameter).zero_()
    return copied


# ---- what is written


@pytest.mark.slow
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_files_hold_flat_plain_tensors_and_nothing_else(
    serialization: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
    expected = {"config.json", "generation_config.json", "trainweights_files.json"} | weight_files(tmp_path)
    assert set(contents(tmp_path)) == expected
    tensors: dict[str, Tensor] = {}
    for file in sorted(path for path in tmp_path.iterdir() if path.suffix in {".safetensors", ".bin"}):
        shard = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        assert not tensors.keys() & shard.keys()
        tensors |= shard
        if file.suffix == ".bin":
            # A view would drag its whole storage into the file.
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in shard.values())
    assert {type(tensor) for tensor in tensors.values()} == {Tensor}
    assert guards_of(tensors) == {NOTICE_NAME, "model.layers.0.self_attn.q_proj.weight"}
    assert set(tensors) - guards_of(tensors) == {
        stored
        for name, parameter in model.named_parameters()
        for stored in (
            [name.replace(".weight", f"._weight_{key}") for key in parameter.tensors]
            if isinstance(parameter, QuantizedTensor)
            else [name]
        )
    }
    if "sharded" in serialization:
        index = json.loads(next(tmp_path.glob("*.index.json")).read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert {*index["weight_map"].values()} == {name for name in weight_files(tmp_path) if not name.endswith("json")}
        assert {Path(name).suffix for name in index["weight_map"].values()} == (
            {".bin"} if "bin" in serialization else {".safetensors"}
        )
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_codes_are_mapped_where_int8_products_read_them_without_a_copy(
    serialization: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
    weights = [weight for weight in load(tmp_path).parameters() if isinstance(weight, QuantizedTensor)]
    assert {weight.qdata.data_ptr() % 16 for weight in weights} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_bytes_do_not_depend_on_the_directory_the_file_name_or_an_earlier_save(
    serialization: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    options = SERIALIZATIONS[serialization]
    model.save_pretrained(tmp_path / "a", **options)
    load(tmp_path / "a").save_pretrained(tmp_path / "another name", **options)
    model.save_pretrained(str(tmp_path / "a"), **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "another name")
    model.save_pretrained(tmp_path / "a", variant="v", **options)
    for file in (path for path in (tmp_path / "a").iterdir() if is_weight_file(path.name) and "index" not in path.name):
        stem, separator, shard = file.name.partition("-") if "-" in file.name else file.name.rpartition(".")
        assert (tmp_path / "a" / f"{stem}.v{separator}{shard}").read_bytes() == file.read_bytes()


def test_max_shard_size_is_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    for options in ({}, {"safe_serialization": False}):
        model.save_pretrained(tmp_path, max_shard_size=30_000, **options)
        shards = [path for path in tmp_path.iterdir() if path.suffix in {".safetensors", ".bin"}]
        assert len(shards) > 4
        assert all(path.stat().st_size < 40_000 for path in shards)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
@pytest.mark.parametrize("earlier", SERIALIZATIONS)
def test_weight_files_of_an_earlier_save_are_removed(
    earlier: str, serialization: str, variant: str | None, model: PreTrainedModel, tmp_path: Path
) -> None:
    zeroed(model).save_pretrained(tmp_path, variant=variant, **SERIALIZATIONS[earlier])
    (tmp_path / "optimizer.bin").write_text("not a weight file")
    model.save_pretrained(tmp_path, variant=variant, **SERIALIZATIONS[serialization])
    model.save_pretrained(tmp_path / "fresh", variant=variant, **SERIALIZATIONS[serialization])
    assert weight_files(tmp_path) == weight_files(tmp_path / "fresh") | {"optimizer.bin"}
    assert computes_the_same(load(tmp_path, variant=variant), model)


@pytest.mark.slow
def test_variants_do_not_touch_each_other(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    zeroed(model).save_pretrained(tmp_path, variant="zero", safe_serialization=False)
    assert weight_files(tmp_path) == {"model.safetensors", "pytorch_model.zero.bin"}
    assert computes_the_same(load(tmp_path), model)
    assert computes_the_same(load(tmp_path, variant="zero"), zeroed(model))


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
@pytest.mark.parametrize("earlier", SERIALIZATIONS)
@pytest.mark.parametrize("dequantize", [False, True])
def test_no_float_config_ever_lies_beside_quantized_weights(
    dequantize: bool,
    earlier: str,
    serialization: str,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = copy.deepcopy(model)
    plain.dequantize()
    before, after = (model, plain) if dequantize else (plain, model)
    before.save_pretrained(tmp_path, **SERIALIZATIONS[earlier])
    calls = 0

    class WatchedDisk(disk.FileSystem):
        """Looks after every rename and removal at what a loader would find."""

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            self.look()

        def unlink(self, path: Path) -> None:
            super().unlink(path)
            self.look()

        def look(self) -> None:
            nonlocal calls
            calls += 1
            found = is_quantized(tmp_path)
            config = json.loads((tmp_path / "config.json").read_text()) if found is not None else {}
            assert found is None or found == ("quantization_config" in config)

    monkeypatch.setattr(disk, "file_system", WatchedDisk())
    after.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
    assert is_quantized(tmp_path) == (not dequantize)
    assert calls > 5


def guards_of(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of guards and notice."""
    return {name for name, tensor in tensors.items() if is_guard(tensor)}


def is_quantized(directory: Path) -> bool | None:
    """Return whether the weights that a loader finds are quantized, None where it finds none."""
    entry = next((directory / name for name in ENTRY_POINTS if (directory / name).exists()), None)
    if entry is None:
        return None
    if entry.suffix == ".json":
        names = json.loads(entry.read_text())["weight_map"]
    else:
        names = load_file(entry) if entry.suffix == ".safetensors" else torch.load(entry)
    return any(parse_stored_name(name) for name in names)


@pytest.mark.slow
def test_a_quantized_model_replaces_a_float_one(model: PreTrainedModel, tmp_path: Path) -> None:
    for options in SERIALIZATIONS.values():
        LLAMA.build().save_pretrained(tmp_path, max_shard_size="64KB")
        model.save_pretrained(tmp_path, **options)
        assert computes_the_same(load(tmp_path), model)


@pytest.mark.slow
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_a_tied_quantized_weight_is_written_once(serialization: str, tied: PreTrainedModel, tmp_path: Path) -> None:
    tied.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
    names: list[str] = []
    for file in (path for path in tmp_path.iterdir() if path.suffix in {".safetensors", ".bin"}):
        names += load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    assert "model.embed_tokens._weight_qdata" in names
    assert not any(name.startswith("lm_head") for name in names)
    reloaded = load(tmp_path)
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert computes_the_same(reloaded, tied)


def test_adapters_are_saved_without_the_weights_below_them(tmp_path: Path) -> None:
    adapted = quantize_on_load(tmp_path / "float", "llama", TrainWeightsConfig("int4", group_size=64))
    adapted.add_adapter(LoraConfig(target_modules=["v_proj"]))
    adapted.save_pretrained(tmp_path / "adapters")
    assert weight_files(tmp_path / "adapters") == {"adapter_model.safetensors"}
    assert all("lora" in name for name in load_file(tmp_path / "adapters" / "adapter_model.safetensors"))


# ---- options


def changed_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    state_dict = model.state_dict()
    state_dict["lm_head.weight"] = torch.full_like(state_dict["lm_head.weight"], 3.0)
    weight = state_dict["model.layers.0.mlp.up_proj.weight"]
    state_dict["model.layers.0.mlp.up_proj.weight"] = weight.map(torch.zeros_like)
    return state_dict


@pytest.mark.slow
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_the_state_dict_that_is_given_is_what_is_saved(
    serialization: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    state_dict = changed_state_dict(model)
    names = list(state_dict)
    model.save_pretrained(tmp_path / "keyword", state_dict=state_dict, **SERIALIZATIONS[serialization])
    model.save_pretrained(tmp_path / "position", True, state_dict, **SERIALIZATIONS[serialization])
    assert list(state_dict) == names, "the caller's dict was changed"
    assert contents(tmp_path / "keyword") == contents(tmp_path / "position")
    reloaded = load(tmp_path / "keyword")
    assert reloaded.lm_head.weight.eq(3.0).all()
    assert not reloaded.model.layers[0].mlp.up_proj.weight.qdata.any()
    kept = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(reloaded.get_parameter(kept).qdata, model.get_parameter(kept).qdata)


def test_a_given_state_dict_is_not_remembered(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, state_dict=changed_state_dict(model))
    model.save_pretrained(tmp_path)
    assert computes_the_same(load(tmp_path), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_given_state_dict_of_a_tied_model_is_saved_once(name: str, tied: PreTrainedModel, tmp_path: Path) -> None:
    if name == "int4":
        config = TrainWeightsConfig("int4", group_size=32, include_embeddings=True)
        tied = quantize_on_load(tmp_path / "float", "llama_tied", config)
    # state_dict() detaches, so that the tied weight is two objects.
    tied.save_pretrained(tmp_path / "given", state_dict=tied.state_dict())
    tied.save_pretrained(tmp_path / "own")
    assert contents(tmp_path / "given") == contents(tmp_path / "own")


def test_a_given_state_dict_may_lack_the_tied_weight(tied: PreTrainedModel, tmp_path: Path) -> None:
    state = {name: value for name, value in tied.state_dict().items() if ".norm" in name or "layernorm" in name}
    tied.save_pretrained(tmp_path, state_dict=state)
    assert {name for name in load_file(tmp_path / "model.safetensors") if not is_guard(name)} >= state.keys()


def test_other_processes_write_nothing_and_do_not_hold_the_directory(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "new", is_main_process=False)
    assert contents(tmp_path / "new") == {}
    with saving(model, tmp_path / "shared"):
        model.save_pretrained(tmp_path / "shared", is_main_process=False)
    assert computes_the_same(load(tmp_path / "shared"), model)


@pytest.mark.slow
@pytest.mark.parametrize("options", SERIALIZATIONS.values(), ids=SERIALIZATIONS)
def test_save_original_format_chooses_the_names(options: dict[str, Any], tmp_path: Path) -> None:
    neox = quantize_on_load(tmp_path / "float", "gpt_neox", TrainWeightsConfig("int8"))
    for original, expected in ((True, "embed_out.weight"), (False, "lm_head.weight")):
        neox.save_pretrained(tmp_path / expected, save_original_format=original, **options)
        names: list[str] = []
        for file in (path for path in (tmp_path / expected).iterdir() if path.suffix in {".safetensors", ".bin"}):
            names += load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        assert {"embed_out.weight", "lm_head.weight"} & set(names) == {expected}
        assert computes_the_same(load(tmp_path / expected), neox)


def test_a_distributed_checkpoint_of_a_model_in_one_piece_is_refused_as_transformers_does(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="FSDP-"):
        model.save_pretrained(tmp_path, distributed_checkpoint=True)


def test_a_distributed_checkpoint_as_bin_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"expected safetensors, found distributed_checkpoint as \.bin"):
        model.save_pretrained(tmp_path, distributed_checkpoint=True, safe_serialization=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("options", SERIALIZATIONS.values(), ids=SERIALIZATIONS)
def test_a_class_with_a_save_pretrained_of_its_own_is_saved_by_it(
    options: dict[str, Any], model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        PreTrainedModel.save_pretrained(self, *args, **kwargs)
        Path(args[0], "extra.txt").write_text("extra")

    monkeypatch.setattr(type(model), "save_pretrained", save_pretrained)
    model.save_pretrained(tmp_path, True, changed_state_dict(model), **options)
    assert (tmp_path / "extra.txt").read_text() == "extra"
    assert load(tmp_path).lm_head.weight.eq(3.0).all()


def test_a_class_with_a_save_pretrained_of_its_own_gets_the_stored_tensors(tmp_path: Path) -> None:
    model = quantize_on_load(tmp_path / "float", "llama", TrainWeightsConfig("int4", group_size=64))

    class Own(type(model)):  # type: ignore[misc]
        def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
            tensors = self.hf_quantizer.get_state_dict_and_metadata(self)[0]
            save_file(tensors, Path(save_directory, "own.safetensors"))

    stored, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    expected = {name: tensor.clone() for name, tensor in stored.items()}
    model.__class__ = Own
    model.save_pretrained(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "own.safetensors")
    assert written.keys() - guards_of(written) == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_class_keeps_its_own_save_pretrained(model: PreTrainedModel) -> None:
    assert type(model).save_pretrained is PreTrainedModel.save_pretrained
    assert type(model).push_to_hub is PreTrainedModel.push_to_hub


# ---- saves that fail


@contextlib.contextmanager
def saving(model: PreTrainedModel, directory: Path) -> Iterator[None]:
    """Run the body in the middle of a save by another thread."""
    started, go_on, errors = threading.Event(), threading.Event(), []
    interrupted = copy.deepcopy(model)
    get_state_dict_and_metadata = interrupted.hf_quantizer.get_state_dict_and_metadata

    def wait(model: PreTrainedModel) -> Any:
        started.set()
        go_on.wait(timeout=60)
        return get_state_dict_and_metadata(model)

    interrupted.hf_quantizer.get_state_dict_and_metadata = wait

    def save() -> None:
        try:
            interrupted.save_pretrained(directory)
        except BaseException as error:
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=save)
    thread.start()
    try:
        assert started.wait(timeout=60)
        yield
    finally:
        go_on.set()
        thread.join(timeout=60)
    assert errors == []


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Make every write beyond this size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Become a user to whom permissions apply; root passes them all."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture(params=["empty", "safetensors", "bin"])
def earlier_save(request: pytest.FixtureRequest, model: PreTrainedModel, tmp_path: Path) -> Path:
    """Return a directory with what was there before the save that is to fail."""
    if request.param != "empty":
        zeroed(model).save_pretrained(tmp_path / "earlier", **SERIALIZATIONS[request.param])
    else:
        (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "notes.txt").write_text("keep me")
    return tmp_path / "earlier"


@pytest.mark.slow
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_a_save_onto_a_full_disk_changes_nothing(
    serialization: str, model: PreTrainedModel, earlier_save: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "sizes", **SERIALIZATIONS[serialization])
    before = contents(earlier_save)
    largest = max(path.stat().st_size for path in (tmp_path / "sizes").iterdir())
    with (
        largest_file(largest - 1),
        pytest.raises(SaveError, match=r"earlier: expected .*File too large.*Nothing was changed there") as raised,
    ):
        model.save_pretrained(earlier_save, **SERIALIZATIONS[serialization])
    assert isinstance(raised.value, OSError)
    assert contents(earlier_save) == before


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("writer", ["safetensors", "torch"])
def test_a_full_disk_is_called_that(
    writer: str, code: int, model: PreTrainedModel, earlier_save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, file: Any) -> None:
        # Half a file, then the disk is full.
        file.write(b"half")
        raise OSError(code, os.strerror(code))

    before = contents(earlier_save)
    if writer == "torch":
        monkeypatch.setattr(torch, "save", fail)
    else:
        monkeypatch.setattr("hf_trainweights.files.safetensors_file._write_pieces", fail)
    with pytest.raises(SaveError, match=r"expected enough free disk space.*Free some space"):
        model.save_pretrained(earlier_save, safe_serialization=writer != "torch")
    assert contents(earlier_save) == before


def test_a_directory_that_cannot_be_written_is_named(model: PreTrainedModel) -> None:
    # Not below tmp_path, whose parents no other user may enter.
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        directory = Path(parent) / "read-only"
        model.save_pretrained(directory)
        before = contents(directory)
        directory.chmod(0o555)
        try:
            for target in (directory, directory / "below"):
                with (
                    unprivileged(),
                    pytest.raises(SaveError, match=r"read-only.*that can be written to.*Check its permissions"),
                ):
                    model.save_pretrained(target)
        finally:
            directory.chmod(0o755)
        assert contents(directory) == before


@pytest.mark.parametrize("target", ["file", "file/below"])
def test_a_file_in_the_way_is_left_alone(target: str, model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(SaveError, match=r"file.*expected a directory.*Choose another name"):
        model.save_pretrained(tmp_path / target)
    assert contents(tmp_path) == {"file": b"keep me"}


@pytest.mark.slow
@pytest.mark.parametrize("options", SERIALIZATIONS.values(), ids=SERIALIZATIONS)
def test_a_directory_in_the_way_of_a_file_changes_nothing(
    options: dict[str, Any], model: PreTrainedModel, tmp_path: Path
) -> None:
    zeroed(model).save_pretrained(tmp_path, **options)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").mkdir()
    before = contents(tmp_path)
    with pytest.raises(SaveError, match=r"a directory has the name of a file.*generation_config\.json"):
        model.save_pretrained(tmp_path, **options)
    assert contents(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["safetensors", "bin"])
def test_a_second_save_at_the_same_time_is_refused(serialization: str, model: PreTrainedModel, tmp_path: Path) -> None:
    with saving(model, tmp_path):
        with pytest.raises(SaveError, match=r"expected one save at a time.*Wait, or use another directory"):
            zeroed(model).save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
        zeroed(model).save_pretrained(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere")
    names = {"config.json", "generation_config.json", "model.safetensors", "trainweights_files.json"}
    assert set(contents(tmp_path)) == names
    assert computes_the_same(load(tmp_path), model)
    model.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])


def test_a_file_system_without_locks_is_written_to(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    model.save_pretrained(tmp_path)
    assert computes_the_same(load(tmp_path), model)


@pytest.mark.slow
def test_an_error_that_is_no_matter_of_files_stays_what_it_is(
    model: PreTrainedModel, earlier_save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("not ours")

    before = contents(earlier_save)
    monkeypatch.setattr("hf_trainweights.files.safetensors_file._bytes_of", fail)
    with pytest.raises(ZeroDivisionError, match="not ours"):
        model.save_pretrained(earlier_save)
    assert contents(earlier_save) == before


def overwrite(directory: Path, safe: bool) -> None:
    """Save other models over the files that a model is mapped from."""
    ids = torch.arange(8)[None]
    expected = AutoModelForCausalLM.from_pretrained(directory)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(directory)
    shorter = AutoModelForCausalLM.from_pretrained(directory, num_hidden_layers=1)
    shorter.save_pretrained(directory, safe_serialization=safe)
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(directory, safe_serialization=safe)
    model.save_pretrained(directory, safe_serialization=safe)
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(directory)(ids).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False])
def test_a_model_that_is_mapped_from_the_files_it_replaces_lives_on(
    safe: bool, model: PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, safe_serialization=safe)
    # In a process of its own: to read from a mapped file that was cut short kills the process with SIGBUS.
    assert exit_code_of_fork(overwrite, tmp_path, safe) == 0


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["safetensors", "bin"])
def test_weights_without_elements_are_saved_in_either_serialization(serialization: str, tmp_path: Path) -> None:
    """MobileBERT has an empty matrix where its embeddings are as wide as its layers; codes and scales have no bytes."""
    sizes = {"hidden_size": 64, "embedding_size": 64, "true_hidden_size": 64, "intra_bottleneck_size": 64}
    config = MobileBertConfig(**sizes, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=96)
    model = MobileBertModel(config)
    quantize_(model, TrainWeightsConfig("int4", group_size=32, include_embeddings=True))
    model.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
    reloaded = MobileBertModel.from_pretrained(tmp_path)
    weights = dict(reloaded.named_parameters())
    for name, weight in model.named_parameters():
        if isinstance(weight, QuantizedTensor):
            assert torch.equal(weights[name].dequantize(), weight.dequantize()), name
