"""A card says what a model is and how to load it; it is written anew until someone edits it, and then kept."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from huggingface_hub import ModelCard
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_trainweights import TrainWeightsConfig, __version__, quantize_
from hf_trainweights.model_card import CARD_NAME, is_generated, model_card, with_tags

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
    assert sum(int(each.replace(",", "")) for each in weights) == sum(each.numel() for each in model.parameters())
    assert bits[::2] == ("5.00", "32.00")
    assert f"hf_trainweights {__version__}," in text
    assert f"torch {torch.__version__}," in text
    assert f"{model.hf_quantizer.summary().bytes_after / 1e6:.2f} MB as they lie here" in text


def test_equal_models_give_equal_cards(model: PreTrainedModel) -> None:
    assert model_card(copy.deepcopy(model), "me/small") == model_card(model, "me/small")


def test_a_base_model_that_is_a_directory_is_nobodys(model: PreTrainedModel, tmp_path: Path) -> None:
    copied = copy.deepcopy(model)
    for local in (str(tmp_path), "", "../models/llama", "/models/llama"):
        copied.config.name_or_path = local
        data = metadata(model_card(copied, "me/small"))
        assert "base_model" not in data
        assert "base_model_relation" not in data


def test_a_model_that_was_loaded_quantized_has_the_base_of_the_card_beside_it(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    assert not (tmp_path / CARD_NAME).exists(), "a plain save writes no card"
    assert "base_model" not in metadata(model_card(LlamaForCausalLM.from_pretrained(tmp_path), "me/small"))
    (tmp_path / CARD_NAME).write_text(model_card(model, "me/small"))
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert metadata(model_card(reloaded, "me/other"))["base_model"] == BASE
    earlier = THEIRS.replace("license: mit", "base_model: a/b")
    assert metadata(model_card(reloaded, "me/other", earlier=earlier))["base_model"] == "a/b"


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
