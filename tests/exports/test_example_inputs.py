"""Inputs that a caller gives in any way reach a model of Transformers by name, and ask it for no cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import nn

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.sources import ExampleInputs, Inputs

IDS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize("given", [IDS, (IDS,), {"input_ids": IDS}], ids=["tensor", "tuple", "dict"])
def test_a_decoder_gets_the_same_inputs_in_whatever_way_they_are_given(given: ExampleInputs) -> None:
    inputs = Inputs.of(ARCHITECTURES["llama"].build(), given)
    assert inputs == Inputs(kwargs={"input_ids": IDS, "use_cache": False})


@pytest.mark.parametrize(("given", "found"), [(3, "int"), ("text", "str")])
def test_what_is_no_arguments_is_refused(given: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"^example_inputs: expected a tensor.*, found {found}\."):
        Inputs.of(nn.Linear(3, 3), given)
