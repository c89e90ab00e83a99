"""`trainweights checkpoint compress`: rewrites checkpoints in place, and prints their sizes and errors."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_trainweights_cli.checkpoint_rows import ERROR_UNITS
from hf_trainweights_cli.console import (
    AsJson,
    Debug,
    errors_in_one_line,
    one_line,
    print_json,
    with_progress,
    wrong_option,
)
from hf_trainweights_cli.runs import CheckpointOrRun, checkpoints
from hf_trainweights_cli.sources import local_copy
from hf_trainweights_cli.tables import Table, print_note, print_table, show_sizes

if TYPE_CHECKING:
    from hf_trainweights.checkpoint import Policy
    from hf_trainweights.checkpoint.manifest import Manifest


def compress(
    path: CheckpointOrRun,
    mode: Annotated[str, typer.Option(metavar="MODE", help="lossless, near-lossless or compact.")] = "lossless",
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="SELECTOR=CHOICE", help='E.g. "re:.*embed.*=raw"; may be repeated, the most exact wins.'),
    ] = None,
    anchor: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="What the run started from: a directory or file of weights, or a model of the Hub."
        ),
    ] = None,
    keep_base: Annotated[
        bool, typer.Option("--keep-base", help="With --anchor: keep those weights in the run, linked or copied.")
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Whose states these are, AdamW for torch's; others than Adam's and AdamW's stay exact.",
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Take a model without training state as well.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try it on a copy, and only say what sizes and errors would be.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before anything is rounded.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make existing checkpoints small where they are: those of a Trainer, or a directory of torch.save files.

    Of a run the oldest comes first, and the following are stored as differences to it; with --anchor all are stored as
    differences to the model that the run started from. Sizes are without anchors.
    What was rounded earlier stays as it is, and is called by the mode that rounded it. On a terminal the command asks
    before it rounds anything. Each file is whole at every moment, but no training may write there meanwhile.
    """
    policy = _policy(mode, rule or [])
    if keep_base and anchor is None:
        raise typer.BadParameter("There is nothing to keep without --anchor.", param_hint="--keep-base")
    with errors_in_one_line(debug):
        base = {} if anchor is None else {"anchor": _base(anchor), "keep_base": keep_base}
        options = {**base, "weights_only": weights_only, "optimizer": optimizer}
        originals = checkpoints(path)
        if not (dry_run or yes):
            _ask_before_rounding(policy, originals)
        compress_one = _compressor(policy, options)
        with _copies(originals) if dry_run else contextlib.nullcontext(originals) as directories:
            rows = [rewrite(directory, compress_one) for directory in with_progress("compressing", directories)]
    rows = [row | {"path": str(original)} for row, original in zip(rows, originals, strict=True)]
    print_rewritten(rows, as_json, "would be" if dry_run else "now")
    if dry_run:
        typer.echo("nothing was changed: this was a dry run", err=True)


def _base(anchor: str) -> Path:
    if anchor == "base":
        message = "The files of a checkpoint do not say what its model was loaded from: name that model."
        raise typer.BadParameter(message, param_hint="--anchor")
    return local_copy(anchor)


def _policy(mode: str, rules: Sequence[str]) -> Policy:
    from hf_trainweights.checkpoint import Policy
    from hf_trainweights.errors import ConfigError

    try:
        return Policy(mode, dict(map(_parse_rule, rules)))
    except ConfigError as error:
        raise wrong_option(error, "--mode" if error.where == "mode" else "--rule") from error


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


def _ask_before_rounding(policy: Policy, directories: Sequence[Path]) -> None:
    """Ask the user at the terminal for a confirmation if the compression may round, which cannot be undone."""
    from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES

    if not (policy.mode in LOSSY_MODES or policy.rules) or not sys.stdin.isatty():
        return
    count = f"{len(directories)} checkpoint{'s' if len(directories) > 1 else ''}"
    how = f"{policy.mode} with rules" if policy.rules else policy.mode
    question = f"{how} may round {count} in place, which cannot be undone (--dry-run shows the errors). Go on?"
    if not typer.confirm(question, err=True):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)


@contextlib.contextmanager
def _copies(directories: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield copies of checkpoints, hard links where possible, which take no space; delete the copies at the end.

    Rewriting replaces a link, so the originals stay. Checkpoints beside them are copied too: they may contain anchors.
    """
    from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories
    from hf_trainweights.files.atomic import link_or_copy, remove_tree
    from hf_trainweights.files.disk import claim_directory

    root = directories[0].absolute().parent
    names = dict.fromkeys(path.absolute().name for path in [*directories, *checkpoint_directories(root)])
    claim = claim_directory(root)
    try:
        for name in names:
            shutil.copytree(
                root / name,
                claim.path / name,
                symlinks=True,
                copy_function=lambda source, target: link_or_copy(Path(source), Path(target)),
            )
        yield [claim.path / path.absolute().name for path in directories]
    finally:
        remove_tree(claim.path, ignore_errors=True)
        claim.release()


def _compressor(policy: Policy, options: dict[str, Any]) -> Callable[[Path], Manifest]:
    from hf_trainweights.checkpoint import compress_directory

    def compress_one(directory: Path) -> Manifest:
        buffers = _buffers(directory)
        return compress_directory(directory, mode=policy.mode, rules=policy.rules, buffers=buffers, **options)

    return compress_one


def _buffers(directory: Path) -> set[str] | None:
    """Return stored names that are no parameters of the model; None if a manifest has roles or the model is unknown."""
    from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
    from hf_trainweights.checkpoint.run.weight_files import read_weights, weight_files
    from hf_trainweights.models.loading.saved_models import saved_parameter_names

    files = [] if (directory / MANIFEST_NAME).exists() else weight_files(directory)
    parameters = saved_parameter_names(directory) if files else None
    return None if parameters is None else read_weights(files[0]).keys() - parameters


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Collect the warnings of a block, and print each in one line at its end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        typer.echo(f"warning: {one_line(warning.message)}", err=True)


def rewrite(directory: Path, function: Callable[[Path], Manifest]) -> dict[str, Any]:
    """Rewrite a checkpoint in place, print its warnings, and return its row for `print_rewritten`."""
    from hf_trainweights.checkpoint.manifest import shown_mode, total_rounding
    from hf_trainweights.checkpoint.run.checkpoints import size_bytes

    bytes_before, before = size_bytes(directory), _manifest_of(directory)
    with warnings_in_one_line():
        manifest = function(directory)
    return {
        "path": str(directory),
        "changed": before is None or (manifest.files, manifest.mode) != (before.files, before.mode),
        "mode": manifest.mode,
        "shown_mode": shown_mode(manifest),
        "rounding": total_rounding(manifest),
        "bytes_before": bytes_before,
        "bytes_after": size_bytes(directory),
    }


def _manifest_of(directory: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, None if it is missing or cannot be read."""
    from hf_trainweights.checkpoint.manifest import read_manifest
    from hf_trainweights.errors import TrainWeightsError

    try:
        return read_manifest(directory)
    except (OSError, TrainWeightsError):
        return None


def print_rewritten(rows: Sequence[dict[str, Any]], as_json: bool, head: str = "now") -> None:
    """Print the rows that `rewrite` returned: the mode of each checkpoint, and its size before and after."""
    if as_json:
        print_json(rows)
        return
    sizes = ("before", "after", "ratio")
    table = Table(("checkpoint", head), right=sizes, drop=("before", "after"), labels=(head,))
    largest: dict[str, float] = {}
    for row in rows:
        name = Path(row["path"]).absolute().name
        mode = row["shown_mode"] if row["changed"] else f"{row['shown_mode']}, unchanged"
        table.add_row(name, mode, *show_sizes(row["bytes_before"], row["bytes_after"]))
        for role, error in row["rounding"].items():
            largest[role] = max(error, largest.get(role, 0.0))
    print_table(table)
    if largest:
        print_note(f"largest error: {', '.join(f'{role} {error:.1e}' for role, error in largest.items())}")
        print_note(ERROR_UNITS)
