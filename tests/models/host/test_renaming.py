"""Renamings lead the names of stored tensors to files and back, by a checkpoint's names or by the module's own."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_trainweights.models.host.renaming import StoredNames, conversions_to_load, renamed_by_save
from hf_trainweights.tensor.stored_names import stored_name

# Classes whose renamings do not fit each stored name, or fit some that need none, and classes that join weights.
CLASSES = {
    "LagunaForCausalLM": "LagunaConfig",
    "MaskFormerModel": "MaskFormerConfig",
    "NomicBertModel": "NomicBertConfig",
    "PhimoeForCausalLM": "PhimoeConfig",
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_stored_name_leads_back_to_its_weight(name: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, CLASSES[name])(num_hidden_layers=2))
    weights = [weight for weight, parameter in model.named_parameters() if parameter.dim() in (2, 3)]
    loaded = StoredNames(model, conversions_to_load(model))
    for weight in weights:
        own = stored_name(weight, "qdata")
        assert loaded.parameter_of_stored(own) == weight
        assert loaded.parameter_of_stored(renamed_by_save(model, [own])[own]) == weight
        assert loaded.find(own) == (weight, "qdata")
    assert all(loaded.find(weight) is None for weight in weights)
