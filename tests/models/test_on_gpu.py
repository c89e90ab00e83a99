"""Models on a GPU: each format is quantized there, saved and loaded to and from it, trained on, split and moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_llama, random_ids
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from weights import FORMS, same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # Compilers warn about what a GPU has and has not.
    pytest.mark.filterwarnings("default"),
]

# How far logits of bfloat16 may lie apart, as a part of their norm: each of two layers rounds several times.
LOGITS = 8 * torch.finfo(torch.bfloat16).eps
SERVED = ["int8", "int4_g32", "uint4", "float8_e4m3"]


@pytest.fixture(scope="module")
def float_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("float")
    make_llama().bfloat16().save_pretrained(directory)
    return directory


def load(path: Path, form: str | None = None, device_map: Any = "cuda", **options: Any) -> PreTrainedModel:
    if form is not None:
        options |= FORMS[form].get_config()
        options = {"quantization_config": TrainWeightsConfig(**options)}
    return AutoModelForCausalLM.from_pretrained(path, device_map=device_map, dtype=torch.bfloat16, **options).eval()


def weights(model: nn.Module) -> dict[str, QuantizedTensor]:
    return {name: tensor for name, tensor in model.named_parameters() if isinstance(tensor, QuantizedTensor)}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(random_ids().to(next(model.parameters()).device)).logits.cpu().double()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).norm() <= LOGITS * expected.norm()


@pytest.mark.parametrize("name", FORMS)
def test_a_format_is_quantized_saved_and_loaded_on_either_side(
    name: str, float_directory: Path, tmp_path: Path
) -> None:
    model = load(float_directory, name)
    held = weights(model)
    assert held
    assert {str(stored.device) for weight in held.values() for stored in weight.tensors.values()} == {"cuda:0"}
    model.save_pretrained(tmp_path)
    again, on_cpu = load(tmp_path), load(tmp_path, device_map="cpu")
    for key, weight in weights(again).items():
        assert same_stored(weight, held[key])
        assert same_stored(weight.cpu(), weights(on_cpu)[key])
        assert torch.equal(weight.dequantize().cpu(), weights(on_cpu)[key].dequantize())
    assert torch.equal(logits(again), logits(model))
    assert_close(logits(again), logits(on_cpu))
    assert_close(logits(on_cpu.cuda()), logits(again))


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_as_good_as_those_that_a_cpu_quantizes(name: str, float_directory: Path) -> None:
    plain = dict(load(float_directory, device_map="cpu").named_parameters())
    here, there = weights(load(float_directory, name)), weights(load(float_directory, name, "cpu"))
    for key, weight in there.items():
        exact = plain[key].double()
        errors = [(found.dequantize(torch.float64).cpu() - exact).norm().item() for found in (here[key], weight)]
        # A GPU sums up in another order, and so a search may end elsewhere.
        assert errors[0] <= 1.005 * errors[1]


@pytest.mark.parametrize("name", SERVED)
def test_a_model_generates_and_computes_split_between_gpu_and_cpu(name: str, float_directory: Path) -> None:
    layers = {"model.embed_tokens": 0, "model.layers.0": "cpu", "model.layers.1": 0}
    split = load(float_directory, name, {**layers, "model.norm": 0, "model.rotary_emb": 0, "lm_head": "cpu"})
    whole = load(float_directory, name)
    with torch.no_grad():
        assert_close(split(random_ids().cuda()).logits.cpu().double(), logits(whole))
    tokens = split.generate(random_ids().cuda(), max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] == random_ids().shape[1] + 3


@pytest.mark.parametrize("name", SERVED)
def test_adapters_train_on_a_quantized_base(name: str, float_directory: Path) -> None:
    torch.manual_seed(0)
    model = get_peft_model(load(float_directory, name), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    before = {key: weight.clone() for key, weight in weights(model).items()}
    losses = []
    for _ in range(8):
        ids = random_ids().cuda()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert before
    assert all(same_stored(weight, before[key]) for key, weight in weights(model).items())


@pytest.mark.parametrize("name", ["int8", "int4_g32", "uint4"])
def test_generation_with_a_compiled_static_cache_gives_the_same(name: str, float_directory: Path) -> None:
    model, options = load(float_directory, name), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(random_ids().cuda(), **options)
    actual = model.generate(random_ids().cuda(), cache_implementation="static", **options)
    torch._dynamo.reset()
    # Where two tokens are about as likely, rounding decides; all tokens before the first such one are the same.
    assert (actual == expected).float().mean() > 0.8


def test_activations_of_eight_bits_are_about_those_of_the_cpu(float_directory: Path) -> None:
    here, there = (load(float_directory, "int8", device, activations="int8") for device in ("cuda", "cpu"))
    assert (logits(here) - logits(there)).norm() <= 0.05 * logits(there).norm()


def test_a_model_is_moved_and_dequantized(float_directory: Path) -> None:
    model = load(float_directory, "int4_g32", "cpu")
    expected = logits(model)
    assert_close(logits(model.cuda()), expected)
    assert {weight.device.type for weight in weights(model).values()} == {"cuda"}
    model.dequantize()
    assert not weights(model)
    assert_close(logits(model), expected)
