"""Which weights of a module are quantized, to which format, and why the others are not.

Candidates are found by structure: the weight of an nn.Linear, of GPT-2's Conv1D (stored the other way round), 3-D
expert parameters in both layouts, and on request embeddings. It works on the meta device: nothing reads a value.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.models.config import TrainWeightsConfig
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What is to be done with one parameter.

    Args:
        name: Full name of the parameter.
        module: The module that owns it.
        format: The format to quantize it to, None to leave it alone.
        reason: Why it is left alone, or why the format is not the configured one; empty if it is.
        transposed: Whether the module keeps the weight as `[*, K, N]`.
        numel: Number of weights.
        bytes_before: Bytes of the float weight.
        bytes_after: Bytes as it will be, or is, held.
    """

    name: str
    module: nn.Module
    format: Format | None
    reason: str
    transposed: bool
    numel: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Summary:
    """What was quantized and what was not; `str()` of it is one line.

    Args:
        tensors: A choice for every parameter; a tied one once.
    """

    tensors: tuple[Choice, ...]

    @property
    def quantized(self) -> tuple[Choice, ...]:
        """The parameters that are quantized."""
        return tuple(choice for choice in self.tensors if choice.format is not None)

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters as floats."""
        return sum(choice.bytes_before for choice in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters as they are held now."""
        return sum(choice.bytes_after for choice in self.tensors)

    def __str__(self) -> str:
        done = Counter(f"{choice.format}{_because(choice)}" for choice in self.quantized)
        left = Counter(choice.reason for choice in self.tensors if choice.format is None)
        quantized = ", ".join(f"{count} {what}" for what, count in done.items()) or "none"
        alone = ", ".join(f"{count} {why}" for why, count in left.items()) or "none"
        sizes = f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        return f"quantized: {quantized}; left alone: {alone}; {sizes}"


def _because(choice: Choice) -> str:
    return f" ({choice.reason})" if choice.reason else ""


def choose(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Summary:
    """Choose a format for every parameter of a module.

    Args:
        module: Any module, also on the meta device.
        config: What the user wants.
        skip: Modules the model itself wants to keep in float, as `modules_to_not_convert`; an override wins over it.

    Returns:
        A choice for each parameter, in the module's order, a tied parameter under its first name.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    aliases = _aliases(module)
    return Summary(
        tuple(
            _choose(owners, aliases[name], name, parameter, config, skip)
            for name, parameter in module.named_parameters()
        )
    )


def unused_overrides(module: nn.Module, config: TrainWeightsConfig) -> list[str]:
    """Return the overrides that no parameter of a module goes by: most likely misspelt.

    Args:
        module: Any module, also on the meta device.
        config: What the user wants.
    """
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    known = {*parameters, *(name.rpartition(".")[0] for name in parameters)}
    return [
        selector
        for selector in config.overrides
        if not (
            any(re.fullmatch(selector[3:], name) for name in known) if selector.startswith("re:") else selector in known
        )
    ]


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """Return for each name of a parameter all names it goes by, itself included: a tied parameter has several."""
    same: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        same[id(parameter)].append(name)
    aliases = {name: names for names in same.values() for name in names}
    # A Transformers model ties its parameters after their values are loaded, and says before which it will.
    for target, source in getattr(module, "all_tied_weights_keys", {}).items():
        if target in aliases and source in aliases and aliases[target] is not aliases[source]:
            names = aliases[source] + aliases[target]
            aliases |= dict.fromkeys(names, names)
    return aliases


def survey(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Summary:
    """Return what is quantized in a module as it stands, and why the rest is not.

    Args:
        module: A module with its weights loaded.
        config: What the user wanted.
        skip: As for `choose`.
    """
    found = []
    for choice in choose(module, config, skip).tensors:
        weight = getattr(choice.module, choice.name.rpartition(".")[2])
        if choice.format is not None and not isinstance(weight, QuantizedTensor):
            choice = replace(choice, format=None, reason="not in the checkpoint", bytes_after=choice.bytes_before)
        found.append(choice)
    return Summary(tuple(found))


def _choose(
    owners: Mapping[str, nn.Module],
    aliases: Sequence[str],
    name: str,
    parameter: Tensor,
    config: TrainWeightsConfig,
    skip: Sequence[str],
) -> Choice:
    wanted, reason = _wanted(owners, aliases, name, parameter, config, skip)
    owner = owners[name.rpartition(".")[0]]
    transposed = is_transposed(owner, parameter)
    numel, size = parameter.numel(), parameter.numel() * parameter.element_size()
    if isinstance(parameter, QuantizedTensor):
        form, expected = parameter.format, wanted.fallback(parameter.stored_shape) if wanted else None
        reason = reason if form == wanted else _misfit(wanted) if form == expected else "as saved"
        return Choice(name, owner, form, reason, parameter.transposed, numel, size, parameter.stored_bytes)
    if wanted is None:
        return Choice(name, owner, None, reason, transposed, numel, size, size)
    *lead, N, K = parameter.shape
    stored = (*lead, K, N) if transposed else (*lead, N, K)
    chosen = wanted.fallback(stored)
    reason = reason if chosen == wanted else _misfit(wanted)
    return Choice(name, owner, chosen, reason, transposed, numel, size, chosen.stored_bytes(stored, parameter.dtype))


def _misfit(wanted: Format | None) -> str:
    return f"shape does not fit {wanted}"


def _wanted(
    owners: Mapping[str, nn.Module],
    aliases: Sequence[str],
    name: str,
    parameter: Tensor,
    config: TrainWeightsConfig,
    skip: Sequence[str],
) -> tuple[Format | None, str]:
    """Return the format that the rules give, and why it is None or not the configured one."""
    module_name, _, leaf = name.rpartition(".")
    known = [each for alias in aliases for each in _names(alias)]
    chosen, overridden = config.format_for(known)
    if not is_weight(owners[module_name], leaf, parameter):
        return None, "not the weight of a linear, expert or embedding layer"
    if parameter.dtype not in FLOAT_DTYPES:
        return None, f"{parameter.dtype}"
    if overridden:
        return chosen, "override"
    if any(not should_convert_module(each, config.modules_to_not_convert or []) for each in known):
        return None, "in modules_to_not_convert"
    embedding = any(isinstance(owners[alias.rpartition(".")[0]], nn.Embedding) for alias in aliases)
    if embedding and not config.include_embeddings:
        return None, "embedding (include_embeddings=True quantizes it)"
    if any(not should_convert_module(each, list(skip)) for each in _names(name)):
        return None, "kept in float by the model"
    return chosen, ""


def _names(name: str) -> tuple[str, str]:
    """Return what a user may call a parameter: its module, which comes first for a plain weight, or its own name."""
    module_name, _, leaf = name.rpartition(".")
    return (module_name, name) if leaf == "weight" else (name, module_name)


def is_weight(owner: nn.Module, leaf: str, parameter: Tensor) -> bool:
    """Return whether a parameter is one that can be quantized.

    Args:
        owner: The module that owns it.
        leaf: Its name there.
        parameter: The parameter, also on the meta device.
    """
    if isinstance(owner, nn.Linear | nn.Embedding) or is_conv1d(owner):
        return leaf == "weight" and parameter.dim() == 2
    return is_experts(owner, parameter)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' Conv1D, a linear layer that keeps its weight as `[K, N]`.

    Args:
        module: Any module.
    """
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def is_experts(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a parameter holds the weights of several experts, `[E, N, K]` or `[E, K, N]`.

    Args:
        owner: The module that owns it.
        parameter: The parameter.
    """
    named = hasattr(owner, "num_experts") or hasattr(owner, "is_transposed") or "expert" in type(owner).__name__.lower()
    return parameter.dim() == 3 and named and min(parameter.shape[1:]) > 1


def is_transposed(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a module reduces along the last dimension but one of its weight.

    Args:
        owner: The module that owns the weight.
        parameter: The weight.
    """
    if parameter.dim() != 3:
        return is_conv1d(owner)
    declared = getattr(owner, "is_transposed", None)
    if declared is not None:
        return bool(declared)
    first, hidden = getattr(owner, "gate_up_proj", None), getattr(owner, "hidden_size", None)
    return isinstance(first, Tensor) and first.dim() == 3 and first.shape[1] == hidden != first.shape[2]


def model_skips(module: nn.Module, config: TrainWeightsConfig) -> list[str]:
    """Return the modules that a Transformers model wants to keep in float; none for any other module.

    Args:
        module: Any module.
        config: What the user wants; `include_embeddings` takes the output head and tied embeddings off the list.
    """
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
