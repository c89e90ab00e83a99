"""What a user chooses: kept as JSON, refused with the allowed values, and which of several rules wins."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import FORMATS, get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import GROUP_SIZES, Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.choosing.config import CONFIG_VERSION, QUANT_METHOD

ALL_FORMATS = ", ".join(FORMATS)

EVERYTHING = {
    "format": "int4",
    "group_size": 32,
    "modules_to_not_convert": ["lm_head", r"layers\.\d+\.mlp"],
    "activations": None,
    "overrides": {"re:.*down_proj": "int8", "lm_head": None, "a.b": {"format": "int8", "group_size": 64}},
    "include_embeddings": True,
    "base_model": "someone/tiny-llama",
}


# JSON


@pytest.mark.parametrize("arguments", [{}, {"format": "int4"}, {"format": "float8_e4m3"}, EVERYTHING])
def test_json_round_trips(arguments: dict[str, Any]) -> None:
    config = TrainWeightsConfig(**arguments)
    loaded = TrainWeightsConfig.from_dict(json.loads(config.to_json_string()))
    assert loaded == config
    assert loaded.to_dict() == config.to_dict()
    assert loaded.to_dict() == config.to_dict() | arguments
    assert loaded.default_format == config.default_format


@pytest.mark.parametrize("arguments", [{}, EVERYTHING])
def test_the_dict_holds_json_values_only(arguments: dict[str, Any]) -> None:
    dictionary = TrainWeightsConfig(**arguments).to_dict()
    assert json.loads(json.dumps(dictionary)) == dictionary
    assert dictionary["quant_method"] == QUANT_METHOD
    assert dictionary["version"] == CONFIG_VERSION
    assert set(dictionary) - {"override_order"} == {"quant_method", "version", *EVERYTHING}


def test_the_dict_shares_nothing_with_the_configuration_nor_with_its_arguments() -> None:
    arguments = copy.deepcopy(EVERYTHING)
    config = TrainWeightsConfig(**arguments)
    arguments["overrides"]["a.b"]["group_size"] = 128
    arguments["modules_to_not_convert"].clear()
    dictionary = config.to_dict()
    dictionary["overrides"].clear()
    dictionary["modules_to_not_convert"].clear()
    assert config == TrainWeightsConfig(**EVERYTHING)


def test_a_set_of_names_has_an_order() -> None:
    names = [f"layers.{number}" for number in range(8)]
    assert TrainWeightsConfig(modules_to_not_convert=set(names)).modules_to_not_convert == names  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_are_equal(copied: Any) -> None:
    config = TrainWeightsConfig(**EVERYTHING)
    assert copied(config) == config
    assert copied(config) is not config


def test_configurations_differ_where_a_value_does() -> None:
    config = TrainWeightsConfig("int4", group_size=32)
    assert config != TrainWeightsConfig("int4", group_size=64)
    assert config != config.to_dict()
    assert config != TrainWeightsConfig("int4", group_size=32, include_embeddings=True)


def test_a_file_round_trips(tmp_path: Path) -> None:
    config = TrainWeightsConfig(**EVERYTHING)
    config.to_json_file(tmp_path / "config.json")
    assert TrainWeightsConfig.from_dict(json.loads((tmp_path / "config.json").read_text())) == config


def test_transformers_keeps_it_in_config_json(tmp_path: Path) -> None:
    model_config = LlamaConfig(quantization_config=TrainWeightsConfig(**EVERYTHING).to_dict())
    model_config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path).quantization_config
    assert AutoQuantizationConfig.from_dict(loaded) == TrainWeightsConfig(**EVERYTHING)


def test_repr_names_the_format() -> None:
    assert '"format": "int4"' in repr(TrainWeightsConfig("int4"))


# Unknown keys


@pytest.mark.parametrize(
    ("arguments", "next_step"),
    [
        ({"num_bits": 4}, 'Write TrainWeightsConfig("int4").'),
        ({"w_bit": 8}, 'Write TrainWeightsConfig("int8").'),
        ({"nbits": 3}, 'Did you mean "bits"?'),
        ({"load_in_4bit": True}, 'Write TrainWeightsConfig("int4").'),
        ({"load_in_8bit": True}, 'Write TrainWeightsConfig("int8").'),
        ({"bnb_4bit_quant_type": "nf4"}, 'Name the format: TrainWeightsConfig("int4").'),
        ({"llm_int8_skip_modules": ["lm_head"]}, 'Write "modules_to_not_convert".'),
        ({"modules_to_not_covert": ["lm_head"]}, 'Did you mean "modules_to_not_convert"?'),
        ({"groupsize": 32}, 'Did you mean "group_size"?'),
        ({"xyz": 1}, "Leave it out."),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_right_one(arguments: Any, next_step: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(arguments))}: expected one of format, group_size, ") as error:
        TrainWeightsConfig(**arguments)
    assert error.value.next_step == next_step
    with pytest.raises(ConfigError, match="keys among format") as error:
        TrainWeightsConfig.from_dict({"format": "int8", **arguments}).check_quantizing()
    assert error.value.next_step == next_step


@pytest.mark.parametrize(
    ("spelt", "meant"),
    [
        *[(name, "codebook4") for name in ("iq4_xs", "iq4_nl", "codebook")],
        *[(name, "int4") for name in ("nf4", "fp4", "int4_weight_only", "4bit", "4-bit", "INT4", "w4a16")],
        *[(name, "int8") for name in ("int8_weight_only", "8bit", "in8", "q8_0", "INT8", "int-8", "w8a8")],
        *[(name, "float8_e4m3") for name in ("fp8", "float8", "float8_e4m3fn", "FP8", "float8_dynamic", "f8")],
    ],
)
def test_a_format_by_another_librarys_name_is_refused_with_ours(spelt: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf'format: expected one of .* found .*\. Did you mean "{meant}"\?'):
        TrainWeightsConfig(spelt)


def test_a_name_or_a_dict_stands_for_a_configuration() -> None:
    config = TrainWeightsConfig("int4", group_size=32)
    assert TrainWeightsConfig.of(config) is config
    assert TrainWeightsConfig.of("int4") == TrainWeightsConfig("int4")
    assert TrainWeightsConfig.of({"format": "int4", "group_size": 32}) == config
    for wrong in (4, None, ["int4"]):
        with pytest.raises(ConfigError, match="expected a TrainWeightsConfig or the name of a format, found"):
            TrainWeightsConfig.of(wrong)  # type: ignore[arg-type]


def test_unknown_keys_of_a_file_are_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    stored = {"format": "int8", "calibration": {"samples": 8}, "modules_to_not_covert": ["lm_head"]}
    with caplog.at_level(logging.WARNING, "hf_trainweights"):
        config = TrainWeightsConfig.from_dict(stored)
    assert len(caplog.messages) == 2
    assert "keeps modules_to_not_covert=['lm_head'] but does not use it: it knows format, group_size" in caplog.text
    assert config.to_dict()["calibration"] == {"samples": 8}
    assert TrainWeightsConfig.from_dict(json.loads(config.to_json_string())) == config
    assert config != TrainWeightsConfig("int8")


def test_a_float_model_is_not_quantized_by_unknown_keys() -> None:
    config = TrainWeightsConfig.from_dict({"format": "int8", "modules_to_not_covert": ["lm_head"]})
    with pytest.raises(ConfigError, match=r"expected keys among format, group_size.*found modules_to_not_covert\. D"):
        config.check_quantizing()
    TrainWeightsConfig(**EVERYTHING).check_quantizing()


@pytest.mark.parametrize("value", [torch.float32, {1, 2}, object()], ids=["dtype", "set", "object"])
def test_an_unknown_value_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"dtype: expected one of format, group_size, .* or a JSON value to keep"):
        TrainWeightsConfig.from_dict({"dtype": value})


@pytest.mark.parametrize("key", ["default_format", "format_for", "to_dict", "update"])
def test_an_unknown_key_must_not_hide_a_method(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: expected one of format, .* found the name of a method"):
        TrainWeightsConfig.from_dict({key: 1})


def test_values_beside_a_files_are_taken_as_transformers_takes_them() -> None:
    config, unused = TrainWeightsConfig.from_dict(
        {"format": "int4", "new": 1}, return_unused_kwargs=True, include_embeddings=True, token="x"
    )
    assert (config.include_embeddings, config.new, unused) == (True, 1, {"token": "x"})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"format": "int3"}, r"format: expected one of .*, found 'int3'\. "),
        ({"version": 99}, r"version: expected 1 or 2, found 99\. Install"),
        ({"overrides": {"lm_head": "int3"}}, r"overrides\['lm_head'\]: expected one of"),
        ({"dequantize": True}, r"dequantize: expected no such key"),
    ],
)
def test_an_error_in_a_dict_says_that_it_may_come_from_a_file(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^quantization_config \(in config\.json, or passed as a dict\): {message}"):
        TrainWeightsConfig.from_dict(stored)


# Values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, Int8()),
        ({"format": "int8"}, Int8()),
        ({"format": "int8", "group_size": 64}, Int8(group_size=64)),
        ({"format": "int8", "activations": "int8"}, Int8(activations="int8")),
        ({"format": "int4"}, Int4(group_size=128)),
        ({"format": "int4", "group_size": 32}, Int4(group_size=32)),
        ({"format": "float8_e4m3"}, Float8E4M3()),
        ({"format": "float8_e4m3", "activations": "float8"}, Float8E4M3(activations="float8")),
    ],
)
def test_the_default_format(arguments: dict[str, Any], expected: Format) -> None:
    config = TrainWeightsConfig(**arguments)
    assert config.default_format == expected
    assert config.group_size == expected.get_config().get("group_size")


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_int4_takes_every_group_size_it_lists(group_size: int) -> None:
    assert TrainWeightsConfig("int4", group_size=group_size).default_format == Int4(group_size)


BAD = {
    "format": ({"format": "int3"}, rf"format: expected one of {ALL_FORMATS}, found 'int3'"),
    "format list": ({"format": ["int8"]}, rf"format: expected one of {ALL_FORMATS}, found \['int8'\]"),
    "group size": ({"format": "int4", "group_size": 48}, "group_size: expected one of 32, 64, 128 for int4, found 48"),
    "group size text": ({"format": "int4", "group_size": "64"}, "expected one of 32, 64, 128 for int4, found '64'"),
    "group size float": ({"format": "int4", "group_size": 64.0}, "expected one of 32, 64, 128 for int4, found 64.0"),
    "group size true": ({"format": "int8", "group_size": True}, "expected a positive integer or None for int8"),
    "group size zero": ({"format": "int8", "group_size": 0}, "expected a positive integer or None for int8, found 0"),
    "activations of groups": (
        {"format": "int8", "group_size": 32, "activations": "int8"},
        "activations: expected .* None with a group_size, found 'int8' with group_size 32",
    ),
    "activations": ({"format": "int8", "activations": "int4"}, 'activations: expected "int8" or None'),
    "float8 activations of int8": ({"format": "int8", "activations": "float8"}, 'activations: expected "int8" or None'),
    "int8 activations of float8": (
        {"format": "float8_e4m3", "activations": "int8"},
        'activations: expected "float8" or None',
    ),
    "float8 activations of groups": (
        {"format": "float8_e4m3", "group_size": 32, "activations": "float8"},
        "activations: expected .* None with a group_size or other scales, found 'float8' with group_size 32",
    ),
    "activations of int4": (
        {"format": "int4", "activations": "int8"},
        "format int4: expected .*column_order, found activ",
    ),
    "no group size": (
        {"format": "codebook4", "group_size": 32},
        "codebook4: expected column_scale, column_order, found",
    ),
    "column scale": ({"column_scale": 1}, "column_scale: expected True or False, found 1"),
    "include": ({"include_embeddings": 1}, "include_embeddings: expected True or False, found 1"),
    "base": ({"base_model": 1}, "base_model: expected the id of a repository or None, found 1"),
    "skip text": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: expected a list of module names"),
    "skip number": ({"modules_to_not_convert": 5}, "modules_to_not_convert: expected a list of module names, found 5"),
    "skip numbers": ({"modules_to_not_convert": [5]}, r"expected a list of module names, found \[5\]"),
    "skip regex": ({"modules_to_not_convert": ["a("]}, r"expected a regular expression, found 'a\('"),
    "overrides text": ({"overrides": "int8"}, "overrides: expected a dict of names to formats, found 'int8'"),
    "overrides list": ({"overrides": [("a", "int8")]}, "overrides: expected a dict of names to formats"),
    "override key": ({"overrides": {3: "int8"}}, rf"overrides\[3\]: expected one of {ALL_FORMATS}, a dict"),
    "override value": ({"overrides": {"a": 8}}, rf"overrides\['a'\]: expected one of {ALL_FORMATS}, a dict .* found 8"),
    "override format": (
        {"overrides": {"a": "int3"}},
        rf"overrides\['a'\]: expected one of {ALL_FORMATS}, found 'int3'",
    ),
    "override dict": ({"overrides": {"a": {}}}, rf"overrides\['a'\]: expected one of {ALL_FORMATS}, found None"),
    "override parameter": (
        {"overrides": {"a": {"format": "int4", "bits": 3}}},
        r"overrides\['a'\].*group_size, column_scale, column_order, found bits",
    ),
    "override group": ({"overrides": {"a": {"format": "int4", "group_size": 1}}}, r"overrides\['a'\].*32, 64, 128"),
    "override regex": ({"overrides": {"re:*": "int8"}}, r"overrides: expected a regular expression, found '\*'"),
    "method": ({"quant_method": "gptq"}, "quant_method: expected 'trainweights', found 'gptq'"),
    "bits of int4": ({"format": "int4", "bits": 8}, "format: expected None with bits or size, .* found 'int4'"),
    "bits of coded": ({"format": "coded", "bits": 9}, "bits: expected a number from 2 to 8 for coded, found 9"),
    "version": ({"version": 3}, "version: expected 1 or 2, found 3. Install the hf_trainweights that wrote this model"),
    "version text": ({"version": "1"}, "version: expected 1 or 2, found '1'"),
    "version true": ({"version": True}, "version: expected 1 or 2, found True"),
    "version none": ({"version": None}, "version: expected 1 or 2, found None"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_and_the_allowed_listed(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(ConfigError, match=message) as error:
        TrainWeightsConfig(**arguments)
    assert isinstance(error.value, ValueError)
    assert error.value.next_step.endswith((".", "?"))


# Which rule wins


@pytest.mark.parametrize(
    ("overrides", "names", "expected"),
    [
        ({}, ["a.b"], (Int4(32), False)),
        ({"a.b": "int8"}, ["a.b"], (Int8(), True)),
        ({"a.b": None}, ["a.b"], (None, True)),
        ({"a.b": {"format": "int4", "group_size": 64}}, ["a.b"], (Int4(64), True)),
        ({"a": "int8"}, ["a.b"], (Int8(), True)),
        ({"b": "int8"}, ["a.b"], (Int8(), True)),
        ({"a.b": "int8", "a": None}, ["a.b"], (Int8(), True)),
        ({"b": None, "a": "int8"}, ["a.b"], (Int8(), True)),
        ({"a.b": "int8"}, ["a.b", "a.b.weight"], (Int8(), True)),
        ({"a.b.weight": "int8"}, ["a.b", "a.b.weight"], (Int8(), True)),
        ({"a.b.weight": "int8", "a.b": None}, ["a.b", "a.b.weight"], (Int8(), True)),
        ({"a.b": None, "a.b.weight": "int8"}, ["a.b", "a.b.weight"], (Int8(), True)),
        ({"re:a.*": "int8"}, ["a.b"], (Int8(), True)),
        ({"re:a": "int8"}, ["a.b"], (Int4(32), False)),
        ({"re:b": "int8"}, ["a.b"], (Int4(32), False)),
        ({"re:.*b": "int8"}, ["a.b"], (Int8(), True)),
        ({"re:a.*": "int8", "re:.*b": None}, ["a.b"], (Int8(), True)),
        ({"re:.*b": None, "re:a.*": "int8"}, ["a.b"], (None, True)),
        ({"re:.*": None, "a.b": "int8"}, ["a.b"], (Int8(), True)),
        ({"re:.*": None, "a.b.weight": "float8_e4m3"}, ["a.b", "a.b.weight"], (Float8E4M3(), True)),
        ({"a.b": "int8"}, ["axb"], (Int4(32), False)),
        ({r"re:.*experts\.(gate_up|down)_proj": "int8"}, ["m.experts.down_proj", "m.experts"], (Int8(), True)),
    ],
)
def test_the_more_exact_selector_wins_then_the_first_expression(
    overrides: dict[str, Any], names: list[str], expected: tuple[Format | None, bool]
) -> None:
    config = TrainWeightsConfig("int4", group_size=32, overrides=overrides)
    assert config.format_for(names) == expected
    assert config.format_for(iter(names)) == expected


formats = st.sampled_from(
    [None, "int8", "int4", "float8_e4m3", {"format": "int4", "group_size": 64}, {"format": "int8", "group_size": 16}]
)
selectors = st.text(st.characters(codec="utf-8", exclude_characters="\\"), max_size=20).map(
    lambda name: name if not name.startswith("re:") else name[3:]
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    overrides=st.dictionaries(selectors.filter(lambda name: not name.startswith("re:")), formats, max_size=4),
    include_embeddings=st.booleans(),
    form=st.sampled_from(list(FORMATS)),
)
def test_any_configuration_round_trips(overrides: dict[str, Any], include_embeddings: bool, form: str) -> None:
    config = TrainWeightsConfig(form, overrides=overrides, include_embeddings=include_embeddings)
    loaded = TrainWeightsConfig.from_dict(json.loads(config.to_json_string()))
    assert loaded == config
    for name, override in overrides.items():
        chosen = (
            None if override is None else get_format({"format": override} if isinstance(override, str) else override)
        )
        assert loaded.format_for([name]) == (chosen, True)


def test_dequantizing_on_load_is_refused() -> None:
    # Transformers would take the quantizer off the model and leave its weights quantized.
    with pytest.raises(ConfigError, match=r"call model\.dequantize\(\)"):
        TrainWeightsConfig.from_dict({"format": "int8", "dequantize": True})


def test_the_order_of_overrides_survives_files_that_sort_keys() -> None:
    config = TrainWeightsConfig("int8", overrides={"re:.*proj": "int4", "re:.*down_proj": None})
    text = json.dumps(config.to_dict(), sort_keys=True)
    assert list(TrainWeightsConfig.from_dict(json.loads(text)).overrides or ()) == ["re:.*proj", "re:.*down_proj"]
    assert TrainWeightsConfig.from_dict(json.loads(text)) == config
    in_order = TrainWeightsConfig("int8", overrides={"re:.*down_proj": None, "re:.*proj": "int4"})
    assert "override_order" not in in_order.to_dict()


@pytest.mark.parametrize("order", ["re:a", [], ["re:a", "re:a"], ["re:b"], [["re:a"]], 3])
def test_an_order_that_does_not_fit_the_overrides_is_refused(order: object) -> None:
    with pytest.raises(ConfigError, match="override_order: expected the keys of overrides, each once"):
        TrainWeightsConfig.from_dict({"overrides": {"re:a": "int8"}, "override_order": order})
