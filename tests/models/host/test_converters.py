"""Transformers' converters are what we take them for, and ours do the same."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter, WeightTransform
from transformers.quantizers.base import HfQuantizer

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.models.host import checkpoints
from hf_trainweights.models.host.checkpoints import (
    MergingConverter,
    QuantizerOp,
    make_converter,
    offer_before_merging,
)


class Operation(QuantizerOp):
    """An operation that changes nothing."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return input_dict


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("float")
    ARCHITECTURES["qwen3_moe"].build().save_pretrained(root)
    return root


def quantized(directory: Path) -> PreTrainedModel:
    load = ARCHITECTURES["qwen3_moe"].auto_class.from_pretrained
    return load(directory, quantization_config=TrainWeightsConfig("int8"))


# ---- the installed version


@pytest.mark.parametrize(
    "name",
    [
        *("source_patterns", "_original_source_patterns", "_original_target_patterns", "scope_prefix"),
        *("base_model_prefix", "collected_tensors", "layer_targets", "quantization_operation", "operations"),
        "force_cpu",
    ],
)
def test_a_converter_has_the_attribute(name: str) -> None:
    assert hasattr(WeightConverter(["a", "b"], "c", [Concatenate(dim=1)]), name)


def test_the_operations_of_a_merge_tell_their_dimension() -> None:
    assert (MergeModulelist(dim=0).dim, Concatenate(dim=1).dim) == (0, 1)


def test_a_converter_collects_by_pattern_and_asks_for_a_quantizers_operation() -> None:
    converter = WeightConverter(["x.*.a", "x.*.b"], "x.c", [MergeModulelist(dim=0), Concatenate(dim=1)])
    converter.add_tensor("x.c", "x.0.a", "x.*.a", lambda: torch.ones(2))
    assert converter.quantization_operation is None
    assert [load().tolist() for load in converter.collected_tensors["x.*.a"]] == [[1, 1]]
    assert converter.layer_targets == {"x.c": {"x.0.a"}}


@pytest.mark.slow
def test_scales_keep_their_dtype_by_the_mark_of_the_operation(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(directory).save_pretrained(tmp_path)
    load: Callable[..., PreTrainedModel] = ARCHITECTURES["qwen3_moe"].auto_class.from_pretrained

    def scale() -> Tensor:
        return load(tmp_path, dtype=torch.bfloat16).model.layers[0].self_attn.q_proj.weight.scale

    assert scale().dtype == torch.float32
    monkeypatch.delattr(QuantizerOp, "hf_quantizer")
    # Up to Transformers 5.20 the dtypes of a quantized checkpoint are left alone without the mark.
    assert scale().dtype == (torch.bfloat16 if hasattr(HfQuantizer, "get_new_dtype") else torch.float32)


# ---- other versions


@pytest.mark.parametrize("name", ["WeightConverter", "ConversionOps", "MergeModulelist", "Concatenate"])
def test_without_a_class_the_error_says_which_versions_have_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_model_loading, name)
    with pytest.raises(UnsupportedError, match=r"core_model_loading: expected transformers>=5\.17.*pip install"):
        runpy.run_path(checkpoints.__file__)


# ---- our converters


@pytest.mark.parametrize(
    "converter",
    [
        WeightConverter(["a", "b"], "c", [Concatenate(dim=0)]),
        WeightConverter("a", ["b", "c"], [Chunk(dim=0)]),
        WeightConverter("x.*.a", "x.a", [MergeModulelist(dim=1)]),
        WeightConverter(["x.*.a", "x.*.b"], "x.c", [MergeModulelist(dim=0), Concatenate(dim=2)]),
        type("Own", (WeightConverter,), {"__slots__": ()})("x.*.a", "x.a", [MergeModulelist(dim=0)]),
    ],
    ids=lambda converter: str([type(operation).__name__ for operation in converter.operations]),
)
def test_converters_that_do_something_else_stay_as_they_are(converter: WeightConverter) -> None:
    assert offer_before_merging(converter) is converter


def test_a_wrapped_converter_keeps_patterns_scope_and_place() -> None:
    converter = WeightConverter(["x.*.a", "x.*.b"], "x.c", [MergeModulelist(dim=0), Concatenate(dim=1)], force_cpu=True)
    converter.scope_prefix, converter.base_model_prefix = "text", "model"
    wrapped = offer_before_merging(converter)
    assert isinstance(wrapped, MergingConverter)
    for attribute in (
        "source_patterns",
        "target_patterns",
        "operations",
        "force_cpu",
        "scope_prefix",
        "base_model_prefix",
    ):
        assert getattr(wrapped, attribute) == getattr(converter, attribute)


@pytest.mark.parametrize("kind", ["stored tensors", "experts"])
def test_a_copied_converter_does_the_same_for_a_weight_of_its_own(kind: str) -> None:
    merge = WeightConverter(["x.*.a", "x.*.b"], "x.c", [MergeModulelist(dim=0), Concatenate(dim=1)], force_cpu=True)
    merge.scope_prefix, merge.base_model_prefix = "text", "model"
    stored = make_converter(lambda name: None, ("qdata", "scale"), Operation())
    original = stored if kind == "stored tensors" else offer_before_merging(merge)
    copies = [copy.deepcopy(original) for _ in range(2)]
    for number, copied in enumerate(copies):
        assert type(copied) is type(original)
        copied.add_tensor(f"target {number}", "key", original.source_patterns[0], number)
        copied.quantization_operation = Operation()
    own = {"collected_tensors", "layer_targets", "quantization_operation"}
    for copied in copies:
        for attribute in {*WeightTransform.__slots__, *WeightConverter.__slots__, *type(original).__slots__} - own:
            assert getattr(copied, attribute) == getattr(original, attribute)
    assert [list(copied.layer_targets) for copied in copies] == [["target 0"], ["target 1"]]
    assert all(len(copied.collected_tensors[original.source_patterns[0]]) == 1 for copied in copies)
    assert not original.collected_tensors
    assert not original.layer_targets
    assert original.quantization_operation is None
