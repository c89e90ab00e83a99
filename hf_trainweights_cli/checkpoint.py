"""`trainweights checkpoint`: lists, inspects, verifies, compares, compresses and restores checkpoints.

Every command takes a checkpoint directory, and most take a run: a directory of `checkpoint-<step>` directories.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hf_trainweights_cli.checkpoint_restoring import restore
from hf_trainweights_cli.checkpoint_rewriting import compress, warnings_in_one_line
from hf_trainweights_cli.checkpoint_rows import print_manifest, summary_row, verification_row
from hf_trainweights_cli.commands import Command, new_app
from hf_trainweights_cli.console import (
    AsJson,
    Debug,
    errors_in_one_line,
    exit_with,
    print_json,
    say,
    status,
    with_progress,
    wrong_option,
)
from hf_trainweights_cli.differences import Top, show_comparison
from hf_trainweights_cli.runs import BaseDirectory, CheckpointOrRun, checkpoints, require_one_checkpoint, use_base
from hf_trainweights_cli.tables import Table, print_note, print_table, show_sizes


def list_checkpoints(
    path: CheckpointOrRun,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the run, and the loss a Trainer logged: .svg or .html."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List checkpoints: how each is stored and what it takes on disk.

    An anchor, a file that several checkpoints share, counts for the oldest of them.
    Only manifests are read. Exits with 1 if one is damaged.
    """
    seen: set[tuple[int, int]] = set()
    _check_plot(plot)
    with errors_in_one_line(debug):
        rows = [summary_row(directory, seen) for directory in checkpoints(path)]
        _draw(path, plot)
    problems = [f"{row['path']}: {row['problem']}" for row in rows if row["problem"]]
    if as_json:
        print_json(rows)
    else:
        sizes, drop = ("plain", "on disk", "ratio", "anchor"), ("anchor", "plain", "ratio")
        table = Table(("checkpoint", "mode"), right=sizes, drop=drop, labels=("mode",))
        for row in rows:
            mode = "damaged" if row["problem"] else row["shown_mode"] or "no manifest"
            sizes = show_sizes(row["plain_bytes"], row["disk_bytes"])
            anchor = "base" if row["base"] else (row["anchor"] or "")[:8]
            table.add_row(Path(row["path"]).name, mode, *sizes, anchor)
        if len(rows) > 1:
            table.add_section()
            totals = (sum(row[key] for row in rows) for key in ("plain_bytes", "disk_bytes"))
            table.add_row("total", "", *show_sizes(*totals), "")
        print_table(table)
        for needed in dict.fromkeys(row["needs"] for row in rows if row["needs"]):
            print_note(f"base: {needed}")
    if plot is not None:
        say(f"picture: {plot}", err=as_json)
    exit_with(problems)


def _check_plot(out: Path | None) -> None:
    if out is None:
        return
    from hf_trainweights.errors import ConfigError
    from hf_trainweights.report.write import PLOTS, check_name

    try:
        check_name(out, PLOTS)
    except ConfigError as error:
        raise wrong_option(error, "--plot") from error


def _draw(run: Path, out: Path | None) -> None:
    if out is None:
        return
    from hf_trainweights.report.write import plot_run

    plot_run(run, out)


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, file_okay=False, help="A checkpoint directory.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="One line per tensor instead of one per codec.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint's manifest says: codecs, sizes and the largest error of what is not exact."""
    from hf_trainweights.checkpoint.manifest import read_manifest

    with errors_in_one_line(debug):
        require_one_checkpoint(path)
        manifest = read_manifest(path)
    if as_json:
        print_json({"path": str(path), **asdict(manifest)})
    else:
        print_manifest(path, manifest, each_tensor=tensors)


def verify(path: CheckpointOrRun, base: BaseDirectory = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Read every file and compare it with the manifest: a single flipped bit is found. So is a base that is gone.

    A complete directory without a manifest is called unverified. Exits with 1 if anything is damaged or missing.
    """
    with errors_in_one_line(debug):
        use_base(base)
        rows = [verification_row(directory) for directory in with_progress("verifying", checkpoints(path))]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            say(f"{row['path']}: {row['state']}")
            for name in row["foreign"]:
                say(f"  not part of it, and not used: {name}")
    exit_with(
        [f"{row['path']}/{name}: {text}".replace("/:", ":") for row in rows for name, text in row["problems"].items()]
    )


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", exists=True, help="A checkpoint directory, or one file of it.")],
    second: Annotated[Path, typer.Argument(metavar="B", exists=True, help="What it is compared with.")],
    top: Top = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare weights and optimizer states of two checkpoints, plain or small: the largest error first.

    Exits with 1 if one has names, shapes or dtypes that the other has not.
    """
    from hf_trainweights.inspection.difference import compare_checkpoints

    with errors_in_one_line(debug), status("comparing"):
        comparison = compare_checkpoints(first, second)
    show_comparison(comparison, top, as_json=as_json)


def gc(
    path: CheckpointOrRun,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove what interrupted saves left behind: temporary files, and anchors that no file needs."""
    from hf_trainweights.checkpoint import collect_garbage

    with errors_in_one_line(debug), warnings_in_one_line():
        removed = collect_garbage(path, dry_run=dry_run)
    if as_json:
        print_json({"removed": [str(path) for path in removed], "dry_run": dry_run})
    else:
        verb = "would remove" if dry_run else "removed"
        for line in [f"{verb} {path}" for path in removed] or ["Nothing to remove."]:
            say(line)


app = new_app(help="Look into small training checkpoints, check, make and restore them.")
app.command("ls", cls=Command)(list_checkpoints)
for command in (inspect, verify, diff, restore, compress, gc):
    app.command(cls=Command)(command)
