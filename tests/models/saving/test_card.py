"""A card says what a model is and how to load it; it is written anew until someone edits it, and then kept."""

from __future__ import annotations

import ast
import copy
import logging
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from huggingface_hub import ModelCard
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_trainweights import TrainWeightsConfig, __version__, quantize_, verify_model
from hf_trainweights.models.choosing.summary import Calibrated
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.models.saving.hub import (
    CARD_NAME,
    Push,
    calibrated_of,
    choose_card,
    is_generated,
    model_card,
    read_card,
    with_tags,
)

BASE = "someone/tiny-llama"
THEIRS = "---\nlicense: mit\ntags:\n- mine\n---\n# My words\n"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    built = ARCHITECTURES["llama"].build()
    built.config.name_or_path = BASE
    quantize_(built, TrainWeightsConfig("int4", group_size=32, overrides={"re:.*down_proj": "int8"}))
    return built


def metadata(text: str) -> dict[str, object]:
    return ModelCard(text).data.to_dict()


def test_the_metadata_names_the_base_model_and_what_became_of_it(model: PreTrainedModel) -> None:
    assert metadata(model_card(model, "me/small", ["mine", "int4"])) == {
        "base_model": BASE,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf-trainweights", "quantized", "int4", "int8", "mine"],
    }


def test_the_snippet_imports_the_package_first(model: PreTrainedModel) -> None:
    [code] = re.findall(r"```python\n(.*?)```", model_card(model, "me/small"), re.DOTALL)
    first, second, load = ast.parse(code).body
    assert ast.unparse(first) == "import hf_trainweights"
    assert ast.unparse(second) == "from transformers import LlamaForCausalLM"
    assert ast.unparse(load) == "model = LlamaForCausalLM.from_pretrained('me/small')"
    assert "pip install hf_trainweights\n" in model_card(model, "me/small")


def test_the_table_counts_every_weight_once(model: PreTrainedModel) -> None:
    text = model_card(model, "me/small")
    rows = re.findall(r"^\| ([\w ]+?) \| (\d+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) MB \|$", text, re.MULTILINE)
    names, tensors, weights, bits, _ = zip(*rows, strict=True)
    assert names == ("int4 g32", "int8", "not quantized")
    assert sum(map(int, tensors)) == len(list(model.parameters()))
    assert sum(int(weight.replace(",", "")) for weight in weights) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert bits[::2] == ("5.00", "32.00")
    assert f"hf_trainweights {__version__}," in text
    assert f"torch {version('torch')}," in text
    assert f"{model.hf_quantizer.summary().bytes_after / 1e6:.2f} MB as they lie here" in text


def test_equal_models_give_equal_cards(model: PreTrainedModel) -> None:
    assert model_card(copy.deepcopy(model), "me/small") == model_card(model, "me/small")


@pytest.mark.slow
def test_what_calibration_was_worth_outlives_saving_and_loading(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    batches = [{"input_ids": torch.arange(96).view(4, 24)} for _ in range(2)]
    summary = quantize_(model, "int4", calibration=batches)
    sentence = f"The codes were {summary.calibrated}."
    assert sentence in model_card(model, "someone/llama", calibrated=calibrated_of(model))
    model.save_pretrained(tmp_path / "first")
    loaded = load_saved(tmp_path / "first")
    assert sentence in model_card(loaded, "someone/llama", calibrated=calibrated_of(loaded))
    loaded.save_pretrained(tmp_path / "second")
    assert verify_model(tmp_path / "second").ok
    assert Calibrated.beside(tmp_path / "second") == Calibrated.beside(tmp_path / "first") == summary.calibrated


@pytest.mark.slow
def test_damaged_digests_say_nothing_of_calibration(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    quantize_(model, "int4", calibration=[{"input_ids": torch.arange(96).view(4, 24)}])
    model.save_pretrained(tmp_path)
    (tmp_path / "trainweights_files.json").write_text("{}")
    assert calibrated_of(load_saved(tmp_path)) is None


def quantized_from(source: str) -> PreTrainedModel:
    built = ARCHITECTURES["llama"].build()
    built.config.name_or_path = source
    quantize_(built, TrainWeightsConfig("int8"))
    return built


@pytest.mark.slow
def test_a_base_model_that_is_a_directory_is_nobodys(tmp_path: Path) -> None:
    for local in (str(tmp_path), "", "../models/llama", "/models/llama"):
        data = metadata(model_card(quantized_from(local), "me/small"))
        assert "base_model" not in data
        assert "base_model_relation" not in data


def test_the_base_model_outlives_saving_and_loading(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "first")
    LlamaForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert not (tmp_path / "second" / CARD_NAME).exists(), "a plain save writes no card"
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "second")
    assert metadata(model_card(reloaded, "me/small"))["base_model"] == BASE


def test_a_configuration_is_not_changed_by_the_model_that_it_quantizes() -> None:
    config, built = TrainWeightsConfig("int8"), ARCHITECTURES["llama"].build()
    built.config.name_or_path = BASE
    quantize_(built, config)
    assert built.config.quantization_config.base_model == BASE
    assert config.base_model is None


def test_a_base_model_that_is_given_is_named() -> None:
    built = ARCHITECTURES["llama"].build()
    built.config.name_or_path = BASE
    quantize_(built, TrainWeightsConfig("int8", base_model="a/b"))
    assert metadata(model_card(built, "me/small"))["base_model"] == "a/b"


def test_a_model_of_unknown_base_has_that_of_the_card_beside_it(tmp_path: Path) -> None:
    quantized_from("").save_pretrained(tmp_path)
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert "base_model" not in metadata(model_card(reloaded, "me/small"))
    earlier = THEIRS.replace("license: mit", "base_model: a/b")
    assert metadata(model_card(reloaded, "me/small", earlier=earlier))["base_model"] == "a/b"
    (tmp_path / CARD_NAME).write_text(f"---\nbase_model: {BASE}\n---\n")
    assert metadata(model_card(reloaded, "me/small", earlier=earlier))["base_model"] == BASE


@pytest.mark.slow
@pytest.mark.parametrize("place", ["on the Hub", "beside the files"])
def test_what_an_earlier_card_of_ours_knows_goes_on(place: str, tmp_path: Path) -> None:
    quantized_from("").save_pretrained(tmp_path)
    earlier = model_card(quantized_from(BASE), "me/small")
    assert is_generated(earlier)
    on_hub, beside = (earlier, None) if place == "on the Hub" else (None, earlier)
    push = Push("me/small", frozenset(), on_hub, (), {})
    assert metadata(choose_card(LlamaForCausalLM.from_pretrained(tmp_path), push, beside, None))["base_model"] == BASE


def test_a_card_that_is_no_utf_8_is_read(tmp_path: Path) -> None:
    (tmp_path / CARD_NAME).write_bytes("Modèle\r\n".encode("latin-1"))
    assert read_card(tmp_path / CARD_NAME) == "Mod\ufffdle\r\n"


LICENSE = {"license": "other", "license_name": "llama3.2", "license_link": "LICENSE.txt"}


@pytest.mark.slow
def test_licence_and_task_of_the_float_models_card_are_kept(tmp_path: Path) -> None:
    built = ARCHITECTURES["llama"].build()
    built.save_pretrained(tmp_path / "float")
    lines = "".join(f"{key}: {value}\n" for key, value in LICENSE.items())
    card = f"---\n{lines}pipeline_tag: feature-extraction\nbase_model: a/b\ndatasets: [c]\n---\n# Theirs\n"
    (tmp_path / "float" / CARD_NAME).write_text(card)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "float", quantization_config=TrainWeightsConfig("int8"))
    text = model_card(model, "me/small")
    expected = {**LICENSE, "pipeline_tag": "feature-extraction", "library_name": "transformers"}
    assert metadata(text) == expected | {"tags": ["hf-trainweights", "quantized", "int8"]}
    model.save_pretrained(tmp_path / "quantized")
    (tmp_path / "quantized" / CARD_NAME).write_text(text)
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "quantized")
    assert metadata(model_card(reloaded, "me/small")) == metadata(text)
    (tmp_path / "quantized" / CARD_NAME).unlink()
    assert metadata(model_card(reloaded, "me/small", earlier=text)) == metadata(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "warned"),
    [
        (b"# No metadata\n", False),
        (b"---\nlicense: [mit\n---\n", True),
        (b"---\n- license\n---\n", True),
        (b"---\ntags: 3\n---\n", True),
        (b"\xff\xfe", False),
    ],
)
def test_a_card_that_cannot_be_read_says_nothing(
    card: bytes, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized_from("").save_pretrained(tmp_path)
    (tmp_path / CARD_NAME).write_bytes(card)
    with caplog.at_level(logging.WARNING, "hf_trainweights"):
        data = metadata(model_card(LlamaForCausalLM.from_pretrained(tmp_path), "me/small"))
    assert data.keys() == {"library_name", "pipeline_tag", "tags"}
    assert ("nothing is taken from it" in caplog.text) == warned


def test_a_card_in_the_working_directory_is_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CARD_NAME).write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    assert "license" not in metadata(model_card(quantized_from(""), "me/small"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("llama", "text-generation"),
        ("gpt2", "text-generation"),
        ("whisper", "automatic-speech-recognition"),
        ("clip", "zero-shot-image-classification"),
        ("t5", None),
    ],
)
def test_the_task_is_that_of_the_class(architecture: str, task: str | None) -> None:
    built = ARCHITECTURES[architecture].build()
    quantize_(built, TrainWeightsConfig("int8"))
    assert metadata(model_card(built, "me/small")).get("pipeline_tag") == task


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("Gemma3ForConditionalGeneration", "image-text-to-text"),
        ("BartForConditionalGeneration", None),
        ("LlamaModel", None),
        ("OwnModel", None),
    ],
)
def test_of_several_tasks_the_one_that_says_most_is_named(model: PreTrainedModel, name: str, task: str | None) -> None:
    copied = copy.deepcopy(model)
    copied.__class__ = type(name, (LlamaForCausalLM,), {})
    assert metadata(model_card(copied, "me/small")).get("pipeline_tag") == task


def test_a_dequantized_model_is_not_called_quantized(model: PreTrainedModel) -> None:
    plain = copy.deepcopy(model)
    plain.dequantize()
    text = model_card(plain, "me/plain", ["mine"])
    assert metadata(text) == {"library_name": "transformers", "tags": ["mine"]}
    body = ModelCard(text).text.rpartition("<!--")[0]
    assert "quantized" not in body
    assert "hf_trainweights" not in body
    assert is_generated(text)


def test_a_class_of_the_users_own_is_loaded_as_auto_model(model: PreTrainedModel) -> None:
    copied = copy.deepcopy(model)
    copied.__class__ = type("OwnModel", (LlamaForCausalLM,), {})
    assert "from transformers import AutoModel\n" in model_card(copied, "me/small")


def test_our_card_is_ours_until_someone_edits_it(model: PreTrainedModel) -> None:
    text = model_card(model, "me/small")
    assert is_generated(text)
    assert is_generated(text.replace("\n", "\r\n")), "a checkout may change line ends"
    for edited in (
        text.replace("# small", "# My small"),
        text.replace("library_name: transformers", "library_name: transformers\nlicense: mit"),
        text + "\nMore.\n",
        "Before.\n" + text,
        text.replace("<!--", "< !--"),
    ):
        assert edited != text
        assert not is_generated(edited)
    for theirs in ("", THEIRS, "# Mine\n"):
        assert not is_generated(theirs)


def test_the_hubs_client_writes_our_card_back_as_it_read_it(model: PreTrainedModel, tmp_path: Path) -> None:
    text = model_card(model, "me/small")
    # A tokenizer's push loads the card and saves it again.
    ModelCard(text).save(tmp_path / CARD_NAME)
    assert (tmp_path / CARD_NAME).read_text() == text


def test_tags_are_added_to_a_card_and_nothing_else() -> None:
    tagged = with_tags(THEIRS, ["new", "mine", "new"])
    assert metadata(tagged) == {"license": "mit", "tags": ["mine", "new"]}
    assert ModelCard(tagged).text == ModelCard(THEIRS).text
    assert with_tags(THEIRS, ["mine"]) == with_tags(THEIRS, []) == THEIRS
    assert metadata(with_tags("# No metadata\n", ["new"])) == {"tags": ["new"]}
