"""`export_onnx`: write a quantized model as an ONNX file that holds the same codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.exports.onnx.decoder import trace_decoder, verify_decoder
from hf_trainweights.exports.onnx.encoder_decoder import trace_encoder_decoder, verify_encoder_decoder
from hf_trainweights.exports.onnx.graph import save_graphs, trace
from hf_trainweights.exports.onnx.model import VerificationReport, verify_onnx_model
from hf_trainweights.exports.refusals import check_file_name, require
from hf_trainweights.exports.sources import ExampleInputs, Inputs, in_eval_mode, model_of
from hf_trainweights.exports.targets import BLOCKS_OPSET, Onnx, OnnxRuntime, Target
from hf_trainweights.files.staging import staged_files
from hf_trainweights.files.weight_files import ENTRY_POINTS
from hf_trainweights.models.saving.new_directories import copy_companions, write_config

TaskName = Literal["text-generation", "text2text-generation", "automatic-speech-recognition"]


class Task(NamedTuple):
    """The functions that trace and verify a model for a task.

    Args:
        trace: Returns an `onnx_ir.Model` for each file, by its name; UnsupportedError: the model is for another task.
        verify: Compares the files in a directory with the model.
    """

    trace: Callable[[Any, Target, int], dict[str, Any]]
    verify: Callable[[Path, Any], VerificationReport]


# Tasks by their names in Transformers' pipelines.
TASKS = {
    "text-generation": Task(trace_decoder, verify_decoder),
    **{
        name: Task(partial(trace_encoder_decoder, task=name), verify_encoder_decoder)
        for name in ("text2text-generation", "automatic-speech-recognition")
    },
}

_TARGETS = {"portable": Onnx, "onnxruntime": OnnxRuntime}


def export_onnx(
    model_or_directory: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    task: TaskName | None = None,
    example_inputs: ExampleInputs | None = None,
    runtime: Literal["portable", "onnxruntime"] = "portable",
    opset: int = BLOCKS_OPSET,
    dynamic_axes: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    external_data: bool | None = None,
    verify: bool = True,
) -> None:
    """Write a quantized model as an ONNX file that holds the same codes and scales.

    By default the file holds one call of `forward`. If there is a task, `out` is a directory for text generation. It
    has `config.json`, `generation_config.json`, the tokenizer's files if the model comes from a directory, and

    - with `"text-generation"`, `model.onnx`: a decoder with past;
    - with `"text2text-generation"` (T5, BART) or `"automatic-speech-recognition"` (Whisper), `encoder_model.onnx`,
      `decoder_model.onnx` for the first call, and `decoder_with_past_model.onnx` for the others.

    Args:
        model_or_directory: A module with quantized float32 weights, or the directory of a quantized model.
        out: The file, which ends in `.onnx`; a file of that name is replaced. For a task it is a directory.
        task: None for one call of `forward`, or one of the tasks above.
        example_inputs: A tensor, a tuple or a dict of arguments; None for text and image models of Transformers, and
            with a task.
        runtime: `"portable"` for ops of ONNX alone; `"onnxruntime"` for ONNX Runtime's own products of codes.
        opset: Version of ONNX's ops, at least 21.
        dynamic_axes: As for `torch.onnx.export`. By default a model of Transformers has all axes free that it can.
        dynamic_shapes: As for `torch.export.export`.
        input_names: Names of the graph's inputs; a task has its own.
        output_names: Names of the graph's outputs; a task has its own.
        external_data: Whether weights go to a second file, `<file>.data`. By default they do if one file is too large.
        verify: Whether to run the file in ONNX Runtime and compare it with the model, before it is put in place.

    Raises:
        ConfigError: An option is wrong, the directory holds no complete model, or no weight of it is quantized.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: ONNX cannot hold the model, the file computes other results, or a package is missing.
        SaveError: `out` cannot be written. Earlier files there are untouched.

    Examples:
        >>> export_onnx("llama-int4", "llama-onnx", task="text-generation", runtime="onnxruntime")  # doctest: +SKIP
    """
    out, names = Path(out), {"input_names": input_names, "output_names": output_names}
    options = {"dynamic_axes": dynamic_axes, "dynamic_shapes": dynamic_shapes, **names}
    _check(task, out, runtime, opset, {"example_inputs": example_inputs, **options})
    with in_eval_mode(model_of(model_or_directory, torch.float32)) as model:
        chosen = TASKS[task] if task else _one_call(out.name, Inputs.of(model, example_inputs), options)
        graphs = chosen.trace(model, _TARGETS[runtime](), opset)
        with staged_files(out if task else out.parent, lambda name: name.removesuffix(".data") in graphs) as staged:
            save_graphs(graphs, staged.path, external_data)
            if task:
                _write_companions(model, model_or_directory, staged.path)
            if verify:
                _check_outputs(out, lambda: chosen.verify(staged.path, model))


def _one_call(file: str, inputs: Inputs, options: Mapping[str, Any]) -> Task:
    """Return the functions that trace and verify one call of any module's `forward`."""
    return Task(
        trace=lambda model, target, opset: {file: trace(model, inputs, target, opset, options)},
        verify=lambda directory, model: verify_onnx_model(directory / file, model, inputs.args or inputs.kwargs),
    )


def _write_companions(model: PreTrainedModel, source: nn.Module | str | os.PathLike[str], directory: Path) -> None:
    """Write the files from which readers of ONNX files take the tokenizer, sizes and special tokens."""
    if not isinstance(source, nn.Module):
        copy_companions(source, directory)
    write_config(model, directory, None, torch.float32)


def _check(task: str | None, out: Path, runtime: str, opset: object, options: Mapping[str, Any]) -> None:
    require("onnx_ir", "onnx")
    if runtime not in [*_TARGETS]:
        raise ConfigError("runtime", f"one of {', '.join(_TARGETS)}", repr(runtime), "Choose one of these.")
    if type(opset) is not int or opset < BLOCKS_OPSET:
        fault = f"{opset}, which has no scales for blocks" if type(opset) is int else repr(opset)
        raise ConfigError("opset", f"{BLOCKS_OPSET} or later", fault, f"Leave it out, or pass {BLOCKS_OPSET}.")
    for name in ("input_names", "output_names"):
        names = options[name]
        if names is not None and not (isinstance(names, list | tuple) and all(isinstance(item, str) for item in names)):
            raise ConfigError(name, "a list of names", repr(names)[:80], "Pass a list of strings, or leave it out.")
    if task is not None:
        _check_task(task, out, options)
    else:
        check_file_name(out, ".onnx")


def _check_task(task: str, out: Path, options: Mapping[str, Any]) -> None:
    if task not in [*TASKS]:
        raise ConfigError("task", f"None or one of {', '.join(TASKS)}", repr(task), "Choose one of these.")
    if extra := [name for name, value in options.items() if value is not None]:
        clash = f"{', '.join(extra)} with task={task!r}"
        raise ConfigError(extra[0], "inputs, names and free dimensions of the task's own", clash, "Leave these out.")
    if out.suffix == ".onnx" or out.is_file():
        raise ConfigError("out", f"a directory for task={task!r}", str(out), f"Write to {out.with_suffix('')}.")
    if there := [name for name in ENTRY_POINTS if (out / name).exists()]:
        next_step = "Its config.json would be replaced. Choose another directory."
        raise ConfigError("out", "a directory without another model", f"{there[0]} in {out}", next_step)


def _check_outputs(out: Path, verify: Callable[[], VerificationReport]) -> None:
    """Verify files. UnsupportedError: outputs differ, or ONNX Runtime refuses the model, such as Falcon with alibi."""
    try:
        report = verify()
    except CorruptFileError as error:
        expected = "a graph that ONNX Runtime runs as it is"
        next_step = (
            "Nothing was written. Use export_torchscript or export_program. Or pass verify=False to write the file for "
            "another runtime."
        )
        raise UnsupportedError(out.name, expected, error.found, next_step) from error
    if not report:
        next_step = "Nothing was written. Pass verify=False to look at the file."
        raise UnsupportedError(out.name, "a graph that computes what the model computes", str(report), next_step)
