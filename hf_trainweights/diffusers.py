"""Importing this module lets `from_pretrained` and `save_pretrained` of diffusers quantize, save and load components.

diffusers keeps its quantizers in two dictionaries; this module adds one entry to each and changes nothing else.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from enum import StrEnum
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.models.choosing.config import QUANT_METHOD, TrainWeightsConfig
from hf_trainweights.models.choosing.selection import NOT_IN_CHECKPOINT, check_choice, choose, survey
from hf_trainweights.models.choosing.summary import Choice, check_not_empty
from hf_trainweights.models.loading.conversion import wrong_shape
from hf_trainweights.models.loading.stored_weights import check_weight_files
from hf_trainweights.models.quantizer import refuse_disk
from hf_trainweights.models.saving.saved_tensors import get_memory_footprint
from hf_trainweights.tensor.guards import guards_of, is_guard, is_notice
from hf_trainweights.tensor.modules import as_parameter, dequantize_weights
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import flatten_state_dict, group_stored, parse_stored_name, unflatten_weight

# Imported as Any, so that type checkers judge this module alike whether diffusers is installed or not.
_registry: Any = import_module("diffusers.quantizers.auto")
DiffusersQuantizer: Any = import_module("diffusers.quantizers.base").DiffusersQuantizer


class _Method(StrEnum):
    # diffusers asks a method for its `value`, where Transformers takes any string.
    TRAINWEIGHTS = QUANT_METHOD


class TrainWeightsDiffusersQuantizer(DiffusersQuantizer):
    """Quantizes a component of diffusers while it loads, and loads and saves a quantized one.

    The hooks take the arguments that `DiffusersQuantizer` documents.

    Args:
        quantization_config: The user's configuration, or the one in config.json.
        kwargs: `pre_quantized`, whether the files are quantized already.

    Raises:
        ConfigError: A float component is to be quantized, and a key of the configuration is unknown, or formats are
            still to be chosen for `bits` or `size`.
    """

    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: TrainWeightsConfig, **kwargs: Any):
        super().__init__(copy.copy(quantization_config), **kwargs)
        self.quantization_config.quant_method = _Method.TRAINWEIGHTS
        if not self.pre_quantized:
            quantization_config.check_quantizing()
            if quantization_config.needs_plan:
                next_step = "Name a format, or call quantize_ on the loaded component."
                raise ConfigError("quantization_config", "a format", "bits or size", next_step)
        self._choices: dict[str, Choice] = {}
        self._skip: list[str] = []
        self._shapes: dict[str, torch.Size] = {}
        # For each weight the suffixes of its stored tensors in all files, and the tensors that wait for another shard.
        self._stored: dict[str, set[str]] = {}
        self._pending: dict[str, dict[str, Tensor]] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse device maps with modules on the disk, which would leave weights in float."""
        refuse_disk(device_map)

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of parameters that stay float; float32 if the user gives none, as in the float model."""
        return torch_dtype or torch.float32

    def adjust_target_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype by which `device_map="auto"` counts quantized weights: too many bytes for 4-bit formats."""
        return torch.int8

    def get_special_dtypes_update(self, model: nn.Module, torch_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each parameter that stays float, for `device_map="auto"`."""
        return {name: torch_dtype for name, _ in model.named_parameters() if name not in self._choices}

    @property
    def supports_parallel_loading(self) -> bool:
        """False: the tensors of a weight may lie in two shards."""
        return False

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Return the names of the weights that the files hold; CorruptFileError: tensors of one are missing."""
        if not self.pre_quantized:
            return loaded_keys
        # A guard is a one-byte tensor under the plain name of a weight. A weight is lost if the files have it alone.
        lost = [name for name, weight in check_weight_files(checkpoint_files).items() if weight.kind == "guard"]
        _require_all([name for name in lost if not is_notice(name)])
        self._stored = {name: set(stored) for name, stored in group_stored(dict.fromkeys(loaded_keys)).items()}
        plain = [name for name in loaded_keys if parse_stored_name(name) is None and not is_notice(name)]
        return [*(name for name in plain if name not in self._stored), *self._stored]

    def _process_model_before_weight_loading(self, model: Any, keep_in_fp32_modules: Any = (), **kwargs: Any) -> None:
        config = self.quantization_config
        self._skip = list(keep_in_fp32_modules)
        choices = choose(model, config, self._skip)
        if not self.pre_quantized:
            check_choice(choices)
        self._choices = {choice.name: choice for choice in choices.summary.quantized}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        model.config.quantization_config = config

    def maybe_update_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a shard; a quantized weight comes with the shard that has its last stored tensor."""
        if not self.pre_quantized:
            return dict(state_dict)
        for name, stored in group_stored(state_dict).items():
            self._pending.setdefault(name, {}).update(stored)
        floats = {
            name: tensor
            for name, tensor in state_dict.items()
            if parse_stored_name(name) is None
            and not is_notice(name)
            and not (name in self._stored and is_guard(tensor))
        }
        complete = [name for name, stored in self._pending.items() if stored.keys() == self._stored[name]]
        return floats | {name: self._weight(name, self._pending.pop(name)) for name in complete}

    def _weight(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        return unflatten_weight(name, stored, None, self.quantization_config.default_format, self._shapes.get(name))

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether a value is quantized, or is to be quantized."""
        return isinstance(param_value, QuantizedTensor) or (not self.pre_quantized and param_name in self._choices)

    def check_quantized_param_shape(self, param_name: str, current_param: Tensor, loaded_param: Tensor) -> bool:
        """Refuse a quantized weight of another shape: diffusers calls this only if the shapes differ."""
        raise wrong_shape(param_name, tuple(current_param.shape), str(tuple(loaded_param.shape)))

    def create_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, target_device: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Quantize a value if it is float, and put it into the model; QuantizationError: it holds NaN or Inf."""
        weight = param_value
        if not isinstance(weight, QuantizedTensor):
            choice = self._choices[param_name]
            assert choice.format is not None
            weight = QuantizedTensor.quantize(weight, choice.format, choice.transposed, param_name)
        owner, _, leaf = param_name.rpartition(".")
        weight = weight.map(lambda stored: stored.to(target_device))
        setattr(model.get_submodule(owner), leaf, as_parameter(weight))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        summary = survey(model, self.quantization_config, self._skip)
        _require_all([choice.name for choice in summary.tensors if choice.reason == NOT_IN_CHECKPOINT])
        check_not_empty(summary, self.quantization_config)
        model.get_memory_footprint = functools.partial(get_memory_footprint, model)
        return model

    def get_state_dict_and_metadata(
        self, state_dict: Mapping[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the plain tensors to save, with guards, and no metadata."""
        config = self.quantization_config
        guards = guards_of(name for name, tensor in state_dict.items() if isinstance(tensor, QuantizedTensor))
        return guards | flatten_state_dict(state_dict, config.default_format, config.compress), {}

    def _dequantize(self, model: Any) -> Any:
        dequantize_weights(model)
        self.forget(model)
        # `forget` has deleted the attribute. diffusers will delete it once more, so put it back.
        model.hf_quantizer = self
        return model

    def forget(self, model: Any) -> None:
        """Remove the quantizer and its configuration from a component whose weights are float again."""
        del model.hf_quantizer
        config = {key: value for key, value in model.config.items() if key != "quantization_config"}
        model._internal_dict = type(model.config)(config)

    @property
    def is_serializable(self) -> bool:
        """True: quantized components can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters train on the frozen quantized weights."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile traces quantized weights without a graph break."""
        return True


def _require_all(lost: list[str]) -> None:
    """Raise a CorruptFileError if the files lack quantized weights."""
    if lost:
        problem, next_step = f"none of {', '.join(lost[:3])}", "Download the component again, or save it again."
        raise CorruptFileError("weight files", "the stored tensors of every quantized weight", problem, next_step)


_registry.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = TrainWeightsConfig
_registry.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = TrainWeightsDiffusersQuantizer
