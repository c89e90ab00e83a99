"""The hooks that Transformers calls while it loads, saves and dequantizes a model; other modules do the work."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from hf_trainweights.errors import ConfigError
from hf_trainweights.models.budget.allocation import allocate
from hf_trainweights.models.budget.measure import check_measurable, measure_checkpoint
from hf_trainweights.models.choosing.advice import say_if_head_is_large, say_if_slow
from hf_trainweights.models.choosing.config import QUANT_METHOD, TrainWeightsConfig
from hf_trainweights.models.choosing.selection import Choices, check_choice, choose, survey
from hf_trainweights.models.choosing.summary import Calibrated, Summary, check_not_empty
from hf_trainweights.models.host.checkpoints import (
    expect_unused,
    make_converter,
    offer_before_merging,
    restore_conversions,
)
from hf_trainweights.models.host.models import forget_method
from hf_trainweights.models.host.module_names import ModuleNames
from hf_trainweights.models.host.ranks import failing_alike, is_loaded_by_ranks, read_whole, run_on_parts
from hf_trainweights.models.host.renaming import StoredNames
from hf_trainweights.models.loading.conversion import (
    LoadState,
    TrainWeightsDeserialize,
    TrainWeightsQuantize,
    return_freed_memory,
)
from hf_trainweights.models.loading.stored_weights import (
    check_guards,
    check_is_float,
    check_none_is_missing,
    check_weight_files,
)
from hf_trainweights.models.saving.hub import hub_id
from hf_trainweights.models.saving.saved_tensors import SaveRequest, flat_state_dict, revert_stored_apart
from hf_trainweights.models.saving.saving import attach_methods
from hf_trainweights.tensor.guards import NOTICE_NAME
from hf_trainweights.tensor.modules import dequantize_weights, is_quantized
from hf_trainweights.tensor.stored_names import FoldStoredTensors, stored_suffixes

# Tensors of a quantized file are views of the memory-mapped file: on the "cpu" they take no memory until they are used.
_MAPPED = 'Modules on "disk" are memory-mapped on "cpu" instead: nothing is copied until it is used.'

_logger = logging.get_logger(__name__)


def refuse_disk(device_map: Any) -> None:
    """Check that a device map keeps every weight that is quantized on the fly in memory."""
    if isinstance(device_map, Mapping) and "disk" in device_map.values():
        raise ConfigError(
            "device_map",
            "memory for every weight that is quantized on the fly",
            'modules on "disk", which Transformers would leave in float',
            "Save a quantized copy first (save_pretrained), then load that with this device_map.",
        )


class TrainWeightsHfQuantizer(HfQuantizer):
    """Quantizes a model while it loads, and loads, saves and reports a quantized one.

    The hooks take the arguments that `HfQuantizer` documents.

    Args:
        quantization_config: The user's configuration, or the one in config.json.
        kwargs: `pre_quantized`, whether the checkpoint is quantized already.

    Raises:
        ConfigError: A float model is to be quantized, and a key of the configuration is unknown.
    """

    def __init__(self, quantization_config: TrainWeightsConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.quantization_config: TrainWeightsConfig = quantization_config
        if not self.pre_quantized:
            quantization_config.check_quantizing()
        self.state = LoadState(quantization_config.default_format)
        self.operation = TrainWeightsQuantize(self.state)
        self._model_bytes = 0
        # The choices for the model on the meta device and its files, while a budget still has to choose formats.
        self._to_allocate: tuple[Choices, Sequence[str]] | None = None
        # A save sets this on a copy of the quantizer.
        self.save_request: SaveRequest | None = None
        # The gain of calibration, if the codes have just been chosen with texts.
        self.calibrated: Calibrated | None = None
        self._summary: Summary | None = None
        # While ranks load a quantized model: the hook by which each rank reads whole weights, to cut them itself.
        self._whole_reads: RemovableHandle | None = None
        # The model while it is loaded: Transformers up to 5.20 does not pass it to `update_weight_conversions`.
        self._skeleton: PreTrainedModel | None = None

    def summary(self) -> Summary:
        """Return the choice for each parameter: quantized or left alone, and why.

        Raises:
            ConfigError: No model was loaded with this quantizer yet.
        """
        if self._summary is None:
            raise ConfigError(
                "summary", "a loaded model", "none", "Call it on model.hf_quantizer after from_pretrained."
            )
        return self._summary

    def adopt(self, model: PreTrainedModel) -> Summary:
        """Make a model quantized in place the same as one that `from_pretrained` quantized; return the choices."""
        if getattr(model, "hf_quantizer", None) is not self:
            model.hf_quantizer, model.is_quantized = self, True  # type: ignore[assignment]
            model.quantization_method = self.quantization_config.quant_method  # type: ignore[assignment]
            self.postprocess_model(model)
        else:
            self._summary = survey(model, self.quantization_config)
        return self.summary()

    # Before the weights are loaded

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse device maps that would leave weights of a float checkpoint in float: modules on the disk."""
        # Transformers calls this with the user's map, and again with the one that it made of "auto".
        if not self.pre_quantized:
            refuse_disk(device_map)

    def update_device_map(self, device_map: Any) -> Any:
        """Return a new device map with "cpu" for "disk"; a value that is no dict comes back unchanged."""
        if not isinstance(device_map, Mapping):
            return device_map
        if "disk" in device_map.values():
            _logger.warning(_MAPPED)
        return {name: "cpu" if device == "disk" else device for name, device in device_map.items()}

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Return limits for `device_map="auto"` that put no module of a quantized checkpoint on the "disk"."""
        if not self.pre_quantized:
            return max_memory
        if sum(max_memory.values()) < self._model_bytes:
            _logger.warning(_MAPPED)
        return {**max_memory, "cpu": sys.maxsize}

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._skeleton, files = model, kwargs.get("checkpoint_files") or []
        with failing_alike(is_loaded_by_ranks(model)):
            self.state.stored = check_weight_files(files, model.config.name_or_path or "")
        if not self.pre_quantized:
            # The configuration may come from a calibrated model, but a load chooses codes by each weight alone.
            self.quantization_config = self.quantization_config.but(calibration_sha256=None)
        choices = self._take(choose(model, self.quantization_config))
        if self.pre_quantized:
            expect_unused(model, NOTICE_NAME)
            check_guards(model, self.state.choices, self.state.stored)
        else:
            check_is_float(model.config.name_or_path or "checkpoint", self.state.stored, model)
            if self.quantization_config.needs_plan:
                check_measurable(model, files)
                self._to_allocate = choices, files
        if is_loaded_by_ranks(model):
            self._whole_reads = read_whole(model, lambda parts: self.state.plan_cuts(model, parts, self.pre_quantized))
        return model

    def _take(self, choices: Choices) -> Choices:
        """Take choices for the load that follows, and return them."""
        if not self.pre_quantized:
            check_choice(choices)
        self.state.choices = {choice.name: choice for choice in choices.summary.quantized}
        self._model_bytes = choices.summary.bytes_after
        return choices

    def _allocate(self, conversions: list[Any]) -> None:
        """Choose formats for a budget: read the files for it, now that the conversions of this load are known."""
        if self._to_allocate is None:
            return
        (choices, files), self._to_allocate = self._to_allocate, None
        measured = measure_checkpoint(self, choices, files, conversions)
        allocated = self._take(allocate(choices, *measured))
        # A copy: the user may quantize another model by the same configuration.
        model: Any = allocated.module
        self.quantization_config = model.config.quantization_config = allocated.config

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Return the bytes per weight of a parameter, scales included, for `device_map="auto"`."""
        choice = self.state.choices.get(param_name)
        if choice is None:
            return param.element_size()
        # A quantized checkpoint tells the bytes better than the configuration: its scales may have another dtype. But
        # coded tensors take more bytes in memory than in the file.
        stored = self.state.stored.get(param_name) if self.pre_quantized else None
        size_bytes = choice.bytes_after if stored is None or stored.is_coded else stored.stored_bytes
        return size_bytes / max(1, choice.numel)

    # While the weights are loaded

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return whether to quantize a float parameter; for any other one Transformers refuses a wrong shape."""
        return not self.pre_quantized and param_name in self.state.choices

    def get_quantize_ops(self) -> TrainWeightsQuantize:
        """Return the operation that quantizes a float weight."""
        return self.operation

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel | None = None
    ) -> list[Any]:
        """Return the model's converters, with ours before them for a quantized checkpoint.

        A converter of the model would join or transpose codes. Experts of a float checkpoint are quantized before the
        model's converters merge them.
        """
        model = model or self._skeleton
        if self.pre_quantized and model is not None:
            # The files tell which weights are quantized: config.json does not keep the order of the overrides.
            stored = [name for name, weight in self.state.stored.items() if weight.is_stored]
            find = StoredNames(model, weight_conversions, stored).find
            # Stored tensors stay on the CPU as views of the file, until a rank's part of them is moved to its device.
            on_cpu = self._whole_reads is not None
            ours = make_converter(find, stored_suffixes(), TrainWeightsDeserialize(self.state), on_cpu)
            return [ours, *weight_conversions]
        self._allocate(weight_conversions)
        return [offer_before_merging(conversion) for conversion in weight_conversions]

    # When they are loaded

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._skeleton = None
        if self._whole_reads is not None:
            self._whole_reads.remove()
            self._whole_reads = None
        with failing_alike(is_loaded_by_ranks(model)):
            if self.state.error is not None:
                raise self.state.error
        run_on_parts(model)
        if not self.pre_quantized and self.quantization_config.base_model is None:
            # A copy: the user may quantize another model by the same configuration.
            self.quantization_config = self.quantization_config.but(base_model=hub_id(model))
            model.config.quantization_config = self.quantization_config
        self._summary = survey(model, self.quantization_config)
        if self.pre_quantized:
            check_none_is_missing(model, self.summary(), self.state.stored)
        else:
            check_not_empty(self.summary(), self.quantization_config)
        _logger.info("%s", self._summary)
        if not self.state.is_to_write:
            say_if_slow(model, self.quantization_config)
            if not self.pre_quantized:
                say_if_head_is_large(self.summary())
        return_freed_memory()
        if self.pre_quantized:
            restore_conversions(model, [choice.name for choice in self.summary().quantized])
        attach_methods(model)
        model.register_load_state_dict_pre_hook(ModuleNames())
        model.register_load_state_dict_pre_hook(FoldStoredTensors(self.state.default))
        return model

    # Afterwards

    # Pyright infers from the base class, whose methods are abstract or return nothing, that they return None.
    def get_state_dict_and_metadata(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the plain tensors to save by name, a tied weight once, and no metadata.

        safetensors would write an entry of ours and Transformers' own in random order, so two saves would differ.
        """
        flat = flat_state_dict(model, self.state.default, self.quantization_config.compress, self.save_request)
        if self.save_request is not None:
            # The model is a copy, made for this save.
            revert_stored_apart(model, flat)
        return flat, {}

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return True: quantized models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """True: adapters train on the frozen quantized weights."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True: else the Trainer would not even evaluate a model without adapters; `saving.train` warns instead."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile traces quantized weights without a graph break."""
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # After a save config.dtype is a string.
        target = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        shown = {parameter.dtype for parameter in model.parameters() if is_quantized(parameter)}
        dequantize_weights(model, target)
        if target is not None:
            # Float weights that a cast gave the same dtype get the new dtype too: a product takes no two dtypes.
            for parameter in model.parameters():
                if parameter.dtype in shown:
                    parameter.data = parameter.data.to(target)
        forget_method(model, QUANT_METHOD)
        return model
