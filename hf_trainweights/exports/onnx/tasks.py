"""What a model may be exported for: the files of each task, how they are traced, and how they are verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.exports.onnx.decoder import check_decoder, trace_decoder, verify_decoder
from hf_trainweights.exports.onnx.encoder_decoder import (
    check_encoder_decoder,
    trace_encoder_decoder,
    verify_encoder_decoder,
)
from hf_trainweights.exports.onnx.verification import VerificationReport
from hf_trainweights.exports.targets.base import Target

FILE = "model.onnx"
"""The one file of a decoder."""

TaskName = Literal["text-generation", "text2text-generation", "automatic-speech-recognition"]


class Task(ABC):
    """How a model becomes the graphs of a task, which is named as Transformers' pipelines name it."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def check(self, model: nn.Module) -> PreTrainedModel:
        """Return a model that can be exported for the task; UnsupportedError: it cannot."""

    @abstractmethod
    def trace(self, model: PreTrainedModel, target: Target, opset: int) -> dict[str, Any]:
        """Return an `onnx_ir.Model` for each file, by its name."""

    @abstractmethod
    def verify(self, directory: Path, model: PreTrainedModel) -> VerificationReport:
        """Return how far the files are from the model."""


class _Decoder(Task):
    def check(self, model: nn.Module) -> PreTrainedModel:
        return check_decoder(model)

    def trace(self, model: PreTrainedModel, target: Target, opset: int) -> dict[str, Any]:
        return {FILE: trace_decoder(model, target, opset)}

    def verify(self, directory: Path, model: PreTrainedModel) -> VerificationReport:
        return verify_decoder(directory / FILE, model)


class _EncoderDecoder(Task):
    def check(self, model: nn.Module) -> PreTrainedModel:
        return check_encoder_decoder(model, self.name)

    def trace(self, model: PreTrainedModel, target: Target, opset: int) -> dict[str, Any]:
        return trace_encoder_decoder(model, target, opset)

    def verify(self, directory: Path, model: PreTrainedModel) -> VerificationReport:
        return verify_encoder_decoder(directory, model)


_ALL: tuple[Task, ...] = (
    _Decoder("text-generation"),
    _EncoderDecoder("text2text-generation"),
    _EncoderDecoder("automatic-speech-recognition"),
)
TASKS = {task.name: task for task in _ALL}
