"""The life of a model in the formats that hold other programs' weights: saved, loaded, trained, compared, changed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_default, exhaustive
from peft import LoraConfig, get_peft_model
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from weights import random_codes, same_stored, stored_tensors

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.distributed import ModelState, TrainWeightsReader, TrainWeightsWriter
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_order import ColumnOrdered
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.inspection.difference import compare_models
from hf_trainweights.inspection.listing import inspect_weights
from hf_trainweights.report.write import write_report
from hf_trainweights.tensor.distributed.placements import is_distributed
from hf_trainweights.tensor.distributed.shards import gather
from hf_trainweights.testing.values import assert_close_product

FORMS: dict[str, Format] = {
    str(form): form
    for form in (
        Affine(4, 32, "k4", "none"),
        Affine(6, 16, "k6", "none"),
        Affine(3, 16, "k3", "none"),
        Affine(2, 16, "k2", "none"),
        Affine(4, 64, offset="bias", rounding="each"),
        Affine(4, 128, offset="zero_point_minus_1"),
        Affine(3, 64, offset="float_zero_point", rounding="each"),
        Table4(32, "e8m0"),
        Table4(16, "e4m3"),
        Table4(64, "nested"),
        Table4(32, "iq4_xs"),
        Float8E4M3(128),
        Float8E4M3(32, "e8m0"),
        ColumnOrdered(Int4(64)),
        ColumnOrdered(Affine(4, 128)),
    )
}
# One that has minima, one with shared tensors, one with a wrapper.
USUAL = ("affine4 k4", "table4 g64 nested", "affine4 g128 with ordered columns")
each_form = pytest.mark.parametrize("name", by_default(USUAL, FORMS))
IDS = torch.arange(2, 26).view(2, 12)
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 64}


def imported(name: str, dtype: torch.dtype = torch.float32, *, experts: bool = False, columns: int = 256) -> Any:
    """Return a model whose layers have random stored tensors of a format, as an import leaves them."""
    form, config = (
        FORMS[name],
        TrainWeightsConfig("int8", overrides={"re:.*(_proj|experts)$": FORMS[name].get_config()}),
    )
    sizes = {**SIZES, "hidden_size": columns, "intermediate_size": columns}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
        if experts:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS))
    for parameter in model.parameters():
        # Not the buffers, which a load leaves in float32.
        parameter.data = parameter.data.to(dtype)
    with random_codes(form):
        quantize_(model.eval(), config)
    return model


def weights(model: nn.Module) -> dict[str, QuantizedTensor]:
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, QuantizedTensor)}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def assert_same_model(left: Any, right: Any) -> None:
    assert weights(left).keys() == weights(right).keys()
    assert all(same_stored(weight, weights(right)[name]) for name, weight in weights(left).items())
    assert torch.equal(logits(left), logits(right))


@pytest.mark.slow
@each_form
@pytest.mark.parametrize("options", [{}, *exhaustive({"safe_serialization": False})], ids=str)
@pytest.mark.parametrize("experts", [False, *exhaustive(True)])
def test_a_model_comes_back_bit_for_bit_and_is_written_in_the_same_bytes(
    name: str, options: dict[str, Any], experts: bool, tmp_path: Path
) -> None:
    model = imported(name, torch.bfloat16, experts=experts)
    assert FORMS[name] in {weight.format for weight in weights(model).values()}
    first, second = tmp_path / "first", tmp_path / "second"
    model.save_pretrained(first, **options)
    loaded = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16, device_map="cpu")
    assert_same_model(loaded, model)
    loaded.save_pretrained(second, **options)
    for file in sorted(first.glob("model*")):
        assert (second / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
@each_form
def test_a_compressed_model_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = imported(name)
    model.save_pretrained(tmp_path, compress=True)
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), model)


@pytest.mark.slow
@each_form
def test_it_computes_and_learns_as_its_float_weights_do(name: str) -> None:
    model = imported(name)
    dense = copy.deepcopy(model)
    assert_same_model(dense, model)
    dequantize_(dense)
    exact = copy.deepcopy(dense).double()
    assert_close_product(logits(model), logits(dense), logits(exact))
    gradients = []
    for each in (model, dense):
        embeddings = each.get_input_embeddings()(IDS).detach().requires_grad_()
        each(inputs_embeds=embeddings).logits.square().sum().backward()
        gradients.append(embeddings.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3 * gradients[1].abs().max().item())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@each_form
def test_an_adapter_trains_and_is_merged_into_the_nearest_format(name: str) -> None:
    model: Any = get_peft_model(imported(name), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(4):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with pytest.warns(UserWarning, match="2 quantized weights were changed and rounded to"):
        merged = model.merge_and_unload()
    form = FORMS[name].for_new_values()
    changed = {key for key, weight in weights(merged).items() if weight.format == form}
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"} <= changed


@pytest.mark.slow
@each_form
def test_files_are_listed_compared_and_reported(name: str, tmp_path: Path) -> None:
    model = imported(name)
    model.save_pretrained(tmp_path / "model")
    listed = inspect_weights(tmp_path / "model")
    entries = {entry.name: entry for entry in listed.entries}
    assert str(FORMS[name]) in str(entries["model.layers.0.mlp.up_proj.weight"])
    comparison = compare_models(tmp_path / "model", tmp_path / "model")
    assert not comparison.problems
    assert {difference.largest for difference in comparison.tensors} == {0.0}
    write_report(tmp_path / "model", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 1000


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.is_import_only])
def test_floats_are_not_quantized_to_it(name: str) -> None:
    model, form = nn.Sequential(nn.Linear(256, 256)), FORMS[name]
    with pytest.raises(ConfigError, match=rf"overrides\['0'\]: expected a format that floats .*found {form}.*Choose "):
        quantize_(model, TrainWeightsConfig("int8", overrides={"0": form.get_config()}))
    assert type(model[0].weight) is nn.Parameter


def test_an_order_that_misses_a_column_is_refused(tmp_path: Path) -> None:
    weight = weights(imported("int4 g64 with ordered columns"))["model.layers.0.mlp.up_proj.weight"]
    for wrong in (-1, 3, 256):
        order = weight.tensors["column_order"].clone()
        order[0, 0] = wrong if wrong != 3 else order[0, 1]
        with pytest.raises(CorruptFileError, match="column_order to hold each of 256 columns once"):
            QuantizedTensor(weight.tensors | {"column_order": order}, weight.format, weight.stored_shape, weight.dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_mxfp4_has_the_values_that_transformers_reads(dtype: torch.dtype) -> None:
    form, shape, values = Table4(32, "e8m0"), (3, 5, 256), (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor([*values, *(-value for value in values)])
    tensors = stored_tensors(form, shape, dtype) | {"table": table.expand(3, 1, 16).contiguous()}
    octets = tensors["qdata"].view(torch.uint8).view(3, 5, 8, 16)
    read = convert_moe_packed_tensors(octets, tensors["scale"], dtype=dtype).transpose(-1, -2)
    assert torch.equal(form.dequantize(tensors, shape, dtype), read)


def test_a_wrapper_stands_alone() -> None:
    with pytest.raises(ConfigError, match="format int4: expected at most one of column_scale, column_order"):
        get_format({"format": "int4", "column_scale": True, "column_order": True})


every_form = pytest.mark.parametrize("names", [USUAL, *exhaustive([*FORMS])], ids=["usual ones", "all"])


def on_ranks(path: Path) -> Any:
    """Return a model that this rank shares with the others by a plan of tensor parallelism."""
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
    config = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=config)


def compute_by_a_plan(rank: int, root: Path, names: Sequence[str]) -> None:
    """Check that ranks hold parts of the weights of a saved model, and compute what one process does."""
    del rank
    for name in names:
        if not FORMS[name].has_cuttable_columns:
            with pytest.raises(UnsupportedError, match=r"down_proj\.weight: expected a weight in .* that the style"):
                on_ranks(root / name)
            continue
        model, alone = on_ranks(root / name), AutoModelForCausalLM.from_pretrained(root / name)
        torch.testing.assert_close(logits(model), logits(alone), rtol=1e-4, atol=1e-4)
        shards = {key: tensor for key, tensor in model.named_parameters() if key in weights(alone)}
        assert any(is_distributed(shard) for shard in shards.values())
        for key, shard in shards.items():
            whole: Any = gather(shard) if is_distributed(shard) else shard
            assert same_stored(whole.detach(), weights(alone)[key].detach()), key


def compute_by_fsdp(rank: int, root: Path, names: Sequence[str]) -> None:
    """Check that ranks of FSDP2 compute exactly what one process does with a saved model."""
    del rank
    for name in names:
        model, alone = (AutoModelForCausalLM.from_pretrained(root / name) for _ in range(2))
        fully_shard(model.model.layers[0])
        assert torch.equal(logits(fully_shard(model)), logits(alone))


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("compute", [compute_by_a_plan, compute_by_fsdp])
def test_two_ranks_compute_what_one_process_does(
    compute: Callable[[int, Path, Sequence[str]], None], names: Sequence[str], tmp_path: Path
) -> None:
    for name in names:
        # Each rank gets a superblock of 256 columns.
        imported(name, columns=512).save_pretrained(tmp_path / name)
    run_ranks(2, compute, tmp_path, names)


def spread(name: str, seed: int) -> nn.Sequential:
    """Return two layers of a format that all ranks share."""
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    for number, layer in enumerate(layers):
        form, shape = FORMS[name], (256, 256)
        stored = stored_tensors(form, shape, torch.float32, 2 * seed + number)
        layer.weight = nn.Parameter(QuantizedTensor(stored, form, shape, torch.float32), requires_grad=False)
        fully_shard(layer)
    return fully_shard(layers)


def save_shards(rank: int, root: Path, names: Sequence[str]) -> list[Tensor]:
    """Save the layers of each format as torch.distributed.checkpoint, and return what they compute."""
    del rank
    computed = []
    for name in names:
        layers = spread(name, 0)
        state_dict_saver.save({"model": ModelState(layers)}, storage_writer=TrainWeightsWriter(root / name))
        computed.append(layers(torch.ones(1, 256)))
    return computed


def load_shards(rank: int, root: Path, names: Sequence[str]) -> list[Tensor]:
    """Return what layers compute that took the saved weights."""
    del rank
    computed = []
    for name in names:
        layers = spread(name, 1)
        state_dict_loader.load({"model": ModelState(layers)}, storage_reader=TrainWeightsReader(root / name))
        computed.append(layers(torch.ones(1, 256)))
    return computed


@pytest.mark.slow
@every_form
def test_a_checkpoint_of_two_ranks_comes_back_on_two_and_three(names: Sequence[str], tmp_path: Path) -> None:
    saved, _ = run_ranks(2, save_shards, tmp_path, names)
    for world_size in (2, 3):
        for loaded in run_ranks(world_size, load_shards, tmp_path, names):
            assert all(torch.equal(*pair) for pair in zip(loaded, saved, strict=True))
