"""Runs the demo: trains a model or takes the user's, and measures it in every format."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_trainweights.errors import ConfigError
from hf_trainweights.kernels import compiled
from hf_trainweights.report.page import describe_machine
from hf_trainweights_cli.demo.checkpoints import Checkpoints
from hf_trainweights_cli.demo.corpus import read_corpus
from hf_trainweights_cli.demo.float_model import check_causal_lm
from hf_trainweights_cli.demo.measurement import Row, measure
from hf_trainweights_cli.demo.probe import PROMPT, make_probe
from hf_trainweights_cli.demo.speed import Shape, Speed, measure_speed
from hf_trainweights_cli.demo.training import Recipe, Report, train_model

# One format of each kind, so that a newcomer sees the choice in little over a minute: bytes as integers and as floats,
# half bytes, and codes that are small only in files.
USUAL_FORMATS = ("int8", "float8_e4m3", "int4", "coded")

# Fewer windows for the user's own model, which may be a thousand times larger.
_MAX_WINDOWS, _MAX_WINDOWS_OF_OTHERS = 48, 16


@dataclass(frozen=True)
class Result:
    """The measurements of a demo.

    Args:
        model: The model that was quantized.
        held_out: The name of the text to measure perplexity on: files that the training did not see.
        prompt: The text that the samples continue.
        losses: The training's loss at each step; empty for a model of the user's.
        rows: The baseline and each format.
        machine: The processor, and the compiled products that it can use.
        speeds: The speed of a larger model in each format; empty for a model of the user's.
        checkpoints: The checkpoints of the training; None for a model of the user's.
    """

    model: str
    held_out: str
    prompt: str
    losses: tuple[float, ...]
    rows: tuple[Row, ...]
    machine: str = ""
    speeds: tuple[Speed, ...] = ()
    checkpoints: Checkpoints | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """Every failed check, with its format."""
        return tuple(f"{row.format}: {failure}" for row in self.rows for failure in row.failures)


def run_demo(
    out: Path,
    formats: Sequence[str],
    recipe: Recipe,
    report: Report,
    model: str | None = None,
    keep: bool = True,
    shape: Shape | None = None,
) -> Result:
    """Train a model, or take the user's, and measure it in every format, the float baseline first.

    Failed checks raise no error: the result lists them. `out` is a new or empty directory. If `keep` is false, the
    files of each format are removed from it after their measurement.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("--out", "a new or empty directory", str(out), "Choose another one: nothing is overwritten.")
    corpus = read_corpus()
    training = None
    if model is None:
        source = str(out / "model")
        training = train_model(Path(source), out / "run", corpus, recipe, report)
        # The model is small enough for the CPU, which gives the same numbers on a machine with an accelerator.
        probe = make_probe(source, corpus, _MAX_WINDOWS, device_map="cpu")
    else:
        source = model
        check_causal_lm(source)
        probe = make_probe(source, corpus, _MAX_WINDOWS_OF_OTHERS, device_map="auto")
    rows: list[Row] = []
    for name in (None, *formats):
        rows.append(measure(source, name, probe, out, report))
        if not keep:
            shutil.rmtree(out / rows[-1].format)
    if training is None:
        return Result(source, corpus.name, PROMPT, (), tuple(rows), _describe_machine())
    speeds, checkpoints = measure_speed(formats, shape or Shape(), report), training.checkpoints
    title = "Llama trained here"
    return Result(title, corpus.name, PROMPT, training.losses, tuple(rows), _describe_machine(), speeds, checkpoints)


def _describe_machine() -> str:
    """Return the name of the processor, and the compiled products that it can use."""
    return f"{describe_machine()}, {compiled.describe()}"
