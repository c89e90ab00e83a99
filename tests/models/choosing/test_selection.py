"""Which weights are chosen, to which format, and why the others are not; nothing here reads a weight's values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from covering import exhaustive
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MobileBertConfig,
    MobileBertForMaskedLM,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.pytorch_utils import Conv1D

from hf_trainweights import TrainWeightsConfig, quantize_, quantize_directory, summary
from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.choosing import selection
from hf_trainweights.models.choosing.config_values import listed
from hf_trainweights.models.choosing.selection import LAST_WITH_BIAS, choose, router_layers, survey
from hf_trainweights.models.choosing.summary import Choice

SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
EMBEDDING = "embedding (include_embeddings=True quantizes it)"
NOT_A_WEIGHT = "not the weight of a linear, expert or embedding layer"
INT4 = TrainWeightsConfig("int4", group_size=32)


def choices(module: nn.Module, config: TrainWeightsConfig = INT4, skip: tuple[str, ...] = ()) -> dict[str, Choice]:
    return {choice.name: choice for choice in choose(module, config, skip).summary.tensors}


def outcomes(module: nn.Module, config: TrainWeightsConfig = INT4, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return for each parameter the format, or the reason where there is none."""
    return {name: choice.format or choice.reason for name, choice in choices(module, config, skip).items()}


class Experts(nn.Module):
    """Expert weights as a user may write them, in one of both layouts."""

    def __init__(self, transposed: bool = False, count: int = 4, hidden: int = 64, inner: int = 96) -> None:
        super().__init__()
        self.num_experts = count
        self.hidden_size = hidden
        up = (hidden, 2 * inner) if transposed else (2 * inner, hidden)
        down = (inner, hidden) if transposed else (hidden, inner)
        self.gate_up_proj = nn.Parameter(torch.zeros(count, *up))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * inner))
        self.down_proj = nn.Parameter(torch.zeros(count, *down))


# What is found


FOUND: dict[str, tuple[Callable[[], nn.Module], dict[str, Format | str]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(64, 8)),
        {"0.weight": Int4(32), "0.bias": NOT_A_WEIGHT},
    ),
    "linear alone": (lambda: nn.Linear(64, 8), {"weight": Int4(32), "bias": NOT_A_WEIGHT}),
    "subclass of linear": (
        lambda: nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(64, 8, bias=False)),
        {"0.weight": Int4(32)},
    ),
    "conv1d": (
        lambda: nn.Sequential(Conv1D(8, 64)),
        {"0.weight": Int4(32), "0.bias": NOT_A_WEIGHT},
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(8, 64)), {"0.weight": EMBEDDING}),
    "embedding that is written to": (
        lambda: nn.Sequential(nn.Embedding(8, 64, max_norm=1)),
        {"0.weight": NOT_A_WEIGHT},
    ),
    "experts": (
        lambda: nn.ModuleDict({"experts": Experts()}),
        {
            "experts.gate_up_proj": Int4(32),
            "experts.gate_up_proj_bias": NOT_A_WEIGHT,
            "experts.down_proj": Int4(32),
        },
    ),
    "attention": (
        lambda: nn.Sequential(nn.MultiheadAttention(64, 4)),
        {
            "0.in_proj_weight": NOT_A_WEIGHT,
            "0.in_proj_bias": NOT_A_WEIGHT,
            "0.out_proj.weight": Int4(32),
            "0.out_proj.bias": NOT_A_WEIGHT,
        },
    ),
    "others": (
        lambda: nn.Sequential(
            nn.LayerNorm(64, bias=False),
            nn.Conv1d(4, 4, 3, bias=False),
            nn.Bilinear(4, 4, 4, bias=False),
            nn.LSTM(4, 4, bias=False),
            nn.EmbeddingBag(4, 4),
        ),
        dict.fromkeys(
            ("0.weight", "1.weight", "2.weight", "3.weight_ih_l0", "3.weight_hh_l0", "4.weight"), NOT_A_WEIGHT
        ),
    ),
    "reparametrized": (
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 8, bias=False))),
        dict.fromkeys(("0.parametrizations.weight.original0", "0.parametrizations.weight.original1"), NOT_A_WEIGHT),
    ),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_found_by_structure(name: str, device: str) -> None:
    make, expected = FOUND[name]
    with torch.device(device):
        module = make()
    assert outcomes(module) == expected


def test_other_dtypes_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(64, 8, bias=False, dtype=torch.float64), nn.Linear(64, 8, bias=False))
    module[1].weight = nn.Parameter(torch.zeros(8, 64, dtype=torch.int8), requires_grad=False)
    assert outcomes(module) == {"0.weight": "torch.float64", "1.weight": "torch.int8"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float_dtypes_are_quantized(dtype: torch.dtype) -> None:
    assert outcomes(nn.Linear(64, 8, bias=False, dtype=dtype)) == {"weight": Int4(32)}


def test_a_shape_that_does_not_fit_falls_back_and_says_so() -> None:
    choice = choices(nn.Linear(60, 8, bias=False))["weight"]
    assert (choice.format, choice.reason) == (Int8(), "shape does not fit int4 g32")
    choice = choices(nn.Linear(64, 1, bias=False))["weight"]
    assert (choice.format, choice.reason) == (Int8(), "shape does not fit int4 g32")
    choice = choices(nn.Linear(60, 8, bias=False), TrainWeightsConfig("int8", group_size=32))["weight"]
    assert (choice.format, choice.reason) == (Int8(), "shape does not fit int8 g32")


# Experts


EXPERTS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "handmade": (Experts, False),
    "handmade transposed": (lambda: Experts(transposed=True), True),
    "qwen3_moe": (
        lambda: Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=96, num_experts=4)),
        False,
    ),
    "gpt_oss": (
        lambda: GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=4)),
        True,
    ),
    "llama4": (
        lambda: Llama4TextExperts(Llama4TextConfig(hidden_size=64, intermediate_size=96, num_local_experts=4)),
        True,
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_found_in_both_layouts(name: str) -> None:
    make, transposed = EXPERTS[name]
    with torch.device("meta"):
        module = nn.ModuleDict({"experts": make()})
    found = {key.rpartition(".")[2]: choice for key, choice in choices(module).items() if choice.format}
    assert set(found) == {"gate_up_proj", "down_proj"}
    for leaf, K in (("gate_up_proj", 64), ("down_proj", 96)):
        choice = found[leaf]
        weight = module["experts"].get_parameter(leaf)
        assert choice.transposed == transposed
        assert weight.shape[-2 if transposed else -1] == K
        assert choice.bytes_after == weight.numel() // 2 + weight.numel() // 32 * 4


@pytest.mark.parametrize("inner", [32, 64], ids=["square gate_up_proj", "square down_proj"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_layout_of_experts_is_seen_though_one_weight_is_square(transposed: bool, inner: int) -> None:
    module = nn.ModuleDict({"m": Experts(transposed=transposed, hidden=64, inner=inner)})
    found = {name: choice for name, choice in choices(module).items() if choice.format}
    assert {name: choice.transposed for name, choice in found.items()} == dict.fromkeys(
        ("m.gate_up_proj", "m.down_proj"), transposed
    )


def test_conv1d_is_stored_the_other_way_round() -> None:
    choice = choices(nn.Sequential(Conv1D(6, 64)))["0.weight"]
    assert choice.transposed
    assert choice.format == Int4(32)
    assert choices(nn.Sequential(Conv1D(64, 6)))["0.weight"].format == Int8()


# Which rule wins


class Model(nn.Module):
    """An embedding, a layer, experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 64)
        self.layer = nn.Linear(64, 64, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(64, 8, bias=False)


RULES: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "nothing": ({}, (), {"embed.weight": EMBEDDING, "layer.weight": Int4(32), "head.weight": Int4(32)}),
    "include": ({"include_embeddings": True}, (), {"embed.weight": Int4(32)}),
    "model's skip": ({}, ("head",), {"head.weight": "kept in float by the model", "layer.weight": Int4(32)}),
    "user's skip": (
        {"modules_to_not_convert": ["layer"]},
        (),
        {"layer.weight": "in modules_to_not_convert", "head.weight": Int4(32)},
    ),
    "user's skip of experts": (
        {"modules_to_not_convert": ["experts"]},
        (),
        {"experts.gate_up_proj": "in modules_to_not_convert", "experts.down_proj": "in modules_to_not_convert"},
    ),
    "user's skip of one parameter": (
        {"modules_to_not_convert": ["experts.down_proj"]},
        (),
        {"experts.gate_up_proj": Int4(32), "experts.down_proj": "in modules_to_not_convert"},
    ),
    "override by module": ({"overrides": {"layer": "int8"}}, (), {"layer.weight": Int8(), "head.weight": Int4(32)}),
    "override by parameter": ({"overrides": {"layer.weight": "int8"}}, (), {"layer.weight": Int8()}),
    "override none": ({"overrides": {"layer": None}}, (), {"layer.weight": "override"}),
    "override of experts": (
        {"overrides": {"experts.down_proj": "int8", "re:experts\\.gate.*": None}},
        (),
        {"experts.down_proj": Int8(), "experts.gate_up_proj": "override"},
    ),
    "override of all experts": (
        {"overrides": {"experts": "int8"}},
        (),
        {"experts.down_proj": Int8(), "experts.gate_up_proj": Int8()},
    ),
    "override of an embedding": ({"overrides": {"embed": "int8"}}, (), {"embed.weight": Int8()}),
    "override over the model's skip": ({"overrides": {"head": "int8"}}, ("head",), {"head.weight": Int8()}),
    "override over the user's skip": (
        {"overrides": {"layer": "int8"}, "modules_to_not_convert": ["layer"]},
        (),
        {"layer.weight": Int8()},
    ),
    "override cannot make a weight": (
        {"overrides": {"re:.*": "int8"}},
        (),
        {"experts.gate_up_proj_bias": NOT_A_WEIGHT, "layer.weight": Int8()},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    arguments, skip, expected = RULES[name]
    actual = outcomes(Model(), TrainWeightsConfig("int4", group_size=32, **arguments), skip)
    assert {key: actual[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("layers.1", "layers.1.mlp", True),
        ("layers.1", "layers.11.mlp", False),
        ("layers.1", "model.layers.1.mlp", False),
        ("layers.*", "layers.11.mlp", True),
        ("mlp.gate", "mlp.gate_proj", False),
        ("a|b", "b.weight", True),
        ("fc1", "decoder.layers.23.fc1", True),
        (".*", "anything", True),
    ],
)
def test_a_pattern_matches_a_suffix_or_from_the_start_up_to_a_module(pattern: str, name: str, expected: bool) -> None:
    assert listed([pattern], [name]) == ({name} if expected else set())


# Tied weights


class Tied(nn.Module):
    """A head and an embedding that share a weight, whichever comes first."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        for name in ("head", "embed") if head_first else ("embed", "head"):
            self.add_module(name, nn.Linear(64, 8, bias=False) if name == "head" else nn.Embedding(8, 64))
        self.embed.weight = self.head.weight
        self.layer = nn.Linear(64, 64, bias=False)


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, EMBEDDING),
        ({"include_embeddings": True}, Int4(32)),
        ({"overrides": {"head": "int8"}}, Int8()),
        ({"overrides": {"embed": "int8"}}, Int8()),
        ({"overrides": {"re:embed\\.weight": "int8"}}, Int8()),
        ({"overrides": {"head": None}, "include_embeddings": True}, "override"),
        ({"modules_to_not_convert": ["head"], "include_embeddings": True}, "in modules_to_not_convert"),
        ({"modules_to_not_convert": ["embed"], "include_embeddings": True}, "in modules_to_not_convert"),
    ],
)
def test_a_tied_weight_is_known_by_all_its_names(head_first: bool, arguments: dict[str, Any], expected: Any) -> None:
    config = TrainWeightsConfig("int4", group_size=32, **arguments)
    actual = outcomes(Tied(head_first), config)
    assert actual == {("head" if head_first else "embed") + ".weight": expected, "layer.weight": Int4(32)}


def test_a_shared_module_counts_once() -> None:
    shared = nn.Linear(64, 64, bias=False)
    module = nn.ModuleDict({"first": shared, "second": shared})
    summary = choose(module, INT4).summary
    assert [choice.name for choice in summary.tensors] == ["first.weight"]
    assert summary.bytes_before == 64 * 64 * 4
    assert outcomes(module, TrainWeightsConfig("int4", overrides={"second": None})) == {"first.weight": "override"}


def tiny_llama(**options: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        **options,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    ("arguments", "embedding", "head"),
    [
        ({}, False, False),
        ({"include_embeddings": True}, True, True),
        ({"include_embeddings": True, "overrides": {"lm_head": None}}, True, False),
        ({"overrides": {"lm_head": "int8"}}, False, True),
    ],
)
def test_a_model_that_is_not_tied_yet_is_taken_for_tied(
    tie: bool, arguments: dict[str, Any], embedding: bool, head: bool
) -> None:
    model = tiny_llama(tie_word_embeddings=tie)
    # This is what from_pretrained shows before it loads: two parameters, and the names of those that will be one.
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    config = TrainWeightsConfig("int4", group_size=32, **arguments)
    found = choices(model, config)
    chosen = {name: found[f"{name}.weight"].format is not None for name in ("model.embed_tokens", "lm_head")}
    # Tied, what the head gets, the embedding gets too.
    assert chosen == {"model.embed_tokens": head if tie else embedding, "lm_head": head}


# The summary


def test_a_transformers_model_is_chosen_from_on_meta() -> None:
    model = tiny_llama()
    summary = choose(model, INT4).summary
    assert len(summary.quantized) == 7
    assert len(summary.tensors) == 7 + 3 + 2
    assert str(summary) == (
        "quantized: 7 int4 g32; left alone: 1 embedding (include_embeddings=True quantizes it), "
        "3 not the weight of a linear, expert or embedding layer, "
        "1 output head (include_embeddings=True quantizes it); "
        "0.2 MB -> 0.0 MB; the output head in float is 27 % of what a token reads; "
        "overrides={'lm_head': 'int8'} makes it 4 times smaller"
    )


def test_the_last_layer_is_the_same_before_and_after_a_load_ties_the_head() -> None:
    sizes = {"hidden_size": 64, "embedding_size": 32, "intra_bottleneck_size": 32, "intermediate_size": 64}
    config = MobileBertConfig(vocab_size=32, num_hidden_layers=1, num_attention_heads=2, **sizes)
    model = MobileBertForMaskedLM(config)
    tied = outcomes(model, TrainWeightsConfig("int8", include_embeddings=True))
    model.cls.predictions.decoder.weight = nn.Parameter(torch.empty_like(model.cls.predictions.decoder.weight))
    untied = outcomes(model, TrainWeightsConfig("int8", include_embeddings=True))
    assert tied["cls.predictions.dense.weight"] == untied["cls.predictions.dense.weight"] == Int8()


def test_a_table_that_the_model_makes_anew_at_each_load_is_not_quantized(tmp_path: Path) -> None:
    sizes = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in SIDE.items()}
    model = MarianMTModel(MarianConfig(vocab_size=32, d_model=64, max_position_embeddings=8, pad_token_id=0, **sizes))
    overrides: Any = {"embed_positions": "int8"}
    config = TrainWeightsConfig("int8", include_embeddings=True, overrides=overrides)
    assert outcomes(model, config)["model.encoder.embed_positions.weight"] == "made anew at each load"
    quantize_(model, config)
    model.save_pretrained(tmp_path)
    expected = model.model.encoder.embed_positions.weight
    assert torch.equal(MarianMTModel.from_pretrained(tmp_path).model.encoder.embed_positions.weight, expected)


def test_gpt2_is_quantized_though_it_has_no_linear_but_its_head() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=64, n_layer=1, n_head=2))
    summary = choose(model, INT4).summary
    assert len(summary.quantized) == 4
    assert all(choice.transposed for choice in summary.quantized)


def test_fallbacks_and_overrides_are_told_apart() -> None:
    module = nn.Sequential(nn.Linear(64, 8), nn.Linear(60, 8), nn.Linear(64, 8))
    config = TrainWeightsConfig("int4", group_size=32, overrides={"2": "int8"})
    assert str(choose(module, config).summary).startswith(
        "quantized: 1 int4 g32, 1 int8 (shape does not fit int4 g32), 1 int8 (override); left alone: 3 not "
    )


@pytest.mark.parametrize("options", [{"bits": 4.5}, *exhaustive({"size": "200KB"}, {"format": "int8"})])
@pytest.mark.parametrize("way", ["load", "directory", "in place"])
def test_a_model_is_read_for_its_rules_once_before_it_gets_its_weights_and_once_after(
    options: dict[str, Any], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = ARCHITECTURES["llama"].build(), TrainWeightsConfig(**options)
    model.save_pretrained(tmp_path / "float")
    read: list[nn.Module] = []
    monkeypatch.setattr(selection, "router_layers", lambda module: read.append(module) or router_layers(module))
    if way == "load":
        LlamaForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    elif way == "directory":
        quantize_directory(tmp_path / "float", tmp_path / "small", config)
    else:
        quantize_(model, config)
    assert len(read) == 2


@pytest.mark.parametrize("form", ["int8", "int4", "float8_e4m3"])
def test_what_is_foretold_comes_true(form: str) -> None:
    config = TrainWeightsConfig(form, include_embeddings=True)
    module = nn.ModuleDict({"linear": nn.Linear(128, 8), "odd": nn.Linear(60, 8), "conv": Conv1D(6, 128)})
    module["embed"] = nn.Embedding(8, 128)
    module["experts"] = Experts(transposed=True, hidden=128, inner=64)
    nn.init.normal_(module["conv"].weight)
    foretold = choose(module, config).summary
    quantize_(module, config)
    assert survey(module, config) == foretold
    for choice in foretold.quantized:
        weight: Tensor = module.get_parameter(choice.name)
        assert weight.stored_bytes == choice.bytes_after
        assert weight.transposed == choice.transposed
        assert weight.format == choice.format


def test_survey_tells_what_is_not_as_configured() -> None:
    module = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False))
    quantize_(nn.Sequential(module[0]), INT4)
    quantize_(nn.Sequential(module[1]), TrainWeightsConfig("int8"))
    summary = survey(module, INT4)
    assert [(choice.format, choice.reason) for choice in summary.tensors] == [
        (Int4(32), ""),
        (Int8(), "as saved"),
        (None, "not in the checkpoint"),
    ]
    assert summary.bytes_after == 8 * 32 + 8 * 2 * 4 + 8 * 64 + 8 * 4 + 8 * 64 * 4
    assert summary.bytes_before == 3 * 8 * 64 * 4


@pytest.mark.parametrize(
    "make", [lambda: nn.LazyLinear(8), lambda: nn.Sequential(nn.Linear(64, 8), nn.LazyConv1d(4, 3))]
)
@pytest.mark.parametrize("ask", [choose, lambda module, config: summary(module)], ids=["choose", "summary"])
def test_a_lazy_layer_that_no_inputs_have_reached_is_refused(make: Callable[[], nn.Module], ask: Any) -> None:
    with pytest.raises(QuantizationError, match=r"a weight with a shape .* Run the module on inputs once"):
        ask(make(), INT4)


def test_a_last_layer_with_a_bias_is_quantized_and_the_summary_says_so() -> None:
    values = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(**values))
    reasons = {name: choice.reason for name, choice in choices(model).items() if choice.format is not None}
    assert reasons.pop("classifier.weight") == LAST_WITH_BIAS
    assert set(reasons.values()) == {""}
    left = TrainWeightsConfig("int4", group_size=32, modules_to_not_convert=["classifier"])
    assert outcomes(model, left)["classifier.weight"] == "in modules_to_not_convert"
