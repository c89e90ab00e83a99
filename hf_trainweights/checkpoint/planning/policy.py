"""Which codec for which tensor: three modes, and rules for exceptions.

| role | what | `near-lossless` | `compact` |
|---|---|---|---|
| weight | parameters | delta-uniform, step rms / 4 | delta-uniform, step rms |
| exp_avg | first moment of Adam and AdamW | update-space, step 1/4 | update-space, step 1/2 |
| exp_avg_sq | their second moment; exactly: planes-rank1 | log-rank1, step 1 | log-rank1, step 2 |
| buffer | buffers of the module | exact | exact |
| other | step counters, states of other optimizers (see optimizers.py) | exact | exact |

In `lossless` everything is exact. `rms` is the root mean square of the first difference to the anchor. A weight
without an anchor has the steps that the last update of Adam, or an earlier anchor, lets expect; where neither is there,
or the weight did not change, it is exact. A tensor of fewer than 4096 elements is exact in every mode and
under every rule: norms and biases take little space and steer much.
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
from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, ROLES, Codec
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.exact import Planes, PlanesDelta, PlanesRank1
from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, TensorPlan
from hf_trainweights.checkpoint.encoded.tree import Key, KeyPath
from hf_trainweights.checkpoint.planning.optimizers import rule_of
from hf_trainweights.checkpoint.planning.roles import is_optimizer_state, recorded_names
from hf_trainweights.errors import ConfigError, did_you_mean
from hf_trainweights.files.selectors import EXPRESSION, most_exact, name_and_modules, require_used, select
from hf_trainweights.formats import FORMATS

# Tensors with fewer elements are always exact.
SIZE_FLOOR = 4096
OPTIMIZER_ROLES = ("exp_avg", "exp_avg_sq", "other")

# The selector of a rule for a role alone.
_ANY_NAME = f"{EXPRESSION}.*"


@dataclass(frozen=True)
class _Mode:
    """How much a mode may round: steps in the rms of a first difference, and which codec to try by role."""

    steps_per_rms: int
    codecs: Mapping[str, tuple[Codec, ...]]


_MODES = {
    "lossless": _Mode(0, {"exp_avg_sq": (PlanesRank1(),)}),
    "near-lossless": _Mode(4, {"exp_avg": (UpdateSpace(step=0.25),), "exp_avg_sq": (LogRank1(step=1),)}),
    "compact": _Mode(1, {"exp_avg": (UpdateSpace(step=0.5),), "exp_avg_sq": (LogRank1(step=2),)}),
}
MODES = tuple(_MODES)
LOSSY_MODES = MODES[1:]
# What editors complete; the values are checked where they arrive.
ModeName = Literal["lossless", "near-lossless", "compact"] | str


@dataclass(frozen=True)
class Policy:
    """Chooses a codec for each tensor; a value that compares equal to its copy through JSON.

    Args:
        mode: One of `MODES`, for everything that no rule selects.
        rules: Selector to choice. A selector is a role, `optimizer` for all of an optimizer's state, the name of
            weights as in `TrainWeightsConfig`, or `role/name`. The most exact name wins, as there; expressions
            (`re:pattern`) and roles alone win in this order. A choice is a mode, a codec (`"raw"`), a format
            (`"int8"`: the codec grouped), or one of the latter two with options:
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
            found = type(self.rules).__name__
            raise ConfigError("rules", "a dict from selector to choice", found, "See the class docstring.")
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
            ConfigError: It describes none.
        """
        if set(value) != {"mode", "rules"}:
            found = ", ".join(map(str, value))
            raise ConfigError("policy", "mode and rules", found, "Pass what to_dict returned.")
        return cls(**value)

    def plan_weights(
        self, weights: Mapping[str, Any], anchor: Container[str] = (), *, buffers: Collection[str] = ()
    ) -> Plan:
        """Plan a weights file that stands alone, or is stored against an anchor.

        Alone a lossy mode rounds float32 only: weights of half precision are small as they are.

        Args:
            weights: A flat state dict under module names.
            anchor: The names that are in the anchor.
            buffers: Which of the weights are buffers.

        Returns:
            A plan for `encode_file(weights, plan)`, exact without the steps of the lossy modes: how far a weight moves
            between saves.
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
        """Plan a tree by what it looks like: an optimizer's state, a module's, or a dict of those; the rest is exact.

        Args:
            tree: What the file holds.
            names: Names of an optimizer's parameters, as in `plan_optimizer`, where the tree is its state dict.
            optimizer: Its class, likewise.

        Returns:
            A plan for `encode_file(tree, plan)`.

        Raises:
            ConfigError: A rule selects optimizer states by name, and there are no names.
        """
        plan: dict[KeyPath, TensorPlan] = {}
        found: list[tuple[KeyPath, Any]] = [((), tree)]
        seen: set[int] = set()  # a dict may contain itself
        while found:
            place, value = found.pop()
            if not isinstance(value, dict) or id(value) in seen:
                continue
            seen.add(id(value))
            if value.keys() >= {"state", "param_groups"}:
                planned = self.plan_optimizer(
                    value, **({} if place else {"names": names or None, "optimizer": optimizer})
                )
            elif value and all(isinstance(each, Tensor) for each in value.values()):
                planned = self.plan_weights(value)
            else:
                found += [((*place, key), each) for key, each in value.items()]
                continue
            for path, each in planned.items():
                moment = (*place, *each.exp_avg_sq) if each.exp_avg_sq else None
                plan[(*place, *path)] = dataclasses.replace(each, exp_avg_sq=moment)
        return plan

    def plan_optimizer(
        self, state: Mapping[str, Any], *, names: Mapping[Key, str] | None = None, optimizer: str | None = None
    ) -> Plan:
        """Plan the file of `optimizer.state_dict()`; of other layouts every tensor is exact.

        Args:
            state: The state dict.
            names: Its parameters' names by their index in it. Default: those that an optimizer made from
                `model.named_parameters()` records itself.
            optimizer: Its class, as `class_name` returns it. Default: torch's Adam if its groups have exactly the
                settings of that, else none that is known.

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
        rules = {index: rule_of(optimizer, group) for group in groups for index in group["params"]}
        choose = self._chooser(names.get(index, str(index)) for index in states)
        plan: dict[KeyPath, TensorPlan] = {}
        for index, values in states.items():
            name = names.get(index, str(index))
            rule = rules.get(index)
            roles = rule.roles if rule and rule.fits(values) else {}
            for key, tensor in _tensors(values).items():
                role = roles.get(key, "other")
                codecs = _codecs(choose(role, name), role, tensor)
                moment = ("state", index, "exp_avg_sq") if UpdateSpace in map(type, codecs) else None
                plan["state", index, key] = TensorPlan(role, name, codecs, exp_avg_sq=moment)
        return plan

    @cached_property
    def _parsed_rules(self) -> list[_Rule]:
        return [_parse_rule(selector, choice) for selector, choice in self.rules.items()]

    @property
    def rules_of_exact_weights(self) -> dict[str, Any]:
        """The rules but for those of weights, which are exact instead."""
        others = zip(self.rules.items(), self._parsed_rules, strict=True)
        return {"weight": "lossless"} | dict(rule for rule, parsed in others if parsed.roles != ("weight",))

    def require_used(self, names: Iterable[str]) -> None:
        """Check that each rule that names tensors names some.

        Args:
            names: The names of all weights, buffers and parameters of the optimizer.

        Raises:
            ConfigError: A rule names none; the error has the nearest name.
        """
        known = [each for name in names for each in name_and_modules(name)]
        selectors = [rule.selector for rule in self._parsed_rules if rule.selector != _ANY_NAME]
        require_used("rules", select(selectors, known), known)

    def _chooser(self, names: Iterable[str]) -> Callable[[str, str], str | Codec]:
        """Return the function from role and name to the choice, where these are all names."""
        known = {each for name in names for each in name_and_modules(name)}
        selected = select((rule.selector for rule in self._parsed_rules), known) | {_ANY_NAME: frozenset(known)}
        rules: dict[str, dict[str, str | Codec]] = {role: {} for role in ROLES}
        for rule in self._parsed_rules:
            for role in rule.roles:
                rules[role].setdefault(rule.selector, rule.choice)

        def choose(role: str, name: str) -> str | Codec:
            candidates = {each: selected[each] for each in rules[role] if name in selected[each]}
            decides = most_exact(candidates, (name.rpartition(".")[0], name))
            return self.mode if decides is None else rules[role][decides]

        return choose

    def _require_names(self, states: Mapping[Any, Any], names: Mapping[Key, str]) -> None:
        for selector, rule in zip(self.rules, self._parsed_rules, strict=True):
            is_by_name = rule.selector != _ANY_NAME and rule.roles[0] in OPTIMIZER_ROLES
            if is_by_name and not states.keys() <= names.keys():
                next_step = "Make the optimizer from model.named_parameters(), or select by role alone."
                found = "an optimizer state without names"
                raise ConfigError(f"rules[{selector!r}]", "names of the optimizer's parameters", found, next_step)


def _tensors(mapping: object) -> dict[Any, Tensor]:
    if not isinstance(mapping, Mapping):
        return {}
    return {key: value for key, value in mapping.items() if isinstance(value, Tensor)}


def _steps_per_rms(choice: str | Codec, role: str, tensor: Tensor) -> int:
    """Return the steps of a weight that a mode may round; 0 if the weight is exact or a rule names its codec."""
    is_exact = role == "buffer" or tensor.numel() < SIZE_FLOOR or tensor.dtype not in LOSSY_DTYPES
    return 0 if is_exact or isinstance(choice, Codec) else _MODES[choice].steps_per_rms


def _codecs(choice: str | Codec, role: str, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the codec to try for a tensor, but for the steps of a weight; none means exact."""
    is_small = tensor.numel() < SIZE_FLOOR
    if isinstance(choice, Codec):
        return (choice,) if choice.lossless or not is_small else ()
    return () if is_small else _MODES[choice].codecs.get(role, ())


@dataclass(frozen=True)
class _Rule:
    """A rule of a `Policy`, checked: roles of a tensor, what selects its name, and a mode or a codec."""

    roles: tuple[str, ...]
    selector: str
    choice: str | Codec


def _parse_rule(selector: Any, choice: Any) -> _Rule:
    """Check a rule of `Policy` and return what it means; ConfigError: unknown, or the codec does not suit the role."""
    where = f"rules[{selector!r}]"
    roles, name = _parse_selector(where, selector)
    parsed = _parse_choice(where, choice)
    for role in roles:
        if isinstance(parsed, Codec) and role not in parsed.roles:
            suitable = [codec_id for codec_id, each in CODECS.items() if role in each.roles]
            next_step = "Choose one of these."
            if role == "exp_avg_sq":
                next_step = "Nothing linear: it rounds small values to zero, and the next update divides by them."
            raise ConfigError(where, f"for {role} one of {', '.join((*MODES, *suitable))}", parsed.codec_id, next_step)
    return _Rule(roles, name, parsed)


def _parse_selector(where: str, selector: Any) -> tuple[tuple[str, ...], str]:
    """Return the roles and the selector of names."""
    known = (*ROLES, "optimizer")
    text = selector if isinstance(selector, str) else ""
    role, slash, name = text.partition("/")
    near = did_you_mean(role, known, "")
    if text.startswith(EXPRESSION) or (role and not slash and role not in known and not near):
        role, slash, name = "weight", "/", text
    if role not in known or (slash and not name):
        allowed = f"{', '.join(known)}, the name of a weight, or a role/name; a name may be re:pattern"
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
