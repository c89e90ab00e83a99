"""`trainweights checkpoint`: looks into small checkpoints, checks, makes and restores them.

Every command takes a checkpoint directory, most of them also a run: a directory of `checkpoint-<step>` directories.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_trainweights_cli.checkpoint_rows import bytes_without_anchors, print_manifest, summary_row, verification_row
from hf_trainweights_cli.console import (
    AsJson,
    Debug,
    errors_in_one_line,
    exit_with,
    new_table,
    one_line,
    print_comparison,
    print_json,
    print_table,
    say,
    show_sizes,
    status,
    with_progress,
)

if TYPE_CHECKING:
    from hf_trainweights.checkpoint.directory.manifest import Manifest

app = typer.Typer(no_args_is_help=True, help="Look into small training checkpoints, check, make and restore them.")

_PATH_HELP = "A checkpoint directory, or a run: a directory of checkpoint-<step> directories."
CheckpointOrRun = Annotated[Path, typer.Argument(metavar="PATH", exists=True, file_okay=False, help=_PATH_HELP)]
_CHECKPOINT_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".safetensors")


@app.command("ls")
def list_checkpoints(path: CheckpointOrRun, as_json: AsJson = False, debug: Debug = False) -> None:
    """List checkpoints: how each is stored and what it takes on disk.

    An anchor, a file that several checkpoints share, counts for the oldest of them.
    Only manifests are read. Exits with 1 if one is damaged.
    """
    seen: set[tuple[int, int]] = set()
    with errors_in_one_line(debug):
        rows = [summary_row(directory, seen) for directory in _checkpoints(path)]
    problems = [f"{row['path']}: {row['problem']}" for row in rows if row["problem"]]
    if as_json:
        print_json(rows)
    else:
        table = new_table("checkpoint", "mode", right=("plain", "on disk", "ratio", "anchor"))
        table.columns[1].no_wrap = False
        for row in rows:
            mode = "damaged" if row["problem"] else row["shown_mode"] or "no manifest"
            sizes = show_sizes(row["plain_bytes"], row["disk_bytes"])
            table.add_row(Path(row["path"]).name, mode, *sizes, (row["anchor"] or "")[:8])
        if len(rows) > 1:
            table.add_section()
            totals = (sum(row[key] for row in rows) for key in ("plain_bytes", "disk_bytes"))
            table.add_row("total", "", *show_sizes(*totals), "")
        print_table(table)
    exit_with(problems)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, file_okay=False, help="A checkpoint directory.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="One line per tensor instead of one per codec.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint's manifest says: codecs, sizes and the largest error of what is not exact."""
    from hf_trainweights.checkpoint.directory.manifest import read_manifest

    with errors_in_one_line(debug):
        manifest = read_manifest(path)
    if as_json:
        print_json(asdict(manifest))
    else:
        print_manifest(path, manifest, each_tensor=tensors)


@app.command()
def verify(path: CheckpointOrRun, as_json: AsJson = False, debug: Debug = False) -> None:
    """Read every file and compare it with the manifest: a single flipped bit is found.

    A complete directory without a manifest is called unverified. Exits with 1 if anything is damaged or missing.
    """
    with errors_in_one_line(debug):
        rows = [verification_row(directory) for directory in with_progress("verifying", _checkpoints(path))]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            say(f"{row['path']}: {row['state']}")
            for name in row["foreign"]:
                say(f"  not part of it, and not used: {name}")
    exit_with(
        [f"{row['path']}/{name}: {each}".replace("/:", ":") for row in rows for name, each in row["problems"].items()]
    )


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", exists=True, help="A checkpoint directory, or one file of it.")],
    second: Annotated[Path, typer.Argument(metavar="B", exists=True, help="What it is compared with.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare weights and optimizer states of two checkpoints, plain or small, tensor by tensor.

    Exits with 1 if one has keys, shapes or dtypes that the other has not.
    """
    from hf_trainweights.inspection.difference import compare_checkpoints

    with errors_in_one_line(debug), status("comparing"):
        comparison = compare_checkpoints(first, second)
    if as_json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison)
    exit_with(comparison.problems)


@app.command()
def restore(path: CheckpointOrRun, as_json: AsJson = False, debug: Debug = False) -> None:
    """Turn small checkpoints back into plain files that load without this package, where they are.

    What was rounded stays rounded. Each file is whole at every moment, small or plain.
    """
    from hf_trainweights.checkpoint import restore_directory

    with errors_in_one_line(debug):
        rows = _rewrite("restoring", path, restore_directory)
    _print_rewritten(rows, as_json)


@app.command()
def compress(
    path: CheckpointOrRun,
    mode: Annotated[str, typer.Option(metavar="MODE", help="lossless, near-lossless or compact.")] = "lossless",
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="SELECTOR=CHOICE", help='E.g. "re:.*embed.*=raw"; may be repeated, the first match wins.'),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make existing checkpoints small where they are: those of a Trainer, or a directory of torch.save files.

    Of a run the oldest comes first, and the following are stored as differences to it. Sizes are without anchors.
    What was rounded earlier stays as it is, and is called by the mode that rounded it.
    Each file is whole at every moment, but no training may write there meanwhile.
    """
    from hf_trainweights.checkpoint import Policy, compress_directory
    from hf_trainweights.errors import ConfigError

    try:
        policy = Policy(mode, dict(map(_parse_rule, rule or ())))
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--mode" if error.where == "mode" else "--rule") from error
    with errors_in_one_line(debug):
        rows = _rewrite(
            "compressing",
            path,
            lambda each: compress_directory(each, mode=policy.mode, rules=policy.rules, buffers=_buffers(each)),
        )
    _print_rewritten(rows, as_json)


@app.command()
def gc(
    path: CheckpointOrRun,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove what interrupted saves left behind: temporary files, and anchors that no file needs."""
    from hf_trainweights.checkpoint import collect_garbage

    with errors_in_one_line(debug):
        removed = collect_garbage(path, dry_run=dry_run)
    if as_json:
        print_json({"removed": [str(each) for each in removed], "dry_run": dry_run})
    else:
        verb = "would remove" if dry_run else "removed"
        for line in [f"{verb} {each}" for each in removed] or ["Nothing to remove."]:
            say(line)


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint directories of a run, the oldest first, or the one checkpoint that `path` is itself."""
    from hf_trainweights.checkpoint.directory.discovery import checkpoint_directories
    from hf_trainweights.checkpoint.directory.manifest import MANIFEST_NAME
    from hf_trainweights.errors import ConfigError

    is_run = not (path / MANIFEST_NAME).exists()
    directories = checkpoint_directories(path)[::-1] if is_run else []
    if directories or not is_run or any(file.suffix in _CHECKPOINT_SUFFIXES for file in path.iterdir()):
        return directories or [path]
    expected = "a checkpoint, or a directory of checkpoint-<step> directories"
    raise ConfigError(str(path), expected, "neither", "Give the output directory of a training run.")


def _parse_rule(text: str) -> tuple[str, Any]:
    selector, equals, choice = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not of the form SELECTOR=CHOICE.", param_hint="--rule")
    if not choice.startswith("{"):
        return selector, choice
    try:
        return selector, json.loads(choice)
    except ValueError as error:
        raise typer.BadParameter(f"{choice} is not JSON: {error}.", param_hint="--rule") from error


def _buffers(directory: Path) -> set[str] | None:
    """Return what is no parameter of the model that config.json describes; None where an earlier save or files tell."""
    from hf_trainweights.checkpoint.directory.manifest import MANIFEST_NAME
    from hf_trainweights.checkpoint.directory.plain_weights import read_weights, weight_files
    from hf_trainweights.models.directory import saved_parameter_names

    files = [] if (directory / MANIFEST_NAME).exists() else weight_files(directory)
    parameters = saved_parameter_names(directory) if files else None
    return None if parameters is None else read_weights(files[0]).keys() - parameters


def _rewrite(what: str, path: Path, function: Callable[[Path], Manifest]) -> list[dict[str, Any]]:
    from hf_trainweights.checkpoint.directory.rounding import shown_mode

    rows = []
    for directory in with_progress(what, _checkpoints(path)):
        before_bytes = bytes_without_anchors(directory)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manifest = function(directory)
        for warning in caught:
            typer.echo(f"warning: {one_line(warning.message)}", err=True)
        sizes = {"before_bytes": before_bytes, "after_bytes": bytes_without_anchors(directory)}
        rows.append({"path": str(directory), "shown_mode": shown_mode(manifest), **sizes})
    return rows


def _print_rewritten(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    table = new_table("checkpoint", "now", right=("before", "after", "ratio"))
    table.columns[1].no_wrap = False
    for row in rows:
        sizes = show_sizes(row["before_bytes"], row["after_bytes"])
        table.add_row(Path(row["path"]).absolute().name, row["shown_mode"], *sizes)
    print_json(rows) if as_json else print_table(table)
