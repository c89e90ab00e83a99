"""`Policy` plans a codec for each tensor of a checkpoint: three modes, and rules for exceptions.

| role | tensors | `near-lossless` | `compact` |
|---|---|---|---|
| weight | parameters | delta-uniform, step rms / 4 | delta-uniform, step rms |
| exp_avg | means that are divided (see update_rules.py) | update-space, step 1/4 | update-space, step 1/2 |
| momentum | means that are not | row-uniform, step 13/32 | row-uniform, step 1 |
| exp_avg_sq, maximum, sum, norm | divisors; if exact, planes-rank1 | log-rank1, step 1 | log-rank1, step 2 |
| buffer | buffers of the module | exact | exact |
| factor, iterate, other | step counters, averaged weights, states without a rule | exact | exact |

In `lossless` everything is exact. `rms` is the root mean square of a weight's first difference to its anchor. For a
weight that has no anchor, the last update of Adam or an earlier anchor predicts `rms`. If neither exists, or the weight
did not change, it is exact. A tensor of fewer than 4096 elements is exact in every mode and under every rule, because
norms and biases take little space and have much influence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, ROLES, SQUARES, Codec
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.exact import Planes, PlanesDelta, PlanesRank1
from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.checkpoint.codecs.norm_space import NormSpace
from hf_trainweights.checkpoint.codecs.rows import RowUniform
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, TensorPlan
from hf_trainweights.checkpoint.encoded.tree import Key, KeyPath
from hf_trainweights.checkpoint.planning.optimizers import rules_of
from hf_trainweights.checkpoint.planning.roles import is_optimizer_state, recorded_names
from hf_trainweights.checkpoint.planning.update_rules import OPTIMIZER_ROLES, state_of
from hf_trainweights.errors import ConfigError, did_you_mean
from hf_trainweights.files.selectors import EXPRESSION, most_exact, name_and_modules, require_used, select
from hf_trainweights.formats import FORMATS

# Tensors with fewer elements are always exact.
SIZE_FLOOR = 4096

# The selector of names in a rule that selects by role alone.
_ANY_NAME = f"{EXPRESSION}.*"


@dataclass(frozen=True)
class _Mode:
    """A mode: the number of steps in the rms of a weight's first difference, and the codecs of other roles."""

    steps_per_rms: int
    codecs: Mapping[str, tuple[Codec, ...]]


def _mode(steps_per_rms: int, mean_step: float, momentum_step: float, log_step: int) -> _Mode:
    squares = dict.fromkeys(SQUARES, (LogRank1(step=log_step),))
    means = {"exp_avg": (UpdateSpace(step=mean_step),), "momentum": (RowUniform(step=momentum_step),)}
    return _Mode(steps_per_rms, {**means, **squares})


_MODES = {
    "lossless": _Mode(0, dict.fromkeys(SQUARES, (PlanesRank1(),))),
    # Half of the rms as a momentum's step moves the loss of Muon by a little more than .002.
    "near-lossless": _mode(4, mean_step=0.25, momentum_step=13 / 32, log_step=1),
    "compact": _mode(1, mean_step=0.5, momentum_step=1.0, log_step=2),
}
MODES = tuple(_MODES)
LOSSY_MODES = MODES[1:]
# The literals are for completion in editors. `Policy` checks the value.
ModeName = Literal["lossless", "near-lossless", "compact"] | str


@dataclass(frozen=True)
class Policy:
    """Chooses a codec for each tensor. It is a value: a policy restored from JSON equals the original.

    Args:
        mode: One of `MODES`, for every tensor that no rule selects.
        rules: Selector to choice. A selector is a role, `optimizer` for all of an optimizer's state, the name of
            weights as in `TrainWeightsConfig`, or `role/name`. If several rules select a tensor, the most exact name
            wins, as in `TrainWeightsConfig`, then expressions (`re:pattern`), then roles alone. A choice is a mode, a
            codec (`"raw"`), a format (`"int8"`: the codec grouped), or a codec or format with options:
            `{"codec": "delta-uniform", "bound": 1e-5}`, `{"format": "int4", "group_size": 32}`.

    Raises:
        ConfigError: A mode, selector or choice is unknown, or a codec does not suit a role.

    Examples:
        >>> policy = Policy("compact", {"optimizer": "lossless", "embed": "raw"})
        >>> policy.plan_weights({"embed.weight": torch.zeros(64, 64)})["embed.weight",].candidates
        (Raw(),)
    """

    mode: ModeName = "lossless"
    rules: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("mode", f"one of {', '.join(MODES)}", repr(self.mode), "Choose one of these.")
        if not isinstance(self.rules, Mapping):
            kind = type(self.rules).__name__
            raise ConfigError("rules", "a dict from selector to choice", kind, "See the class docstring.")
        object.__setattr__(self, "rules", dict(self.rules))
        for selector, choice in self.rules.items():
            _parse_rule(selector, choice)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as JSON; the order of the rules matters."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Policy:
        """Return the policy that `to_dict` described.

        Raises:
            ConfigError: `value` does not describe a policy.
        """
        if set(value) != {"mode", "rules"}:
            keys = ", ".join(map(str, value))
            raise ConfigError("policy", "mode and rules", keys, "Pass what to_dict returned.")
        return cls(**value)

    def plan_weights(
        self, weights: Mapping[str, Any], anchor: Container[str] = (), *, buffers: Collection[str] = ()
    ) -> Plan:
        """Plan a weights file that is stored without reference (full), or against an anchor.

        If it has no anchor, a lossy mode rounds float32 only, because weights of half precision are small already.

        Args:
            weights: A flat state dict under module names.
            anchor: The names that are in the anchor.
            buffers: The names of weights that are buffers.

        Returns:
            A plan for `encode_file(weights, plan)`. Weights that a lossy mode rounds stay exact until `with_steps` adds
            their steps, which depend on how far each weight moves between saves.
        """
        plan: dict[KeyPath, TensorPlan] = {}
        tensors = _tensors(weights)
        choose = self._chooser(map(str, tensors))
        for name, tensor in tensors.items():
            role = "buffer" if name in buffers else "weight"
            choice = choose(role, str(name))
            steps, is_half = _steps_per_rms(choice, role, tensor), tensor.dtype != torch.float32
            codecs = _codecs(choice, role, tensor)
            if name in anchor:
                codecs = codecs if isinstance(choice, Codec) else (PlanesDelta(),)
                plan[name,] = TensorPlan(role, name, codecs, name, None, steps, or_exact=steps > 0 and is_half)
            elif steps and not is_half:
                plan[name,] = TensorPlan(role, name, (Planes(),), steps_per_rms=steps, or_exact=True)
            else:
                plan[name,] = TensorPlan(role, name, codecs)
        return plan

    def plan_tree(self, tree: Any, names: Mapping[Key, str] | None = None, optimizer: str | None = None) -> Plan:
        """Plan a tree by its layout: state dicts of optimizers and modules, at any depth; the rest is exact.

        Args:
            tree: The content of the file.
            names: If the tree is an optimizer's state dict, the names of its parameters, as in `plan_optimizer`.
            optimizer: If the tree is an optimizer's state dict, its class, as in `plan_optimizer`.

        Returns:
            A plan for `encode_file(tree, plan)`.

        Raises:
            ConfigError: A rule selects optimizer states by name, and there are no names.
        """
        plan: dict[KeyPath, TensorPlan] = {}
        open_nodes: list[tuple[KeyPath, Any]] = [((), tree)]
        seen: set[int] = set()  # a dict may contain itself
        while open_nodes:
            prefix, node = open_nodes.pop()
            if not isinstance(node, dict | list | tuple) or id(node) in seen:
                continue
            seen.add(id(node))
            if not isinstance(node, dict):
                open_nodes += [((*prefix, index), value) for index, value in enumerate(node)]
                continue
            if node.keys() >= {"state", "param_groups"}:
                at_top = {} if prefix else {"names": names or None, "optimizer": optimizer}
                planned = self.plan_optimizer(node, **at_top)
            elif node and all(isinstance(value, Tensor) for value in node.values()):
                planned = self.plan_weights(node)
            else:
                open_nodes += [((*prefix, key), value) for key, value in node.items()]
                continue
            for path, tensor_plan in planned.items():
                moment = (*prefix, *tensor_plan.exp_avg_sq) if tensor_plan.exp_avg_sq else None
                plan[(*prefix, *path)] = dataclasses.replace(tensor_plan, exp_avg_sq=moment)
        return plan

    def plan_optimizer(
        self, state: Mapping[str, Any], *, names: Mapping[Key, str] | None = None, optimizer: str | None = None
    ) -> Plan:
        """Plan the file of `optimizer.state_dict()`. In a tree of another layout every tensor is exact.

        Args:
            state: The state dict.
            names: The parameters' names by their index in the state dict. Default: the names that an optimizer records
                itself if it was made from `model.named_parameters()`.
            optimizer: Its class, as `class_name` returns it. Default: torch's Adam if its groups have exactly the
                settings of Adam, else an unknown class.

        Returns:
            A plan for `encode_file(state, plan)`.

        Raises:
            ConfigError: A rule selects optimizer states by name, and there are no names.
        """
        if not is_optimizer_state(state):
            return {}
        states, groups = state["state"], state["param_groups"]
        names = recorded_names(state) if names is None else names
        self._require_names(states, names)
        rules = {index: rules_of(optimizer, group) for group in groups for index in group["params"]}
        choose = self._chooser(names.get(index, str(index)) for index in states)
        plan: dict[KeyPath, TensorPlan] = {}
        for index, values in states.items():
            name = names.get(index, str(index))
            paths = _paths(values, ("state", index))
            flat = {key: value for key, (_, value) in paths.items()}
            rule = next((rule for rule in rules.get(index, ()) if rule.fits(flat)), None)
            for key, tensor in _tensors(flat).items():
                moment = state_of(rule, key)
                codecs = _codecs(choose(moment.role, name), moment.role, tensor)
                if rule and rule.is_norm(key):
                    codecs = tuple(map(_in_units_of_a_norm, codecs))
                is_relative = any("exp_avg_sq" in codec.references for codec in codecs)
                square = paths[moment.square][0] if is_relative and moment.square else None
                plan[paths[key][0]] = TensorPlan(moment.role, name, codecs, exp_avg_sq=square)
        return plan

    @cached_property
    def _parsed_rules(self) -> list[_Rule]:
        return [_parse_rule(selector, choice) for selector, choice in self.rules.items()]

    @property
    def rules_of_exact_weights(self) -> dict[str, Any]:
        """The rules except those for weights, and one that makes all weights exact."""
        others = zip(self.rules.items(), self._parsed_rules, strict=True)
        return {"weight": "lossless"} | dict(rule for rule, parsed in others if parsed.roles != ("weight",))

    def require_used(self, names: Iterable[str]) -> None:
        """Check that each rule with a selector of names selects at least one name.

        Args:
            names: The names of all weights, buffers and parameters of the optimizer.

        Raises:
            ConfigError: A rule selects no name; the error has the nearest name.
        """
        all_names = [own_or_module for name in names for own_or_module in name_and_modules(name)]
        selectors = [rule.selector for rule in self._parsed_rules if rule.selector != _ANY_NAME]
        require_used("rules", select(selectors, all_names), all_names)

    def _chooser(self, names: Iterable[str]) -> Callable[[str, str], str | Codec]:
        """Return a function from a tensor's role and name to its choice; `names` are the names of all tensors."""
        all_names = {own_or_module for name in names for own_or_module in name_and_modules(name)}
        selected = select((rule.selector for rule in self._parsed_rules), all_names) | {_ANY_NAME: frozenset(all_names)}
        rules: dict[str, dict[str, str | Codec]] = {role: {} for role in ROLES}
        for rule in self._parsed_rules:
            for role in rule.roles:
                rules[role].setdefault(rule.selector, rule.choice)

        def choose(role: str, name: str) -> str | Codec:
            candidates = {selector: selected[selector] for selector in rules[role] if name in selected[selector]}
            winner = most_exact(candidates, (name.rpartition(".")[0], name))
            return self.mode if winner is None else rules[role][winner]

        return choose

    def _require_names(self, states: Mapping[Any, Any], names: Mapping[Key, str]) -> None:
        for selector, rule in zip(self.rules, self._parsed_rules, strict=True):
            is_by_name = rule.selector != _ANY_NAME and rule.roles[0] in OPTIMIZER_ROLES
            if is_by_name and not states.keys() <= names.keys():
                next_step = "Make the optimizer from model.named_parameters(), or select by role alone."
                problem = "an optimizer state without names"
                raise ConfigError(f"rules[{selector!r}]", "names of the optimizer's parameters", problem, next_step)


def _tensors(mapping: object) -> dict[Any, Tensor]:
    if not isinstance(mapping, Mapping):
        return {}
    return {key: value for key, value in mapping.items() if isinstance(value, Tensor)}


def _paths(values: Mapping[Any, Any], parent: KeyPath) -> dict[Any, tuple[KeyPath, Any]]:
    """Return key path and value of each state of a parameter by its key, also of states in a dict of their own.

    bitsandbytes puts its states into such a dict, so that FSDP does not gather them.
    """
    paths: dict[Any, tuple[KeyPath, Any]] = {}
    for key, value in values.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        paths |= {inner_key: ((*parent, key, inner_key), state) for inner_key, state in inner}
        paths[key] = (*parent, key), value
    return {key: (path, state) for key, (path, state) in paths.items() if not isinstance(state, Mapping)}


def _steps_per_rms(choice: str | Codec, role: str, tensor: Tensor) -> int:
    """Return the steps per rms that a mode gives a weight; 0 if the tensor is exact or a rule names its codec."""
    is_exact = role == "buffer" or tensor.numel() < SIZE_FLOOR or tensor.dtype not in LOSSY_DTYPES
    return 0 if is_exact or isinstance(choice, Codec) else _MODES[choice].steps_per_rms


def _codecs(choice: str | Codec, role: str, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the codec to try for a tensor, or () for exact. A mode's codec for weights comes later (`with_steps`)."""
    is_small = tensor.numel() < SIZE_FLOOR
    if isinstance(choice, Codec):
        return (choice,) if choice.lossless or not is_small else ()
    return () if is_small else _MODES[choice].codecs.get(role, ())


def _in_units_of_a_norm(codec: Codec) -> Codec:
    """Return the codec for a first moment that is divided by a norm: the largest gradients, not their root mean square.

    Measured at Adamax's default beta of .999, norms are three to four times as large as roots of Adam's second moments.
    """
    return NormSpace(step=codec.step / 4) if type(codec) is UpdateSpace else codec


@dataclass(frozen=True)
class _Rule:
    """A checked rule of a `Policy`: the roles and the selector of names that it applies to, and a mode or a codec."""

    roles: tuple[str, ...]
    selector: str
    choice: str | Codec


def _parse_rule(selector: Any, choice: Any) -> _Rule:
    """Check and parse a rule of `Policy`; ConfigError: a part is unknown, or the codec does not suit the role."""
    where = f"rules[{selector!r}]"
    roles, name = _parse_selector(where, selector)
    parsed = _parse_choice(where, choice)
    for role in roles:
        if isinstance(parsed, Codec) and role not in parsed.roles:
            suitable = [codec_id for codec_id, codec in CODECS.items() if role in codec.roles]
            next_step = "Choose one of these."
            if role in SQUARES:
                next_step = "Nothing linear: it rounds small values to zero, and the next update divides by them."
            raise ConfigError(where, f"for {role} one of {', '.join((*MODES, *suitable))}", parsed.codec_id, next_step)
    return _Rule(roles, name, parsed)


def _parse_selector(where: str, selector: Any) -> tuple[tuple[str, ...], str]:
    """Split the selector of a rule into roles and a selector of names."""
    allowed_roles = (*ROLES, "optimizer")
    text = selector if isinstance(selector, str) else ""
    role, slash, name = text.partition("/")
    near = did_you_mean(role, allowed_roles, "")
    if text.startswith(EXPRESSION) or (role and not slash and role not in allowed_roles and not near):
        role, slash, name = "weight", "/", text
    if role not in allowed_roles or (slash and not name):
        allowed = f"{', '.join(allowed_roles)}, the name of a weight, or a role/name; a name may be re:pattern"
        next_step = f"{near} Weights of that name are weight/{role}." if near else "Choose one of these."
        raise ConfigError(where, f"a selector: {allowed}", repr(selector), next_step)
    if name.startswith(EXPRESSION):
        try:
            re.compile(name.removeprefix(EXPRESSION))
        except re.error as error:
            raise ConfigError(where, "a regular expression after re:", str(error), "Correct it.") from error
    return OPTIMIZER_ROLES if role == "optimizer" else (role,), name or _ANY_NAME


def _parse_choice(where: str, choice: Any) -> str | Codec:
    if isinstance(choice, str) and choice in MODES:
        return choice
    options: dict[str, Any] = dict(choice) if isinstance(choice, Mapping) else {}
    if isinstance(choice, str):
        options = {"format": choice} if choice in FORMATS else {"codec": choice}
    name = options.get("format", options.get("codec"))
    if not isinstance(name, str) or name not in (FORMATS if "format" in options else CODECS):
        allowed = ", ".join((*MODES, *CODECS, *FORMATS))
        next_step = 'Write one of these, or one with options, e.g. {"format": "int4", "group_size": 32}.'
        raise ConfigError(where, f"one of {allowed}", repr(choice), next_step)
    try:
        if "format" in options:
            return Grouped(options)
        del options["codec"]
        if name == DeltaUniform.codec_id and "bound" in options:
            return DeltaUniform.within(**options)
        return CODECS[name](**options)
    except TypeError as error:
        raise ConfigError(where, f"the options of {name}", repr(choice), f"{error}.") from error
