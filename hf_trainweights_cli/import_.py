"""`trainweights import`: converts models that other programs quantized."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, print_json, say, working
from hf_trainweights_cli.sources import NewDirectory, require_source, saying_where_it_was_looked_for
from hf_trainweights_cli.summaries import print_summary, summary_as_json


def import_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of a quantized model, or a file.")],
    out: NewDirectory,
    file: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="The GGUF file to read among several, such as '*Q4_K_M*'."),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Directory or Hub id whose config.json and tokenizer a GGUF file gets."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a model that another program quantized in this package's layout, codes and scales as they are.

    Reads GGUF files, compressed-tensors, GPTQ, AWQ, AutoRound, bitsandbytes, MLX, HQQ, ModelOpt, Quanto, torchao, and
    Transformers' MXFP4 and float8. A weight that cannot be held exactly is refused by name, and
    nothing is written.
    """
    from hf_trainweights import import_directory

    with errors_in_one_line(debug), working(f"importing {model}"):
        require_source(model)
        with saying_where_it_was_looked_for(model):
            summary = import_directory(model, out, file=file, base_model=base_model)
    if as_json:
        print_json({"source": model, "out": str(out), **summary_as_json(summary)})
    else:
        print_summary(summary)
        say(f"written to {out}")
