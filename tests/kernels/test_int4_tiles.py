"""The tiled layout of int4: exact both ways, the layout of PyTorch's op, and never in a file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_trainweights import TrainWeightsConfig, kernels, quantize_
from hf_trainweights.formats import get_format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import int4_tiles
from hf_trainweights.kernels.int4_tiles import Int4Tiles, choose_layout, tile_rows
from hf_trainweights.tensor import handlers
from hf_trainweights.tensor.held_tensor import Held
from hf_trainweights.tensor.layouts import choose_layouts_
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Compiled products would read the stored tensors instead.
pytestmark = pytest.mark.usefixtures("without_compiled")

has_tiles = pytest.mark.skipif(tile_rows() is None, reason="PyTorch has no tiled int4 product for this CPU")
CONFIG = TrainWeightsConfig("int4", group_size=32)


def random_tensors(*shape: int, group_size: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return canonical tensors of every code, with scales of both signs and zero."""
    *lead, K = shape
    generator = torch.Generator().manual_seed(sum(shape))
    words = torch.randint(-(2**31), 2**31, (*lead, K // 8), generator=generator).to(torch.int32)
    scale = torch.randn(*lead, K // group_size, generator=generator).to(dtype)
    scale.view(-1)[0] = 0
    return {"qdata": words, "scale": scale}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert all(tensor.is_contiguous() for tensor in actual.values())


def tiled_model(name: str = "llama") -> PreTrainedModel:
    """Return a quantized bfloat16 model, some of whose weights are in tiles."""
    model = ARCHITECTURES[name].build(torch.bfloat16)
    quantize_(model, CONFIG)
    assert any(isinstance(weight.kernel_layout, Int4Tiles) for weight in quantized(model).values())
    return model


def quantized(module: nn.Module) -> dict[str, QuantizedTensor]:
    return {name: weight for name, weight in module.named_parameters() if isinstance(weight, QuantizedTensor)}


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((64, 32), 32), ((128, 192), 64), ((320, 1152), 128), ((64, 65536), 128), ((3, 128, 64), 32)],
)
def test_tiles_and_back_are_exact(shape: tuple[int, ...], group_size: int, rows: int) -> None:
    form, layout = Int4(group_size), Int4Tiles(rows)
    tensors = random_tensors(*shape, group_size=group_size)
    tiles = layout.from_canonical(tensors)
    *lead, N, K = shape
    assert {name: (tuple(tile.shape), tile.dtype) for name, tile in tiles.items()} == {
        "qdata": ((*lead, N, K // 2), torch.uint8),
        "scale": ((*lead, K // group_size, N, 2), torch.bfloat16),
    }
    assert_same(layout.to_canonical(tiles), tensors)
    for dtype in (torch.bfloat16, torch.float32):
        weight = QuantizedTensor.from_held(Held(tiles, layout), form, shape, torch.bfloat16)
        assert torch.equal(weight.dequantize(dtype), form.dequantize(tensors, shape, dtype))


def test_experts_are_tiled_one_by_one() -> None:
    layout, tensors = Int4Tiles(64), random_tensors(3, 128, 64, group_size=32)
    tiles = layout.from_canonical(tensors)
    for index in range(3):
        expert = layout.from_canonical({name: tensor[index] for name, tensor in tensors.items()})
        assert_same({name: tensor[index] for name, tensor in tiles.items()}, expert)


def test_no_experts_are_no_tiles() -> None:
    # A slice such as w[0:0] is held in the layout of the weight.
    layout, tensors = Int4Tiles(64), random_tensors(3, 128, 64, group_size=32)
    none = {name: tensor[:0] for name, tensor in layout.from_canonical(tensors).items()}
    assert_same(layout.to_canonical(none), {name: tensor[:0] for name, tensor in tensors.items()})


def test_weights_of_many_blocks_convert_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_tiles, "_BLOCK_BYTES", 2 * 64 * 32)
    layout, tensors = Int4Tiles(64), random_tensors(64 * 7, 64, group_size=32)
    assert_same(layout.to_canonical(layout.from_canonical(tensors)), tensors)


@has_tiles
def test_tiles_are_what_torch_s_own_conversion_makes() -> None:
    codes = torch.randint(0, 16, (192, 96), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    octets = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    tensors = {"qdata": octets.view(torch.int32), "scale": torch.ones(192, 3)}
    tiles = Int4Tiles(tile_rows() or 0).from_canonical(tensors)
    assert torch.equal(tiles["qdata"], torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))


@pytest.mark.parametrize("rows", [32, 64])
def test_rows_are_taken_without_the_rest(rows: int) -> None:
    layout, tensors = Int4Tiles(rows), random_tensors(192, 64, group_size=32)
    tiles, indices = layout.from_canonical(tensors), torch.tensor([0, 191, 33, 64, 33, 31, 32, 63])
    assert_same(layout.take_rows(tiles, indices), {name: tensor[indices] for name, tensor in tensors.items()})
    for wrong in (-1, 192):
        with pytest.raises(IndexError, match="out of range"):
            layout.take_rows(tiles, torch.tensor([wrong]))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 64), True),
        ((96, 64), False),
        ((2, 128, 64), True),
        ((2, 96, 64), False),
        ((0, 128, 64), False),
    ],
)
def test_tiles_hold_whole_tiles_of_rows_alone(shape: tuple[int, ...], expected: bool) -> None:
    assert Int4Tiles(64).fits(shape) == expected


@has_tiles
@pytest.mark.parametrize(
    ("shape", "dtype", "device", "tiled"),
    [
        ((64, 32), torch.bfloat16, "cpu", True),
        ((64, 32), torch.float16, "cpu", False),
        ((64, 32), torch.float32, "cpu", False),
        ((64, 32), torch.bfloat16, "meta", False),
        ((16, 32), torch.bfloat16, "cpu", False),
    ],
)
def test_only_what_the_op_takes_is_tiled(shape: tuple[int, int], dtype: torch.dtype, device: str, tiled: bool) -> None:
    chosen = kernels.choose_layout(Int4(32), shape, dtype, torch.device(device))
    assert chosen == (Int4Tiles(tile_rows() or 0) if tiled else None)
    assert kernels.choose_layout(Int8(), shape, dtype, torch.device(device)) is None


@pytest.mark.parametrize("wrong", ["another layout", "no op"])
def test_an_unknown_cpu_keeps_the_canonical_layout(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
        if wrong == "no op":
            raise NotImplementedError("no kernel for this CPU")
        return x.new_zeros(len(x), len(qdata))

    monkeypatch.setattr(int4_tiles, "multiply_tiles", product)
    assert tile_rows.__wrapped__() is None
    monkeypatch.setattr(int4_tiles, "tile_rows", lambda: None)
    assert choose_layout(Int4(32), (64, 32), torch.bfloat16) is None


@has_tiles
def test_a_skeleton_on_meta_may_be_the_first_to_ask_for_the_tiles() -> None:
    with torch.device("meta"):
        assert tile_rows.__wrapped__() == tile_rows()


def test_the_layout_shows_in_nothing_that_a_user_looks_at(tensor: QuantizedTensor) -> None:
    canonical = tensor.canonical()
    assert isinstance(tensor.kernel_layout, Int4Tiles)
    assert canonical.kernel_layout is None
    assert tensor.format == canonical.format == Int4(32)
    assert get_format(tensor.format.get_config()) == tensor.format
    assert (repr(tensor), tensor.stored_bytes) == (repr(canonical), canonical.stored_bytes)
    assert_same(tensor.tensors, canonical.tensors)
    assert torch.equal(tensor.qdata, canonical.qdata)
    assert torch.equal(tensor.scale, canonical.scale)
    assert tensor.__reduce_ex__(2)[1][1:] == canonical.__reduce_ex__(2)[1][1:]
    assert_same(tensor.__reduce_ex__(2)[1][0], canonical.tensors)


def test_a_handler_gets_the_canonical_weight_unless_it_asked_for_any_layout(
    tensor: QuantizedTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def handler(func: object, weight: QuantizedTensor) -> Tensor:
        del func
        found.append(weight.kernel_layout)
        return torch.zeros(())

    for any_layout in (False, True):
        monkeypatch.setitem(handlers.HANDLERS, torch.ops.aten.sum.default, handlers.Handler(handler, any_layout))
        tensor.sum()
    assert found == [None, tensor.kernel_layout]


def test_a_stored_tensor_that_is_assigned_takes_the_place_of_the_tiles(tensor: QuantizedTensor) -> None:
    codes = torch.zeros_like(tensor.qdata)
    tensor.qdata = codes
    assert tensor.kernel_layout is None
    assert tensor.qdata is codes


@pytest.fixture
def tensor() -> QuantizedTensor:
    """A weight in tiles; ops on it are compared with the same ops on its canonical twin."""
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return QuantizedTensor.quantize(weight, Int4(32)).in_layout(Int4Tiles(tile_rows() or 64))


KEEP_THE_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "transpose": lambda w: w.t(),
    "twice transposed": lambda w: w.mT.transpose(0, 1),
    "deepcopy": copy.deepcopy,
}
MAKE_IT_CANONICAL: dict[str, Callable[[Tensor], Tensor]] = {
    "to float32": lambda w: w.to(torch.float32),
    "to float16": lambda w: w.half(),
    "to meta": lambda w: w.to("meta"),
    "rows": lambda w: w[3:70],
    "one row": lambda w: w[5],
    "chosen rows": lambda w: w[torch.tensor([3, 100])],
    "split": lambda w: w.split(32)[1],
    "columns": lambda w: w[:, 2:7],
    "empty_like": torch.empty_like,
    "arithmetic": lambda w: w * 2,
}


@pytest.mark.parametrize("name", KEEP_THE_LAYOUT)
def test_ops_that_move_no_row_keep_the_layout(name: str, tensor: QuantizedTensor) -> None:
    result = KEEP_THE_LAYOUT[name](tensor)
    assert isinstance(result, QuantizedTensor)
    assert result.kernel_layout == tensor.kernel_layout
    assert torch.equal(result.dequantize(), KEEP_THE_LAYOUT[name](tensor.canonical()).dequantize())


@pytest.mark.parametrize("name", MAKE_IT_CANONICAL)
def test_every_other_op_sees_the_canonical_layout(name: str, tensor: QuantizedTensor) -> None:
    result, expected = MAKE_IT_CANONICAL[name](tensor), MAKE_IT_CANONICAL[name](tensor.canonical())
    assert (type(result), result.shape, result.dtype, result.device) == (
        type(expected),
        expected.shape,
        expected.dtype,
        expected.device,
    )
    if isinstance(result, QuantizedTensor):
        assert (result.format, result.kernel_layout) == (Int4(32), None)
    if name not in ("to meta", "empty_like"):
        assert torch.equal(*(t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (result, expected)))


@pytest.fixture
def experts() -> QuantizedTensor:
    """Weights of three experts in tiles."""
    weight = torch.randn(3, 128, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return QuantizedTensor.quantize(weight, Int4(32)).in_layout(Int4Tiles(tile_rows() or 64))


CHOOSE_EXPERTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda w: w[1],
    "one by a tensor": lambda w: w[torch.tensor(2)],
    "some": lambda w: w[1:],
    "every other": lambda w: w[::2],
    "a list": lambda w: w[torch.tensor([2, 0, 0])],
    "all": lambda w: w.unbind()[2],
    "parts": lambda w: w.split(2)[0],
    "transposed": lambda w: w.transpose(1, 2)[1],
}


@pytest.mark.parametrize("name", CHOOSE_EXPERTS)
def test_choosing_experts_keeps_the_layout(name: str, experts: QuantizedTensor) -> None:
    result, expected = CHOOSE_EXPERTS[name](experts), CHOOSE_EXPERTS[name](experts.canonical())
    assert isinstance(result, QuantizedTensor)
    assert (result.format, result.kernel_layout) == (experts.format, experts.kernel_layout)
    assert result.shape == expected.shape
    assert torch.equal(result.dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_parts_of_experts_are_canonical(name: str, experts: QuantizedTensor) -> None:
    part = {"rows": lambda w: w[:, 3:70].dequantize(), "columns": lambda w: w[:, :, 2:7]}[name]
    assert torch.equal(part(experts), part(experts.canonical()))


@pytest.mark.parametrize("rows", [1, 40])
def test_experts_are_multiplied_as_if_alone(rows: int, experts: QuantizedTensor) -> None:
    x = torch.randn(3 * rows, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    alone = [F.linear(part, expert) for part, expert in zip(x.split(rows), experts.unbind(), strict=True)]
    ends = torch.arange(1, 4, dtype=torch.int32) * rows
    assert torch.equal(torch._grouped_mm(x, experts.mT, ends), torch.cat(alone))
    assert torch.equal(torch.bmm(x.view(3, rows, 64), experts.mT), torch.stack(alone))


@has_tiles
def test_experts_of_a_model_are_tiled() -> None:
    holder = nn.Module()
    holder.experts = nn.Module()
    for name, N in (("gate_up_proj", 128), ("down_proj", 80)):
        weight = QuantizedTensor.quantize(torch.ones(3, N, 64, dtype=torch.bfloat16), Int4(32))
        setattr(holder.experts, name, nn.Parameter(weight, requires_grad=False))
    choose_layouts_(holder)
    assert isinstance(holder.experts.gate_up_proj.kernel_layout, Int4Tiles)
    assert holder.experts.down_proj.kernel_layout is None


def test_rows_are_looked_up_in_tiles(tensor: QuantizedTensor) -> None:
    indices = torch.tensor([[0, 127, 64], [33, 1, 0]])
    assert torch.equal(F.embedding(indices, tensor), F.embedding(indices, tensor.dequantize()))


def test_copying_goes_into_the_layout_of_the_target(tensor: QuantizedTensor) -> None:
    canonical, target = tensor.canonical(), tensor.clone()
    other = QuantizedTensor.quantize(torch.ones(128, 64, dtype=torch.bfloat16), Int4(32))
    target.copy_(other)
    assert target.kernel_layout == tensor.kernel_layout
    assert torch.equal(target.dequantize(), other.dequantize())
    other.copy_(tensor)
    assert_same(other.tensors, canonical.tensors)


@has_tiles
def test_tied_weights_stay_tied_and_embeddings_alone_stay_canonical() -> None:
    config = TrainWeightsConfig("int4", group_size=32, include_embeddings=True)
    tied = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128, bias=False)).bfloat16()
    tied[1].weight = tied[0].weight
    quantize_(tied, config)
    assert tied[0].weight is tied[1].weight
    assert isinstance(tied[0].weight.kernel_layout, Int4Tiles)
    alone = nn.Sequential(nn.Embedding(128, 64)).bfloat16()
    quantize_(alone, config)
    assert alone[0].weight.kernel_layout is None


@has_tiles
def test_a_model_that_is_not_all_on_the_cpu_is_left_alone() -> None:
    layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, device="meta")]).bfloat16()
    quantize_(layers, TrainWeightsConfig("int4", group_size=32, modules_to_not_convert=["1"]))
    assert layers[0].weight.kernel_layout is None


WRITERS: dict[str, Callable[[PreTrainedModel, Path], object]] = {
    "torch.save of the state dict": lambda model, path: save(model.state_dict(), path),
    "safetensors": lambda model, path: model.save_pretrained(path),
    "bin": lambda model, path: model.save_pretrained(path, safe_serialization=False),
    "Trainer": lambda model, path: save_by_trainer(model, path),
}


def save(value: object, path: Path) -> None:
    path.mkdir()
    with (path / "file").open("wb") as stream:
        torch.save(value, stream)


def save_by_trainer(model: PreTrainedModel, path: Path) -> None:
    # Trainer refuses to train a quantized model without adapters, but what it saves of one is this.
    arguments = TrainingArguments(str(path), use_cpu=True, report_to=[])
    trainer = Trainer.__new__(Trainer)
    trainer.args, trainer.model, trainer.processing_class, trainer.data_collator = arguments, model, None, None
    trainer.accelerator = type("Accelerator", (), {"unwrap_model": lambda _, m, **__: m})()
    trainer._save(str(path))
    (path / "training_args.bin").unlink()


@has_tiles
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", WRITERS)
def test_no_file_depends_on_the_layout(
    name: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[name](tiled_model(architecture), tmp_path / "tiled")
    monkeypatch.setattr(kernels, "choose_layout", lambda *_: None)
    canonical = ARCHITECTURES[architecture].build(torch.bfloat16)
    quantize_(canonical, CONFIG)
    WRITERS[name](canonical, tmp_path / "canonical")
    files = sorted(path.name for path in (tmp_path / "tiled").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "canonical").iterdir())
    for file in files:
        assert (tmp_path / "tiled" / file).read_bytes() == (tmp_path / "canonical" / file).read_bytes(), file


@has_tiles
def test_a_pickled_model_is_canonical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiled_model()
    save(model, tmp_path / "pickled")
    monkeypatch.setattr(kernels, "choose_layout", lambda *_: None)
    loaded = quantized(torch.load(tmp_path / "pickled" / "file", weights_only=False))
    for name, weight in quantized(model).items():
        assert loaded[name].kernel_layout is None
        assert_same(loaded[name].tensors, weight.canonical().tensors)


@has_tiles
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_an_exported_program_is_saved_in_the_canonical_layout(tmp_path: Path) -> None:
    layer = nn.Linear(64, 64).bfloat16()
    quantize_(layer, CONFIG)
    assert isinstance(layer.weight.kernel_layout, Int4Tiles)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exported = torch.export.export(layer, (x,))
    torch.export.save(exported, tmp_path / "layer.pt2")
    assert b"int4_tiles" not in (tmp_path / "layer.pt2").read_bytes()
    loaded = torch.export.load(tmp_path / "layer.pt2")
    assert torch.equal(loaded.module()(x), layer(x))
    # Decomposed, the program is one of plain tensors, whose op takes the tiles of any CPU.
    assert torch.equal(exported.run_decompositions().module()(x), layer(x))


@has_tiles
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_loading_tiles_a_model_and_a_reload_gives_equal_weights(architecture: str, tmp_path: Path) -> None:
    model = tiled_model(architecture)
    model.save_pretrained(tmp_path)
    reloaded = ARCHITECTURES[architecture].auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    weights = quantized(reloaded)
    assert weights.keys() == quantized(model).keys()
    for name, weight in quantized(model).items():
        assert weights[name].kernel_layout == weight.kernel_layout
        assert_same(weights[name].tensors, weight.tensors)
    assert str(reloaded.hf_quantizer.summary()) == str(model.hf_quantizer.summary())
