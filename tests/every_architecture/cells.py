"""The questions to each architecture. A cell returns if the promise holds, and raises if not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from every_architecture.comparing import (
    DifferenceError,
    differing,
    distance,
    require_near,
    require_same,
    require_same_files,
)
from every_architecture.inputs import run
from every_architecture.training import (
    NotAskedError,
    quantized_linears,
    require_resume,
    with_adapters,
    with_float_parts,
)
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CompressedTensorsConfig, PreTrainedModel

from hf_trainweights import (
    QuantizedTensor,
    TrainWeightsCheckpointCallback,
    TrainWeightsConfig,
    export_compressed_tensors,
    quantize_,
    quantize_directory,
    verify_model,
)
from hf_trainweights.checkpoint import compress_directory

FORMATS: dict[str, dict[str, Any]] = {"int8": {"format": "int8"}, "int4": {"format": "int4", "group_size": 32}}
# How far outputs in float32 may be off, relative to their norm: products round otherwise than dequantized weights.
NEAR = 1e-3
# Equal weights give other last digits where PyTorch chooses a convolution by the address of its weight.
SAME = 1e-4
# So far are weights moved to see whether outputs jump, as where a model takes the best of queries that are much alike.
TINY = 1e-6


class Subject:
    """A tiny model, which is saved in float, and its inputs.

    Args:
        model: The float model, which stays as it is.
        inputs: Arguments of its forward; None if none are known, then outputs are not compared.
        folder: Where its cells write.
    """

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor] | None, folder: Path):
        self.model, self.inputs, self.folder = model, inputs, folder

    @cached_property
    def float_directory(self) -> Path:
        """The directory of the float model."""
        directory = self.folder / "float"
        self.float_model().save_pretrained(directory)
        return directory

    @cached_property
    def not_read(self) -> set[str]:
        """Names of the tensors that Transformers itself gives other values when it loads the float model.

        Raises:
            DifferenceError: It does not find weights that it has saved.
        """
        loaded, info = type(self.model).from_pretrained(self.float_directory, output_loading_info=True)
        if info["missing_keys"]:
            raise DifferenceError(f"it does not find {len(info['missing_keys'])} weights that it has saved")
        return differing(loaded, self.model)

    def float_model(self) -> PreTrainedModel:
        """Return a copy of the float model."""
        return copy.deepcopy(self.model)

    def load(self, directory: Path, **options: Any) -> PreTrainedModel:
        """Return the model in a directory, loaded by its own class.

        A class that several model types share would read the configuration of another type as its own.
        """
        if not isinstance(self.model.config, type(self.model).config_class or object):
            options["config"] = type(self.model.config).from_pretrained(directory)
        return type(self.model).from_pretrained(directory, **options).eval()

    def loaded(self, config: dict[str, Any]) -> PreTrainedModel:
        """Return the model quantized while it is loaded."""
        return self.load(self.float_directory, quantization_config=TrainWeightsConfig(**config))

    def quantized(self, config: dict[str, Any]) -> PreTrainedModel:
        """Return the model quantized in place."""
        model = self.float_model()
        quantize_(model, TrainWeightsConfig(**config))
        return model

    def require_same(self, actual: PreTrainedModel, expected: PreTrainedModel) -> None:
        """Check that two models are and compute the same, but for what Transformers itself does not read."""
        require_same(actual, expected, self.not_read)
        if self.inputs is not None and not self.not_read:
            require_near(run(actual, self.inputs), run(expected, self.inputs), SAME)

    @property
    def written(self) -> Path:
        """What a cell writes to, of which a refusal must leave no file."""
        return self.folder / "written"

    def new_directory(self, name: str) -> Path:
        """Return a path for a cell to write to."""
        self.written.mkdir(exist_ok=True)
        return self.written / name


def loads_as_in_place(subject: Subject, config: dict[str, Any]) -> None:
    """Quantizing while loading gives the model that quantizing in place gives."""
    loaded = subject.loaded(config)
    subject.require_same(loaded, subject.quantized(config))


def computes_as_dequantized(subject: Subject, config: dict[str, Any]) -> None:
    """The outputs are near those of the dequantized model, and not those of the float model."""
    model = subject.quantized(config)
    inputs = _known(subject.inputs)
    actual = run(model, inputs)
    dequantized = copy.deepcopy(model)
    dequantized.dequantize()
    if any(isinstance(parameter, QuantizedTensor) for parameter in dequantized.parameters()):
        raise DifferenceError("dequantize leaves quantized weights")
    expected = run(dequantized, inputs)
    if distance(actual, expected) > NEAR and _jumps(dequantized, inputs, expected):
        raise NotAskedError("its outputs jump where weights change by a millionth")
    require_near(actual, expected, NEAR)


@torch.no_grad()
def _jumps(model: PreTrainedModel, inputs: dict[str, Tensor], outputs: list[Tensor]) -> bool:
    """Move the weights of a model by a millionth, some times, and return whether its outputs move much."""
    for _ in range(8):
        for parameter in filter(torch.is_floating_point, model.parameters()):
            parameter.add_(parameter * torch.randn_like(parameter), alpha=TINY)
        if distance(run(model, inputs), outputs) > NEAR:
            return True
    return False


def saves(subject: Subject, config: dict[str, Any], **options: Any) -> None:
    """A saved model is verified and reloads equal, and the next save writes the same weight files."""
    model = subject.quantized(config)
    first, second = subject.new_directory("first"), subject.new_directory("second")
    model.save_pretrained(first, **options)
    report = verify_model(first)
    if not report.ok:
        raise DifferenceError(f"verify_model: {report}")
    reloaded = subject.load(first)
    subject.require_same(reloaded, model)
    reloaded.save_pretrained(second, **options)
    if not subject.not_read:
        _require_same_weights(second, first)


def saves_bin(subject: Subject, config: dict[str, Any]) -> None:
    """Torch files keep the same promises."""
    saves(subject, config, safe_serialization=False)


def directory_as_in_place(subject: Subject, config: dict[str, Any]) -> None:
    """`quantize_directory` writes the files of a model that was quantized while it was loaded."""
    out, expected = subject.new_directory("directory"), subject.new_directory("expected")
    quantize_directory(subject.float_directory, out, TrainWeightsConfig(**config))
    subject.require_same(subject.load(out), subject.quantized(config))
    loaded = subject.loaded(config)
    loaded.save_pretrained(expected)
    require_same_files(out, expected)


def trains_adapters(subject: Subject, config: dict[str, Any]) -> None:
    """A resume of LoRA on the quantized model has its weights to the bit."""
    inputs, folder = _known(subject.inputs), subject.new_directory("adapters")
    names = quantized_linears(subject.loaded(config))
    try:
        callback = TrainWeightsCheckpointCallback()
        require_resume(lambda: with_adapters(subject.loaded(config), names), inputs, folder, callback)
    except (DifferenceError, ValueError, NotImplementedError) as error:
        try:
            alone = subject.new_directory("alone")
            require_resume(lambda: with_adapters(subject.float_model(), names), inputs, alone)
        except (DifferenceError, ValueError, NotImplementedError):
            raise NotAskedError("Transformers and PEFT alone do not train or resume such adapters") from error
        raise


def trains_float_parts(subject: Subject, config: dict[str, Any]) -> None:
    """A resume of training the float weights has them to the bit."""
    inputs, callback = _known(subject.inputs), TrainWeightsCheckpointCallback()
    folder = subject.new_directory("trained")
    try:
        require_resume(lambda: with_float_parts(subject.loaded(config)), inputs, folder, callback)
    except (ValueError, StrictDataclassError) as error:
        try:
            require_resume(lambda: with_float_parts(subject.float_model()), inputs, subject.new_directory("alone"))
        except (ValueError, StrictDataclassError):
            raise NotAskedError("Transformers alone does not resume the float model") from error
        raise


def float_checkpoint(subject: Subject, _: dict[str, Any]) -> None:
    """`from_pretrained` reads the float model from a compressed checkpoint."""
    directory = subject.new_directory("compressed")
    subject.float_model().save_pretrained(directory)
    compress_directory(directory, weights_only=True)
    require_same(subject.load(directory), subject.float_model(), subject.not_read)


def calibrates(subject: Subject, config: dict[str, Any]) -> None:
    """Calibration with the model's own kind of inputs leaves them alone, gains, and the model saves and reloads."""
    inputs = _known(subject.inputs)
    model = subject.float_model()
    batches = [{name: value.clone() for name, value in inputs.items()}]
    summary = quantize_(model, TrainWeightsConfig(**config), calibration=batches)
    if not all(torch.equal(batches[0][name], value) for name, value in inputs.items()):
        raise DifferenceError("the batches were changed")
    calibrated = summary.calibrated
    if calibrated is not None and not calibrated.error_after <= calibrated.error_before:
        raise DifferenceError(f"error {calibrated.error_before:.3g} became {calibrated.error_after:.3g}")
    directory = subject.new_directory("calibrated")
    model.save_pretrained(directory)
    subject.require_same(subject.load(directory), model)


def exports_compressed_tensors(subject: Subject, config: dict[str, Any]) -> None:
    """Stock Transformers reads the dequantized weights from the exported checkpoint.

    It dequantizes while loading where dense weights have one format, and afterwards where they have several.
    """
    model = subject.quantized(config)
    quantized = (weight for weight in model.parameters() if isinstance(weight, QuantizedTensor))
    formats = {weight.format for weight in quantized if weight.dim() == 2}
    directory = subject.new_directory("compressed-tensors")
    export_compressed_tensors(model, directory)
    model.dequantize()
    if len(formats) == 1:
        reader = CompressedTensorsConfig(dequantize=True)
        require_same(subject.load(directory, dtype="auto", quantization_config=reader), model, subject.not_read)
        return
    read: Any = subject.load(directory, dtype="auto")
    read.hf_quantizer.compressor.decompress_model(read)
    left_over = {name for name in read.state_dict() if name.endswith(("weight_scale", "weight_shape"))}
    require_same(read, model, subject.not_read | left_over)


def _known(inputs: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Return inputs that are known.

    Raises:
        NotAskedError: None are.
    """
    if inputs is None:
        raise NotAskedError("no inputs are known")
    return inputs


def _require_same_weights(actual: Path, expected: Path) -> None:
    """Check that weight files hold the same bytes; config.json may say otherwise how the model came about."""
    for path in (*expected.glob("*.safetensors"), *expected.glob("*.bin")):
        if not (actual / path.name).exists() or (actual / path.name).read_bytes() != path.read_bytes():
            raise DifferenceError(f"the second save writes another {path.name}")


EMBEDDED = {name: {**config, "include_embeddings": True} for name, config in FORMATS.items()}
Check = Callable[[Subject, dict[str, Any]], None]


def _in_both(name: str, check: Check, configs: dict[str, dict[str, Any]] = EMBEDDED) -> dict[str, Any]:
    return {f"{name}, {form}": (check, config) for form, config in configs.items()}


CELLS: dict[str, tuple[Check, dict[str, Any]]] = {
    **_in_both("load", loads_as_in_place),
    **_in_both("forward", computes_as_dequantized),
    **_in_both("safetensors", saves),
    **_in_both("bin", saves_bin),
    **_in_both("directory", directory_as_in_place),
    "LoRA": (trains_adapters, FORMATS["int8"]),
    "float parts": (trains_float_parts, FORMATS["int8"]),
    "checkpoint": (float_checkpoint, {}),
    "calibration": (calibrates, EMBEDDED["int4"]),
    **_in_both("compressed-tensors", exports_compressed_tensors, FORMATS),
}
