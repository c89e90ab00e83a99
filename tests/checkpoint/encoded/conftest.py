from __future__ import annotations

import pytest
import torch
from trees import trained, write_anchor, write_encoded

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.files import reading


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch):
    monkeypatch.setattr(reader, "_directories", {})
    monkeypatch.setattr(reading, "_digests", {})


@pytest.fixture
def state():
    return trained("AdamW")[1].state_dict()


@pytest.fixture
def delta(tmp_path):
    """A weights file stored against an anchor in the same directory: path, anchor's path, weights."""
    torch.manual_seed(0)
    old = {"w": torch.randn(80, 64), "b": torch.randn(7)}
    new = {name: tensor + 1e-6 for name, tensor in old.items()}
    directory = tmp_path / "checkpoint-5"
    directory.mkdir()
    anchor = Anchor(write_anchor(directory, old))
    plan = {(name,): TensorPlan("weight", name, (CODECS["planes-delta"](),), anchor=name) for name in new}
    return write_encoded(directory / "pytorch_model.bin", new, plan, anchor=anchor), anchor.path, new
