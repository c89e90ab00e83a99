"""`trainweights quantize` and `dequantize`: convert a saved model into another directory."""

from __future__ import annotations

import json
import shlex
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_trainweights_cli.console import (
    AsJson,
    Debug,
    errors_in_one_line,
    print_json,
    say,
    working,
    wrong_option,
)
from hf_trainweights_cli.sources import Model, NewDirectory, read_texts, require_source
from hf_trainweights_cli.summaries import print_summary, summary_as_json
from hf_trainweights_cli.tables import show_size

if TYPE_CHECKING:
    from hf_trainweights import TrainWeightsConfig
    from hf_trainweights.errors import ConfigError


class Dtype(StrEnum):
    """The dtypes of float weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Activations(StrEnum):
    """The formats that activations are rounded to."""

    INT8 = "int8"
    FLOAT8 = "float8"


DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Dtype of what is not quantized; as in the source if not given.")
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="int8 if not given; or int4, codebook4, uint2 to uint6, ...; see --bits and --size.",
    ),
]
BitsOption = Annotated[
    float | None,
    typer.Option(
        "--bits",
        metavar="BITS",
        help="Choose a format for each weight, with so many bits a weight, in several times the time of int4. "
        "With --format coded: 2 to 8, in the file.",
    ),
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="Choose a format for each weight, for files of e.g. 1.2GB, in several times the time of int4.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--for-target",
        metavar="TARGET",
        help="With --bits or --size: gguf or compressed-tensors, to choose formats that it can hold.",
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE|self",
        help="Choose codes with texts, one a line, or with what the model writes itself: minutes for a better model.",
    ),
]
RulesOption = Annotated[
    Path | None,
    typer.Option(
        "--rules",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help='JSON or TOML: names, or "re:" and a regular expression, to a format; false leaves a weight alone.',
    ),
]


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of a float model.")],
    out: NewDirectory,
    name: FormatOption = None,
    bits: BitsOption = None,
    size: SizeOption = None,
    for_target: TargetOption = None,
    group_size: Annotated[
        int | None, typer.Option(metavar="N", help="Weights that share a scale; the format's default if not given.")
    ] = None,
    column_scale: Annotated[
        bool, typer.Option("--column-scale", help="Give each input column a factor of its own.")
    ] = False,
    compress: Annotated[
        bool, typer.Option("--compress", help="Keep all weights of the files entropy-coded, without loss.")
    ] = False,
    dtype: DtypeOption = None,
    include_embeddings: Annotated[
        bool, typer.Option("--include-embeddings", help="Quantize the input embeddings and the output head too.")
    ] = False,
    activations: Annotated[
        Activations | None, typer.Option(help="int8 with --format int8, or float8 with float8_e4m3; without groups.")
    ] = None,
    rules: RulesOption = None,
    calibration: CalibrationOption = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Quantize a saved model into another directory, tokenizer and processor included.

    Each weight goes from file to file by itself, so neither the float model nor the quantized one need fit into memory.
    With --calibration the float one must.
    """
    overrides = _read_rules(rules) if rules else None
    chosen = activations and activations.value
    options: dict[str, Any] = {"activations": chosen, "overrides": overrides, "include_embeddings": include_embeddings}
    options |= {"bits": bits, "size": size, "for_target": for_target}
    options |= {"column_scale": column_scale, "compress": compress}
    config = _config(name, group_size, options)
    texts = calibration if calibration in (None, "self") else read_texts(Path(calibration), "--calibration")
    # Imported here, so that `--help` does not wait for Transformers.
    from hf_trainweights.models.directory import quantize_directory

    with errors_in_one_line(debug), working(f"quantizing {model}"):
        require_source(model)
        float_dtype = dtype.value if dtype else "auto"
        summary = quantize_directory(model, out, config, dtype=float_dtype, calibration=texts)
    if as_json:
        print_json({"source": model, "out": str(out), **summary_as_json(summary)})
    else:
        print_summary(summary)
        size_bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        say(f"written to {out}, {show_size(size_bytes)} of weight files")
        if calibration is None:
            say(f"next: {shlex.join(['trainweights', 'diff', model, str(out)])}  shows what each weight lost")
        else:
            # Calibration makes single weights worse and the model better, so errors of weights would mislead.
            command = shlex.join(["trainweights", "report", str(out), model])
            say(f"next: {command} --texts FILE  shows what the model lost")


def dequantize(
    model: Model,
    out: NewDirectory,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Dtype of all weights; as they were saved if not given.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a quantized model as a float model that Transformers loads without this package, tokenizer included.

    Its weights are the values of the codes: what quantizing rounded stays rounded. One float weight is in
    memory at a time.
    """
    from hf_trainweights.models.directory import dequantize_directory

    with errors_in_one_line(debug), working(f"dequantizing {model}"):
        require_source(model)
        dequantize_directory(model, out, dtype=dtype.value if dtype else "auto")
    disk_bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if as_json:
        print_json({"source": model, "out": str(out), "disk_bytes": disk_bytes})
    else:
        say(f"written to {out}: {show_size(disk_bytes)} of float weights")


def _config(name: str | None, group_size: int | None, options: dict[str, Any]) -> TrainWeightsConfig:
    """Return the configuration; report errors in it as wrong usage of an option."""
    from hf_trainweights import TrainWeightsConfig
    from hf_trainweights.errors import ConfigError
    from hf_trainweights.formats import FORMATS

    if name is not None and name not in FORMATS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(FORMATS)}.", param_hint="--format")
    try:
        return TrainWeightsConfig(name, group_size, **options)
    except ConfigError as error:
        raise wrong_option(error, _option(error)) from error


def _option(error: ConfigError) -> str:
    """Return the command-line option of the configuration's field that an error names."""
    first = error.where.partition(" ")[0].partition("[")[0]
    return {"overrides": "--rules"}.get(first, f"--{first.replace('_', '-')}")


def _read_rules(file: Path) -> dict[str, Any]:
    """Read overrides from a JSON or TOML file; false stands for None, because TOML has no null."""
    try:
        text = file.read_text(encoding="utf-8")
        rules = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="--rules") from error
    if not isinstance(rules, dict):
        raise typer.BadParameter(f"{file} holds no table of names to formats.", param_hint="--rules")
    return {name: None if rule is False else rule for name, rule in rules.items()}
