from __future__ import annotations

import torch

from hf_trainweights.checkpoint.encoded.storage_paths import storage_name
from hf_trainweights.checkpoint.encoded.tree import flatten


def test_storage_is_called_by_the_key_path_of_its_first_tensor():
    weight = torch.zeros(4)
    structure, _ = flatten({"lr": torch.tensor(1.0), "tied": [weight, weight[1:]], "state": {0: {"x": weight[:2]}}})
    assert storage_name(structure, 1) == "tensor tied.0"
    assert storage_name(structure, 7) == "storage 7"
    for index in (1.0, True, None, [], -1, 99):
        assert storage_name({"tree": {"tensor": index}, "tensors": [{"storage": 0}] * 2}, 0) == "storage 0"
