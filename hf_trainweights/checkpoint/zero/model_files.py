"""Writes the model files of a ZeRO checkpoint, which repeat the weights in the dtype of training, e.g. bfloat16.

The float32 weights lie in the anchors of the ranks (rank_files.py). A weight of a model file is nearly always its
float32 weight, rounded to bfloat16, so the file stores the difference to that, which takes next to no space. If a lossy
mode has rounded the float32 weights, this file gets the rounded ones too: both then describe the same model. Buffers
and frozen weights have no float32 weight. They become an anchor of their own, to which later checkpoints refer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.exact import PlanesDelta
from hf_trainweights.checkpoint.encoded.decoder import Anchor, AnchorParts
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.storages import Joined, unshared
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name
from hf_trainweights.checkpoint.encoded.tree import KeyPath
from hf_trainweights.checkpoint.manifest import FileEntry
from hf_trainweights.checkpoint.planning.policy import SIZE_FLOOR
from hf_trainweights.checkpoint.run.job import RewriteJob
from hf_trainweights.checkpoint.run.weights import Weights, WeightsAnchor, encoded_entry
from hf_trainweights.checkpoint.zero.files import load_states
from hf_trainweights.checkpoint.zero.partitions import Piece, parsed_piece
from hf_trainweights.checkpoint.zero.rank_files import Rewritten, plan_same, write_anchor
from hf_trainweights.errors import CorruptFileError, UnstorableError

# The parts of a model file that have tensors by name.
_PARTS = ("module", "frozen_param_fragments")


@dataclass(frozen=True)
class ModelOrder:
    """A model file to rewrite: the anchors of the ranks that have its weights, and the bounds of their pieces by name.

    `candidate` is the run's anchor for the tensors that no rank has in float32.
    """

    name: str
    anchors: Sequence[str]
    bounds: Mapping[str, float] = field(default_factory=dict)
    candidate: WeightsAnchor | None = None


def rewrite_models(job: RewriteJob, orders: Sequence[ModelOrder]) -> list[Rewritten]:
    """Rewrite model files in the directory of a tag; a rank does that for some of them."""
    return [_rewrite(job, order) for order in orders]


def _rewrite(job: RewriteJob, order: ModelOrder) -> Rewritten:
    try:
        tree = load_states(job.path / order.name)
    except CorruptFileError as error:
        return Rewritten(order.name, problem=str(error))
    if not isinstance(tree, dict):
        return Rewritten(order.name, problem="it holds no dict")
    parts = [Anchor(job.path / anchor_file_name(sha256), sha256=sha256) for sha256 in order.anchors]
    tree, plan, others = repeat(tree, RepeatedWeights(parts, order.bounds))
    entries: dict[str, FileEntry] = {}
    record, own = None, None
    if others:
        anchor, entries, record = write_anchor(job, Weights(others, [*others]), order.candidate)
        parts, own = [*parts, anchor], anchor.sha256
    try:
        with job.open_file(order.name) as target:
            anchors = AnchorParts(parts) if parts else None
            written = encode_file(tree, plan, target, anchor=anchors, anchor_directory=job.path)
    except UnstorableError as error:
        return Rewritten(order.name, problem=str(error))
    entries[order.name] = encoded_entry(target, written)
    return Rewritten(order.name, entries, record, own)


def repeat(
    tree: Mapping[Any, Any], repeated: RepeatedWeights
) -> tuple[dict[Any, Any], dict[KeyPath, TensorPlan], dict[str, Tensor]]:
    """Replace each weight of a model file by pieces that refer to float32 weights.

    Return the new content, its plan, and by name the large tensors that no rank has in float32.
    """
    new, plan, others = dict(tree), {}, Others()
    for entry in _PARTS:
        tensors = tree.get(entry)
        if not isinstance(tensors, dict):
            continue
        new[entry] = copy.copy(tensors)
        joined = repeated.join_all(tensors) if entry == "module" else {}
        for name, tensor in tensors.items():
            if name in joined:
                new[entry][name] = joined[name]
                plan |= plan_same({piece: (entry, name, piece) for piece in joined[name].pieces})
            elif isinstance(tensor, Tensor) and tensor.numel() >= SIZE_FLOOR:
                own_name, new[entry][name] = others.add(f"{entry}.{name}", tensor)
                plan[entry, name] = TensorPlan("buffer", own_name, (PlanesDelta(),), anchor=own_name)
    return new, plan, others.tensors


class Others:
    """Large tensors that no rank has in float32, each with memory of its own, by the first of its names."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}

    def add(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Add a tensor, unless it is tied to an earlier one; return the first name, and the tensor under that name."""
        own_name = self._names.setdefault(_memory(tensor), name)
        if own_name == name:
            self.tensors[name] = unshared(tensor.contiguous()).requires_grad_(tensor.requires_grad)
        return own_name, self.tensors[own_name]


class RepeatedWeights:
    """The float32 weights of all ranks, and `bounds` on the errors of those pieces that were rounded, by name."""

    def __init__(self, anchors: Sequence[Anchor], bounds: Mapping[str, float]):
        self.anchors = AnchorParts(anchors) if anchors else None
        self._bounds = bounds
        self._pieces: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for name in self.anchors or ():
            if parsed := parsed_piece(name):
                parameter, start, stop = parsed
                self._pieces[parameter].append((start, stop, name))

    def join_all(self, tensors: Mapping[str, Any]) -> dict[str, Joined]:
        """Return by name the tensors that ranks have in float32, and those that are tied to one of them."""
        plain = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.numel()}
        joined = {name: made for name, tensor in plain.items() if (made := self._join(name, tensor))}
        tied = {_memory(plain[name]): made for name, made in joined.items()}
        return {
            name: joined.get(name) or tied[_memory(x)]
            for name, x in plain.items()
            if name in joined or _memory(x) in tied
        }

    def _join(self, name: str, tensor: Tensor) -> Joined | None:
        pieces, position = sorted(self._pieces.get(name, ())), 0
        for start, stop, _ in pieces:
            if start != position:
                return None
            position = stop
        if position != tensor.numel() or tensor.dtype not in LOSSY_DTYPES:
            return None
        flat, shape = tensor.detach().contiguous().view(-1), tuple(tensor.shape)
        rows = {own: Piece(name, start, stop, shape).view(unshared(flat[start:stop])) for start, stop, own in pieces}
        return Joined({own: self._rounded(own, x) for own, x in rows.items()}, shape, tensor.requires_grad)

    def _rounded(self, name: str, elements: Tensor) -> Tensor:
        """Return the rounded float32 weights in the elements' dtype, if these are within the bound."""
        bound = self._bounds.get(name)
        if bound is None or self.anchors is None:
            return elements
        decoded, limits = self.anchors.tensor(name), torch.finfo(elements.dtype)
        allowed = elements.float().abs().mul_(limits.eps).add_(bound + limits.smallest_normal)
        is_near = decoded.shape == elements.shape and bool(((elements.float() - decoded).abs_() <= allowed).all())
        return decoded.to(elements.dtype) if is_near else elements


def _memory(tensor: Tensor) -> object:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
