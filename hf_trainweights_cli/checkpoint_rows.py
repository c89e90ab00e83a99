"""Makes the output of `trainweights checkpoint`: rows for JSON and tables, and the tables of a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_trainweights_cli.console import printable, say
from hf_trainweights_cli.tables import Table, print_note, print_table, show_sizes

if TYPE_CHECKING:
    from hf_trainweights.checkpoint.manifest import Manifest

ERROR_UNITS = "Errors are those of one element; of update-space in sqrt(exp_avg_sq), of log-rank1 in log2."


def summary_row(directory: Path, seen: set[tuple[int, int]]) -> dict[str, Any]:
    """Return the facts in a checkpoint's manifest, and its bytes on disk without the inodes in `seen`."""
    from hf_trainweights.checkpoint.manifest import read_manifest, shown_mode, total_rounding
    from hf_trainweights.errors import TrainWeightsError

    size_bytes = disk_bytes(directory, seen)
    manifest, problem = None, None
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        pass
    except (TrainWeightsError, OSError) as error:
        problem = str(error)
    files = manifest.files.values() if manifest else ()
    return {
        "path": str(directory),
        "mode": manifest and manifest.mode,
        "shown_mode": manifest and shown_mode(manifest),
        "rounding": total_rounding(manifest) if manifest else {},
        "step": manifest and manifest.step,
        "created": manifest and manifest.created,
        "disk_bytes": size_bytes,
        "plain_bytes": _plain_bytes_of(directory, manifest) if manifest else size_bytes,
        "anchor": next(filter(None, (entry.report.get("anchor") for entry in files)), None),
        "base": manifest and manifest.base and manifest.base.to_dict(),
        "needs": _needs(manifest) if manifest else None,
        "problem": problem,
    }


def _needs(manifest: Manifest) -> str | None:
    """Describe the base of a checkpoint in words; None if it has no base."""
    if manifest.base is None:
        return None
    return f"{manifest.base}{', kept in the run' if manifest.keeps_base else ''}"


def disk_bytes(directory: Path, seen: set[tuple[int, int]]) -> int:
    """Return the bytes of a directory's files, except inodes in `seen`, and add the counted inodes to `seen`."""
    total = 0
    for file in directory.rglob("*"):
        status = file.lstat()
        if file.is_file() and (inode := (status.st_dev, status.st_ino)) not in seen:
            seen.add(inode)
            total += status.st_size
    return total


def _plain_bytes_of(directory: Path, manifest: Manifest) -> int:
    """Return the bytes that a checkpoint would take without encoding, including files that its manifest omits."""
    files = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*") if file.is_file()}
    unlisted = (file.lstat().st_size for name, file in files.items() if name not in manifest.files)
    return sum(_plain_bytes(manifest).values()) + sum(unlisted)


def _plain_bytes(manifest: Manifest) -> dict[str, int]:
    """Return the bytes that each file would take without encoding: 0 for an anchor, which would not exist then."""
    files = manifest.files.items()
    return {name: 0 if name.endswith(".anchor") else entry.plain_bytes for name, entry in files}


def verification_row(directory: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, intact, damaged or (if it has no manifest) unverified, and its problems."""
    from hf_trainweights.checkpoint.dcp.reader import dcp_directories
    from hf_trainweights.checkpoint.directory import layout_of, plain_problem
    from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
    from hf_trainweights.checkpoint.run.checkpoints import (
        checkpoint_directories,
        converted_weights_problem,
        verify_checkpoint,
    )

    path = directory.resolve()
    sharded = dcp_directories(path)
    if not (path / MANIFEST_NAME).exists() and (sharded or path in checkpoint_directories(path.parent)):
        problem = layout_of(path).problem() if sharded == [path] else plain_problem(path)
        problem = problem or converted_weights_problem(path)
        state, problems, foreign = "unverified", {"": problem} if problem else {}, []
    else:
        report = verify_checkpoint(path)
        state, problems, foreign = "intact", dict(report.problems), list(report.foreign)
    shown = "damaged" if problems else state
    return {"path": str(directory), "ok": not problems, "state": shown, "problems": problems, "foreign": foreign}


def print_manifest(path: Path, manifest: Manifest, *, each_tensor: bool) -> None:
    """Print the tables of a manifest: its files, and its tensors by codec or one by one."""
    from hf_trainweights.checkpoint.manifest import shown_mode

    say(f"{path.absolute().name}: {shown_mode(manifest)}, step {manifest.step}, {manifest.created}")
    say(f"written by hf_trainweights {manifest.package_version}, torch {manifest.torch_version}")
    metrics = [printable(f"{name} {value}") for name, value in manifest.metrics.items()]
    typer.echo(f"metrics: {', '.join(metrics) or 'none'}")
    files = Table(("file",), right=("plain", "on disk", "ratio"), drop=("plain",))
    for name, plain_bytes in _plain_bytes(manifest).items():
        shown = f"{name[:8]}...anchor" if name.endswith(".anchor") else name
        files.add_row(shown, *show_sizes(plain_bytes, manifest.files[name].size_bytes))
    print_table(files)
    tensors = [tensor for entry in manifest.files.values() for tensor in entry.report.get("tensors", ())]
    if not tensors:
        return
    head = ("name", "role", "codec") if each_tensor else ("role", "codec")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for tensor in tensors:
        groups.setdefault(tuple(tensor[name] for name in head), []).append(tensor)
    counts = () if each_tensor else ("tensors", "plain")
    table = Table(head, right=(*counts, "stored", "ratio", "error"), drop=("role", *counts, "ratio", "stored"))
    for key, members in groups.items():
        plain, *stored = show_sizes(*(sum(member[name] for member in members) for name in ("bytes_in", "bytes_out")))
        bounds = [member["bound"] for member in members if member["bound"] is not None]
        first = () if each_tensor else (len(members), plain)
        table.add_row(*key, *first, *stored, f"{max(bounds):.2g}" if bounds else "exact")
    print_table(table)
    if any(tensor["bound"] is not None for tensor in tensors):
        print_note(ERROR_UNITS)
