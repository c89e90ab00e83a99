"""The codecs that each mode chooses for a tensor, and rules: which mode or codec some tensors have instead.

policy.py shows the modes as a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, ROLES, Codec
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.checkpoint.codecs.log_rank1 import LogRank1
from hf_trainweights.checkpoint.codecs.planes import PlanesRank1
from hf_trainweights.checkpoint.codecs.update_space import UpdateSpace
from hf_trainweights.errors import ConfigError, did_you_mean
from hf_trainweights.files.selectors import EXPRESSION
from hf_trainweights.formats import FORMATS

# Tensors with fewer elements are always exact.
SIZE_FLOOR = 4096


@dataclass(frozen=True)
class LossyMode:
    """How much a mode may round: steps in the rms of a first difference, and codecs of Adam's moments."""

    steps_per_rms: int
    exp_avg: Codec
    exp_avg_sq: Codec


LOSSY_MODES = {
    "near-lossless": LossyMode(4, UpdateSpace(step=0.25), LogRank1(step=1)),
    "compact": LossyMode(1, UpdateSpace(step=0.5), LogRank1(step=2)),
}
MODES = ("lossless", *LOSSY_MODES)
# What editors complete; the values are checked where they arrive.
ModeName = Literal["lossless", "near-lossless", "compact"] | str

# The selector of a rule for a role alone.
ANY_NAME = f"{EXPRESSION}.*"

OPTIMIZER_ROLES = ("exp_avg", "exp_avg_sq", "other")
# Tensors of an optimizer's state that a mode treats by name; Adam keeps them for each parameter.
MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})


def allowed_codecs(choice: str | Codec, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the codec that a rule names as a candidate for a tensor; none for exact, or to round a small one."""
    if isinstance(choice, Codec) and (choice.lossless or tensor.numel() >= SIZE_FLOOR):
        return (choice,)
    return ()


def lossy_mode_of(choice: str | Codec, role: str, tensor: Tensor) -> LossyMode | None:
    """Return the mode that may round a weight, or None if the weight is exact or a rule names its codec."""
    is_small = tensor.numel() < SIZE_FLOOR
    if isinstance(choice, Codec) or role == "buffer" or is_small or tensor.dtype not in LOSSY_DTYPES:
        return None
    return LOSSY_MODES.get(choice)


def state_codecs(choice: str | Codec, role: str, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the codecs to try for a tensor of an optimizer's state; nothing means exact."""
    if isinstance(choice, Codec):
        return allowed_codecs(choice, tensor)
    if role not in MOMENTS or tensor.numel() < SIZE_FLOOR:
        return ()
    if choice not in LOSSY_MODES:
        return (PlanesRank1(),) if role == "exp_avg_sq" else ()
    mode = LOSSY_MODES[choice]
    return (mode.exp_avg if role == "exp_avg" else mode.exp_avg_sq,)


@dataclass(frozen=True)
class Rule:
    """A rule of a `Policy`, checked: roles of a tensor, what selects its name, and a mode or a codec."""

    roles: tuple[str, ...]
    selector: str
    choice: str | Codec


def parse_rule(selector: Any, choice: Any) -> Rule:
    """Check a rule of `Policy` and return what it means; ConfigError: unknown, or the codec does not suit the role."""
    where = f"rules[{selector!r}]"
    roles, name = _parse_selector(where, selector)
    parsed = _parse_choice(where, choice)
    if isinstance(parsed, Codec):
        _require_suitable(where, roles, parsed)
    return Rule(roles, name, parsed)


def _parse_selector(where: str, selector: Any) -> tuple[tuple[str, ...], str]:
    """Return the roles and the selector of names."""
    known = (*ROLES, "optimizer")
    role, slash, name = selector.partition("/") if isinstance(selector, str) else ("", "", "")
    if isinstance(selector, str) and selector.startswith(EXPRESSION):
        role, slash, name = "weight", "/", selector
    near = did_you_mean(role, known, "")
    if role and not slash and role not in known and not near:
        role, slash, name = "weight", "/", selector
    if role not in known or (slash and not name):
        allowed = f"{', '.join(known)}, the name of a weight, or a role/name; a name may be re:pattern"
        next_step = f"{near} Weights of that name are weight/{role}." if near else "Choose one of these."
        raise ConfigError(where, f"a selector: {allowed}", repr(selector), next_step)
    if name.startswith(EXPRESSION):
        try:
            re.compile(name.removeprefix(EXPRESSION))
        except re.error as error:
            raise ConfigError(where, "a regular expression after re:", str(error), "Correct it.") from error
    return OPTIMIZER_ROLES if role == "optimizer" else (role,), name or ANY_NAME


def _require_suitable(where: str, roles: tuple[str, ...], codec: Codec) -> None:
    for role in roles:
        if role not in codec.roles:
            suitable = [codec_id for codec_id, each in CODECS.items() if role in each.roles]
            next_step = "Choose one of these."
            if role == "exp_avg_sq":
                next_step = "Nothing linear: it rounds small values to zero, and the next update divides by them."
            raise ConfigError(where, f"for {role} one of {', '.join((*MODES, *suitable))}", codec.codec_id, next_step)


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
