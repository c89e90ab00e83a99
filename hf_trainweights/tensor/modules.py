"""Weights of any nn.Module exchanged in place: quantized, dequantized, measured, and shown by `print`."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hf_trainweights import kernels
from hf_trainweights.errors import ConfigError, QuantizationError
from hf_trainweights.formats.base import largest_magnitude
from hf_trainweights.models.config import TrainWeightsConfig
from hf_trainweights.models.selection import Choice, Summary, unused_overrides
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor, unsupported_by_torchscript

_logger = logging.getLogger(__name__)


def quantize_chosen(module: nn.Module, summary: Summary) -> None:
    """Quantize the weights that were chosen, in place, all or none.

    Args:
        module: The module they were chosen from.
        summary: What was chosen. Weights that are quantized already stay as they are.

    Raises:
        QuantizationError: A weight holds NaN or Inf, or is on the meta device; the module is unchanged.
    """
    # Every weight is checked before the first is replaced, so that an error leaves a whole float module behind.
    todo = [choice for choice in summary.quantized if not isinstance(_weight(choice), QuantizedTensor)]
    for choice in todo:
        _check_values(choice)
    places = _places(module)
    for choice in todo:
        assert choice.format is not None
        weight = _weight(choice)
        tensor = QuantizedTensor.quantize(weight, choice.format, choice.transposed, choice.name)
        _put(places[id(weight)], as_parameter(tensor))


def as_parameter(weight: QuantizedTensor) -> nn.Parameter:
    """Make a quantized weight a frozen parameter, in place.

    nn.Parameter marks a tensor likewise, but a copy of it from `detach`: a tenth of the time that a reload takes.

    Args:
        weight: A weight that nothing else holds.

    Returns:
        The weight itself.

    Example:
        >>> from hf_trainweights.formats import get_format
        >>> weight = as_parameter(QuantizedTensor.quantize(torch.ones(4, 8), get_format({"format": "int8"})))
        >>> isinstance(weight, nn.Parameter), weight.requires_grad
        (True, False)
    """
    weight._is_param = True  # type: ignore[attr-defined]
    return weight  # type: ignore[return-value]


def choose_layouts_(module: nn.Module) -> None:
    """Hold each quantized weight of a linear layer in the memory layout in which it is multiplied fastest, in place.

    Nothing changes where a part of the module is on another device: accelerate then moves weights for every call.

    Args:
        module: Any module.
    """
    if any(parameter.device.type != "cpu" for parameter in module.parameters()):
        return
    slow = 0
    for places in _places(module).values():
        weight = getattr(*places[0])
        if isinstance(weight, QuantizedTensor) and not all(isinstance(owner, nn.Embedding) for owner, _ in places):
            slow += weight.format.name == "int4" and weight.dtype != torch.bfloat16
            form = kernels.layout(weight.format, weight.stored_shape, weight.scale.dtype, weight.device)
            if form != weight.format and weight.dtype == weight.scale.dtype:
                _put(places, as_parameter(weight.in_layout(form)))
    if slow:
        _logger.warning(
            "%d int4 weights without bfloat16 activations: on the CPU they take longer than float weights. "
            "dtype=torch.bfloat16, or int8, is fast.",
            slow,
        )


def dequantize_(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized weights of a module by the float weights they stand for, in place.

    Args:
        module: Any module.
        dtype: Dtype of the float weights; each weight's own if None.

    Raises:
        CorruptFileError: A stored tensor does not fit its format.

    Example:
        >>> from hf_trainweights import quantize_
        >>> layer = nn.Linear(64, 64)
        >>> _ = quantize_(layer, TrainWeightsConfig("int8"))
        >>> dequantize_(layer)
        >>> type(layer.weight).__name__
        'Parameter'
    """
    for places in _places(module).values():
        owner, name = places[0]
        weight = getattr(owner, name)
        if isinstance(weight, QuantizedTensor):
            _put(places, nn.Parameter(weight.dequantize(dtype).contiguous(), requires_grad=False))


def get_model_size_in_bytes(module: nn.Module) -> int:
    """Return the bytes that a module's parameters and buffers really hold.

    Args:
        module: Any module; memory that several tensors share counts once, a quantized weight by its stored tensors.

    Raises:
        NotImplementedError: A tensor is sparse.

    Example:
        >>> get_model_size_in_bytes(nn.Linear(4, 4, bias=False))
        64
    """
    sizes: dict[int, int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        for held in tensor.tensors.values() if isinstance(tensor, QuantizedTensor) else [tensor]:
            storage = held.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def model_skips(module: nn.Module, config: TrainWeightsConfig) -> list[str]:
    """Return the modules that a Transformers model wants to keep in float; none for any other module.

    Args:
        module: Any module.
        config: What the user wants; `include_embeddings` takes the output head and tied embeddings off the list.
    """
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

    if not isinstance(module, PreTrainedModel):
        return []
    skips = set(HfQuantizer.get_modules_to_not_convert(module, None, None))
    if config.include_embeddings:
        head = module.get_output_embeddings()
        tied = {*module.all_tied_weights_keys, *module.all_tied_weights_keys.values()}
        skips -= {name.removesuffix(".weight") for name in tied}
        skips -= {name for name, submodule in module.named_modules() if submodule is head}
    # These hold for every dtype: a model that must not be float16 here must not be int8 either.
    for kept in (module._keep_in_fp32_modules, module._keep_in_fp32_modules_strict):
        skips |= set(kept or ())
    return sorted(skips)


def check_choice(module: nn.Module, summary: Summary, config: TrainWeightsConfig) -> None:
    """Check that the choice is what was meant: something is quantized; warn of an override that nothing goes by.

    Args:
        module: What was chosen from.
        summary: What was chosen.
        config: What the user wants.

    Raises:
        ConfigError: Nothing is quantized.
    """
    for selector in unused_overrides(module, config):
        _logger.warning("overrides[%r] matches no module and no parameter: is it misspelt?", selector)
    check_not_empty(summary, config)


def check_not_empty(summary: Summary, config: TrainWeightsConfig) -> None:
    """Check that something is quantized.

    Args:
        summary: What was chosen.
        config: What the user wants.

    Raises:
        ConfigError: Nothing is.
    """
    if not summary.quantized:
        raise ConfigError(
            "model",
            f"at least one weight to quantize to {config.default_format}",
            str(summary),
            "Quantized are nn.Linear, Conv1D and expert weights; check modules_to_not_convert and overrides.",
        )


def announce(summary: Summary) -> None:
    """Log the summary in one line.

    Args:
        summary: What was done.
    """
    _logger.info("%s", summary)


def describe(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Make `print(module)` name the module's quantized weights, and torch.jit.script refuse it, while it has any.

    PyTorch calls this whenever a module gets a parameter, be it by `load_state_dict(assign=True)`.

    Args:
        module: The module.
        name: Name of the parameter there.
        parameter: What it is to be.
    """
    own = vars(module)
    if isinstance(parameter, QuantizedTensor):
        if "extra_repr" not in own:
            own["extra_repr"] = functools.partial(extra_repr, module)
        own["__prepare_scriptable__"] = refuse_torchscript
    elif own.get("__prepare_scriptable__") is refuse_torchscript:
        others = (weight for key, weight in module._parameters.items() if key != name)
        if not any(isinstance(weight, QuantizedTensor) for weight in others):
            del own["__prepare_scriptable__"]
            if getattr(own["extra_repr"], "func", None) is extra_repr:
                del own["extra_repr"]


register_module_parameter_registration_hook(describe)  # type: ignore[arg-type]


def extra_repr(module: nn.Module) -> str:
    """Return the module's own description and its quantized weights'.

    Args:
        module: The module to describe.
    """
    own = type(module).extra_repr(module)
    weights = {
        name: p.format.canonical for name, p in module.named_parameters(recurse=False) if isinstance(p, QuantizedTensor)
    }
    return ", ".join(([own] if own else []) + [f"{name}={form}" for name, form in weights.items()])


def refuse_torchscript() -> None:
    """Raise: torch.jit.script calls this on every module, and would save quantized weights as garbage.

    Raises:
        UnsupportedError: Always.
    """
    raise unsupported_by_torchscript()


def _weight(choice: Choice) -> Tensor:
    return getattr(choice.module, choice.name.rpartition(".")[2])


def _check_values(choice: Choice) -> None:
    weight = _weight(choice)
    if weight.is_meta:
        raise QuantizationError(
            choice.name, "a weight with values", "one on the meta device", "Load the weights, then quantize."
        )
    if not _all_finite(weight.detach()):
        raise QuantizationError(
            choice.name,
            "finite values",
            "NaN or Inf",
            "Repair the checkpoint or leave this tensor out with modules_to_not_convert.",
        )


def _all_finite(weight: Tensor) -> bool:
    # No sum gets rid of NaN or Inf, and it takes a third of the time of the largest magnitude, which carries both, too.
    # Only a sum of finite values may overflow.
    if weight.numel() == 0 or weight.sum().isfinite():
        return True
    return bool(largest_magnitude(weight.contiguous()).isfinite().all())


def _places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return where each parameter stands, by its identity: a tied one in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            places[id(parameter)].append((owner, name))
    return places


def _put(places: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for owner, name in places:
        setattr(owner, name, parameter)
