"""Modules with quantized weights name them where they are printed, and refuse TorchScript."""

from __future__ import annotations

import functools

from torch import nn

from hf_trainweights.tensor.quantized_tensor import QuantizedTensor, unsupported_by_torchscript


def describe(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Make `print(module)` name the module's quantized weights, and torch.jit.script refuse it, while it has any.

    PyTorch calls this whenever a module gets a parameter, be it by `load_state_dict(assign=True)`.
    """
    own = vars(module)
    if isinstance(parameter, QuantizedTensor):
        if "extra_repr" not in own:
            own["extra_repr"] = functools.partial(extra_repr, module)
        own["__prepare_scriptable__"] = refuse_torchscript
    elif own.get("__prepare_scriptable__") is refuse_torchscript:
        others = (weight for key, weight in module.named_parameters(recurse=False) if key != name)
        if not any(isinstance(weight, QuantizedTensor) for weight in others):
            del own["__prepare_scriptable__"]
            if getattr(own["extra_repr"], "func", None) is extra_repr:
                del own["extra_repr"]


def extra_repr(module: nn.Module) -> str:
    """Return the module's own description and its quantized weights'."""
    own = type(module).extra_repr(module)
    weights = {name: p.format for name, p in module.named_parameters(recurse=False) if isinstance(p, QuantizedTensor)}
    return ", ".join(([own] if own else []) + [f"{name}={form}" for name, form in weights.items()])


def refuse_torchscript() -> None:
    """Raise: torch.jit.script calls this on every module, and would save quantized weights as garbage."""
    raise unsupported_by_torchscript()
