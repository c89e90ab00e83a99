"""What a model may be exported for: the files of each task, how they are traced, and how they are verified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hf_trainweights.exports.onnx.decoder import trace_decoder, verify_decoder
from hf_trainweights.exports.onnx.encoder_decoder import trace_encoder_decoder, verify_encoder_decoder
from hf_trainweights.exports.onnx.verification import VerificationReport
from hf_trainweights.exports.targets.base import Target

TaskName = Literal["text-generation", "text2text-generation", "automatic-speech-recognition"]


class Task(NamedTuple):
    """How a model becomes the graphs of a task.

    Args:
        trace: Returns an `onnx_ir.Model` for each file, by its name; UnsupportedError: the model is for another task.
        verify: Returns how far the files in a directory are from the model.
    """

    trace: Callable[[Any, Target, int], dict[str, Any]]
    verify: Callable[[Path, Any], VerificationReport]


# By the names that Transformers' pipelines have for them.
TASKS = {
    "text-generation": Task(trace_decoder, verify_decoder),
    **{
        name: Task(partial(trace_encoder_decoder, task=name), verify_encoder_decoder)
        for name in ("text2text-generation", "automatic-speech-recognition")
    },
}
