"""Quantized weights as flat plain tensors and back: exact, in order, under names that are not mistaken for others."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from weights import FORMS, LAYOUTS, quantized_weight, random_weight, same_stored

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats import FORMATS
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.tensor.stored_names import (
    CODED_FLOAT_SUFFIX,
    CODED_SUFFIX,
    FORMAT_SUFFIX,
    FoldStoredTensors,
    flatten_state_dict,
    flatten_weight,
    group_stored,
    parse_stored_name,
    stored_name,
    stored_suffixes,
    unflatten_weight,
)

SUFFIXES = stored_suffixes()
NAME = "layers.0.q_proj.weight"

identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)


def by_suffix(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return flat tensors of one weight by what they are."""
    parsed = {parse_stored_name(name): tensor for name, tensor in flat.items()}
    assert None not in parsed
    return {suffix: tensor for (_, suffix), tensor in parsed.items()}


def encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


# Names


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(identifiers, max_size=4), leaf=identifiers, suffix=st.sampled_from(SUFFIXES))
def test_names_round_trip(parts: list[str], leaf: str, suffix: str) -> None:
    name = ".".join([*parts, leaf])
    assert parse_stored_name(stored_name(name, suffix)) == (name, suffix)


@pytest.mark.parametrize(
    ("name", "suffix", "expected"),
    [
        ("weight", "qdata", "_weight_qdata"),
        ("layers.0.q_proj.weight", "scale", "layers.0.q_proj._weight_scale"),
        ("layers.0.mlp.experts.gate_up_proj", "format", "layers.0.mlp.experts._gate_up_proj_format"),
        ("_private.weight_scale", "scale", "_private._weight_scale_scale"),
        # A state dict may have any names, and a ParameterDict any but those with dots.
        ("a.w-x y\n", "scale", "a._w-x y\n_scale"),
    ],
)
def test_names_are_those_of_the_file_format(name: str, suffix: str, expected: str) -> None:
    assert stored_name(name, suffix) == expected
    assert parse_stored_name(expected) == (name, suffix)


@pytest.mark.parametrize(
    "name",
    [
        "weight",
        "a.weight",
        "a.weight_scale",
        "a._weight",
        "a._scale",
        "a.b_scale",
        "a._weight_scale.b",
        "",
    ],
)
def test_other_names_are_not_those_of_stored_tensors(name: str) -> None:
    assert parse_stored_name(name) is None


def test_every_suffix_of_every_format_is_known() -> None:
    *tensor_names, last, coded, coded_float = stored_suffixes()
    assert set(tensor_names) == {"column_scale", "column_order"} | {
        name for form in FORMATS.values() for name in form.tensor_names
    }
    assert (last, coded, coded_float) == (FORMAT_SUFFIX, CODED_SUFFIX, CODED_FLOAT_SUFFIX)
    assert {last, coded, coded_float}.isdisjoint(tensor_names)


def test_suffixes_of_a_format_that_is_registered_later_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Later(Int8):
        name: ClassVar[str] = "later"
        tensor_names: ClassVar[tuple[str, ...]] = ("qdata", "scale", "half_point", "point")

    assert parse_stored_name("a._weight_half_point") is None
    monkeypatch.setitem(FORMATS, "later", Later)
    assert parse_stored_name("a._weight_half_point") == ("a.weight", "half_point")
    assert parse_stored_name("a._weight_half_scale") == ("a.weight_half", "scale")


def test_group_stored_gathers_what_belongs_together() -> None:
    names = {"a._weight_scale": 2, "b.bias": 3, "a._weight_qdata": 1, "a._other_qdata": 4, "a._weight_format": 5}
    assert group_stored(names) == {
        "a.weight": {"scale": 2, "qdata": 1, "format": 5},
        "a.other": {"qdata": 4},
    }
    assert group_stored({}) == {}


# One weight


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_round_trips(form: str) -> None:
    for layout, default, dtype in itertools.product(LAYOUTS, ("int8", "int4_g32"), (torch.float32, torch.bfloat16)):
        weight = quantized_weight(form, layout, dtype)
        flat = flatten_weight(NAME, weight, FORMS[default])
        assert all(type(tensor) is Tensor for tensor in flat.values())
        rebuilt = unflatten_weight(NAME, by_suffix(flat), dtype, FORMS[default])
        assert same_stored(rebuilt, weight)
        if not weight.format.is_coded_in_files:  # else one tensor stands for all
            assert all(any(tensor is stored for tensor in flat.values()) for stored in weight.tensors.values())
            assert rebuilt.qdata is weight.qdata


@pytest.mark.parametrize(
    ("form", "layout", "expected"),
    [
        ("int8", "matrix", None),
        ("int8", "matrix_transposed", {"format": "int8", "group_size": None, "transposed": True}),
        ("int8_g32", "matrix", {"format": "int8", "group_size": 32}),
        ("int4", "matrix", {"format": "int4", "group_size": 128}),
        ("float8_e4m3", "experts_transposed", {"format": "float8_e4m3", "transposed": True}),
    ],
)
def test_the_format_is_written_where_it_is_not_the_default(
    form: str, layout: str, expected: dict[str, Any] | None
) -> None:
    flat = by_suffix(flatten_weight(NAME, quantized_weight(form, layout), FORMS["int8"]))
    written = flat.pop("format", None)
    assert set(flat) == {"qdata", "scale"}
    assert (written is None) == (expected is None)
    if written is not None:
        assert written.dtype == torch.uint8
        assert json.loads(bytes(written.tolist())) == expected
        assert bytes(written.tolist()) == json.dumps(expected, sort_keys=True, separators=(",", ":")).encode()


def test_the_weight_shows_the_dtype_asked_for_and_keeps_its_scale() -> None:
    weight = quantized_weight("int4", dtype=torch.float16)
    flat = by_suffix(flatten_weight(NAME, weight, FORMS["int4"]))
    rebuilt = unflatten_weight(NAME, flat, torch.bfloat16, FORMS["int4"])
    assert rebuilt.dtype == torch.bfloat16
    assert rebuilt.scale.dtype == torch.float16


def test_flat_tensors_survive_safetensors_bit_for_bit() -> None:
    weights = {f"a.{form}": quantized_weight(form, "experts_transposed", torch.bfloat16) for form in FORMS}
    flat = flatten_state_dict(weights, FORMS["int8"])
    loaded = safetensors.torch.load(safetensors.torch.save(flat))
    for name, tensors in group_stored(loaded).items():
        assert same_stored(unflatten_weight(name, tensors, torch.bfloat16, FORMS["int8"]), weights[name])


def test_a_state_dict_keeps_its_order_and_everything_else() -> None:
    bias, extra = torch.zeros(6), {"step": 3}
    state_dict = {"a.weight": quantized_weight(), "a.bias": bias, "b.weight": quantized_weight("int4"), "extra": extra}
    flat = flatten_state_dict(state_dict, FORMS["int8"])
    assert list(flat) == [
        "a._weight_qdata",
        "a._weight_scale",
        "a.bias",
        "b._weight_qdata",
        "b._weight_scale",
        "b._weight_format",
        "extra",
    ]
    assert flat["a.bias"] is bias
    assert flat["extra"] is extra
    assert list(state_dict) == ["a.weight", "a.bias", "b.weight", "extra"]


# Damage


def stored(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = by_suffix(flatten_weight(NAME, quantized_weight("int4"), FORMS["int4"])) | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (stored(qdata=None), "expected qdata of at least 2 dimensions, found no qdata"),
        (stored(scale=None), r"expected scale to be torch\.float32 of shape \(6, 1\).*found no tensor"),
        ({}, "found no qdata"),
        (stored(qdata=torch.zeros(16, dtype=torch.int32)), r"found qdata of shape \(16,\)"),
        (stored(qdata=torch.zeros(6, 16)), r"expected qdata to be torch\.int32.*found torch\.float32"),
        (stored(qdata=torch.zeros(6, 15, dtype=torch.int32)), "expected columns that int4 g128 can hold, found 120"),
        (stored(scale=torch.zeros(6, 2)), r"found torch\.float32 of shape \(6, 2\)"),
        (stored(scale=torch.zeros(6, 1, dtype=torch.int64)), r"found torch\.int64"),
        (stored(scale=torch.zeros(5, 1)), r"found torch\.float32 of shape \(5, 1\)"),
    ],
)
def test_damaged_tensors_are_refused_by_name(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CorruptFileError, match=rf"layers\.0\.q_proj\.weight: .*{message}.*save it again"):
        unflatten_weight(NAME, tensors, torch.float32, FORMS["int4"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        '"int4"',
        "null",
        "{}",
        '{"format":"int3"}',
        '{"format":["int4"]}',
        '{"format":"int4","bits":3}',
        '{"format":"int4","group_size":"32"}',
        '{"format":"int4","group_size":0}',
        "\x00\x01",
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_format_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        CorruptFileError, match=r"layers\.0\.q_proj\._weight_format: expected JSON .* int8, int4"
    ) as error:
        unflatten_weight(NAME, stored(format=encoded(text)), torch.float32, FORMS["int8"])
    assert error.value.__cause__ is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8], ids=str)
def test_a_format_that_is_no_bytes_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(CorruptFileError, match=r"_weight_format: expected JSON"):
        unflatten_weight(NAME, stored(format=torch.full((4,), -1.0).to(dtype)), torch.float32, FORMS["int8"])


def test_a_format_that_the_tensors_are_not_in_is_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"expected qdata to be torch\.int8"):
        unflatten_weight(NAME, stored(format=encoded('{"format":"int8"}')), torch.float32, FORMS["int4"])


# Loading flat tensors into a quantized module


def quantized_module() -> nn.ModuleDict:
    module = nn.ModuleDict({"a": nn.Linear(128, 6), "b": nn.Linear(128, 6, bias=False), "c": nn.Linear(4, 4)})
    module["a"].weight = nn.Parameter(quantized_weight("int4"))
    module["b"].weight = nn.Parameter(quantized_weight("int8", seed=1))
    module.register_load_state_dict_pre_hook(FoldStoredTensors(FORMS["int4"]))
    return module


def other_values(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    other["a"].weight = nn.Parameter(quantized_weight("int4", seed=2))
    other["b"].weight = nn.Parameter(quantized_weight("int8", seed=3))
    with torch.no_grad():
        other["a"].bias.fill_(7)
    return other


def same_module(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(same_stored(a, b) if isinstance(a, QuantizedTensor) else torch.equal(a, b) for a, b in pairs)


def test_a_quantized_module_takes_flat_tensors_in_place() -> None:
    module = quantized_module()
    other = other_values(module)
    flat = flatten_state_dict(other.state_dict(), FORMS["int4"])
    addresses = [weight.data_ptr() for weight in module.parameters()]
    assert not same_module(module, other)
    result = module.load_state_dict(flat)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same_module(module, other)
    assert [weight.data_ptr() for weight in module.parameters()] == addresses


def test_a_quantized_module_takes_its_own_state_dict_too() -> None:
    module = quantized_module()
    other = other_values(module)
    module.load_state_dict(other.state_dict())
    assert same_module(module, other)


def test_flat_tensors_may_come_one_by_one_and_in_any_order() -> None:
    module = quantized_module()
    other = other_values(module)
    flat = flatten_state_dict(other.state_dict(), FORMS["int4"])
    for name in sorted(flat, reverse=True):
        result = module.load_state_dict({name: flat[name]}, strict=False)
        assert not result.unexpected_keys
    assert same_module(module, other)


def test_flat_tensors_are_found_under_a_prefix() -> None:
    module = quantized_module()
    other = other_values(module)
    outer = nn.ModuleDict({"base_model": module})
    flat = flatten_state_dict(other.state_dict(prefix="base_model."), FORMS["int4"])
    outer.load_state_dict(flat)
    assert same_module(module, other)


def test_a_weight_without_its_scale_is_missing() -> None:
    module = quantized_module()
    flat = flatten_state_dict(module.state_dict(), FORMS["int4"])
    del flat["a._weight_scale"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "a\.weight"'):
        module.load_state_dict(flat)


def test_names_that_only_look_like_stored_tensors_are_left_alone() -> None:
    module = quantized_module()
    flat = flatten_state_dict(module.state_dict(), FORMS["int4"])
    strange = {"c._weight_scale": torch.zeros(1), "nothing._weight_scale": torch.zeros(1)}
    result = module.load_state_dict(flat | strange, strict=False)
    assert sorted(result.unexpected_keys) == sorted(strange)


@pytest.mark.parametrize("form", ["int8", "int4_g32", "float8_e4m3"])
def test_flat_tensors_of_another_format_are_refused(form: str) -> None:
    module = quantized_module()
    before = copy.deepcopy(module)
    flat = flatten_state_dict(module.state_dict(), FORMS["int4"])
    del flat["a._weight_qdata"], flat["a._weight_scale"]
    flat |= flatten_weight("a.weight", quantized_weight(form, seed=5), FORMS["int4"])
    with pytest.raises(RuntimeError, match=r'(?s)parameter named "a\.weight".*two quantized tensors of one format'):
        module.load_state_dict(flat)
    assert same_module(module, before)


def test_a_damaged_weight_is_named_and_loads_nothing() -> None:
    module = quantized_module()
    before = copy.deepcopy(module)
    flat = flatten_state_dict(other_values(module).state_dict(), FORMS["int4"])
    flat["b._weight_scale"] = random_weight(6, 2)
    with pytest.raises(CorruptFileError, match=r"b\.weight: expected scale"):
        module.load_state_dict(flat)
    assert same_module(module, before)


def test_a_copied_module_waits_for_its_own_tensors() -> None:
    module = quantized_module()
    flat = flatten_state_dict(other_values(module).state_dict(), FORMS["int4"])
    module.load_state_dict({"a._weight_qdata": flat["a._weight_qdata"]}, strict=False)
    copied = copy.deepcopy(module)
    module.load_state_dict({"a._weight_scale": flat["a._weight_scale"]}, strict=False)
    assert not same_stored(copied["a"].weight, module["a"].weight)
    copied.load_state_dict({"a._weight_scale": flat["a._weight_scale"]}, strict=False)
    assert same_stored(copied["a"].weight, module["a"].weight)


def test_no_suffix_begins_another() -> None:
    # Transformers up to 5.17 takes a name that begins with a pattern for one that matches it.
    suffixes = stored_suffixes()
    assert [(one, other) for one in suffixes for other in suffixes if one != other and other.startswith(one)] == []
