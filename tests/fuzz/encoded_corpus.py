"""Small encoded files of every codec, dtype and awkward shape: what the targets for encoded files begin with."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.encoded.decoder import Anchor, decode_file
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.testing.codecs import random_bits
from tests.checkpoint.codecs.cases import INSTANCES, inputs
from tests.trees import encoded_bytes, fingerprint, small_tree, trained, write_anchor

SHAPES = ([0, 5], [7], [1], [3, 2, 5], [21, 33])
_FULL_STOP = "\u00b7"
# What fingerprinting a tensor may cost; a view that repeats its elements can claim any number of them.
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One encoded file.

    Args:
        structure: Its JSON, as text.
        payload: Its payload.
        file: The file as `torch.save` writes it.
        print: Fingerprint of what it holds.
    """

    structure: str
    payload: bytes
    file: bytes
    print: Any


def build_samples(directory: Path) -> list[Sample]:
    """Return the corpus; anchors lie in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        return [_sample(file) for file in _encoded_files(directory)]


def _encoded_files(directory: Path) -> Iterator[EncodedFile]:
    yield from _one_tensor_each(directory)
    yield from (encode_file(tree, {}) for tree in (small_tree(), _strided()))
    # Two blocks of an entropy coder.
    yield encode_file({"w": torch.zeros((1 << 18) + 3, dtype=torch.uint8)}, {})
    for name in ("AdamW", "SGD"):
        _, optimizer, scheduler = trained(name, steps=1)
        small = {"scheduler": scheduler.state_dict(), "groups": optimizer.state_dict()["param_groups"]}
        yield encode_file(small, {})


def seal(structure: Any) -> str:
    """Return a structure with a right digest, whatever it says."""
    text = structure if isinstance(structure, str) else json.dumps(structure).replace(".", _FULL_STOP)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() + text


def as_payload(data: bytes) -> Tensor:
    """Return bytes as a payload."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def touch(tree: Any) -> Any:
    """Read every element of a tree, so that one beyond its memory shows, and return the fingerprint.

    Returns:
        None where a tensor has too many elements.
    """
    return fingerprint(tree) if all(leaf.numel() <= _MOST_ELEMENTS for leaf in leaves(tree)) else None


def leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)


def _sample(encoded: EncodedFile) -> Sample:
    structure = encoded.structure[64:].replace(_FULL_STOP, ".")
    payload = encoded.payload.numpy().tobytes()
    return Sample(
        structure, payload, encoded_bytes(encoded), fingerprint(decode_file(encoded.payload, encoded.structure))
    )


def _strided() -> dict[str, Tensor]:
    """Return tensors that share memory and are not contiguous, one of three dimensions."""
    base = random_bits([4, 6, 5], torch.float32)
    return {"whole": base, "part": base[1:3, ::2].transpose(0, 2), "row": base[0, 0], "none": base[:0]}


def _one_tensor_each(directory: Path) -> Iterator[EncodedFile]:
    for codec in INSTANCES:
        for dtype in sorted(codec.dtypes, key=str):
            for shape in SHAPES:
                try:
                    yield _encode_one(codec, shape, dtype, directory)
                except TrainWeightsError:  # not every codec takes every shape
                    continue


def _encode_one(codec: Codec, shape: list[int], dtype: torch.dtype, directory: Path) -> EncodedFile:
    tensor, references = inputs(codec, shape, dtype)
    if "anchor" in codec.references:
        anchor = Anchor(write_anchor(directory, {"w": references["anchor"]}))
        plan = {("w",): TensorPlan("weight", "w", (codec,), anchor="w")}
        return encode_file({"w": tensor, "step": 1}, plan, anchor=anchor)
    if "exp_avg_sq" in codec.references and "exp_avg_sq" in references:
        plan = {("w",): TensorPlan("exp_avg", "w", (codec,), exp_avg_sq=("v",))}
        return encode_file({"v": references["exp_avg_sq"], "w": tensor}, plan)
    return encode_file({"w": tensor, "lr": 0.5}, {("w",): TensorPlan("weight", "w", (codec,))})
