"""Inputs that a caller gives in any way reach a model of Transformers by name, and ask it for no cache."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES

from hf_trainweights.exports.sources import ExampleInputs, Inputs

IDS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize("given", [IDS, (IDS,), {"input_ids": IDS}], ids=["tensor", "tuple", "dict"])
def test_a_decoder_gets_the_same_inputs_in_whatever_way_they_are_given(given: ExampleInputs) -> None:
    inputs = Inputs.of(ARCHITECTURES["llama"].build(), given)
    assert inputs == Inputs(kwargs={"input_ids": IDS, "use_cache": False})
