"""Weights of a base as a reference: read from any of its formats, and matched by name with those of a checkpoint."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from bases import put_into_cache, weights, write

from hf_trainweights.checkpoint.codecs import get_codec
from hf_trainweights.checkpoint.encoded.base_files import identify_base
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights, matching_names
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.plan import TensorPlan
from hf_trainweights.errors import CorruptFileError

ELSEWHERE = Path("relative")


def open_base(directory: Path, state: dict[str, torch.Tensor], name: str = "model.safetensors") -> BaseWeights:
    write(directory / name, state, name)
    return BaseWeights(identify_base(directory), ELSEWHERE)


def stored_and_loaded(state: dict[str, torch.Tensor], base: BaseWeights) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the codecs that store weights as an exact difference where they can, and what torch.load makes of it."""
    named = base.named_as(state)
    plan = {
        (name,): TensorPlan("weight", name, (get_codec("planes-delta")(),), anchor=name if name in named else None)
        for name in state
    }
    encoded = encode_file(state, plan, anchor=named)
    file = io.BytesIO()
    torch.save(encoded, file)
    file.seek(0)
    return [entry.codec for entry in encoded.report], torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_difference_to_either_format_is_exact(tmp_path: Path, name: str) -> None:
    codecs, loaded = stored_and_loaded(weights(1), open_base(tmp_path, weights(), name))
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], each) for key, each in weights(1).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_difference_to_a_base_of_another_dtype_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    base = open_base(tmp_path, {name: each.to(dtype) for name, each in weights().items()})
    codecs, loaded = stored_and_loaded(weights(1), base)
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], each) for key, each in weights(1).items())


def test_a_model_with_a_head_refers_to_its_base_model_and_the_other_way_round(tmp_path: Path) -> None:
    head = {**{f"model.{name}": each for name, each in weights(1).items()}, "score.weight": torch.randn(2, 80)}
    codecs, loaded = stored_and_loaded(head, open_base(tmp_path, weights()))
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], each) for key, each in head.items())
    (tmp_path / "with-head").mkdir()
    codecs, loaded = stored_and_loaded(weights(1), open_base(tmp_path / "with-head", head))
    assert codecs[0] == "planes-delta"
    assert all(torch.equal(loaded[key], each) for key, each in weights(1).items())


def test_of_tied_weights_one_name_in_the_base_is_enough(tmp_path: Path) -> None:
    weight = weights(1)["layer.weight"]
    base = open_base(tmp_path, {"layer.weight": weights()["layer.weight"]})
    codecs, loaded = stored_and_loaded({"head.weight": weight, "layer.weight": weight}, base)
    assert codecs == ["planes-delta"]
    assert loaded["head.weight"].data_ptr() == loaded["layer.weight"].data_ptr()


def test_names_match_by_one_prefix_and_only_in_equal_shapes() -> None:
    stored = {"a.weight": (2, 2), "a.bias": (2,), "b.weight": (2, 2), "score.weight": (3, 2)}
    given = {"m.a.weight": (2, 2), "m.a.bias": (2,), "m.b.weight": (2, 1), "x.b.weight": (2, 2), "score.weight": (4, 2)}
    assert matching_names(given, stored) == {"m.a.weight": "a.weight", "m.a.bias": "a.bias"}


def test_a_name_that_is_in_both_goes_before_one_with_a_prefix() -> None:
    stored = {"a.weight": (2,), "m.a.weight": (2,), "b.weight": (2,)}
    assert matching_names({"m.a.weight": (2,), "m.b.weight": (2,)}, stored) == {
        "m.a.weight": "m.a.weight",
        "m.b.weight": "b.weight",
    }


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path, monkeypatch, name: str) -> None:
    snapshot = put_into_cache(tmp_path, monkeypatch, weights(), name)
    torch.save([1, 2], snapshot / name)
    with pytest.raises(CorruptFileError, match=r"tester/tiny"):
        BaseWeights(identify_base(snapshot), ELSEWHERE)


def test_a_weight_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="a base that holds other"):
        open_base(tmp_path, weights()).tensor("other")
