"""Which weights of a module are quantized, to which format, and why the others are not: the rules and their order.

Structure tells what can be quantized, and no value is read, so the meta device serves too: the weights of nn.Linear, of
GPT-2's Conv1D (stored the other way round), of embeddings, and 3-D expert parameters in both layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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

# Why a weight is left alone that the configuration would have quantized.
NOT_IN_CHECKPOINT = "not in the checkpoint"
# Why it must be float: another package writes it into a file, or its values change while the model computes.
SAVED_ELSEWHERE = "in a file that sentence-transformers writes"
WRITTEN = "its module's own code writes to it"
ROUTER = "router (an override quantizes it)"
# Why a weight has its format, where that is not the configured one.
OVERRIDE, PLANNED = "override", "planned"
# Why a weight has the configured format although some heads are left alone: Transformers keeps those in float that end
# a model without a bias, and these end it with one.
LAST_WITH_BIAS = "last layer, with a bias: modules_to_not_convert leaves it in float"
# Why a weight that is quantized already keeps its format: the configuration leaves it alone, or wants another one.
LEFT_AS_SAVED, AS_SAVED = "left as saved", "as saved"


class _Rules:
    """What a configuration says about the names of a module."""

    def __init__(self, module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str]):
        self.config = config
        # Each module by each of its names, and for each name of a parameter all its names.
        self.owners, self.aliases = dict(module.named_modules(remove_duplicate=False)), aliases_of(module)
        names = list(dict.fromkeys(each for name in self.aliases for each in (*_names(name), *name_and_modules(name))))
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
            kept = listed(modules_kept_in_float(model, config.include_embeddings), own)
            self.skipped |= {prefix + name for name in kept}
            self.not_saved |= {prefix + name for name in names_not_saved(model)}


def choose(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Summary:
    """Choose a format for every parameter of a module, in its order, a tied one once under its first name.

    `skip` is kept in float beside what a model of Transformers itself keeps so; an override wins over it.
    QuantizationError: a lazy layer has no weights yet.
    """
    for name, parameter in module.named_parameters():
        check_has_shape(name, parameter)
    rules = _Rules(module, config, skip)
    return Summary(tuple(_choose(name, parameter, rules) for name, parameter in module.named_parameters()))


def survey(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Summary:
    """Return the choices that a loaded module shows: what is quantized in it, and why the rest is not."""
    found = []
    for choice in choose(module, config, skip).tensors:
        weight = choice.weight
        if choice.format is not None and not isinstance(local_tensor(weight), QuantizedTensor):
            choice = Choice.of(choice.name, choice.module, weight, None, NOT_IN_CHECKPOINT, choice.transposed)
        found.append(choice)
    return Summary(tuple(found))


def check_choice(module: nn.Module, summary: Summary, config: TrainWeightsConfig) -> None:
    """Check that a user's configuration can be had: its selectors select, and nothing is in another format already.

    A saved model's configuration may name what another class of the same model lacks, such as its head: it is not
    checked.
    """
    # With a budget, weights that are quantized already are left alone, unless there are no others.
    taken = (AS_SAVED,) if config.plan is None or config.plan else (AS_SAVED, LEFT_AS_SAVED)
    wrong = [choice for choice in summary.quantized if choice.reason in taken]
    other = [f"{choice.name} in {choice.format}" for choice in wrong]
    if other:
        found = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        # The sum of both errors is nothing that anybody chooses without being told, and float weights may be at hand.
        next_step = (
            "Quantize the float model: quantizing twice adds both errors. To accept that, call dequantize_(module) "
            "first; to keep these weights as they are, name them in modules_to_not_convert."
        )
        raise ConfigError("module", "float weights, or weights in the format of the configuration", found, next_step)
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for where, selectors in (
        ("overrides", config.overrides),
        ("modules_to_not_convert", config.modules_to_not_convert),
    ):
        require_used(where, select(selectors or (), names), names)
    check_not_empty(summary, config)


def aliases_of(module: nn.Module) -> dict[str, list[str]]:
    """Return for each name of a parameter all its names, that one included: a tied parameter has several."""
    same: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        same[id(parameter)].append(name)
    aliases = {name: names for names in same.values() for name in names}
    # A Transformers model ties its parameters after their values are loaded; until then it only names them.
    for target, source in tied_names(module).items():
        if target in aliases and source in aliases and aliases[target] is not aliases[source]:
            names = aliases[source] + aliases[target]
            aliases |= dict.fromkeys(names, names)
    return aliases


def _choose(name: str, parameter: Tensor, rules: _Rules) -> Choice:
    wanted, reason = _wanted(name, parameter, rules)
    owner = rules.owners[name.rpartition(".")[0]]
    weight = local_tensor(parameter)
    held = weight.format if isinstance(weight, QuantizedTensor) else None
    transposed = weight.transposed if held else is_transposed(owner, parameter)
    if held and rules.config.budget is not None and reason != OVERRIDE:
        wanted = None  # a budget counts what is quantized already, and chooses for the rest
    fitting = wanted.fallback(stored_shape(parameter, transposed)) if wanted else None
    form = held or fitting
    if form != wanted:
        reason = LEFT_AS_SAVED if wanted is None else f"shape does not fit {wanted}" if form == fitting else AS_SAVED
    return Choice.of(name, owner, parameter, form, reason, transposed)


def _wanted(name: str, parameter: Tensor, rules: _Rules) -> tuple[Format | None, str]:
    """Return the format that the rules give, and why it is None or not the configured one."""
    module_name, _, leaf = name.rpartition(".")
    known = [each for alias in rules.aliases[name] for each in _names(alias)]
    chosen, overridden = rules.config.format_for(known, rules.selected)
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
    if not rules.left_out.isdisjoint(known):
        return None, "in modules_to_not_convert"
    if name in rules.saved_elsewhere:
        return None, SAVED_ELSEWHERE
    if not rules.written.isdisjoint(rules.aliases[name]):
        return None, WRITTEN
    if rules.owners[module_name] in rules.routers:
        return None, ROUTER
    places = [rules.owners[alias.rpartition(".")[0]] for alias in rules.aliases[name]]
    if not rules.config.include_embeddings:
        if any(place in rules.heads for place in places):
            return None, HEAD
        if any(isinstance(place, nn.Embedding) for place in places):
            return None, EMBEDDING
    if not rules.skipped.isdisjoint(_names(name)):
        return None, "kept in float by the model"
    return chosen, PLANNED if rules.config.plan else LAST_WITH_BIAS if name in rules.last_with_bias else ""


def _names(name: str) -> tuple[str, str]:
    """Return the two names that a user may give a parameter: its module's, first for a plain weight, and its own."""
    module_name, _, leaf = name.rpartition(".")
    return (module_name, name) if leaf == "weight" else (name, module_name)


def router_layers(module: nn.Module) -> set[nn.Module]:
    """Return the linear layers that decide which experts a token goes to, or how much one of them counts.

    A small error there sends tokens to other experts, and a router is a few thousandths of a model. Its name or that of
    its class says so. A layer beside experts that has one output for each of them is a router by whatever name.
    """
    routers: set[nn.Module] = set()
    for name, part in module.named_modules():
        if _says_router(name.rpartition(".")[2], part) and not _chooses_among_networks(part):
            routers.update(_linear_layers(part))
        routers.update(_gates_beside_experts(part))
    return routers


def _says_router(name: str, part: nn.Module) -> bool:
    return "router" in name.split("_") or "Router" in type(part).__name__


def _chooses_among_networks(part: nn.Module) -> bool:
    """Return whether a module holds the networks that it chooses among, as the `Router` of Sentence Transformers."""
    inside = (each for each in part.modules() if each is not part)
    return any(
        isinstance(each, nn.ModuleList | nn.ModuleDict | PreTrainedModel) or _own_experts(each) for each in inside
    )


def _gates_beside_experts(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers beside experts that have an output for each of them, or a gate's single one."""
    children = dict(part.named_children())
    gates = {name for name in children if not {"gate", "gates", "gating"}.isdisjoint(name.split("_"))}
    experts = [child for name, child in children.items() if "expert" in name and name not in gates]
    counts = _own_experts(part).union(*(_own_experts(inner) for child in experts for inner in child.modules()))
    counts |= {len(child) for child in experts if isinstance(child, nn.ModuleList | nn.ModuleDict)}
    has_router = any(_says_router(name, child) for name, child in children.items())
    for name, child in children.items() if experts or counts else ():
        for layer in _linear_layers(child) if name in gates else filter(_is_linear, [child]):
            outputs = layer.nf if isinstance(layer, Conv1D) else layer.out_features
            if (outputs in counts and not has_router) or (outputs == 1 and name in gates):
                yield layer


def _own_experts(part: nn.Module) -> set[int]:
    """Return of how many experts a module itself holds the weights."""
    return {len(parameter) for parameter in part.parameters(recurse=False) if is_experts(part, parameter)}


def _linear_layers(part: nn.Module) -> Iterator[nn.Linear | Conv1D]:
    return filter(_is_linear, part.modules())


def _is_linear(part: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    return isinstance(part, nn.Linear | Conv1D)


def is_weight(owner: nn.Module, leaf: str, parameter: Tensor) -> bool:
    """Return whether a parameter is one that can be quantized."""
    if isinstance(owner, nn.Linear | nn.Embedding | Conv1D):
        # Each look-up in a table with such a norm writes to it.
        return leaf == "weight" and parameter.dim() == 2 and getattr(owner, "max_norm", None) is None
    return is_experts(owner, parameter)


def is_experts(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a parameter holds the weights of several experts, `[E, N, K]` or `[E, K, N]`."""
    named = hasattr(owner, "num_experts") or hasattr(owner, "is_transposed") or "expert" in type(owner).__name__.lower()
    return parameter.dim() == 3 and named and min(parameter.shape[1:]) > 1


def is_transposed(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a module reduces along the last dimension but one of its weight."""
    if parameter.dim() != 3:
        return isinstance(owner, Conv1D)
    declared = getattr(owner, "is_transposed", None)
    if declared is not None:
        return bool(declared)
    first, hidden = getattr(owner, "gate_up_proj", None), getattr(owner, "hidden_size", None)
    return isinstance(first, Tensor) and first.dim() == 3 and first.shape[1] == hidden != first.shape[2]
