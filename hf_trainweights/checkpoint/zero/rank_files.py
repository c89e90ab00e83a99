"""Writes the files of one rank: its slices of the weights, and its optimizer states, which refer to these slices.

The float32 weights of a rank become a file of their own, `<sha256>.anchor`, because later checkpoints refer to it. The
file that DeepSpeed reads takes them from there, and stores nothing but the moments. Where the weights were rounded, it
takes the rounded ones.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_trainweights.checkpoint.codecs.exact import PlanesDelta
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.reader import is_encoded, read_report, read_structure, report_of
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, TensorPlan
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name
from hf_trainweights.checkpoint.encoded.tree import Key, KeyPath
from hf_trainweights.checkpoint.manifest import FileEntry
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.planning.update_rules import OPTIMIZER_ROLES
from hf_trainweights.checkpoint.run.file_checks import file_problem
from hf_trainweights.checkpoint.run.job import RewriteJob
from hf_trainweights.checkpoint.run.weight_files import is_lossy
from hf_trainweights.checkpoint.run.weights import Weights, WeightsAnchor, encode_weights, encoded_entry
from hf_trainweights.checkpoint.zero.files import load_states
from hf_trainweights.checkpoint.zero.partitions import Partitions, Piece, Shapes
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.atomic import create_file, move_file, remove_files
from hf_trainweights.files.disk import temporary_path
from hf_trainweights.files.reading import DigestedFile, file_sha256


@dataclass(frozen=True)
class RankOrder:
    """One file of optimizer states to rewrite: the rank that wrote it, the parameters' shapes, and the run's anchor."""

    name: str
    rank: int
    size: int
    shapes: Shapes
    candidate: WeightsAnchor | None = None


@dataclass(frozen=True)
class Rewritten:
    """The entries of files that were written, by name, and what the next checkpoint needs: the anchor's record.

    `anchor` is the digest of the file with the weights of `name`; None if the file was left plain. `is_kept` is true if
    an earlier call has encoded the file with a loss, and this one left it as it is. The entry of
    `name` reports how these weights were stored, and the entry of the anchor reports nothing.
    """

    name: str
    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    record: Mapping[str, Any] | None = None
    anchor: str | None = None
    problem: str | None = None
    is_kept: bool = False


@dataclass(frozen=True)
class SlicedWeights(Weights):
    """The weights of one rank: each is a piece of a parameter, and planned as the parameter would be."""

    pieces: Mapping[str, Piece] = field(default_factory=dict)

    def plan(self, policy: Policy, anchor: Container[str] = ()) -> Plan:
        """Plan each piece as its parameter is planned; a piece of padding is exact."""
        shapes = {piece.parameter: piece.shape for piece in self.pieces.values() if not piece.is_padding}
        whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        full, delta = policy.plan_weights(whole), policy.plan_weights(whole, whole)
        plan: dict[KeyPath, TensorPlan] = {}
        for name in self.state:
            piece = self.pieces.get(name)
            if piece is None or piece.is_padding:
                plan[name,] = TensorPlan("buffer", name, ())
                continue
            of_parameter = (delta if name in anchor else full)[piece.parameter,]
            plan[name,] = replace(of_parameter, name=name, anchor=of_parameter.anchor and name)
        return plan


def require_whole_files(directory: Path, names: Sequence[str]) -> None:
    """Check files in the directory of a tag; a rank does that for the files it has written, before any is rewritten.

    CorruptFileError: a file is damaged.
    """
    for name in names:
        if problem := file_problem(directory / name):
            next_step = "No file was changed. Use another checkpoint, or restore the file from a copy."
            raise CorruptFileError(str(directory / name), "a whole file", problem, next_step)


def rewrite_states(job: RewriteJob, orders: Sequence[RankOrder], interval_steps: int | None) -> list[Rewritten]:
    """Rewrite files of optimizer states in the directory of a tag; a rank does that for the files it has written."""
    return [_rewrite(job, order, interval_steps) for order in orders]


def _rewrite(job: RewriteJob, order: RankOrder, interval_steps: int | None) -> Rewritten:
    file = job.path / order.name
    if is_encoded(file) and (rewritten := _rounded_before(file)):  # encoding it again would hide its error
        return rewritten
    try:
        tree = load_states(file)
        partitions = Partitions(tree, order.shapes, order.rank, order.size)
    except (CorruptFileError, ValueError) as error:
        return Rewritten(order.name, problem=str(error))
    optimizer, pieces = partitions.optimizer(), partitions.pieces
    names = {name: name for name in pieces}
    weights = SlicedWeights(
        partitions.weights, (), optimizer, names, job.optimizer_class, interval_steps=interval_steps, pieces=pieces
    )
    anchor, entries, record = write_anchor(job, weights, order.candidate)
    stored, report = weights.state, entries[anchor.path.name].report
    if any(tensor["bound"] is not None for tensor in report["tensors"]):
        stored = {name: anchor.tensor(name) for name in weights.state}
    states, weight_paths, state_paths = partitions.joined(stored)
    plan = plan_same(weight_paths)
    parameters: dict[Key, str] = {name: piece.parameter for name, piece in pieces.items()}
    for (_, name, key), planned in job.policy.plan_optimizer(
        optimizer, names=parameters, optimizer=job.optimizer_class
    ).items():
        if name in state_paths:
            path = state_paths[str(name)]
            moment = (*path, "exp_avg_sq", name) if planned.exp_avg_sq else None
            plan[(*path, key, name)] = replace(planned, name=str(name), exp_avg_sq=moment)
    with job.open_file(order.name) as target:
        new_tree = {**tree, "optimizer_state_dict": states}
        written = encode_file(new_tree, plan, target, anchor=anchor, anchor_directory=job.path)
    entries[order.name] = encoded_entry(target, written)
    return Rewritten(order.name, _with_weights(entries, order.name, report, anchor.path.name), record, anchor.sha256)


def write_anchor(
    job: RewriteJob, weights: Weights, candidate: WeightsAnchor | None
) -> tuple[Anchor, dict[str, FileEntry], Mapping[str, Any] | None]:
    """Write weights to a file that is named by its digest; return it, entries of it and its links, and its record."""
    aside = temporary_path(job.directory)
    try:
        with create_file(aside) as file:
            target = DigestedFile(file)
            encoded = encode_weights(job, weights, candidate, target)
        entry = encoded_entry(target, encoded.written)
        path = job.directory / anchor_file_name(entry.sha256)
        move_file(aside, path)
    finally:
        remove_files([aside])
    anchor = Anchor(path, sha256=entry.sha256)
    return anchor, {**encoded.link_entries, path.name: entry}, encoded.fields(entry)["anchor"]


def plan_same(paths: Mapping[str, KeyPath]) -> dict[KeyPath, TensorPlan]:
    """Plan weights that are in the file's own anchor: their differences to it take no space."""
    return {path: TensorPlan("weight", name, (PlanesDelta(),), anchor=name) for name, path in paths.items()}


def _with_weights(
    entries: Mapping[str, FileEntry], name: str, of_weights: Mapping[str, Any], anchor_name: str
) -> dict[str, FileEntry]:
    """Move the report on the weights from the anchor's entry to that of the file that DeepSpeed reads them from."""
    by_name = {row["name"]: row for row in of_weights["tensors"]}
    rows = [row | _stored(by_name[row["name"]]) if row["role"] == "weight" else row for row in _rows(entries[name])]
    report = {**entries[name].report, "tensors": rows}
    new = {name: replace(entries[name], report=report), anchor_name: replace(entries[anchor_name], report={})}
    return {**entries, **new}


def _rows(entry: FileEntry) -> Sequence[dict[str, Any]]:
    return entry.report["tensors"]


def _stored(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("codec", "params", "bound", "bytes_out")}


def _rounded_before(file: Path) -> Rewritten | None:
    """Return the entries of a file that an earlier call has encoded with a loss, and of its anchor; None if exact."""
    structure = read_structure(file)
    sha256 = structure.get("anchor", {}).get("sha256")
    anchor = file.with_name(anchor_file_name(sha256)) if sha256 else None
    weights = read_report(anchor) if anchor and anchor.is_file() else {"tensors": []}
    if anchor is None or not (is_lossy(structure) or any(row["bound"] is not None for row in weights["tensors"])):
        return None
    report = report_of(structure)
    names = {row["path"]: row for row in weights["tensors"]}
    stored = {entry.get("anchor") for entry in structure["storages"]}
    others = [
        row for row in report["tensors"] if row["role"] in OPTIMIZER_ROLES and row["codec"] != PlanesDelta.codec_id
    ]
    rows = [*others, *(row for name, row in names.items() if name in stored)]
    entry = FileEntry(file.stat().st_size, file_sha256(file), {**report, "tensors": rows})
    return Rewritten(file.name, {file.name: entry}, None, sha256, is_kept=True)
