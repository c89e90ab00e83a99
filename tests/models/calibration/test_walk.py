"""The walk over a model: what it reaches, what it leaves, and that its codes are better."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, DECODER, TEXT, TOKENS, VISION, of_each_family
from covering import exhaustive
from cpus import ICE_LAKE
from torch import Tensor, nn

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError
from hf_trainweights.kernels import cpu_features
from hf_trainweights.models.choosing.summary import Summary

CONFIG = TrainWeightsConfig("int4", group_size=32)


def batches(count: int = 8, tokens: int = 24, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(2, 96, (8, tokens), generator=generator)} for _ in range(count)]


def a_llama(**options: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **options})).eval()


@torch.no_grad()
def outputs(model: nn.Module, inputs: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([model(**batch).logits.flatten() for batch in inputs])


def without(summary: Summary) -> dict[str, str]:
    """Return the quantized weights that calibration left, and why."""
    prefix = "without calibration: "
    left = (each for each in summary.quantized if each.reason.startswith(prefix))
    return {each.name: each.reason.removeprefix(prefix) for each in left}


@pytest.mark.slow
@pytest.mark.parametrize("name", of_each_family())
def test_every_architecture_can_be_calibrated(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    inputs = [architecture.inputs(model) for _ in range(3)]
    expected = {choice.name for choice in quantize_(copy.deepcopy(model), CONFIG).quantized}
    summary = quantize_(model, CONFIG, calibration=inputs)
    assert {choice.name for choice in summary.quantized} == expected
    assert all(isinstance(model.get_parameter(name), QuantizedTensor) for name in expected)
    assert without(summary).keys() < expected
    assert summary.calibrated is not None
    assert summary.calibrated.tokens > 0
    with torch.no_grad():
        model(**inputs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        *exhaustive(
            {"dtype": torch.bfloat16}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
        ),
    ],
    ids=str,
)
def test_outputs_on_other_inputs_are_nearer(options: dict[str, Any]) -> None:
    dtype = options.pop("dtype", torch.float32)
    reference = a_llama(**options).to(dtype)
    plain, calibrated = copy.deepcopy(reference), copy.deepcopy(reference)
    quantize_(plain, "uint2")
    summary = quantize_(calibrated, "uint2", calibration=batches(32))
    assert not without(summary)
    unseen = batches(4, seed=7)
    expected = outputs(reference, unseen)
    errors = [(outputs(model, unseen) - expected).float().norm().item() for model in (calibrated, plain)]
    assert errors[0] < 0.9 * errors[1]
    assert summary.calibrated is not None
    assert summary.calibrated.error_after < 0.9 * summary.calibrated.error_before
    assert "the last block's outputs are off by" in str(summary)


@pytest.mark.slow
def test_errors_of_the_last_block_are_those_of_all() -> None:
    quantized = quantize_(a_llama(), CONFIG, calibration=batches()).calibrated
    assert quantized is not None
    assert list(quantized.blocks) == ["model.layers.0", "model.layers.1"]
    assert quantized.blocks["model.layers.1"] == (quantized.error_before, quantized.error_after)
    assert all(after < before for before, after in quantized.blocks.values())


@pytest.mark.slow
def test_the_same_batches_give_the_same_codes() -> None:
    one, other = a_llama(), a_llama()
    quantize_(one, CONFIG, calibration=batches())
    quantize_(other, CONFIG, calibration=iter(batches()))
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        if isinstance(a, QuantizedTensor):
            assert isinstance(b, QuantizedTensor)
            assert all(torch.equal(a.tensors[key], b.tensors[key]) for key in a.tensors), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_model_in_a_dtype_that_the_cpu_is_slow_in_is_calibrated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "capabilities", lambda: ICE_LAKE)
    model = ARCHITECTURES[name].build().bfloat16()
    summary = quantize_(model, CONFIG, calibration=batches())
    assert not without(summary)
    assert summary.calibrated is not None
    assert summary.calibrated.error_after < summary.calibrated.error_before


@pytest.mark.slow
def test_padding_does_not_matter() -> None:
    plain = batches(4)
    padded = []
    for batch in plain:
        ids = torch.cat((batch["input_ids"], torch.zeros(8, 9, dtype=torch.int64)), dim=1)
        padded.append({"input_ids": ids, "attention_mask": (torch.arange(33) < 24).expand(8, -1).long()})
    one, other = a_llama(), a_llama()
    a, b = quantize_(one, CONFIG, calibration=plain), quantize_(other, CONFIG, calibration=padded)
    assert a.calibrated is not None
    assert b.calibrated is not None
    assert a.calibrated.tokens == b.calibrated.tokens == 4 * 8 * 24
    torch.testing.assert_close(outputs(one, plain), outputs(other, plain), rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "whisper"])
def test_blocks_of_conv1d_and_both_stacks_of_two_are_reached(name: str) -> None:
    model = ARCHITECTURES[name].build()
    summary = quantize_(model, CONFIG, calibration=[ARCHITECTURES[name].inputs(model)])
    calibrated = {choice.name for choice in summary.quantized} - without(summary).keys()
    linear = {choice.name for choice in summary.quantized if choice.format is not None and "int4" in str(choice.format)}
    assert calibrated == linear


class Named(nn.Module):
    """Runs its layers as a test wants."""

    def __init__(self, forward: Callable[[Named, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_a_row(module: Named, x: Tensor) -> Tensor:
    for layer in module.layers:
        x = layer(x)
    return x


def last_left_out(module: Named, x: Tensor) -> Tensor:
    return module.layers[1](module.layers[0](x))


def first_twice(module: Named, x: Tensor) -> Tensor:
    return in_a_row(module, module.layers[0](x))


def side_by_side(module: Named, x: Tensor) -> Tensor:
    return sum((layer(x + 1.0 * number) for number, layer in enumerate(module.layers)), start=x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (in_a_row, set()),
        (side_by_side, set()),
        (last_left_out, {"layers.2.weight"}),
        (first_twice, {"layers.0.weight"}),
    ],
)
def test_layers_that_the_batches_do_not_run_once_are_named(
    forward: Callable[[Named, Tensor], Tensor], left: set[str]
) -> None:
    module = Named(forward)
    found = without(quantize_(module, CONFIG, calibration=[torch.randn(300, 64)]))
    assert found.keys() == left
    assert all(reason == "its module is in no block that the batches run once" for reason in found.values())


def test_layers_of_a_block_that_run_several_times_are_named() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once, self.twice, self.never = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.once(self.twice(self.twice(x)))

    module = nn.Sequential(Block(), Block())
    found = without(quantize_(module, CONFIG, calibration=[torch.randn(300, 64)]))
    assert found == {
        **{f"{number}.twice.weight": "its layer runs several times" for number in (0, 1)},
        **{f"{number}.never.weight": "its layer is not called" for number in (0, 1)},
    }


@pytest.mark.slow
def test_layers_that_a_router_sends_other_tokens_to_are_calibrated_by_what_they_get() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, *experts = (nn.Linear(64, 64) for _ in range(3))
            self.experts = nn.ModuleList(experts)

        def forward(self, x: Tensor) -> Tensor:
            first = x[:, 0] > 0
            y = self.before(x)
            y = y.index_put((first,), self.experts[0](y[first])) if first.any() else y
            return y.index_put((~first,), self.experts[1](y[~first])) if (~first).any() else y

    torch.manual_seed(0)
    module = nn.Sequential(*(Routed() for _ in range(3)))
    calibrated = copy.deepcopy(module)
    # The second batch never reaches the second expert of the first block.
    inputs = [torch.randn(600, 64), torch.ones(8, 64)]
    summary = quantize_(calibrated, "uint2", calibration=inputs)
    assert not without(summary)
    assert summary.calibrated is not None
    assert summary.calibrated.error_after < summary.calibrated.error_before


@pytest.mark.slow
def test_a_shared_weight_and_an_embedding_are_named() -> None:
    module = Named(in_a_row)
    module.layers[2].weight = module.layers[0].weight
    assert without(quantize_(module, CONFIG, calibration=[torch.randn(300, 64)])) == {
        "layers.0.weight": "several layers share it"
    }
    config = TrainWeightsConfig("int4", group_size=32, include_embeddings=True)
    found = without(quantize_(a_llama(), config, calibration=batches()))
    assert found["model.embed_tokens.weight"] == "its layer is no linear one"


def test_a_module_without_blocks_is_one() -> None:
    module = nn.Linear(64, 64)
    summary = quantize_(module, CONFIG, calibration=[torch.randn(300, 64)])
    assert not without(summary)
    assert summary.calibrated is not None
    assert summary.calibrated.tokens == 300


class Head(nn.Module):
    """A chain of blocks, and a layer that does not get what the last of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).relu())


def test_one_block_at_a_time_has_the_values_of_its_quantized_weights() -> None:
    module = Head()
    floats, changed = [block.weight for block in module.blocks], []

    def look(*_: object) -> None:
        changed.append([block.weight is not weight for block, weight in zip(module.blocks, floats, strict=True)])

    for block in module.blocks:
        block.register_forward_hook(look)
    quantize_(module, CONFIG, calibration=[torch.randn(300, 64)])
    assert [True, False, False] in changed
    assert max(map(sum, changed)) == 1


@pytest.mark.slow
def test_overrides_of_eight_bits_stay_as_they_are() -> None:
    config = TrainWeightsConfig("int4", group_size=32, overrides={"down_proj": "int8"})
    found = without(quantize_(a_llama(), config, calibration=batches()))
    assert {name.split(".")[-2] for name in found} == {"down_proj"}
    assert set(found.values()) == {"int8 gains nothing by it"}


@pytest.mark.parametrize("name", ["int8", "float8_e4m3"])
def test_eight_bits_alone_are_refused(name: str) -> None:
    model = a_llama()
    with pytest.raises(ConfigError, match=r"calibration: expected a format of 2 to 6 bits or coded, found .*8"):
        quantize_(model, name, calibration=batches())
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


@pytest.mark.slow
def test_formats_for_a_budget_are_calibrated_too() -> None:
    model = a_llama()
    summary = quantize_(model, TrainWeightsConfig(bits=3.5), calibration=batches())
    assert summary.calibrated is not None
    assert summary.calibrated.error_after < summary.calibrated.error_before
    assert summary.bits_per_weight < 16


def test_a_cache_that_a_batch_asks_for_changes_nothing() -> None:
    model, other = a_llama(), a_llama()
    quantize_(model, CONFIG, calibration=[{**batch, "use_cache": True} for batch in batches(2)])
    quantize_(other, CONFIG, calibration=batches(2))
    assert torch.equal(outputs(model, batches(1)), outputs(other, batches(1)))


def gemma3() -> tuple[transformers.PreTrainedModel, dict[str, Tensor]]:
    vision = {**VISION, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(text_config={**DECODER, "head_dim": 16}, vision_config=vision)
    return transformers.Gemma3ForConditionalGeneration(config), {}


def encoder_decoder() -> tuple[transformers.PreTrainedModel, dict[str, Tensor]]:
    encoder, decoder = (transformers.BertConfig(**{**TEXT, "num_hidden_layers": 1}) for _ in range(2))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.EncoderDecoderModel(config), {"decoder_input_ids": batches(1)[0]["input_ids"]}


def xlm() -> tuple[transformers.PreTrainedModel, dict[str, Tensor]]:
    # It makes a cache whatever it is asked.
    return transformers.XLMModel(transformers.XLMConfig(vocab_size=96, emb_dim=64, n_layers=2, n_heads=4)), {}


def blip() -> tuple[transformers.PreTrainedModel, dict[str, Tensor]]:
    text = {**TEXT, "encoder_hidden_size": 64, "bos_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
    config = transformers.BlipConfig(text_config=text, vision_config=VISION)
    return transformers.BlipForConditionalGeneration(config), {"pixel_values": torch.randn(8, 3, 16, 16)}


@pytest.mark.parametrize("make", [gemma3, *exhaustive(encoder_decoder, blip), xlm])
def test_a_model_whose_parts_make_caches_is_calibrated_with_tokens(
    make: Callable[[], tuple[transformers.PreTrainedModel, dict[str, Tensor]]],
) -> None:
    model, others = make()
    configs = [part.config for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    before = [getattr(config, "use_cache", None) for config in configs]
    summary = quantize_(model, CONFIG, calibration=[{**batch, **others} for batch in batches(2)])
    assert summary.calibrated is not None
    assert 0 < summary.calibrated.error_after < summary.calibrated.error_before
    assert [getattr(config, "use_cache", None) for config in configs] == before
    assert not any(part._forward_pre_hooks for part in model.modules())


class TwoStacks(nn.Module):
    """Reads tokens, and an image if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = (nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]) for _ in range(2))

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        for layer in self.vision if image is not None else ():
            image = layer(image).relu()
        x = x if image is None else x + image
        for layer in self.text:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize("with_image", [(True, False), (False, True), (False,) * 4 + (True,)], ids=str)
def test_a_block_is_calibrated_with_the_batches_that_run_it(with_image: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    model = TwoStacks()
    inputs = [{"x": torch.randn(64, 64), **({"image": torch.randn(64, 64)} if image else {})} for image in with_image]
    summary = quantize_(model, CONFIG, calibration=inputs)
    assert without(summary) == {}
    assert summary.calibrated is not None
    assert summary.calibrated.tokens == 64 * len(with_image)
    assert all(0 < after < before for before, after in summary.calibrated.blocks.values())


class InPlace(nn.Module):
    """Changes its input, and that of its own layers after they have run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        hidden = self.first(x)
        x.mul_(0.5).add_(shift)
        shift.add_(1)
        x += self.second(hidden.relu_())
        return x


class InPlaceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([InPlace(), InPlace()])

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        shift = x.new_ones(1)
        for layer in self.layers:
            x = layer(x, shift)
        return x


class OutOfPlace(InPlace):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x * 0.5 + shift + self.second(self.first(x).relu())


class OutOfPlaceModel(nn.Module):
    """The same function of its input, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OutOfPlace(), OutOfPlace()])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, x.new_full((1,), number))
        return x


def test_a_module_that_changes_its_input_is_calibrated_as_one_that_does_not() -> None:
    torch.manual_seed(0)
    model, other = InPlaceModel(), OutOfPlaceModel()
    other.load_state_dict(model.state_dict())
    inputs = [torch.randn(256, 64) for _ in range(2)]
    before = [x.clone() for x in inputs]
    summary, expected = (quantize_(module, CONFIG, calibration=inputs) for module in (model, other))
    assert all(map(torch.equal, inputs, before))
    assert summary.calibrated is not None
    assert expected.calibrated is not None
    assert summary.calibrated.error_after == pytest.approx(expected.calibrated.error_after, rel=1e-4)
    assert summary.calibrated.error_before == pytest.approx(expected.calibrated.error_before, rel=1e-4)
    assert torch.equal(model.layers[1].second.weight.dequantize(), other.layers[1].second.weight.dequantize())


def test_a_budget_leaves_the_batches_as_they_are() -> None:
    inputs = [torch.randint(2, 96, (4, 8))]

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(96, 64), nn.Linear(64, 64)

        def forward(self, ids: Tensor) -> Tensor:
            ids[:, 0] = 0
            return self.layer(self.table(ids))

    quantize_(Masked(), TrainWeightsConfig(bits=5), calibration=inputs)
    assert (inputs[0] > 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_inputs_that_are_not_finite_are_refused_with_the_layer_s_name(value: float) -> None:
    model = TwoStacks()
    inputs = [{"x": torch.randn(8, 64)}, {"x": torch.full((8, 64), value)}]
    with pytest.raises(ConfigError, match=r"finite inputs of the layer of text\.0\.weight"):
        quantize_(model, CONFIG, calibration=inputs)
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


def test_inputs_of_experts_that_are_not_finite_are_refused_with_the_layer_s_name() -> None:
    model = ARCHITECTURES["mixtral"].build()

    def spoil(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * float("inf"), *args[1:])

    hooked = model.model.layers[1].mlp.experts.register_forward_pre_hook(spoil)
    with pytest.raises(ConfigError, match=r"layer of model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        quantize_(model, CONFIG, calibration=batches(1))
    hooked.remove()


def test_an_error_in_a_later_batch_changes_nothing() -> None:
    model = a_llama().train()
    before = list(model.parameters())
    wrong = [*batches(), {"input_ids": torch.full((1, 4), 9999)}]
    with pytest.raises(ConfigError, match="calibration: expected inputs that the module runs on, found IndexError"):
        quantize_(model, CONFIG, calibration=wrong)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert model.training
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("calibration", [[], iter(())], ids=["list", "iterator"])
def test_no_batches_are_refused(calibration: Any) -> None:
    with pytest.raises(ConfigError, match="calibration: expected batches, found none"):
        quantize_(a_llama(), CONFIG, calibration=calibration)


@pytest.mark.slow
def test_few_tokens_are_told(caplog: pytest.LogCaptureFixture) -> None:
    transformers.utils.logging.enable_propagation()
    quantize_(a_llama(), CONFIG, calibration=batches(1, tokens=4))
    assert "Calibrated with 32 tokens. More are worth more: 512 would be 4 for each input of the largest" in caplog.text


@pytest.mark.slow
def test_dropout_is_off_and_modes_come_back() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**TEXT, **TOKENS}, hidden_dropout_prob=0.9)
    model = transformers.BertForMaskedLM(config).train()
    model.bert.encoder.eval()
    modes = [module.training for module in model.modules()]
    one, other = copy.deepcopy(model), model
    quantize_(one, CONFIG, calibration=batches())
    quantize_(other.eval(), CONFIG, calibration=batches())
    assert modes == [module.training for module in one.modules()]
    with torch.no_grad():
        torch.testing.assert_close(outputs(one.eval(), batches(1)), outputs(other, batches(1)))
