"""`write_report` and `plot_run`: tables and pictures of a model or a training run, in one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories
from hf_trainweights.errors import ConfigError
from hf_trainweights.files.atomic import replace_file, save_errors
from hf_trainweights.files.staging import clean_up
from hf_trainweights.inspection.listing import configured_format, fold_weights
from hf_trainweights.inspection.stored_tensors import StoredTensor, find_parts, read_part
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.report.models import describe_model, measure_weights, model_sections
from hf_trainweights.report.page import Page, Section, default_caption
from hf_trainweights.report.runs import describe_run, read_losses, read_run, run_picture, run_sections
from hf_trainweights.report.texts import measure_with_texts

Source = nn.Module | str | os.PathLike[str]

PLOTS = (".svg", ".html")
"""The endings of the files that `plot_run` writes."""


@dataclass(frozen=True)
class Report:
    """The title, the file and a short summary of a report that was written; `str()` shows all three."""

    title: str
    file: Path
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *self.lines, f"report: {self.file}"])


def write_report(
    source: Source,
    out: str | os.PathLike[str],
    against: Source | None = None,
    texts: Sequence[str] | None = None,
) -> Report:
    """Write a report on a model or a training run into one HTML file, which loads no other file.

    A report on a model shows sizes by format, bits and bytes of each layer, the error of each weight if `against` is
    given, and histograms of the worst ten. A report on a run shows the size of each checkpoint, and the loss. Weights
    on disk are memory-mapped and read one after the other.

    Args:
        source: A module, a directory of a model, a run or one checkpoint, or a weight file.
        out: The file to write, `.html`; an existing file is replaced.
        against: The model to measure errors against, usually the float model; not for a run.
        texts: Texts for both models, which must be directories then. The report shows the error of the model's outputs
            for these texts, and measures the output error of each layer with inputs from the texts instead of noise.

    Returns:
        The path of the report, and a summary.

    Raises:
        ConfigError: The source has no weights, `against` is given for a run, `out` has another ending, or `texts` are
            given without two saved models that take tokens.
        CorruptFileError: A file is damaged, or holds more than data.
        MissingAnchorError: A checkpoint was moved without the anchor it needs.
        SaveError: `out` cannot be written.

    Examples:
        >>> write_report("llama-int8", "report.html", against="llama").title
        'llama-int8, compared with llama'
    """
    out = Path(out)
    check_name(out)
    if _is_run(source) and texts is None:  # `_of_model` refuses texts for anything but two models
        title, lines, sections = _of_run(source, against)
    else:
        title, lines, sections = _of_model(source, against, texts)
    page = Page(title, default_caption(), sections)
    write_page(page, out)
    return Report(title, out, tuple(lines))


def plot_run(root: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Draw the size of each checkpoint of a run, and the loss beside it if one was logged; no tensor is read."""
    root, out = Path(root), Path(out)
    check_name(out, PLOTS)
    checkpoints = read_run(root)
    if not checkpoints:
        expected, next_step = "a run: a directory of checkpoint-<step> directories", "Give the run, not one of them."
        raise ConfigError(str(root), expected, "none of them", next_step)
    if out.suffix.lower() == ".html":
        write_report(root, out)
        return
    picture = run_picture(root.absolute().name, checkpoints, read_losses(root, checkpoints))
    write_text(out, picture.standalone(page=True), "No picture was written.")


def check_name(out: Path, suffixes: Sequence[str] = (".html", ".htm")) -> None:
    """Check the ending of an output file first, so that a report or picture never replaces a file of another kind."""
    if out.suffix.lower() not in suffixes:
        expected = f"a file name that ends in {' or '.join(suffixes)}"
        raise ConfigError(str(out), expected, out.name, "Choose another name.")


def write_page(page: Page, out: Path) -> None:
    """Write a page to a file; an error leaves an existing file as it was."""
    write_text(out, page.html(), "No report was written.")


def write_text(out: Path, text: str, outcome: str) -> None:
    """Write a file completely or not at all, and remove temporary files of killed writers; errors end in `outcome`."""
    with save_errors(out, outcome):
        clean_up(out.parent)
        with replace_file(out) as file:
            file.write(text.encode())


def read_weights(source: Source) -> dict[str, StoredTensor]:
    """Return the weights of a model by name, a tied weight once.

    Weights on disk are views of memory-mapped files, so reading them costs no memory yet. Weights of a sharded
    checkpoint are on the meta device until `values` is called. Only an encoded file is decoded as a whole.
    """
    if isinstance(source, nn.Module):
        return {name: StoredTensor.of(name, parameter) for name, parameter in source.named_parameters()}
    path = _existing(source)
    default = configured_format(path if path.is_dir() else path.parent)
    files = find_parts(path).get("weights", [])
    # A quantized weight is built from the values of several tensors, which must be read for that.
    is_read_later = default is None and any(file.is_dir() for file in files)
    stored = dict(read_part(files, "weights", values=not is_read_later))
    return {weight.name: weight for weight in fold_weights(stored, default)}


def _read_counterparts(source: Source, names: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the weights of another model, some of which are counterparts of weights with these names.

    The files of a float model may name weights otherwise than a quantized model, which is saved after Transformers has
    merged experts and renamed weights. Then Transformers loads the source, and the result has both kinds of names.
    """
    weights = read_weights(source)
    if isinstance(source, nn.Module) or set(names) <= weights.keys() or not (Path(source) / "config.json").is_file():
        return weights
    return read_weights(load_saved(source)) | weights


def _existing(source: str | os.PathLike[str]) -> Path:
    """Return the path of a source on disk; raise ConfigError if it does not exist."""
    path = Path(source)
    if not path.exists():
        next_step = "Give a directory; huggingface_hub.snapshot_download(...) returns that of a model on the Hub."
        raise ConfigError(str(path), "a model, a checkpoint, a run or a weight file", "nothing", next_step)
    return path


def _is_run(source: Source) -> bool:
    return not isinstance(source, nn.Module) and bool(checkpoint_directories(Path(source)))


def _of_run(source: Source, against: Source | None) -> tuple[str, list[str], Sequence[Section]]:
    assert not isinstance(source, nn.Module)
    if against is not None:
        next_step = "Give one checkpoint of the run to compare its weights."
        raise ConfigError("against", "nothing for a run", str(against), next_step)
    root = Path(source)
    checkpoints = read_run(root)
    return _name(source), [describe_run(checkpoints)], run_sections(checkpoints, read_losses(root, checkpoints))


def _of_model(
    source: Source, against: Source | None, texts: Sequence[str] | None
) -> tuple[str, list[str], Sequence[Section]]:
    if not isinstance(source, nn.Module):
        _existing(source)
    measured_with_texts = None
    if texts is not None:
        if isinstance(source, nn.Module) or against is None or isinstance(against, nn.Module):
            expected, next_step = "two saved models, the second one float", "Save them, or leave the texts out."
            raise ConfigError("texts", expected, "a module, or nothing to compare with", next_step)
        measured_with_texts = measure_with_texts(source, against, texts)
    weights = read_weights(source)
    others = {} if against is None else _read_counterparts(against, weights)
    if not weights:
        raise ConfigError(_name(source), "weights", "none", "Give a model, a run or a weight file.")
    measured = measure_weights(weights, others, measured_with_texts and measured_with_texts.inputs)
    title = _name(source) if against is None else f"{_name(source)}, compared with {_name(against)}"
    lines = [*(measured_with_texts.lines() if measured_with_texts else ()), *describe_model(measured, others)]
    return title, lines, model_sections(measured, others, measured_with_texts)


def _name(source: Source) -> str:
    if isinstance(source, nn.Module):
        return type(source).__name__
    path = Path(source).absolute()
    # A snapshot in the Hub's cache: models--user--name/snapshots/<commit>.
    cached = path.parent.name == "snapshots" and path.parents[1].name.startswith("models--")
    return path.parents[1].name.removeprefix("models--").replace("--", "/") if cached else path.name
