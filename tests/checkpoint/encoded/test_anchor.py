from __future__ import annotations

import pytest
import torch
from trees import write_anchor, write_encoded

from hf_trainweights.checkpoint.codecs import get_codec
from hf_trainweights.checkpoint.encoded import anchor_files as anchors
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.plan import TensorPlan
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


def as_anchor(path):
    return path.rename(path.with_name(f"{anchors.file_sha256(path)}{anchors.ANCHOR_SUFFIX}"))


def chain(directory, length):
    """Anchors each of which is a difference to the one before: the last one's path, and its weights."""
    directory.mkdir(exist_ok=True)
    weights = {"w": torch.randn(80, 64)}
    path = write_anchor(directory, weights)
    for _ in range(length - 1):
        weights = {"w": weights["w"] + 1e-3}
        plan = {("w",): TensorPlan("weight", "w", (get_codec("planes-delta")(),), anchor="w")}
        path = as_anchor(write_encoded(directory / "w.bin", weights, plan, anchor=Anchor(path)))
    return path, weights


def test_anchor_may_be_a_difference_to_another_one_beside_it(tmp_path):
    path, weights = chain(tmp_path / "a", 4)
    (tmp_path / "a").rename(tmp_path / "moved")
    anchor = Anchor(tmp_path / "moved" / path.name)
    assert torch.equal(anchor.tensor("w"), weights["w"])
    assert len(set(anchor.files)) == 4
    assert set(anchor.files) == set((tmp_path / "moved").iterdir())


def test_anchor_that_takes_too_many_files_is_refused(tmp_path):
    path, _ = chain(tmp_path, 8)
    assert len(Anchor(path).files) == 8
    plan = {("w",): TensorPlan("weight", "w", (get_codec("planes-delta")(),), anchor="w")}
    ninth = as_anchor(write_encoded(tmp_path / "w.bin", {"w": torch.zeros(80, 64)}, plan, anchor=Anchor(path)))
    with pytest.raises(CorruptFileError, match="expected an anchor that takes at most 8 files"):
        Anchor(ninth)


def test_anchor_whose_own_anchor_is_gone_or_damaged_is_refused(tmp_path):
    path, _ = chain(tmp_path, 3)
    first = Anchor(path).files[-1]
    content = first.read_bytes()
    first.write_bytes(content[:-100] + bytes(100))
    with pytest.raises(CorruptFileError, match="expected an anchor named by its SHA-256"):
        Anchor(path)
    first.unlink()
    with pytest.raises(anchors.MissingAnchorError, match=first.name):
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
