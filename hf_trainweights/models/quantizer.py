"""The Transformers side: which hook of `from_pretrained` and friends does what. Thin on purpose."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from hf_trainweights.errors import ConfigError
from hf_trainweights.models.card import hub_id
from hf_trainweights.models.config import TrainWeightsConfig
from hf_trainweights.models.conversion import (
    LoadState,
    QuantizeThenMerge,
    TrainWeightsDeserialize,
    TrainWeightsQuantize,
    deserialize_converters,
)
from hf_trainweights.models.saving import attach_saving, flat_state_dict
from hf_trainweights.models.selection import Summary, check_choice, check_not_empty, choose, model_skips, survey
from hf_trainweights.models.stored_weights import check_weight_files
from hf_trainweights.tensor.layouts import choose_layouts_
from hf_trainweights.tensor.memory import return_freed_memory
from hf_trainweights.tensor.modules import dequantize_
from hf_trainweights.tensor.stored_names import FoldStoredTensors, stored_name, stored_suffixes

_logger = logging.get_logger(__name__)


class TrainWeightsHfQuantizer(HfQuantizer):
    """Quantizes a model while it loads, and loads, saves and reports a quantized one.

    Args:
        quantization_config: What the user chose, or what config.json says.
        kwargs: `pre_quantized`, whether the checkpoint is quantized already.

    Raises:
        ConfigError: A float model is to be quantized, and a value or a key of the configuration is not allowed.
    """

    requires_parameters_quantization = True

    def __init__(self, quantization_config: TrainWeightsConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.quantization_config: TrainWeightsConfig = quantization_config
        if not self.pre_quantized:
            quantization_config.check_quantizing()
        self.state = LoadState(quantization_config.default_format)
        # What one save was given instead of the model's own; it sets this on a copy.
        self.state_dict_to_save: Mapping[str, Any] | None = None
        self._summary: Summary | None = None

    def summary(self) -> Summary:
        """Return what was quantized and what was left alone, per parameter.

        Raises:
            ConfigError: No model was loaded with this quantizer yet.
        """
        if self._summary is None:
            raise ConfigError(
                "summary", "a loaded model", "none", "Call it on model.hf_quantizer after from_pretrained."
            )
        return self._summary

    def adopt(self, model: PreTrainedModel) -> Summary:
        """Make a model that was quantized in place what `from_pretrained` would have made of it.

        Args:
            model: A model with quantized weights.

        Returns:
            What is quantized in it and what is not.

        Raises:
            ConfigError: Nothing is quantized.
        """
        if getattr(model, "hf_quantizer", None) is not self:
            model.hf_quantizer, model.is_quantized = self, True  # type: ignore[assignment]
            model.quantization_method = self.quantization_config.quant_method  # type: ignore[assignment]
            self.postprocess_model(model)
        else:
            self._summary = survey(model, self.quantization_config, model_skips(model, self.quantization_config))
        return self.summary()

    # Before the weights are loaded

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse device maps that would leave weights in float.

        Args:
            args: Not used.
            kwargs: `device_map`, as the user gave it, and again when a string was resolved to a dict.

        Raises:
            ConfigError: A float checkpoint is to be quantized onto the disk.
        """
        del args
        device_map = kwargs.get("device_map")
        on_disk = isinstance(device_map, dict) and "disk" in device_map.values()
        if on_disk and not self.pre_quantized:
            raise ConfigError(
                "device_map",
                "memory for every weight that is quantized on the fly",
                'modules on "disk", which Transformers would leave in float',
                "Save a quantized copy first (save_pretrained), then load that with this device_map.",
            )
        # Only the second call sees what "auto" became, and only by changing that dict can it be changed.
        if on_disk and "weights_only" not in kwargs:
            assert isinstance(device_map, dict)
            device_map.update(self._without_disk(device_map))

    def update_device_map(self, device_map: Any) -> Any:
        """Return the device map with "cpu" for "disk": a quantized file is memory-mapped, so it stays on the disk.

        Args:
            device_map: What the user gave.
        """
        return self._without_disk(device_map) if isinstance(device_map, dict) else device_map

    def _without_disk(self, device_map: dict[str, Any]) -> dict[str, Any]:
        if "disk" in device_map.values():
            _logger.warning('Modules on "disk" are memory-mapped on "cpu" instead: nothing is copied until it is used.')
        return {name: "cpu" if device == "disk" else device for name, device in device_map.items()}

    def update_attn_implementation(self, config: Any) -> Any:
        """Return the configuration unchanged; the first hook of Transformers 5.23 that tells which model it is of.

        Args:
            config: The model's configuration.

        Raises:
            ConfigError: Its `quantization_config` has a value that is not allowed.
        """
        self._check_read(config)
        return config

    def _check_read(self, config: Any) -> None:
        """Raise what is wrong with the model's config.json, with its path or repository."""
        error = self.quantization_config.read_error
        if error is not None:
            where = f"{Path(config.name_or_path or '', 'config.json')}: quantization_config: {error.where}"
            raise ConfigError(where, error.expected, error.found, error.next_step) from error

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._check_read(model.config)
        self.state.stored = check_weight_files(kwargs.get("checkpoint_files") or [])
        config = self.quantization_config
        summary = choose(model, config, model_skips(model, config))
        if not self.pre_quantized:
            check_choice(model, summary, config)
        self.state.choices = {choice.name: choice for choice in summary.quantized}
        return model

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """The names in a file of each parameter name that quantized weights have."""
        suffixes = stored_suffixes()
        return {leaf: [stored_name(leaf, suffix) for suffix in suffixes] for leaf in self._leaves()}

    def _leaves(self) -> set[str]:
        return {name.rpartition(".")[2] for name in self.state.choices} | {"weight"}

    def update_tp_plan(self, config: Any) -> Any:
        """Return the configuration unchanged; Transformers up to 5.20 asks for it.

        Args:
            config: The model's configuration.

        Raises:
            ConfigError: Its `quantization_config` has a value that is not allowed.
        """
        self._check_read(config)
        return config

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Return the bytes per weight that a parameter takes, scales included, for `device_map="auto"`.

        Args:
            model: The model on the meta device.
            param_name: Full name of the parameter.
            param: The parameter.
        """
        choice = self.state.choices.get(param_name)
        if choice is None:
            return param.element_size()
        # A quantized checkpoint knows better than the configuration: its scales may have another dtype.
        stored = self.state.stored.get(param_name) if self.pre_quantized else None
        return (stored.stored_bytes if stored else choice.bytes_after) / max(1, choice.numel)

    # While the weights are loaded

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is one of the chosen.

        Args:
            model: The model on the meta device.
            param_name: Full name of the parameter.
            kwargs: Not used.
        """
        return param_name in self.state.choices

    def get_quantize_ops(self) -> TrainWeightsQuantize:
        """Return the op that quantizes a float weight."""
        return TrainWeightsQuantize(self.state)

    def get_weight_conversions(self) -> list[Any]:
        """Return the converters that put the weights of a quantized checkpoint together."""
        return deserialize_converters(self.state, self._leaves()) if self.pre_quantized else []

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel | None = None
    ) -> list[Any]:
        """Return the model's converters, experts quantized before they are merged, and our own.

        Args:
            weight_conversions: The model's renamings and converters.
            model: The model on the meta device.
        """
        if self.pre_quantized:
            return [*weight_conversions, *self.get_weight_conversions()]
        return [
            QuantizeThenMerge.wrap(conversion) if hasattr(conversion, "operations") else conversion
            for conversion in weight_conversions
        ]

    # When they are loaded

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self.state.error is not None:
            raise self.state.error
        if not self.pre_quantized and self.quantization_config.base_model is None:
            # A copy: the user may quantize another model by the same configuration.
            self.quantization_config = copy.copy(self.quantization_config)
            self.quantization_config.base_model = hub_id(model)
            model.config.quantization_config = self.quantization_config
        config = self.quantization_config
        self._summary = survey(model, config, model_skips(model, config))
        check_not_empty(self._summary, config)
        _logger.info("%s", self._summary)
        choose_layouts_(model)
        return_freed_memory()
        # Transformers would revert our converters when it saves, and they have no inverse: the names are flat already.
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is not None:
            model._weight_conversions = [  # pyright: ignore[reportArgumentType]  (nn.Module takes any attribute)
                conversion
                for conversion in conversions
                if not any(isinstance(op, TrainWeightsDeserialize) for op in getattr(conversion, "operations", ()))
            ]
        attach_saving(model)
        model.register_load_state_dict_pre_hook(FoldStoredTensors(self.state.default))
        return model

    # Afterwards

    # Pyright infers from the base class, whose methods are abstract or return nothing, that they return None.
    def get_state_dict_and_metadata(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the plain tensors to save, a tied weight once.

        Args:
            model: The quantized model.

        Returns:
            Names to tensors, and an empty dict: safetensors writes a second metadata entry beside Transformers' own in
            random order, so that two saves of one model would differ.
        """
        return flat_state_dict(model, self.state.default, self.state_dict_to_save), {}

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return True: quantized models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """True: adapters train on the frozen quantized weights."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile traces quantized weights without a graph break."""
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # After a save config.dtype is a string.
        dequantize_(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model
