"""Odd training states: what is written reads back bit by bit, or is refused before anything is on the disk."""

from __future__ import annotations

import io
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint import load_checkpoint, save_checkpoint
from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.testing.codecs import random_bits
from tests.fuzz.encoded_corpus import leaves
from tests.fuzz.target import BrokenPromiseError, Outcome, Target
from tests.trees import fingerprint

_DTYPES = sorted(ALL_DTYPES, key=str)
_SHAPES = [[], [0], [1], [0, 3], [5], [4, 6], [2, 3, 4], [8, 9], [1, 1, 1, 1], [80, 3]]
_SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 1 << 63, 1 << 127, -(1 << 4000), 1 << 5000, 0.0, -0.0, 1e308, 5e-324),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "x",
        "a.b",
        "\ud800",
        "\0",
        "\u00b7.",
        "\U0001f600" * 3,
        "n" * 300,
    ),
    *(torch.float32, torch.float8_e8m0fnu, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])),
]
# Values that an encoded file cannot hold.
_UNSTORABLE: list[Any] = [object(), {1, 2}, 1j, b"bytes", bytearray(b"x"), range(3), frozenset(), ..., int, len]
_KEYS: list[Any] = [0, 1, -7, 1 << 80, True, None, 0.5, float("nan"), "w", "_metadata", "tensor", "a.b", "", "\ud800"]
_UNSTORABLE_KEYS: list[Any] = [(1, 2), b"w", frozenset(), torch.float32]
_LOSSLESS = [codec for codec in CODECS.values() if codec.lossless]


class TrainingStates(Target):
    """A tree, made again from a seed, since not all that is in it can be pickled."""

    name = "training-states"
    share = 2.0
    inputs_in_suite = 5000

    def mutate(self, rng: random.Random) -> tuple[int, bool]:
        return rng.getrandbits(48), rng.random() < 0.03

    def run(self, given: tuple[int, bool]) -> Outcome:
        seed, as_checkpoint = given
        tree = _Maker(random.Random(seed)).value(0)
        if as_checkpoint:
            return self._save(tree)
        plan = {(name,): TensorPlan("weight", str(name), tuple(codec() for codec in _LOSSLESS)) for name in ("w", 0)}
        file = io.BytesIO()
        encode_file(tree, plan, file)
        file.seek(0)
        _require_same(tree, torch.load(file, weights_only=True))
        return Outcome.ACCEPTED

    def _save(self, tree: Any) -> Outcome:
        """Save a checkpoint that holds the tree beside a model, and look for what a refusal leaves."""
        root = self.directory / "states"
        root.mkdir(exist_ok=True)
        checkpoint = {"model": {"w": torch.ones(3)}, "extra": tree, "epoch": None, "step": 1}
        path = root / "checkpoint"
        try:
            save_checkpoint(checkpoint, path)
            _require_same(tree, load_checkpoint(path)["extra"])
        except TrainWeightsError as error:
            if left := sorted(each.name for each in root.iterdir()):
                raise BrokenPromiseError(f"a refused save left {left}") from error
            raise
        finally:
            for file in sorted(root.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
        return Outcome.ACCEPTED


class _Maker:
    """Makes a random tree; tensors in it may share memory and be there twice."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.tensors: list[Tensor] = []

    def value(self, depth: int) -> Any:
        kind = self.rng.random()
        if depth == 0 and kind < 0.01:
            return self.deep()
        if depth > 3 or kind < 0.25:
            return self.rng.choice(_UNSTORABLE) if self.rng.random() < 0.01 else self.rng.choice(_SCALARS)
        if kind < 0.6:
            return self.tensor()
        if kind < 0.7:
            items = [self.value(depth + 1) for _ in range(self.rng.randrange(4))]
            return items if self.rng.random() < 0.5 else tuple(items)
        return self.mapping(depth)

    def deep(self) -> Any:
        """Return lists in lists: a tree may be 64 deep."""
        made: Any = self.tensor()
        for _ in range(self.rng.choice((62, 63, 64, 65, 5000))):
            made = [made]
        return made

    def mapping(self, depth: int) -> Any:
        kind = self.rng.choice((dict, dict, OrderedDict, Counter))
        made = kind()
        for _ in range(self.rng.randrange(5)):
            keys = _UNSTORABLE_KEYS if self.rng.random() < 0.01 else _KEYS
            made[self.rng.choice(keys)] = self.value(depth + 1)
        if kind is OrderedDict and self.rng.random() < 0.2:
            made.__dict__["_metadata"] = OrderedDict({"": {"version": 1}})
        if depth < 3 and self.rng.random() < 0.002:
            made["itself"] = made
        return made

    def tensor(self) -> Tensor:
        if self.tensors and self.rng.random() < 0.3:
            return _odd_view(self.rng, self.rng.choice(self.tensors))
        dtype = self.rng.choice(_DTYPES)
        tensor = random_bits(self.rng.choice(_SHAPES), dtype, self.rng.randrange(1 << 20))
        if self.rng.random() < 0.3:
            tensor = _odd_view(self.rng, tensor)
        if self.rng.random() < 0.1 and (dtype.is_floating_point or dtype.is_complex):
            tensor = torch.nn.Parameter(tensor) if self.rng.random() < 0.5 else tensor.detach().requires_grad_()
        self.tensors.append(tensor)
        return tensor


def _odd_view(rng: random.Random, tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a view of it."""
    kind = rng.randrange(9)
    if kind == 0 or not tensor.dim():
        return tensor
    if kind == 1:
        return tensor.transpose(0, -1)
    if kind == 2:
        return tensor[::2]
    if kind == 3:
        return tensor[-1:]
    if kind == 4:
        return tensor[..., 1:]
    if kind == 5:
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if kind == 6:
        return tensor.detach()
    if kind == 7 and tensor.dtype == torch.complex64:
        return tensor.conj()
    return tensor[:0]


def _require_same(tree: Any, loaded: Any) -> None:
    if fingerprint(loaded) != fingerprint(tree):
        raise BrokenPromiseError("a training state came back with other values")
    if list(_sharing(loaded)) != list(_sharing(tree)):
        raise BrokenPromiseError("a training state came back with tensors that share memory in another way")


def _sharing(tree: Any) -> Iterator[tuple[int, int]]:
    """Yield for each tensor the first one that is the same object, and the first one that shares its memory."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    for index, tensor in enumerate(leaves(tree)):
        shared = storages.setdefault(tensor.untyped_storage()._cdata, index)
        yield objects.setdefault(id(tensor), index), shared
