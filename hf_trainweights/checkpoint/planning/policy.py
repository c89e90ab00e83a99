"""Which codec for which tensor: three modes, and rules for what should be otherwise.

| role | what | `near-lossless` | `compact` |
|---|---|---|---|
| weight | parameters | delta-uniform, step rms / 4 | delta-uniform, step rms |
| exp_avg | Adam's first moment | update-space, step 1/4 | update-space, step 1/2 |
| exp_avg_sq | Adam's second moment; exactly: planes-rank1 | log-rank1, step 1 | log-rank1, step 2 |
| buffer | what a module registers as one | exact | exact |
| other | all else: step counters, states of optimizers that are not Adam | exact | exact |

In `lossless` everything is exact. `rms` is that of the first difference to the anchor; a weight without an
anchor, or one that did not change, is exact. Below 4096 elements a tensor is exact whatever mode or rule:
norms and biases weigh nothing and steer much.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, ROLES, Codec
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform, rms_difference
from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.checkpoint.codecs.log_rank1 import LogRank1
from hf_trainweights.checkpoint.codecs.planes_delta import PlanesDelta
from hf_trainweights.checkpoint.codecs.planes_rank1 import PlanesRank1
from hf_trainweights.checkpoint.codecs.update_space import UpdateSpace
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.key_paths import Key, KeyPath
from hf_trainweights.checkpoint.encoded.plan import Plan, TensorPlan
from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import FORMATS

# Tensors with fewer elements are exact always.
SIZE_FLOOR = 4096


@dataclass(frozen=True)
class _LossyMode:
    steps_per_rms: int
    exp_avg: Codec
    exp_avg_sq: Codec


_LOSSY_MODES = {
    "near-lossless": _LossyMode(4, UpdateSpace(step=0.25), LogRank1(step=1)),
    "compact": _LossyMode(1, UpdateSpace(step=0.5), LogRank1(step=2)),
}
MODES = ("lossless", *_LOSSY_MODES)

_OPTIMIZER_ROLES = ("exp_avg", "exp_avg_sq", "other")

# What Adam and AdamW keep per parameter, and apex without the step; a key more and it is another optimizer.
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_ADAM_STATE = {"step", *_MOMENTS}

# A mean change below this is none, and its step would not be a number that delta-uniform takes.
_SMALLEST_RMS = 2.0**-100


@dataclass(frozen=True)
class Policy:
    """Chooses codecs; a value that compares equal to its copy through JSON.

    Args:
        mode: One of `MODES`, for everything that no rule selects.
        rules: Selector to choice; the first match in this order wins. A selector is a role, `optimizer` for all
            of an optimizer's state, `re:pattern` for weights whose whole name matches, or `role/re:pattern`. A
            choice is a mode, a codec (`"raw"`), a format (`"int8"`: the codec grouped), or one of the latter two
            with options: `{"codec": "delta-uniform", "bound": 1e-5}`, `{"format": "int4", "group_size": 32}`.

    Raises:
        ConfigError: A mode, selector or choice is unknown, or a codec does not suit a role.

    Example:
        >>> policy = Policy("compact", {"optimizer": "lossless", "re:.*embed.*": "raw"})
        >>> policy.plan_weights({"embed.weight": torch.zeros(64, 64)})["embed.weight",].candidates
        (Raw(),)
    """

    mode: str = "lossless"
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
        self,
        weights: Mapping[str, Any],
        *,
        buffers: Collection[str] = (),
        anchor: Anchor | None = None,
        delta_rms: Mapping[str, float] | None = None,
    ) -> Plan:
        """Plan the weights file of a checkpoint.

        Args:
            weights: A flat state dict under module names.
            buffers: Which of them are buffers.
            anchor: What they are stored against.
            delta_rms: What `measure_delta_rms` returned at the first difference to this anchor: the steps of
                the lossy modes stay fixed from then on. A weight without an entry is exact.

        Returns:
            A plan for `encode_file(weights, plan, anchor=anchor)`.
        """
        plan: dict[KeyPath, TensorPlan] = {}
        for name, tensor in _tensors(weights).items():
            role = "buffer" if name in buffers else "weight"
            choice = self._choice(role, name)
            reference = name if anchor is not None and name in anchor else None
            rms = (delta_rms or {}).get(name, 0.0) if reference else 0.0
            codecs = _weight_codecs(choice, role, tensor, rms, reference)
            plan[(name,)] = TensorPlan(role, name, codecs, anchor=reference)
        return plan

    def plan_anchor(self, weights: Mapping[str, Any], *, buffers: Collection[str] = ()) -> Plan:
        """Plan a weights file that becomes an anchor and is rounded to bfloat16 where the policy is lossy.

        Args:
            weights: A flat state dict under module names.
            buffers: Which of them are buffers.

        Returns:
            A plan for `encode_file(weights, plan)`. An anchor that is to be exact takes `plan_weights`.
        """
        plan = dict(self.plan_weights(weights, buffers=buffers))
        for path, each in plan.items():
            tensor, choice = weights[each.name], self._choice(each.role, each.name)
            is_lossy = each.role == "weight" and isinstance(choice, str) and choice in _LOSSY_MODES
            if is_lossy and tensor.dtype == torch.float32 and tensor.numel() >= SIZE_FLOOR:
                plan[path] = dataclasses.replace(each, round_to=torch.bfloat16)
        return plan

    def plan_optimizer(self, state: Mapping[str, Any], *, names: Mapping[Key, str] | None = None) -> Plan:
        """Plan the file of `optimizer.state_dict()`; of other layouts every tensor is exact.

        Args:
            state: The state dict.
            names: Its parameters' names by their index in it. Default: those that an optimizer made from
                `model.named_parameters()` records itself.

        Returns:
            A plan for `encode_file(state, plan)`.

        Raises:
            ConfigError: A rule selects optimizer states by name, and there are no names.
        """
        states, groups = state.get("state"), state.get("param_groups")
        if not isinstance(states, Mapping) or not isinstance(groups, list):
            return {}
        names = _recorded_names(groups) if names is None else names
        self._require_names(states, names)
        adam = _adam_parameters(states, groups)
        plan: dict[KeyPath, TensorPlan] = {}
        for index, values in states.items():
            name = names.get(index, str(index))
            for key, tensor in _tensors(values).items():
                role = key if index in adam and key in _MOMENTS else "other"
                codecs = _state_codecs(self._choice(role, name), role, tensor)
                moment = ("state", index, "exp_avg_sq") if UpdateSpace in map(type, codecs) else None
                plan["state", index, key] = TensorPlan(role, name, codecs, exp_avg_sq=moment)
        return plan

    @cached_property
    def _parsed_rules(self) -> list[_Rule]:
        return [_parse_rule(selector, choice) for selector, choice in self.rules.items()]

    def _choice(self, role: str, name: str) -> str | Codec:
        for rule in self._parsed_rules:
            if role in rule.roles and (rule.pattern is None or rule.pattern.fullmatch(name)):
                return rule.choice
        return self.mode

    def _require_names(self, states: Mapping[Any, Any], names: Mapping[Key, str]) -> None:
        for selector, rule in zip(self.rules, self._parsed_rules, strict=True):
            if rule.pattern and rule.roles[0] in _OPTIMIZER_ROLES and not states.keys() <= names.keys():
                next_step = "Make the optimizer from model.named_parameters(), or select by role alone."
                found = "an optimizer state without names"
                raise ConfigError(f"rules[{selector!r}]", "names of the optimizer's parameters", found, next_step)


def measure_delta_rms(weights: Mapping[str, Any], anchor: Anchor) -> dict[str, float]:
    """Measure how far weights have moved from their anchor; this fixes the steps of the lossy modes.

    Args:
        weights: A flat state dict under module names.
        anchor: The anchor. One tensor of it is decoded at a time.

    Returns:
        Root mean square of the difference to the decoded anchor, by name, JSON; without small, shapeshifting and
        non-finite weights. Keep it with the anchor and pass it to `plan_weights` as long as the anchor is used.

    Raises:
        CorruptFileError: The anchor is damaged.
    """
    measured = {}
    for name, tensor in _tensors(weights).items():
        if tensor.numel() < SIZE_FLOOR or tensor.dtype not in LOSSY_DTYPES or name not in anchor:
            continue
        reference = anchor.tensor(name)
        if reference.shape != tensor.shape:
            continue
        rms = rms_difference(tensor.cpu(), reference)
        if math.isfinite(rms):
            measured[name] = rms
    return measured


@dataclass(frozen=True)
class _Rule:
    roles: tuple[str, ...]
    pattern: re.Pattern[str] | None
    choice: str | Codec


def _parse_rule(selector: Any, choice: Any) -> _Rule:
    where = f"rules[{selector!r}]"
    role, slash, rest = selector.partition("/") if isinstance(selector, str) else ("", "", "")
    if isinstance(selector, str) and selector.startswith("re:"):
        role, slash, rest = "weight", "/", selector
    roles = _OPTIMIZER_ROLES if role == "optimizer" else (role,)
    if not set(roles) <= set(ROLES) or bool(slash) != rest.startswith("re:"):
        allowed = f"{', '.join(ROLES)}, optimizer, re:pattern or role/re:pattern"
        raise ConfigError(where, f"a selector: {allowed}", repr(selector), "Choose one of these.")
    try:
        pattern = re.compile(rest.removeprefix("re:")) if slash else None
    except re.error as error:
        raise ConfigError(where, "a regular expression after re:", str(error), "Correct it.") from error
    parsed = _parse_choice(where, choice)
    for role in roles:
        if isinstance(parsed, Codec) and role not in parsed.roles:
            codecs = [codec_id for codec_id, codec in CODECS.items() if role in codec.roles]
            allowed = f"for {role} one of {', '.join((*MODES, *codecs))}"
            next_step = "Nothing linear: it rounds small values to zero, and the next update divides by them."
            raise ConfigError(
                where, allowed, parsed.codec_id, next_step if role == "exp_avg_sq" else "Choose one of these."
            )
    return _Rule(roles, pattern, parsed)


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
        return _make_codec(name, options)
    except TypeError as error:
        raise ConfigError(where, f"the options of {name}", repr(choice), f"{error}.") from error


def _make_codec(name: str, options: dict[str, Any]) -> Codec:
    if "format" in options:
        return Grouped(options)
    del options["codec"]
    if name == DeltaUniform.codec_id and "bound" in options:
        return DeltaUniform.within(**options)
    return CODECS[name](**options)


def _tensors(mapping: object) -> dict[Any, Tensor]:
    if not isinstance(mapping, Mapping):
        return {}
    return {key: value for key, value in mapping.items() if isinstance(value, Tensor)}


def _weight_codecs(
    choice: str | Codec, role: str, tensor: Tensor, rms: float, reference: str | None
) -> tuple[Codec, ...]:
    """Return the candidates for a weight or buffer; an empty tuple means exact, without reference."""
    is_small = tensor.numel() < SIZE_FLOOR
    if isinstance(choice, Codec):
        return (choice,) if choice.lossless or not is_small else ()
    if reference is None:
        return ()
    lossless = PlanesDelta()
    if choice not in _LOSSY_MODES or role == "buffer" or is_small or tensor.dtype not in LOSSY_DTYPES:
        return (lossless,)
    if rms < _SMALLEST_RMS:
        return (lossless,)
    lossy = DeltaUniform(step=rms / _LOSSY_MODES[choice].steps_per_rms)
    # Most bits of a half-precision weight do not change between saves: then exact can be smaller.
    return (lossy,) if tensor.dtype == torch.float32 else (lossless, lossy)


def _state_codecs(choice: str | Codec, role: str, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the candidates for a tensor of an optimizer's state; an empty tuple means exact."""
    is_small = tensor.numel() < SIZE_FLOOR
    if isinstance(choice, Codec):
        return (choice,) if choice.lossless or not is_small else ()
    if role not in _MOMENTS or is_small:
        return ()
    if choice not in _LOSSY_MODES:
        return (PlanesRank1(),) if role == "exp_avg_sq" else ()
    mode = _LOSSY_MODES[choice]
    return (mode.exp_avg if role == "exp_avg" else mode.exp_avg_sq,)


def _adam_parameters(states: Mapping[Any, Any], groups: list[Any]) -> set[Any]:
    """Return the indices of parameters whose state is that of Adam or AdamW."""
    found = set()
    for index in (index for group in groups if "betas" in group for index in group["params"]):
        values = _tensors(states.get(index))
        if not values.keys() >= _MOMENTS or not states[index].keys() <= _ADAM_STATE:
            continue
        exp_avg, exp_avg_sq = values["exp_avg"], values["exp_avg_sq"]
        if exp_avg.shape == exp_avg_sq.shape and {exp_avg.dtype, exp_avg_sq.dtype} <= LOSSY_DTYPES:
            found.add(index)
    return found


def _recorded_names(groups: list[Any]) -> dict[Key, str]:
    names: dict[Key, str] = {}
    for group in groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    return names
