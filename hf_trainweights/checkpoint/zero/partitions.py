"""Cuts the flat partitions of one rank into slices of parameters, so that codecs see rows of matrices.

DeepSpeed puts the parameters of a group one after the other into one flat tensor. ZeRO 1 and 2 cut that tensor into one
partition for each rank; ZeRO 3 cuts each parameter, and a rank's partition is all of its slices. A piece is the part of
a slice that consists of whole rows, or the rest before or after these rows. Its name says which elements of its
parameter it has, `layers.0.weight[128:4096]`.

A wrong guess about where a parameter lies costs bytes and nothing else, because all pieces together are the partition.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from hf_trainweights.checkpoint.encoded.storages import Joined, unshared
from hf_trainweights.checkpoint.encoded.tree import KeyPath
from hf_trainweights.checkpoint.planning.roles import is_optimizer_state

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""The shapes of parameters by name, for each group."""

_PIECE = re.compile(r"(.+)\[(\d+):(\d+)\]")
_STATES = "optimizer_state_dict"
# The keys of the flat weights and of the optimizer's state dict.
_LAYOUTS = (("single_partition_of_fp32_groups", "base_optimizer_state"), ("fp32_flat_groups", "optimizer_state_dict"))


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a parameter of `shape`; padding has its group's name and no shape."""

    parameter: str
    start: int
    stop: int
    shape: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the piece in anchors, plans and reports."""
        return f"{self.parameter}[{self.start}:{self.stop}]"

    @property
    def is_padding(self) -> bool:
        """Whether the elements belong to no parameter."""
        return not self.shape

    def view(self, elements: Tensor) -> Tensor:
        """Return the elements as rows of the parameter, or as they are if they are no whole rows."""
        row = math.prod(self.shape[1:])
        if len(self.shape) < 2 or row == 0 or self.start % row or self.stop % row:
            return elements
        return elements.view(-1, *self.shape[1:])


def parsed_piece(name: str) -> tuple[str, int, int] | None:
    """Return parameter, start and stop from the name of a piece; None if it is no such name."""
    match = _PIECE.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def cut_rows(parameter: str, shape: Sequence[int], start: int, stop: int) -> Iterator[Piece]:
    """Cut a slice of a parameter where its whole rows begin and end."""
    row = math.prod(shape[1:])
    first, last = (-(-start // row) * row, stop // row * row) if len(shape) > 1 and row else (start, stop)
    cuts = [start, *([first, last] if first < last else []), stop]
    for piece_start, piece_stop in pairwise(cuts):
        if piece_start < piece_stop:
            yield Piece(parameter, piece_start, piece_stop, tuple(shape))


class Partitions:
    """The flat partitions of one rank, as a file of optimizer states has them in its `tree`.

    `rank` is the rank among `size` ranks. `shapes` are those of all parameters. ValueError: the tree is another one.
    """

    def __init__(self, tree: Any, shapes: Shapes, rank: int, size: int):
        states = tree.get(_STATES) if isinstance(tree, Mapping) else None
        keys = next((keys for keys in _LAYOUTS if isinstance(states, Mapping) and keys[0] in states), None)
        if keys is None or not isinstance(states, Mapping):
            raise ValueError("no flat partitions")
        self._states, (self._flat_key, self._base_key) = states, keys
        flats, optimizer = states[self._flat_key], states.get(self._base_key)
        if not isinstance(flats, list) or not all(isinstance(flat, Tensor) and flat.dim() == 1 for flat in flats):
            raise ValueError("no list of flat partitions")
        self._flats: list[Tensor] = flats
        self._optimizer = optimizer if is_optimizer_state(optimizer) else {"state": {}, "param_groups": []}
        indices = [index for group in self._optimizer["param_groups"] for index in group["params"]]
        self._indices = indices if len(indices) == len(flats) else []
        self._sizes = [self._padded(number) for number in range(len(flats))]
        whole_parameters = self._flat_key == _LAYOUTS[1][0]
        cut = _of_each_parameter(shapes, self._sizes, rank, size) if whole_parameters else self._of_groups(shapes, rank)
        self._pieces = [list(pieces) for pieces in cut]

    @property
    def pieces(self) -> dict[str, Piece]:
        """The pieces of all partitions by name, padding included."""
        return {piece.name: piece for pieces in self._pieces for piece in pieces}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The float32 weights by the name of the piece."""
        return {
            name: tensor for number, flat in enumerate(self._flats) for name, tensor in self._cut(flat, number).items()
        }

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state dict as if each piece were a parameter, for plans and to estimate drift."""
        if not self._indices:
            return {"state": {}, "param_groups": []}
        numbers = {index: number for number, index in enumerate(self._indices)}
        states: dict[str, dict[str, Any]] = {}
        groups = []
        for group in self._optimizer["param_groups"]:
            names: list[str] = []
            for index in group["params"]:
                state, number = self._optimizer["state"].get(index, {}), numbers[index]
                flat = {key: self._cut(value, number) for key, value in self._flat_states(index).items()}
                rest = {key: value for key, value in state.items() if key not in flat}
                if "step" in group:
                    rest.setdefault("step", group["step"])
                for piece in self._pieces[number]:
                    cut = {key: pieces[piece.name] for key, pieces in flat.items() if piece.name in pieces}
                    states[piece.name] = {**rest, **cut}
                    names.append(piece.name)
            groups.append({**group, "params": names})
        return {"state": states, "param_groups": groups}

    def joined(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, KeyPath], dict[str, KeyPath]]:
        """Return (states, weight_paths, state_paths); in `states` a `Joined` of its pieces stands for each flat tensor.

        `weights` replace the float32 weights. `weight_paths[name]` is the key path of a piece of weights. The path of a
        piece's state, for example exp_avg, is `(*state_paths[name], "exp_avg", name)`.
        """
        flats, weight_paths, state_paths = [], {}, {}
        states: dict[Any, Any] = dict(self._optimizer["state"])
        for number, flat in enumerate(self._flats):
            pieces = {name: weights[name] for name in self._cut(flat, number)}
            flats.append(Joined(pieces, tuple(flat.shape), flat.requires_grad) if pieces else flat)
            weight_paths |= {name: (_STATES, self._flat_key, number, name) for name in pieces}
            if self._indices:
                index = self._indices[number]
                cut = {
                    key: Joined(self._cut(value, number), tuple(value.shape), value.requires_grad)
                    for key, value in self._flat_states(index).items()
                }
                if cut:
                    states[index] = {**states[index], **cut}
                state_paths |= {
                    piece.name: (_STATES, self._base_key, "state", index) for piece in self._pieces[number] if cut
                }
        new = {**self._states, self._flat_key: flats}
        if self._indices:
            new[self._base_key] = {**self._optimizer, "state": states}
        return new, weight_paths, state_paths

    def _flat_states(self, index: Any) -> dict[str, Tensor]:
        """Return the states of a flat parameter that have its shape."""
        state, size = self._optimizer["state"].get(index, {}), self._sizes[self._indices.index(index)]
        return {
            key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == (size,) and size
        }

    def _padded(self, number: int) -> int:
        """Return the elements of a partition with its padding, which DeepSpeed leaves out of the weights it saves."""
        flat = self._flats[number]
        state = self._optimizer["state"].get(self._indices[number], {}) if self._indices else {}
        lengths = [len(value) for value in state.values() if isinstance(value, Tensor) and value.dim() == 1]
        paddings = self._states.get("group_paddings")
        padding = paddings[number] if isinstance(paddings, list) and number < len(paddings) else 0
        # States keep the padding, and all flat ones have one length. A shorter one has another meaning.
        return max([len(flat), *lengths[:1]]) if lengths else len(flat) + (padding if type(padding) is int else 0)

    def _cut(self, flat: Tensor, number: int) -> dict[str, Tensor]:
        """Cut a flat tensor into pieces; the last of them are missing if it ends before."""
        pieces, position = {}, 0
        for piece in self._pieces[number]:
            stop = position + piece.stop - piece.start
            if stop > len(flat):
                break
            pieces[piece.name] = piece.view(unshared(flat[position:stop]))
            position = stop
        # DeepSpeed may leave out some padding, so that a tensor ends inside a piece of it. The rest is a piece, too.
        if position < len(flat):
            rest = Piece(f"rest of group {number}", position, len(flat))
            pieces[rest.name] = unshared(flat[position:])
        return pieces

    def _of_groups(self, shapes: Shapes, rank: int) -> Iterator[list[Piece]]:
        """Yield the pieces of each group: its parameters lie one after the other, and ranks cut the whole."""
        # If DeepSpeed aligns parameters, it lists for each group how many elements of padding follow each parameter.
        paddings = self._states.get("param_alignment_paddings")
        for number, size in enumerate(self._sizes):
            group = dict(shapes[number]) if number < len(shapes) else {}
            gaps = paddings[number] if isinstance(paddings, list) and number < len(paddings) else []
            gaps = gaps if isinstance(gaps, list) and len(gaps) == len(group) else [0] * len(group)
            begin, position, pieces, filled = rank * size, 0, [], 0
            for (name, shape), gap in zip(group.items(), gaps, strict=True):
                count = math.prod(shape)
                start, stop = max(begin - position, 0), min(begin + size - position, count)
                if start < stop:
                    offset = position + start - begin
                    if offset > filled:
                        pieces.append(Piece(f"padding of group {number}", filled, offset))
                    pieces += cut_rows(name, shape, start, stop)
                    filled = offset + stop - start
                position += count + gap
            if filled < size:
                pieces.append(Piece(f"padding of group {number}", filled, size))
            yield pieces


def _of_each_parameter(shapes: Shapes, sizes: Sequence[int], rank: int, size: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each sub-group of ZeRO 3, which cuts every parameter into slices of equal, padded length."""
    parameters = iter([item for group in shapes for item in group.items()])
    waiting = next(parameters, None)
    for number, room in enumerate(sizes):
        pieces, filled = [], 0
        while waiting is not None:
            name, shape = waiting
            count = math.prod(shape)
            length = -(-count // size)
            if filled + length > room:
                break
            start, stop = min(rank * length, count), min((rank + 1) * length, count)
            pieces += cut_rows(name, shape, start, stop)
            if stop - start < length:
                pieces.append(Piece(f"padding of group {number}", filled + stop - start, filled + length))
            filled += length
            waiting = next(parameters, None)
        if filled < room:
            pieces.append(Piece(f"padding of group {number}", filled, room))
        yield pieces
