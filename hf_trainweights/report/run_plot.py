"""`plot_run`: what each checkpoint of a run takes and the loss beside it, as one SVG picture or as an HTML report."""

from __future__ import annotations

import os
from pathlib import Path

from hf_trainweights.errors import ConfigError
from hf_trainweights.report.run_sections import run_picture
from hf_trainweights.report.runs import read_losses, read_run
from hf_trainweights.report.write import write_alone, write_report

_SUFFIXES = (".svg", ".html")


def plot_run(root: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Draw what each checkpoint of a run takes, and the loss beside it where one was logged; no tensor is read."""
    root, out = Path(root), Path(out)
    check_plot_name(out)
    checkpoints = read_run(root)
    if not checkpoints:
        expected, next_step = "a run: a directory of checkpoint-<step> directories", "Give the run, not one of them."
        raise ConfigError(str(root), expected, "none of them", next_step)
    if out.suffix == ".html":
        write_report(root, out)
        return
    picture = run_picture(root.absolute().name, checkpoints, read_losses(root, checkpoints))
    write_alone(out, picture.standalone(page=True), "No picture was written.")


def check_plot_name(out: Path) -> None:
    """Check, before anything is read, that a picture would not replace a file of another kind."""
    if out.suffix not in _SUFFIXES:
        expected = f"a file name that ends in {' or '.join(_SUFFIXES)}"
        raise ConfigError(str(out), expected, out.name, "Choose another name.")
