"""Which weights of a module are quantized, to which format, and why the others are not: the rules and their order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.selectors import name_and_modules, require_used, select
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.layers import is_transposed, is_weight
from hf_trainweights.models.choosing.overrides import left_out, listed
from hf_trainweights.models.choosing.summary import EMBEDDING, HEAD, Choice, Summary, check_not_empty
from hf_trainweights.models.host.models import output_head, tied_names
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Why a weight is left alone that the configuration would have quantized.
NOT_IN_CHECKPOINT = "not in the checkpoint"
# Why a weight has its format, where that is not the configured one.
OVERRIDE, PLANNED = "override", "planned"
# Why a weight that is quantized already keeps its format: the configuration leaves it alone, or wants another one.
LEFT_AS_SAVED, AS_SAVED = "left as saved", "as saved"


class _Rules(NamedTuple):
    """What a configuration says about the names of a module.

    Args:
        selected: Each override's key to the names that it selects.
        left_out: The names that `modules_to_not_convert` selects.
        skipped: The names that the model itself keeps in float.
    """

    config: TrainWeightsConfig
    selected: Mapping[str, frozenset[str]]
    left_out: set[str]
    skipped: set[str]
    head: nn.Module | None

    @classmethod
    def of(cls, module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str], names: Sequence[str]) -> _Rules:
        names = list(dict.fromkeys(each for name in names for each in (*_names(name), *name_and_modules(name))))
        left = left_out(config.modules_to_not_convert or (), names)
        return cls(config, select(config.overrides, names), left, listed(skip, names), output_head(module))


def choose(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Summary:
    """Choose a format for every parameter of a module, in its order, a tied one once under its first name.

    `skip` is what the model itself keeps in float, like `modules_to_not_convert`; an override wins over it.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    aliases = _aliases(module)
    rules = _Rules.of(module, config, skip, list(aliases))
    return Summary(
        tuple(_choose(owners, aliases[name], name, parameter, rules) for name, parameter in module.named_parameters())
    )


def survey(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str] = ()) -> Summary:
    """Return the choices that a loaded module shows: what is quantized in it, and why the rest is not."""
    found = []
    for choice in choose(module, config, skip).tensors:
        weight = local_tensor(getattr(choice.module, choice.name.rpartition(".")[2]))
        if choice.format is not None and not isinstance(weight, QuantizedTensor):
            choice = replace(
                choice, format=None, reason=NOT_IN_CHECKPOINT, bytes_after=choice.bytes_before, file_bytes=None
            )
        found.append(choice)
    return Summary(tuple(found))


def check_choice(module: nn.Module, summary: Summary, config: TrainWeightsConfig) -> None:
    """Check that a user's configuration can be had: its selectors select, and nothing is in another format already.

    A saved model's configuration may name what another class of the same model lacks, such as its head: it is not
    checked.
    """
    unplanned = config.plan is not None and not config.plan
    wrong = [choice for choice in summary.quantized if choice.reason == AS_SAVED or unplanned]
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


def _aliases(module: nn.Module) -> dict[str, list[str]]:
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


def _choose(
    owners: Mapping[str, nn.Module],
    aliases: Sequence[str],
    name: str,
    parameter: Tensor,
    rules: _Rules,
) -> Choice:
    wanted, reason = _wanted(owners, aliases, name, parameter, rules)
    owner = owners[name.rpartition(".")[0]]
    transposed = is_transposed(owner, parameter)
    numel, size = parameter.numel(), parameter.numel() * parameter.element_size()
    weight = local_tensor(parameter)
    if isinstance(weight, QuantizedTensor):
        # The whole weight's shape, of which this rank may hold a part.
        stored = _stored_shape(parameter, weight.transposed)
        if rules.config.budget is not None and reason != OVERRIDE:
            wanted = None  # a budget counts what is quantized already, and chooses for the rest
        form, expected = weight.format, wanted.fallback(stored) if wanted else None
        if form != wanted:
            reason = LEFT_AS_SAVED if wanted is None else _misfit(wanted) if form == expected else AS_SAVED
        after, in_file = (size_of(stored, weight.scale_dtype) for size_of in (form.stored_bytes, form.file_bytes))
        return Choice(name, owner, form, reason, weight.transposed, numel, size, after, in_file)
    if wanted is None:
        return Choice(name, owner, None, reason, transposed, numel, size, size)
    stored = _stored_shape(parameter, transposed)
    chosen = wanted.fallback(stored)
    reason = reason if chosen == wanted else _misfit(wanted)
    after, in_file = (size_of(stored, parameter.dtype) for size_of in (chosen.stored_bytes, chosen.file_bytes))
    return Choice(name, owner, chosen, reason, transposed, numel, size, after, in_file)


def _stored_shape(parameter: Tensor, transposed: bool) -> tuple[int, ...]:
    *lead, N, K = parameter.shape
    return (*lead, K, N) if transposed else (*lead, N, K)


def _misfit(wanted: Format | None) -> str:
    return f"shape does not fit {wanted}"


def _wanted(
    owners: Mapping[str, nn.Module],
    aliases: Sequence[str],
    name: str,
    parameter: Tensor,
    rules: _Rules,
) -> tuple[Format | None, str]:
    """Return the format that the rules give, and why it is None or not the configured one."""
    module_name, _, leaf = name.rpartition(".")
    known = [each for alias in aliases for each in _names(alias)]
    chosen, overridden = rules.config.format_for(known, rules.selected)
    if not is_weight(owners[module_name], leaf, parameter):
        return None, "not the weight of a linear, expert or embedding layer"
    if parameter.dtype not in FLOAT_DTYPES:
        return None, f"{parameter.dtype}"
    if overridden:
        return chosen, OVERRIDE
    if not rules.left_out.isdisjoint(known):
        return None, "in modules_to_not_convert"
    places = [owners[alias.rpartition(".")[0]] for alias in aliases]
    if not rules.config.include_embeddings:
        if any(place is rules.head for place in places):
            return None, HEAD
        if any(isinstance(place, nn.Embedding) for place in places):
            return None, EMBEDDING
    if not rules.skipped.isdisjoint(_names(name)):
        return None, "kept in float by the model"
    return chosen, PLANNED if rules.config.plan else ""


def _names(name: str) -> tuple[str, str]:
    """Return the two names that a user may give a parameter: its module's, first for a plain weight, and its own."""
    module_name, _, leaf = name.rpartition(".")
    return (module_name, name) if leaf == "weight" else (name, module_name)
