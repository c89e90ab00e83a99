"""What the tensors of a state dict are, told from their names: weights by their model, states by their optimizer.

DCP flattens nested dicts and joins the keys by dots. An optimizer is what has `param_groups` beside `state`, as in
`optim.state.layers.0.weight.exp_avg`, whether its own state dict was flat or not. Everything else is a model's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hf_trainweights.checkpoint.planning.modes import MOMENTS

Paths = Mapping[str, Sequence[str | int]]


@dataclass(frozen=True)
class StateName:
    """The name of a value in an optimizer's state dict.

    Args:
        optimizer: Where the optimizer's state dict stands, "" for the top.
        parameter: The parameter's name, or that of a group.
        key: `exp_avg`, `exp_avg_sq`, `step`, `lr`, ...
    """

    optimizer: str
    parameter: str
    key: str


def optimizer_states(names: Iterable[str]) -> dict[str, StateName]:
    """Find the states and groups of optimizers by their names in a flattened state dict, objects included.

    Names that end like Adam's moments are of states even without groups.

    Examples:
        >>> optimizer_states(["optim.state.0.weight.exp_avg", "optim.param_groups", "model.0.weight"])
        {'optim.state.0.weight.exp_avg': StateName(optimizer='optim', parameter='0.weight', key='exp_avg')}
    """
    parts = {name: name.split(".") for name in names}
    optimizers = {
        ".".join(each[:depth]) for each in parts.values() for depth, part in enumerate(each) if part == "param_groups"
    }
    found = {}
    for name, each in parts.items():
        for depth, part in enumerate(each[:-1]):
            prefix, key = ".".join(each[:depth]), each[-1]
            if part == "param_groups" or (part == "state" and (prefix in optimizers or key in MOMENTS)):
                found[name] = StateName(prefix, ".".join(each[depth + 1 : -1]), key)
                break
    return found


def models(names: Iterable[str], paths: Paths) -> dict[str, dict[str, str]]:
    """Sort the flattened names of weights and buffers by where their model's state dict stands, then own names.

    `paths` are the keys from which DCP made a name; one without an entry stands at the top, "".

    Examples:
        >>> models(["model.0.weight"], {"model.0.weight": ("model", "0.weight")})
        {'model': {'0.weight': 'model.0.weight'}}
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        *prefix, last = paths.get(name, (name,))
        found[".".join(map(str, prefix))][str(last)] = name
    return dict(found)


def buffers_of(dimensions: Mapping[str, int], parameters: Collection[str], buffers: Collection[str] | None) -> set[str]:
    """Return which tensors of a model are exact in every mode: `buffers`, or if None those without a state.

    If none has a state in an optimizer (`parameters`), they are those of fewer than two dimensions.

    Examples:
        >>> sorted(buffers_of({"weight": 2, "mean": 1}, {"weight"}, None))
        ['mean']
    """
    if buffers is not None:
        return {name for name in dimensions if name in buffers}
    if not dimensions.keys() & set(parameters):
        return {name for name, count in dimensions.items() if count < 2}
    return dimensions.keys() - set(parameters)
