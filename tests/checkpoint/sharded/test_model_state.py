"""Quantized weights in checkpoints of torch.distributed.checkpoint: stored as plain tensors, loaded back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.sharded.states import failures
from covering import by_default
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.distributed import ModelState, TrainWeightsReader, TrainWeightsWriter
from hf_trainweights.errors import CorruptFileError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def build(seed: int, form: str = "int8") -> nn.Sequential:
    """Return a frozen quantized layer, a trainable one and another quantized one."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(64, 64, bias=False))
    group_size = 32 if form == "int4" else None
    quantize_(layers, TrainWeightsConfig(form, group_size=group_size, modules_to_not_convert=["1"]))
    return layers


def save(path: Path, model: nn.Module, no_dist: bool = True, **options: Any) -> None:
    writer = TrainWeightsWriter(path, **options)
    state_dict_saver.save({"model": ModelState(model)}, storage_writer=writer, no_dist=no_dist)


def load(path: Path, model: nn.Module, reader: type = TrainWeightsReader, no_dist: bool = True) -> None:
    state_dict_loader.load({"model": ModelState(model)}, storage_reader=reader(path), no_dist=no_dist)


def outputs(model: nn.Sequential) -> torch.Tensor:
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    return torch.cat([model[0](inputs), model[1](inputs), model[2](inputs)], -1)


def whole(model: nn.Sequential) -> QuantizedTensor:
    weight = model[0].weight
    assert isinstance(weight, QuantizedTensor)
    return weight


@pytest.mark.parametrize("reader", [TrainWeightsReader, FileSystemReader])
@pytest.mark.parametrize("form", ["int8", "int4", "float8_e4m3"])
def test_a_quantized_model_comes_back_bit_for_bit(tmp_path: Path, form: str, reader: type) -> None:
    saved, loaded = build(0, form), build(1, form)
    expected = outputs(saved)
    save(tmp_path / "checkpoint", saved, mode="compact")
    load(tmp_path / "checkpoint", loaded, reader)
    weight = whole(loaded)
    assert weight.format.name == form
    assert torch.equal(weight.dequantize(), whole(saved).dequantize())
    assert torch.equal(outputs(loaded), expected)
    assert torch.equal(outputs(saved), expected)


def test_a_plain_writer_and_reader_carry_the_same_tensors(tmp_path: Path) -> None:
    saved, loaded = build(0), build(1)
    state_dict_saver.save(
        {"model": ModelState(saved)}, storage_writer=FileSystemWriter(tmp_path / "checkpoint"), no_dist=True
    )
    load(tmp_path / "checkpoint", loaded, FileSystemReader)
    assert torch.equal(outputs(loaded), outputs(saved))


def test_the_names_in_the_checkpoint_are_those_of_files(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", build(0))
    names = set(read_manifest(tmp_path / "checkpoint").sharded["tensors"])
    expected = {f"model.{layer}._weight_{key}" for layer in (0, 2) for key in ("qdata", "scale", "format")}
    assert names == expected | {"model.0.bias", "model.1.weight", "model.1.bias"}


@pytest.mark.parametrize(("form", "text"), [("int4", "Size mismatch"), ("float8_e4m3", "Size mismatch|int8")])
def test_another_format_is_an_error(tmp_path: Path, form: str, text: str) -> None:
    save(tmp_path / "checkpoint", build(0, "int8"))
    errors = failures(lambda: load(tmp_path / "checkpoint", build(1, form)))
    with pytest.raises(ValueError, match=text):
        raise errors[0]


def test_a_weight_that_is_stored_the_other_way_round_is_an_error() -> None:
    saved, loaded = build(0), build(1)
    saved[0].weight = nn.Parameter(whole(saved).t(), requires_grad=False)
    with pytest.raises(CorruptFileError, match=r"0\.weight: expected .*, found .* transposed"):
        ModelState(loaded).load_state_dict(ModelState(saved).state_dict())


def test_a_model_in_a_wrapper_takes_its_quantized_weights() -> None:
    saved, loaded = build(0), build(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        ModelState(DistributedDataParallel(loaded)).load_state_dict(ModelState(saved).state_dict())
    finally:
        dist.destroy_process_group()
    assert torch.equal(outputs(loaded), outputs(saved))


def test_tied_weights_stay_tied() -> None:
    saved, loaded = build(0), build(1)
    for model in (saved, loaded):
        model[2].weight = model[0].weight
    ModelState(loaded).load_state_dict(ModelState(saved).state_dict())
    assert loaded[2].weight is loaded[0].weight
    assert torch.equal(outputs(loaded), outputs(saved))


def test_a_load_goes_through_the_whole_model_once_however_many_weights_it_has() -> None:
    calls = []
    for count in (1, 3):
        model = build(0) if count == 1 else nn.Sequential(*(build(seed) for seed in range(count)))
        state, before = ModelState(model).state_dict(), len(calls)
        model.register_load_state_dict_post_hook(lambda *_: calls.append(1))
        ModelState(model).load_state_dict(state)
        assert len(calls) - before == 1


def saves_and_loads(rank: int, path: Path) -> bool:
    saved, loaded = build(0), build(1)
    save(path, saved, no_dist=False)
    load(path, loaded, no_dist=False)
    return torch.equal(outputs(loaded), outputs(saved))


def test_ranks_that_hold_the_same_weights_store_them_once(tmp_path: Path) -> None:
    assert run_ranks(2, saves_and_loads, tmp_path / "checkpoint") == [True, True]
    entries = read_manifest(tmp_path / "checkpoint").files.values()
    paths = [row["path"] for entry in entries for row in entry.report.get("tensors", ())]
    assert len(paths) == len(set(paths))


def build_sharded(seed: int, form: str) -> nn.Sequential:
    layers = build(seed, form)
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    return layers


def saves_sharded(rank: int, path: Path, form: str) -> None:
    save(path, build_sharded(0, form), no_dist=False)


def loads_sharded(rank: int, path: Path, form: str) -> bool:
    loaded = build_sharded(1, form)
    load(path, loaded, no_dist=False)
    return torch.equal(outputs(loaded), outputs(build_sharded(0, form)))


@pytest.mark.skipif(not hasattr(QuantizedTensor, "fsdp_pre_all_gather"), reason="quantized weights are not sharded")
@pytest.mark.parametrize("form", by_default(("int4",), ("int8", "int4")))
def test_quantized_weights_under_fsdp2_come_back_on_other_numbers_of_ranks(tmp_path: Path, form: str) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(2, saves_sharded, path, form)
    assert run_ranks(2, loads_sharded, path, form) == [True] * 2
    assert run_ranks(3, loads_sharded, path, form) == [True] * 3
    alone = build(1, form)
    load(path, alone)
    assert torch.equal(outputs(alone), outputs(build(0, form)))
