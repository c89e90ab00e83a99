"""A codec that another package brings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hf_trainweights.checkpoint import Codec, EncodedTensor, compress_directory, register_codec
from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ROLES
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.testing import CodecContract


@dataclass(frozen=True)
class Flipped(Codec):
    """Exact: the bytes of a tensor, every bit of them flipped `times` times."""

    times: int = 1

    codec_id = "tests.flipped"
    lossless = True
    roles = ROLES

    def _encode(self, tensor, references):
        payload = tensor.reshape(-1).view(torch.uint8).clone()
        return EncodedTensor([payload ^ 255 if self.times % 2 else payload], {"times": self.times})

    @classmethod
    def _decode(cls, payloads, params, shape, dtype, references):
        cls.check_count(payloads, 1)
        if payloads[0].numel() != shape.numel() * dtype.itemsize:
            raise cls.corrupt("payload 0", "the bytes of the tensor", f"{payloads[0].numel()} bytes")
        payload = payloads[0].clone()
        return (payload ^ 255 if cls.param(params, "times", int) % 2 else payload).view(dtype).view(shape)


class TestCodecOfAnotherPackage(CodecContract):
    codecs = (Flipped(), Flipped(2))

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        monkeypatch.setitem(CODECS, Flipped.codec_id, Flipped)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(CODECS, "tests.flipped", Flipped)  # which takes it out again
    del CODECS["tests.flipped"]
    return register_codec(Flipped)


@pytest.mark.parametrize("choice", ["tests.flipped", {"codec": "tests.flipped", "times": 2}])
def test_a_rule_may_name_a_registered_codec_and_files_come_back(tmp_path, registered, choice):
    weights = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    manifest = compress_directory(tmp_path, rules={"weight": choice})
    assert [row["codec"] for row in manifest.files["pytorch_model.bin"].report["tensors"]] == ["tests.flipped"]
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin")["w"], weights["w"])
    del CODECS["tests.flipped"]
    with pytest.raises(CorruptFileError, match=r"tests\.flipped.*import the package"):
        torch.load(tmp_path / "pytorch_model.bin")


def test_registering_twice_changes_nothing_and_no_codec_takes_the_id_of_another(registered):
    assert register_codec(Flipped) is CODECS["tests.flipped"] is Flipped
    thief = type("Thief", (Flipped,), {"codec_id": "raw"})
    with pytest.raises(ConfigError, match=r"'raw' is taken.*Raw"):
        register_codec(thief)
    assert CODECS["raw"].__name__ == "Raw"


@pytest.mark.parametrize("wrong", [int, Codec, Flipped(), type("Nameless", (Flipped,), {"codec_id": ""})])
def test_what_is_no_codec_is_refused(wrong):
    before = dict(CODECS)
    with pytest.raises(ConfigError, match="codec"):
        register_codec(wrong)
    assert before == CODECS
