"""One flipped bit anywhere: an error on plain torch.load or nothing at all, never a different number."""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile

import pytest
import torch
from covering import exhaustive
from trees import fingerprint, small_tree, trained, write_anchor, written_bytes

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX, padded_length
from hf_trainweights.checkpoint.planning.policy import Policy


def outcomes_of_flips(data: bytes, expected, positions, load):
    """Loads the file with each single bit flipped; returns how many were errors and which gave something else."""
    errors, different = 0, []
    damaged = bytearray(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for position in positions:
            damaged[position // 8] ^= 1 << position % 8
            try:
                actual = load(damaged)
            except Exception:
                errors += 1
            else:
                if fingerprint(actual) != expected:
                    different.append(position)
            damaged[position // 8] ^= 1 << position % 8
    return errors, different


def load_bytes(data):
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("step", [11, *exhaustive(1)])
def test_flipped_bits_of_a_small_file_are_errors_or_harmless(step):
    data = written_bytes(small_tree())
    positions = range(0, len(data) * 8, step)
    errors, different = outcomes_of_flips(data, fingerprint(small_tree()), positions, load_bytes)
    assert different == []
    assert errors > 0.5 * len(positions)  # the rest are zip padding and fields that torch does not read


@pytest.mark.slow
@pytest.mark.parametrize("text_length", [300, *exhaustive(*range(0, 300, 75), *range(375, 600, 75))])
def test_flipped_bits_of_the_pickle_are_errors_whatever_its_length(text_length):
    """A flipped bit of a length makes pickle look for its next instruction anywhere: it must not find an end."""
    tree = {"name": "1.5 layers.0." * (text_length // 13), "w": torch.zeros(46 + text_length, dtype=torch.uint8)}
    file = io.BytesIO()
    structure = encode_file(tree, {("w",): TensorPlan("weight", "w", (CODECS["raw"](),))}, file).structure.encode()
    data = file.getvalue()
    start, stop = data.index(b"\x80\x02c"), data.index(structure) + 64
    end = stop + len(structure) - 64
    positions = [*range(start * 8, stop * 8), *range(end * 8, end * 8 + 80)]
    errors, different = outcomes_of_flips(data, fingerprint(tree), positions, load_bytes)
    assert different == []
    assert errors > 0.9 * len(positions)


@pytest.mark.parametrize("length", [46, 45, 0x2E00, 0x2EFF, 0x2E2E, 0x2E0000, 0x2E002E, 0x2D2E00])
def test_length_of_a_payload_has_no_byte_that_ends_a_pickle(length):
    padded = padded_length(length)
    assert length <= padded < 1.03 * length
    assert b"." not in padded.to_bytes(8, "little")
    if length < 1 << 16:
        tree = {"w": torch.ones(length, dtype=torch.uint8)}
        data = written_bytes(tree, {("w",): TensorPlan("weight", "w", (CODECS["raw"](),))})
        assert zipfile.ZipFile(io.BytesIO(data)).getinfo("archive/data/0").file_size == padded
        assert fingerprint(load_bytes(data)) == fingerprint(tree)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["near-lossless", *exhaustive("lossless", "compact")])
def test_flipped_bits_of_an_optimizer_file_are_errors_or_harmless(mode):
    state = trained("AdamW")[1].state_dict()
    data = written_bytes(state, Policy(mode).plan_optimizer(state))
    step = len(data) * 8 // 600
    errors, different = outcomes_of_flips(
        data, fingerprint(load_bytes(data)), range(0, len(data) * 8, step), load_bytes
    )
    assert different == []
    assert errors > 500


@pytest.mark.slow
@pytest.mark.parametrize("step", [61, *exhaustive(13)])
def test_flipped_bits_of_a_file_against_an_anchor_are_errors_or_harmless(tmp_path, step):
    torch.manual_seed(0)
    weights = {"w": torch.randn(16, 8)}
    anchor = Anchor(write_anchor(tmp_path, weights))
    plan = {("w",): TensorPlan("weight", "w", (CODECS["planes-delta"](),), anchor="w")}
    data = written_bytes(weights, plan, anchor=anchor)
    _, different = outcomes_of_flips(data, fingerprint(weights), range(0, len(data) * 8, step), load_bytes)
    assert different == []
    anchor_data = anchor.path.read_bytes()

    def load_with_anchor(damaged):
        anchor.path.write_bytes(damaged)
        return load_bytes(data)

    positions = range(0, len(anchor_data) * 8, step)
    errors, different = outcomes_of_flips(anchor_data, fingerprint(weights), positions, load_with_anchor)
    assert (errors, different) == (len(positions), [])


@pytest.mark.slow
def test_flipped_bits_of_any_anchor_of_a_chain_are_errors(tmp_path):
    torch.manual_seed(0)
    weights, links = {"w": torch.randn(16, 8)}, []
    for codec in (DeltaUniform(1e-2), DeltaUniform(1e-3), DeltaUniform(1e-3)):
        weights = {"w": weights["w"] + 1e-3 * torch.randn(16, 8)}
        plan = {("w",): TensorPlan("weight", "w", (codec,), anchor="w" if links else None)}
        data = written_bytes(weights, plan, anchor=Anchor(links[-1]) if links else None)
        links.append(tmp_path / f"{hashlib.sha256(data).hexdigest()}{ANCHOR_SUFFIX}")
        links[-1].write_bytes(data)
    expected = fingerprint(load_bytes(data))
    for link in links[:-1]:
        content = link.read_bytes()

        def load_with_anchor(damaged, link=link):
            link.write_bytes(damaged)
            return load_bytes(data)

        positions = range(0, len(content) * 8, 101)
        errors, different = outcomes_of_flips(content, expected, positions, load_with_anchor)
        assert (errors, different) == (len(positions), [])
        link.write_bytes(content)
