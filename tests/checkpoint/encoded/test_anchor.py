from __future__ import annotations

import pytest
import torch
from trees import write_anchor

from hf_trainweights.checkpoint.encoded import anchor_files as anchors
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.errors import CorruptFileError


def test_anchor_decodes_one_tensor_at_a_time(tmp_path):
    torch.manual_seed(0)
    tied = torch.randn(80, 64)
    weights = {"a": tied, "tied": tied, "view": tied[3:5].t(), "buffer": torch.arange(3)}
    anchor = Anchor(write_anchor(tmp_path, weights))
    assert list(anchor) == list(weights)
    assert "a" in anchor
    assert "b" not in anchor
    for name, tensor in weights.items():
        assert torch.equal(anchor.tensor(name), tensor)
        assert anchor.tensor(name).data_ptr() != anchor.tensor(name).data_ptr()
    with pytest.raises(CorruptFileError, match=f"{anchor.path.name}: expected an anchor that holds b"):
        anchor.tensor("b")


def test_anchor_that_needs_an_anchor_is_refused(delta, tmp_path):
    path, _, _ = delta
    path = path.rename(tmp_path / anchors.anchor_file_name(anchors.file_sha256(path)))
    with pytest.raises(CorruptFileError, match="expected an anchor: one flat state dict that refers to no other file"):
        Anchor(path)


@pytest.mark.parametrize(
    "tree",
    [[torch.ones(2)], {"a": {"b": torch.ones(2)}}, {"a": 1}, torch.ones(2)],
    ids=["list", "nested", "int", "tensor"],
)
def test_anchor_that_is_no_flat_state_dict_is_refused(tree, tmp_path):
    with pytest.raises(CorruptFileError, match="expected an anchor: one flat state dict"):
        Anchor(write_anchor(tmp_path, tree))


def test_anchor_under_a_wrong_name_is_refused(tmp_path):
    path = write_anchor(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(CorruptFileError, match="expected an anchor named by its SHA-256"):
        Anchor(path.rename(tmp_path / f"{'0' * 64}.anchor"))
