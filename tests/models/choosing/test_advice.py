"""What takes longer than it must is said once, when a model gets its weights, and only to those who multiply them."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import nn
from transformers import AutoModelForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_, quantize_directory
from hf_trainweights.formats import FORMATS
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.choosing import advice, summary
from hf_trainweights.models.loading.conversion import loading_to_write

INT4 = TrainWeightsConfig("int4", group_size=32)


@pytest.fixture(autouse=True)
def nothing_told_and_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_told", set())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def slow_formats(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these formats alone be slow, whatever the kernels here are like."""

    def say(form: Format, *_: Any) -> str | None:
        return f"{form.name} is slow." if form.name in names else None

    monkeypatch.setattr(advice.kernels, "slowness", say)


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)


@pytest.mark.usefixtures("without_compiled")
@pytest.mark.parametrize("training", [False, True])
def test_int4_that_no_library_multiplies_is_told_to_be_slow_once_when_it_is_quantized(
    training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    for dtype in (torch.bfloat16, torch.float32):
        caplog.clear()
        module = layers(dtype)
        quantize_(module, INT4)
        told.append([message.startswith("int4 weights: no C compiler") for message in caplog.messages])
        caplog.clear()
        with torch.set_grad_enabled(training):
            module(torch.ones(2, 64, dtype=dtype))
        assert caplog.messages == []
    assert told == [[True], []]


@pytest.mark.usefixtures("without_compiled")
def test_codes_of_a_few_bits_are_told_to_be_slow_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        quantize_(layers(), "uint3")
    assert [message.startswith("uint3 weights: no C compiler") for message in caplog.messages] == [True]


def test_several_slow_formats_take_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_formats(monkeypatch, "int8", "uint4")
    quantize_(layers(), TrainWeightsConfig("int8", overrides={"1": "uint4"}))
    assert caplog.messages == ["int8 is slow. uint4 is slow."]


@pytest.mark.slow
def test_a_model_is_told_when_it_is_quantized_as_it_is_loaded_and_when_it_is_reloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_formats(monkeypatch, "int4")
    monkeypatch.setattr(summary, "_LARGE_HEAD", 1)
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=INT4)
    assert caplog.messages == ["int4 is slow."]
    model.save_pretrained(tmp_path / "quantized")
    AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    assert caplog.messages == ["int4 is slow."]
    advice._told.clear()
    AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    assert caplog.messages == ["int4 is slow."] * 2


def test_a_load_that_is_written_elsewhere_silences_no_other_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_formats(monkeypatch, "int4")
    monkeypatch.setattr(summary, "_LARGE_HEAD", 1)
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path)

    def load() -> None:
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=INT4)

    other = threading.Thread(target=load)
    with loading_to_write(None):
        load()
        assert caplog.messages == []
        other.start()
        other.join()
    assert caplog.messages == ["int4 is slow."]


def test_nothing_is_said_where_a_budget_chose(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_formats(monkeypatch, *FORMATS)
    quantize_(layers(), TrainWeightsConfig(bits=6.5))
    assert caplog.messages == []


def test_nothing_is_said_of_embeddings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_formats(monkeypatch, "int4")
    module = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    quantize_(module, TrainWeightsConfig("int8", include_embeddings=True, overrides={"0": "int4"}))
    assert caplog.messages == []


def test_nothing_is_said_where_an_accelerator_may_take_the_weights(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_formats(monkeypatch, "int4")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    quantize_(layers(), INT4)
    assert caplog.messages == []


def test_nothing_is_said_of_weights_that_go_from_file_to_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_formats(monkeypatch, "int4")
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path / "float")
    quantize_directory(tmp_path / "float", tmp_path / "quantized", INT4)
    assert caplog.messages == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "times", "config"),
    [("llama", torch.float32, 4, TrainWeightsConfig("int8")), ("llama_tied", torch.bfloat16, 2, INT4)],
)
def test_a_head_that_is_much_of_what_a_token_reads_is_told_when_a_model_is_quantized(
    name: str,
    dtype: torch.dtype,
    times: int,
    config: TrainWeightsConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow_formats(monkeypatch)  # none
    model = ARCHITECTURES[name].build().to(dtype)
    model.save_pretrained(tmp_path / "float")
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype="auto", quantization_config=config)
    weights = dict(quantized.named_parameters(remove_duplicate=False))
    head = weights["lm_head.weight"].nbytes
    read = quantized.hf_quantizer.summary().bytes_after - (0 if name == "llama_tied" else head)
    smaller = {"model.embed_tokens" if name == "llama_tied" else "lm_head": "int8"}
    share = f"he output head in float is {100 * head / read:.0f} % of what a token reads"
    text = f"{share}; overrides={smaller} makes it {times} times smaller"
    assert caplog.messages == [f"T{text}."]
    assert f"; t{text}" in str(quantized.hf_quantizer.summary())
    smaller_head = copy.deepcopy(model)
    quantize_(smaller_head, TrainWeightsConfig("int8", overrides=smaller))
    assert smaller_head.get_output_embeddings().weight.format == Int8()
    quantize_(model, config)  # is told the same, so not again
    quantized.save_pretrained(tmp_path / "quantized")
    AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    assert len(caplog.messages) == 1


def test_nothing_is_said_of_a_head_that_is_quantized_or_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_formats(monkeypatch)  # none
    quantize_(ARCHITECTURES["llama"].build(), TrainWeightsConfig("int8", include_embeddings=True))
    quantize_(ARCHITECTURES["vit"].build(), TrainWeightsConfig("int8"))
    assert caplog.messages == []
