"""`Storage`: memory that a codec sees as one tensor. `Joined`: a tensor in pieces, each of which is a storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_trainweights.checkpoint.encoded.tree import KeyPath

# numpy has no dtype for some of torch's, such as bfloat16, but one of each size.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Storage:
    """Memory that one or more tensors of a tree share.

    Args:
        source: One of these tensors.
        spans: The elements of the memory that are in use: disjoint `(start, stop)` pairs, ascending.
        shape: The shape that a codec sees: the tensors' if `exclusive`, else the number of elements in use.
        paths: Key paths of the tensors, in the order of the tree.
        exclusive: Whether the elements in use are one contiguous tensor, or several tied ones of the same shape.
        size_bytes: Size of the elements in use.
    """

    source: Tensor
    spans: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    paths: tuple[KeyPath, ...]
    exclusive: bool
    size_bytes: int

    def read(self) -> Tensor:
        """Return the elements in use as a contiguous CPU tensor of `shape`, a view where possible."""
        pieces = [self.source.as_strided((stop - start,), (1,), start).cpu() for start, stop in self.spans]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(self.shape)


@dataclass(frozen=True, eq=False)
class Joined:
    """A tensor of `shape` whose elements are those of its `pieces` by name, one piece after the other.

    DeepSpeed keeps many weights in one flat tensor, which ranks share. `checkpoint/zero` makes a piece of each part of
    a weight, so that a codec compares it with the same part in the anchor. A reader gets one contiguous tensor. A plan
    names a piece by the path of the tensor and then the piece's name.
    """

    pieces: Mapping[str, Tensor]
    shape: tuple[int, ...]
    requires_grad: bool = False

    def view(self, first: int) -> dict[str, Any]:
        """Return the node of this tensor in a file's JSON (tree.py); storage `first` holds the first piece."""
        view: dict[str, Any] = {"joined": [*range(first, first + len(self.pieces))], "shape": [*self.shape]}
        return view | ({"requires_grad": True} if self.requires_grad else {})


def repeated(views: Iterable[object]) -> list[int]:
    """Return the storages that joined views name more than once: a small file could ask for any number of copies."""
    joined = [view["joined"] for view in views if type(view) is dict and type(view.get("joined")) is list]
    counts = Counter(number for numbers in joined for number in numbers if type(number) is int)
    return [number for number, count in counts.items() if count > 1]


def join(numbers: Any, shape: Sequence[int], storages: Sequence[Tensor], *, requires_grad: bool) -> Tensor:
    """Return the tensor of a node that `Joined.view` made, of its storages by number; ValueError: there is none."""
    is_list = type(numbers) is list and bool(numbers)
    if not is_list or not all(type(number) is int and 0 <= number < len(storages) for number in numbers):
        raise ValueError("no list of storages")
    pieces = [storages[number].reshape(-1) for number in numbers]
    if len({piece.dtype for piece in pieces}) > 1 or sum(map(len, pieces)) != math.prod(shape):
        raise ValueError("storages of other sizes or dtypes")
    joined = torch.cat(pieces).view(shape)
    return joined.requires_grad_(requires_grad and (joined.is_floating_point() or joined.is_complex()))


def unshared(tensor: Tensor) -> Tensor:
    """Return a view of a CPU tensor that torch takes for memory of its own.

    Pieces that are views of one tensor would count as one storage.
    """
    plain = tensor.detach()
    words = plain.view(_WORDS[plain.itemsize])
    return torch.from_numpy(words.numpy()).view(plain.dtype)
