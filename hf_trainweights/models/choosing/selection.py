"""Which weights of a module are quantized, to which format, and why the others are not: the rules and their order.

The weights of nn.Linear, of GPT-2's Conv1D (stored the other way round) and of embeddings can be quantized, and 3-D
parameters of experts in both layouts. The rules read no values, so they work on the meta device too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.selectors import name_and_modules, require_used, select
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.config_values import left_out, listed
from hf_trainweights.models.choosing.summary import (
    EMBEDDING,
    HEAD,
    Choice,
    Summary,
    check_has_shape,
    check_not_empty,
    stored_shape,
)
from hf_trainweights.models.choosing.written_weights import written_weights
from hf_trainweights.models.host.adapters import adapter_prefixes
from hf_trainweights.models.host.checkpoints import names_not_saved
from hf_trainweights.models.host.models import (
    last_with_bias,
    models_within,
    modules_kept_in_float,
    output_head,
    tied_names,
    weights_saved_elsewhere,
)
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Why a weight is float although the configuration quantizes it.
NOT_IN_CHECKPOINT = "not in the checkpoint"
# Why a weight must be float: another package writes it into a file, or its values change while the model computes.
SAVED_ELSEWHERE = "in a file that sentence-transformers writes"
WRITTEN = "its module's own code writes to it"
ROUTER = "router (an override quantizes it)"
# Why a weight has another format than the configured one.
OVERRIDE, PLANNED = "override", "planned"
# Why a model's last layer has the configured format: Transformers keeps a last layer in float if it has no bias.
LAST_WITH_BIAS = "last layer, with a bias: modules_to_not_convert leaves it in float"
# Why a weight that is quantized already keeps its format: the configuration leaves it alone, or wants another one.
LEFT_AS_SAVED, AS_SAVED = "left as saved", "as saved"


class _Rules:
    """The rules of a configuration and of the models in a module, as sets of names in that module."""

    def __init__(self, module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str]):
        # Each module by each of its names, and all names of a parameter by each of them.
        self.owners, self.aliases = dict(module.named_modules(remove_duplicate=False)), aliases_of(module)
        names = list(dict.fromkeys(path for name in self.aliases for path in (*_names(name), *name_and_modules(name))))
        # The names that overrides select, that `modules_to_not_convert` selects, and that the model keeps in float.
        self.selected = select(config.overrides, names)
        self.left_out = left_out(config.modules_to_not_convert or (), names)
        self.saved_elsewhere = set(weights_saved_elsewhere(module))
        self.adapters, self.routers = adapter_prefixes(module), router_layers(module)
        self.written = written_weights(module)
        self.heads: list[nn.Module | None] = []
        self.last_with_bias: set[str] = set()
        self.skipped, self.not_saved = listed(skip, names), set[str]()
        for prefix, model in models_within(module):
            self.heads.append(output_head(model))
            self.last_with_bias |= {f"{prefix}{name}.weight" for name in last_with_bias(model)}
            own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            skipped = listed(modules_kept_in_float(model, config.include_embeddings), own)
            self.skipped |= {prefix + name for name in skipped}
            self.not_saved |= {prefix + name for name in names_not_saved(model)}


@dataclass(frozen=True)
class Choices:
    """The choices for a module by a configuration, and the rules that gave them."""

    module: nn.Module
    config: TrainWeightsConfig
    rules: _Rules
    summary: Summary

    def by(self, config: TrainWeightsConfig) -> Choices:
        """Choose formats by a configuration that selects the same weights as this one."""
        return _choose_by(self.rules, self.module, config)

    def without_exceptions(self) -> Choices:
        """Choose as if the user had given neither `overrides` nor `modules_to_not_convert`."""
        rules = copy(self.rules)
        rules.selected, rules.left_out = {}, set()
        return _choose_by(rules, self.module, self.config.but(overrides={}, modules_to_not_convert=None))


def choose(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Choices:
    """Choose a format for every parameter of a module, in its order, a tied one once under its first name.

    `skip` names further modules that stay in float, beside those of Transformers' lists. An override wins over both.
    QuantizationError: a lazy layer has no weights yet.
    """
    for name, parameter in module.named_parameters():
        check_has_shape(name, parameter)
    return _choose_by(_Rules(module, config, skip), module, config)


def _choose_by(rules: _Rules, module: nn.Module, config: TrainWeightsConfig) -> Choices:
    tensors = (_choose(name, parameter, rules, config) for name, parameter in module.named_parameters())
    return Choices(module, config, rules, Summary(tuple(tensors)))


def survey(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Summary:
    """Return the choices for a loaded module by its actual weights: some may be float that were to be quantized.

    `skip` is that of `choose`.
    """
    choices = []
    for choice in choose(module, config, skip).summary.tensors:
        weight = choice.weight
        if choice.format is not None and not isinstance(local_tensor(weight), QuantizedTensor):
            choice = Choice.of(choice.name, choice.module, weight, None, NOT_IN_CHECKPOINT, choice.transposed)
        choices.append(choice)
    return Summary(tuple(choices))


def check_choice(choices: Choices) -> None:
    """Check a user's configuration: its selectors must select something, and no weight may have another format already.

    The configuration of a saved model is not checked. It may name modules that another class of the same model lacks,
    such as a head.
    """
    config, summary = choices.config, choices.summary
    # A budget leaves quantized weights as they are. An empty plan means that there were no others: it is an error.
    reasons = (AS_SAVED,) if config.plan is None or config.plan else (AS_SAVED, LEFT_AS_SAVED)
    refused = [f"{choice.name} in {choice.format}" for choice in summary.quantized if choice.reason in reasons]
    if refused:
        shown = ", ".join(refused[:3]) + (f" and {len(refused) - 3} more" if len(refused) > 3 else "")
        # Errors of both formats would add up. A user must ask for that, because the float weights may be at hand.
        next_step = (
            "Quantize the float model: quantizing twice adds both errors. To accept that, call dequantize_(module) "
            "first; to keep these weights as they are, name them in modules_to_not_convert."
        )
        raise ConfigError("module", "float weights, or weights in the format of the configuration", shown, next_step)
    names = [*choices.rules.owners, *choices.rules.aliases]
    for where, selectors in (
        ("overrides", config.overrides),
        ("modules_to_not_convert", config.modules_to_not_convert),
    ):
        require_used(where, select(selectors or (), names), names)
    check_not_empty(summary, config)


def aliases_of(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by each of these names. A tied parameter has several."""
    same: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        same[id(parameter)].append(name)
    aliases = {name: names for names in same.values() for name in names}
    # A Transformers model ties its parameters after their values are loaded. Until then it only lists the names.
    for target, source in tied_names(module).items():
        if target in aliases and source in aliases and aliases[target] is not aliases[source]:
            names = aliases[source] + aliases[target]
            aliases |= dict.fromkeys(names, names)
    return aliases


def _choose(name: str, parameter: Tensor, rules: _Rules, config: TrainWeightsConfig) -> Choice:
    wanted, reason = _wanted(name, parameter, rules, config)
    owner = rules.owners[name.rpartition(".")[0]]
    weight = local_tensor(parameter)
    present = weight.format if isinstance(weight, QuantizedTensor) else None
    transposed = weight.transposed if present else is_transposed(owner, parameter)
    if present and config.budget is not None and reason != OVERRIDE:
        wanted = None  # a budget counts weights that are quantized already, and chooses formats for the others
    fitting = wanted.fallback(stored_shape(parameter, transposed)) if wanted else None
    chosen = present or fitting
    if chosen != wanted:
        reason = LEFT_AS_SAVED if wanted is None else f"shape does not fit {wanted}" if chosen == fitting else AS_SAVED
    return Choice.of(name, owner, parameter, chosen, reason, transposed)


def _wanted(name: str, parameter: Tensor, rules: _Rules, config: TrainWeightsConfig) -> tuple[Format | None, str]:
    """Return the format that the rules give, and the reason if it is None or not the configured one."""
    module_name, _, leaf = name.rpartition(".")
    all_names = [option for alias in rules.aliases[name] for option in _names(alias)]
    chosen, overridden = config.format_for(all_names, rules.selected)
    if not is_weight(rules.owners[module_name], leaf, parameter):
        return None, "not the weight of a linear, expert or embedding layer"
    if parameter.dtype not in FLOAT_DTYPES:
        return None, f"{parameter.dtype}"
    if name.startswith(rules.adapters):
        return None, "an adapter's, which trains"
    if name in rules.not_saved:
        return None, "made anew at each load"
    if overridden:
        return chosen, OVERRIDE
    if not rules.left_out.isdisjoint(all_names):
        return None, "in modules_to_not_convert"
    if name in rules.saved_elsewhere:
        return None, SAVED_ELSEWHERE
    if not rules.written.isdisjoint(rules.aliases[name]):
        return None, WRITTEN
    if rules.owners[module_name] in rules.routers:
        return None, ROUTER
    owners = [rules.owners[alias.rpartition(".")[0]] for alias in rules.aliases[name]]
    if not config.include_embeddings:
        if any(owner in rules.heads for owner in owners):
            return None, HEAD
        if any(isinstance(owner, nn.Embedding) for owner in owners):
            return None, EMBEDDING
    if not rules.skipped.isdisjoint(_names(name)):
        return None, "kept in float by the model"
    return chosen, PLANNED if config.plan else LAST_WITH_BIAS if name in rules.last_with_bias else ""


def _names(name: str) -> tuple[str, str]:
    """Return the two names by which users may select a parameter: its own and its module's, the usual one first."""
    module_name, _, leaf = name.rpartition(".")
    return (module_name, name) if leaf == "weight" else (name, module_name)


def router_layers(module: nn.Module) -> set[nn.Module]:
    """Return the linear layers that decide which experts a token goes to, or how much an expert counts.

    A small error in a router sends tokens to other experts, and routers are a few thousandths of a model. The name of a
    router or of its class says so. A layer beside experts with one output for each expert is a router by any name.
    """
    routers: set[nn.Module] = set()
    for name, submodule in module.named_modules():
        if _says_router(name.rpartition(".")[2], submodule) and not _chooses_among_networks(submodule):
            routers.update(_linear_layers(submodule))
        routers.update(_gates_beside_experts(submodule))
    return routers


def _says_router(name: str, module: nn.Module) -> bool:
    return "router" in name.split("_") or "Router" in type(module).__name__


def _chooses_among_networks(module: nn.Module) -> bool:
    """Return whether a module holds the networks that it chooses among, as the `Router` of Sentence Transformers."""
    inside = (inner for inner in module.modules() if inner is not module)
    return any(
        isinstance(inner, nn.ModuleList | nn.ModuleDict | PreTrainedModel) or _own_experts(inner) for inner in inside
    )


def _gates_beside_experts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers beside a module's experts with one output for each expert, and gates with one output."""
    children = dict(module.named_children())
    gates = {name for name in children if not {"gate", "gates", "gating"}.isdisjoint(name.split("_"))}
    experts = [child for name, child in children.items() if "expert" in name and name not in gates]
    counts = _own_experts(module).union(*(_own_experts(inner) for child in experts for inner in child.modules()))
    counts |= {len(child) for child in experts if isinstance(child, nn.ModuleList | nn.ModuleDict)}
    has_router = any(_says_router(name, child) for name, child in children.items())
    for name, child in children.items() if experts or counts else ():
        for layer in _linear_layers(child) if name in gates else filter(_is_linear, [child]):
            outputs = layer.nf if isinstance(layer, Conv1D) else layer.out_features
            if (outputs in counts and not has_router) or (outputs == 1 and name in gates):
                yield layer


def _own_experts(module: nn.Module) -> set[int]:
    """Return the numbers of experts in a module's own parameters of experts; empty if it owns no such parameter."""
    return {len(parameter) for parameter in module.parameters(recurse=False) if is_experts(module, parameter)}


def _linear_layers(module: nn.Module) -> Iterator[nn.Linear | Conv1D]:
    return filter(_is_linear, module.modules())


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    return isinstance(module, nn.Linear | Conv1D)


def is_weight(owner: nn.Module, leaf: str, parameter: Tensor) -> bool:
    """Return whether a parameter can be quantized, by its module and shape."""
    if isinstance(owner, nn.Linear | nn.Embedding | Conv1D):
        # Each look-up in an embedding with `max_norm` writes to its weight.
        return leaf == "weight" and parameter.dim() == 2 and getattr(owner, "max_norm", None) is None
    return is_experts(owner, parameter)


def is_experts(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a parameter holds the weights of several experts, `[E, N, K]` or `[E, K, N]`."""
    named = hasattr(owner, "num_experts") or hasattr(owner, "is_transposed") or "expert" in type(owner).__name__.lower()
    return parameter.dim() == 3 and named and min(parameter.shape[1:]) > 1


def is_transposed(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a module multiplies and sums along the last but one dimension of its weight."""
    if parameter.dim() != 3:
        return isinstance(owner, Conv1D)
    declared = getattr(owner, "is_transposed", None)
    if declared is not None:
        return bool(declared)
    hidden, first, last = (getattr(owner, name, None) for name in ("hidden_size", "gate_up_proj", "down_proj"))
    if not isinstance(first, Tensor) or first.dim() != 3 or first.shape[1] != hidden:
        return False
    # `[E, hidden, hidden]` fits both layouts; then `down_proj` is `[E, width, hidden]` or `[E, hidden, width]`.
    return first.shape[2] != hidden or (isinstance(last, Tensor) and last.shape[-1] == hidden)
