"""Quantized models that Transformers distributes over ranks: the codes, results and files of one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from architectures import ARCHITECTURES, DECODER, MOE, generate, outputs, random_floats, text_inputs
from covering import by_default, exhaustive
from ranks import Outcome, outcomes_of_ranks, run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from weights import same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig
from hf_trainweights.errors import QuantizationError, SaveError, UnsupportedError
from hf_trainweights.models.saving import saving
from hf_trainweights.tensor.distributed.placements import is_distributed, local_tensor
from hf_trainweights.tensor.distributed.shards import gather

# Each test starts processes.
pytestmark = pytest.mark.slow

CONFIGS: dict[str, dict[str, Any]] = {
    "int4_columns": {"format": "int4", "group_size": 32, "column_scale": True},
    "int8": {"format": "int8"},
    "int8_g32": {"format": "int8", "group_size": 32, "include_embeddings": True},
    "int4_g32": {"format": "int4", "group_size": 32},
    "float8": {"format": "float8_e4m3", "include_embeddings": True},
}


def make_qwen2() -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER))


def make_qwen3() -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=16))


def make_llama_of_four_heads() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, "num_key_value_heads": 4}))


def make_llama_of_odd_rows() -> PreTrainedModel:
    """One row of its embeddings too many for two ranks."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, "vocab_size": 97}))


def make_mixtral_of_four_heads() -> PreTrainedModel:
    config = transformers.MixtralConfig(**{**MOE, "num_key_value_heads": 4}, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": make_qwen2,
    "qwen3": make_qwen3,
    "llama_of_odd_rows": make_llama_of_odd_rows,
    "llama_of_four_heads": make_llama_of_four_heads,
    "mixtral_of_four_heads": make_mixtral_of_four_heads,
} | {
    name: ARCHITECTURES[name].build
    for name in ("llama", "llama_tied", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gpt_neox")
}


def float_model(directory: Path, name: str) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MAKERS[name]().eval().save_pretrained(directory / name)
    return directory / name


def one_process(path: Path, config: dict[str, Any] | None, **options: Any) -> PreTrainedModel:
    given = {} if config is None else {"quantization_config": TrainWeightsConfig(**config)}
    return AutoModelForCausalLM.from_pretrained(path, **given, **options)


def on_ranks(path: Path, config: dict[str, Any] | None, **sizes: Any) -> PreTrainedModel:
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
    sizes = sizes or {"tp_size": dist.get_world_size()}
    return one_process(path, config, distributed_config=DistributedConfig(**sizes))


def whole(parameter: Tensor) -> Any:
    return gather(parameter) if is_distributed(parameter) else parameter


def assert_same_model(model: PreTrainedModel, expected: PreTrainedModel) -> int:
    """Compare codes, logits, tokens and the summary of a distributed model with one process's; count what is cut."""
    cut = 0
    for (name, parameter), (_, of_one) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        if isinstance(of_one, QuantizedTensor):
            cut += is_distributed(parameter)
            assert not parameter.requires_grad, name
            assert same_stored(whole(parameter.detach()), of_one.detach()), name
        else:
            assert torch.equal(whole(parameter), of_one), name
    assert str(model.hf_quantizer.summary()) == str(expected.hf_quantizer.summary())
    inputs = text_inputs()
    torch.testing.assert_close(outputs(model, inputs)[0], outputs(expected, inputs)[0], rtol=1e-4, atol=1e-4)
    # With gradients Transformers takes another way through its modules.
    torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(generate(model, inputs), generate(expected, inputs))
    return cut


def loads_as_one_process_does(
    rank: int, path: Path, config: str, quantized: Path, sizes: dict[str, int] | None = None
) -> list[int]:
    expected = one_process(path, CONFIGS[config])
    cuts = [assert_same_model(on_ranks(path, CONFIGS[config], **(sizes or {})), expected)]
    if rank == 0:
        expected.save_pretrained(quantized)
    dist.barrier()
    return [*cuts, assert_same_model(on_ranks(quantized, None, **(sizes or {})), expected)]


# Transformers 5.17 refuses a head whose rows do not divide.
CUTS_EVENLY = not hasattr(DistributedConfig, "dp_size")
ODD = pytest.param("llama_of_odd_rows", marks=pytest.mark.skipif(CUTS_EVENLY, reason="later than this Transformers"))


TWO_RANKS = by_default(("qwen3_moe",), [name for name in MAKERS if "_of_" not in name])


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", by_default(("int4_columns", "float8"), CONFIGS))
@pytest.mark.parametrize("name", [ODD, *TWO_RANKS])
def test_two_ranks_hold_the_codes_and_give_the_results_of_one_process(name: str, config: str, tmp_path: Path) -> None:
    """On the fly and from a quantized checkpoint, in each format, with merged experts and packed gate and up."""
    path = float_model(tmp_path, name)
    for cuts in run_ranks(2, loads_as_one_process_does, path, config, tmp_path / "quantized"):
        assert min(cuts) > 0 or name == "gpt_oss"


@pytest.mark.parametrize("config", by_default(("int8",), ("int8", "float8")))
@pytest.mark.parametrize("name", exhaustive("llama_of_four_heads", "mixtral_of_four_heads"))
def test_four_ranks_hold_the_codes_and_give_the_results_of_one_process(name: str, config: str, tmp_path: Path) -> None:
    path = float_model(tmp_path, name)
    for cuts in run_ranks(4, loads_as_one_process_does, path, config, tmp_path / "quantized"):
        assert min(cuts) > 0


def loads_by_the_old_argument(rank: int, path: Path) -> None:
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
    with pytest.warns(FutureWarning, match="tp_plan"):
        model = one_process(path, CONFIGS["int8"], tp_plan="auto")
    assert assert_same_model(model, one_process(path, CONFIGS["int8"]))


def test_the_old_argument_tp_plan_does_the_same(tmp_path: Path) -> None:
    run_ranks(2, loads_by_the_old_argument, float_model(tmp_path, "llama"))


def experts_are_divided(rank: int, path: Path) -> list[torch.Size]:
    sizes = {"ep_size": 2} if hasattr(DistributedConfig, "ep_size") else {"enable_expert_parallel": True}
    model = on_ranks(path, CONFIGS["int4_g32"], tp_size=2, **sizes)
    expected = one_process(path, CONFIGS["int4_g32"])
    for (name, parameter), (_, of_one) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert type(of_one) is not QuantizedTensor or same_stored(whole(parameter), of_one), name
    inputs = text_inputs()
    torch.testing.assert_close(outputs(model, inputs)[0], outputs(expected, inputs)[0], rtol=1e-4, atol=1e-5)
    return [
        local_tensor(parameter).shape for name, parameter in model.named_parameters() if "experts.down_proj" in name
    ]


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", by_default(("int8_g32",), CONFIGS))
@pytest.mark.parametrize("name", ["llama_of_odd_rows", *exhaustive("llama_tied", "qwen3_moe")])
def test_ranks_of_fsdp_hold_parts_and_give_exactly_the_results_of_one_process(
    name: str, config: str, tmp_path: Path
) -> None:
    path = float_model(tmp_path, name)
    for cuts in run_ranks(2, loads_as_one_process_does, path, config, tmp_path / "quantized", {"fsdp_size": 2}):
        assert min(cuts) > 0


@pytest.mark.skipif(CUTS_EVENLY, reason="Transformers 5.17 loads no model so")
@pytest.mark.parametrize("config", exhaustive("int8", "int4_g32"))
def test_a_mesh_of_fsdp_and_a_plan_cuts_twice(config: str, tmp_path: Path) -> None:
    path, sizes = float_model(tmp_path, "llama"), {"fsdp_size": 2, "tp_size": 2}
    for cuts in run_ranks(4, loads_as_one_process_does, path, config, tmp_path / "quantized", sizes):
        assert min(cuts) > 0


@pytest.mark.parametrize("name", ["qwen3_moe", *exhaustive("gpt_oss")])
def test_expert_parallel_ranks_hold_whole_experts(name: str, tmp_path: Path) -> None:
    """Merged while they load, and stored transposed in one tensor."""
    for shapes in run_ranks(2, experts_are_divided, float_model(tmp_path, name)):
        assert {shape[0] for shape in shapes} == {2}


def each_rank_holds_its_share(rank: int, path: Path) -> float:
    config = CONFIGS["int8"]
    return on_ranks(path, config).get_memory_footprint() / one_process(path, config).get_memory_footprint()


def test_each_rank_holds_its_share_of_the_bytes(tmp_path: Path) -> None:
    shares = run_ranks(2, each_rank_holds_its_share, float_model(tmp_path, "llama"))
    assert max(shares) < 0.65


SAVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "safetensors": ("llama_tied", "int8", {}),
    "bin": ("llama", "int4_g32", {"safe_serialization": False}),
    "shards": ("llama", "float8", {"max_shard_size": "60KB"}),
    "bin in shards": ("qwen3_moe", "int8", {"safe_serialization": False, "max_shard_size": "60KB"}),
    "experts": ("qwen3_moe", "int4_g32", {}),
}


def saves(rank: int, path: Path, config: dict[str, Any], directory: Path, options: dict[str, Any]) -> None:
    # Both ways that scripts have: every rank says that it is the main process, or only the first.
    on_ranks(path, config).save_pretrained(directory / "all", **options)
    on_ranks(path, config).save_pretrained(directory / "first", is_main_process=rank == 0, **options)


@pytest.mark.parametrize("name", by_default(("bin in shards", "experts"), SAVES))
def test_a_save_from_ranks_writes_the_files_of_one_process(name: str, tmp_path: Path) -> None:
    architecture, config, options = SAVES[name]
    path = float_model(tmp_path, architecture)
    run_ranks(2, saves, path, CONFIGS[config], tmp_path, options)
    one_process(path, CONFIGS[config]).save_pretrained(tmp_path / "one", **options)
    expected = {file.name: file.read_bytes() for file in (tmp_path / "one").iterdir()}
    for directory in (tmp_path / "all", tmp_path / "first"):
        assert {file.name: file.read_bytes() for file in directory.iterdir()} == expected


class PushAside:
    """In place of a push to the Hub: copies the files into a directory."""

    card, tags, present = None, (), ()

    def __init__(self, target: Path) -> None:
        self.target, self.repo_id = target, target.name

    def commit(self, directory: Path, names: Sequence[str], card: str, remove: Iterable[str]) -> str:
        assert card
        assert list(remove) == []
        self.target.mkdir()
        for name in names:
            shutil.copy(directory / name, self.target)
        return "a commit"


def pushes(rank: int, path: Path, directory: Path) -> object:
    begun: Any = lambda repo_id, private: PushAside(directory / f"{repo_id} private={private}")  # noqa: E731
    saving.begin_push = begun
    return on_ranks(path, CONFIGS["int8"]).push_to_hub("tiny", private=True)


def test_the_first_rank_pushes_the_files_of_one_process(tmp_path: Path) -> None:
    path = float_model(tmp_path, "llama")
    assert run_ranks(2, pushes, path, tmp_path) == ["a commit", None]
    one_process(path, CONFIGS["int8"]).save_pretrained(tmp_path / "one")
    expected = {file.name: file.read_bytes() for file in (tmp_path / "one").iterdir()}
    pushed = {file.name: file.read_bytes() for file in (tmp_path / "tiny private=True").iterdir()}
    assert pushed.pop("README.md")
    assert pushed == expected


def saves_into_a_file(rank: int, path: Path, target: Path) -> None:
    on_ranks(path, CONFIGS["int8"]).save_pretrained(target / "below")


def test_a_save_that_fails_on_the_first_rank_fails_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcomes = outcomes_of_ranks(2, saves_into_a_file, float_model(tmp_path, "llama"), tmp_path / "file")
    assert all(isinstance(outcome.error, SaveError) for outcome in outcomes)
    assert str(outcomes[1].error) == str(outcomes[0].error)


def saves_distributed(rank: int, path: Path, target: Path) -> None:
    on_ranks(path, CONFIGS["int8"]).save_pretrained(target, distributed_checkpoint=True)


def test_a_checkpoint_of_parts_is_refused_on_every_rank(tmp_path: Path) -> None:
    for outcome in outcomes_of_ranks(2, saves_distributed, float_model(tmp_path, "llama"), tmp_path / "out"):
        assert isinstance(outcome.error, UnsupportedError)
        assert "found distributed_checkpoint=True" in str(outcome.error)


def loads(rank: int, path: Path, config: dict[str, Any] | None) -> None:
    on_ranks(path, config)


def errors_of(outcomes: list[Outcome]) -> list[tuple[type, str]]:
    return [(type(outcome.error), str(outcome.error)) for outcome in outcomes]


@pytest.mark.parametrize("quantized", [False, True], ids=["on the fly", "from a quantized checkpoint"])
def test_groups_that_a_plan_would_cut_are_refused_on_every_rank_alike(quantized: bool, tmp_path: Path) -> None:
    path, config = float_model(tmp_path, "llama"), {"format": "int4", "group_size": 64}
    if quantized:
        one_process(path, config).save_pretrained(tmp_path / "quantized")
    errors = errors_of(outcomes_of_ranks(2, loads, *((tmp_path / "quantized", None) if quantized else (path, config))))
    assert errors[0] == errors[1]
    kind, text = errors[0]
    assert kind is UnsupportedError
    assert "model.layers.0.self_attn.o_proj.weight" in text
    assert "int4 g64 that the style 'rowwise' of the plan can cut for 2 ranks" in text
    assert "found a part of (64, 32) of [*, N, K] = (64, 64)" in text
    assert "Choose a smaller group_size" in text


def test_an_error_in_the_part_of_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """The first rows of `q_proj` are those of the first rank, which alone would see what is wrong with them."""
    path = float_model(tmp_path, "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    errors = errors_of(outcomes_of_ranks(2, loads, path, CONFIGS["int8"]))
    assert errors[0] == errors[1]
    assert errors[0][0] is QuantizationError
    assert "q_proj.weight: expected finite values" in errors[0][1]


def loads_own_copy(rank: int, paths: list[Path]) -> None:
    on_ranks(paths[rank], None)


def test_a_file_damaged_for_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    one_process(float_model(tmp_path, "llama"), CONFIGS["int8"]).save_pretrained(tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    content = (tmp_path / "1" / "model.safetensors").read_bytes()
    (tmp_path / "1" / "model.safetensors").write_bytes(content[:-5])
    errors = errors_of(outcomes_of_ranks(2, loads_own_copy, [tmp_path / "0", tmp_path / "1"]))
    assert errors[0] == errors[1]
    assert str(tmp_path / "1" / "model.safetensors") in errors[0][1]


def loads_onto_devices(rank: int, path: Path) -> None:
    config, given = TrainWeightsConfig("int8"), DistributedConfig(tp_size=2)
    AutoModelForCausalLM.from_pretrained(path, quantization_config=config, distributed_config=given, device_map="cpu")


def test_a_device_map_beside_a_plan_is_refused_on_every_rank(tmp_path: Path) -> None:
    for outcome in outcomes_of_ranks(2, loads_onto_devices, float_model(tmp_path, "llama")):
        assert isinstance(outcome.error, ValueError)
        assert "`device_map` are mutually exclusive" in str(outcome.error)


def is_dequantized(rank: int, path: Path) -> None:
    model, expected = on_ranks(path, CONFIGS["int4_g32"]), one_process(path, CONFIGS["int4_g32"])
    before = outputs(model, text_inputs())[0]
    model.dequantize()
    expected.dequantize()
    for (name, parameter), (_, of_one) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(whole(parameter), of_one), name
    torch.testing.assert_close(outputs(model, text_inputs())[0], before, rtol=1e-4, atol=1e-5)


def test_a_distributed_model_is_dequantized_part_by_part(tmp_path: Path) -> None:
    run_ranks(2, is_dequantized, float_model(tmp_path, "llama"))


def takes_flat_tensors(rank: int, path: Path, other: Path) -> None:
    model, expected = on_ranks(path, CONFIGS["int8"]), one_process(other, CONFIGS["int8"])
    if rank == 0:
        expected.save_pretrained(other / "int8")
    dist.barrier()
    # PyTorch takes no whole float tensor for one that is distributed.
    plain = {name for name, parameter in expected.named_parameters() if not isinstance(parameter, QuantizedTensor)}
    cut = {name for name, parameter in model.named_parameters() if is_distributed(parameter)}
    flat = load_file(other / "int8" / "model.safetensors")
    model.load_state_dict({name: tensor for name, tensor in flat.items() if name not in plain & cut}, strict=False)
    for (name, parameter), (_, of_one) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        if isinstance(of_one, QuantizedTensor):
            assert same_stored(whole(parameter.detach()), of_one.detach()), name


def test_a_distributed_model_takes_the_tensors_of_a_file(tmp_path: Path) -> None:
    """Trainer resumes so."""
    path = float_model(tmp_path, "llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).save_pretrained(tmp_path / "other")
    run_ranks(2, takes_flat_tensors, path, tmp_path / "other")


def returns_gradients(rank: int, path: Path) -> None:
    gradients = []
    for model in (on_ranks(path, CONFIGS["int4_g32"]), one_process(path, CONFIGS["int4_g32"])):
        inputs = random_floats(2, 8, 64).requires_grad_()
        model(inputs_embeds=inputs).logits.square().sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


def test_gradients_pass_through_the_parts_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, returns_gradients, float_model(tmp_path, "llama"))
