"""`trainweights import`: converts models that other quantizers wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, print_json, say, working
from hf_trainweights_cli.sources import NewDirectory, local_copy
from hf_trainweights_cli.summaries import print_summary, summary_as_json


def import_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of a quantized model.")],
    out: NewDirectory,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a model that another quantizer quantized in this package's layout, codes and scales as they are.

    Reads compressed-tensors, GPTQ, AWQ, bitsandbytes int8, torchao and Transformers' float8. What cannot be held
    exactly is refused by name, and nothing is written.
    """
    from hf_trainweights import import_directory

    with errors_in_one_line(debug), working(f"importing {model}"):
        summary = import_directory(local_copy(model), out)
    if as_json:
        print_json({"source": model, "out": str(out), **summary_as_json(summary)})
    else:
        print_summary(summary)
        say(f"written to {out}")
