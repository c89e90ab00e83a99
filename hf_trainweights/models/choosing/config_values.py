"""The values of a TrainWeightsConfig: a budget, overrides, a plan, and selectors of weights that stay in float.

Functions here check and interpret them. Errors suggest right values in place of wrong ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_trainweights.errors import ConfigError, did_you_mean
from hf_trainweights.files.selectors import EXPRESSION, matching, select
from hf_trainweights.formats import FORMATS, get_format
from hf_trainweights.formats.base import Format

# The value of an override: the name of a format, a dict of name and parameters, or None to leave a weight in float.
Override = str | Mapping[str, Any] | None

# The rest of a name after a pattern that matches its start: the pattern ends at a `.` or at the end of the name.
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))(?s:.*)"

# The key that names the order of the overrides in config.json.
OVERRIDE_ORDER = "override_order"

# Arguments of other libraries' configurations: those that hold the number of bits, and advice for all others.
_BITS = ("w_bit", "num_bits", "nbits")
_ADVICE = {
    **dict.fromkeys(
        ("quant_type", "bnb_4bit_quant_type", "weights", "weights_dtype"),
        'Name the format: TrainWeightsConfig("int4").',
    ),
    **dict.fromkeys(("llm_int8_skip_modules", "ignore", "modules_to_exclude"), 'Write "modules_to_not_convert".'),
    **dict.fromkeys(("bnb_4bit_compute_dtype", "compute_dtype", "dtype"), "Pass dtype to from_pretrained."),
    "q_group_size": 'Write "group_size".',
}

_UNITS = {"": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
_UNITS["b"] = 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

TARGETS = ("gguf", "compressed-tensors")
"""Layouts of exports that do not hold every format."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """A limit that formats are chosen for; one of the two is set.

    Args:
        bits: Mean bits of a weight, scales included.
        size_bytes: Bytes of the weight files that a save writes.
    """

    bits: float | None
    size_bytes: int | None

    @classmethod
    def of(cls, bits: object, size: object) -> Budget | None:
        """Return the budget that a user sets, or None.

        Examples:
            >>> Budget.of(None, "1.2 GB")
            Budget(bits=None, size_bytes=1200000000)
        """
        if bits is None and size is None:
            return None
        if bits is not None and size is not None:
            raise ConfigError("bits", "either bits or size", f"bits={bits!r} and size={size!r}", "Leave one out.")
        if bits is None:
            return cls(None, _size_bytes(size))
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits < math.inf:
            raise ConfigError("bits", "a number of bits per weight", repr(bits), "4.0 is four bits a weight.")
        return cls(float(bits), None)


def check_left_to_budget(**options: object) -> None:
    """Check that a user who sets a budget does not set options that the budget chooses."""
    for name, value in options.items():
        if value is not None:
            next_step = "Leave one out; overrides give single weights a format of their own."
            raise ConfigError(name, "None with bits or size, which choose the formats", repr(value), next_step)


def check_target(target: str | None, bits: object, size: object) -> str | None:
    """Return the layout to choose formats for. ConfigError: there is no such layout, or neither bits nor size."""
    if target is not None and target not in TARGETS:
        next_step = "Leave it out for ONNX, TorchScript and .pt2, which hold every format."
        raise ConfigError("for_target", f"one of {', '.join(TARGETS)}", repr(target), next_step)
    if target is not None and bits is None and size is None:
        next_step = "Give one of these; of a format that you name, the export says whether it holds it."
        raise ConfigError("for_target", "bits or size, for which formats are chosen", "neither", next_step)
    return target


def _size_bytes(size: object) -> int:
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None and match[2].lower() in _UNITS:
        count = int(float(match[1]) * _UNITS[match[2].lower()])
    else:
        count = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if count <= 0:
        raise ConfigError(
            "size", "a number of bytes, or a text such as '1.2GB' or '900MiB'", repr(size), "Give one of these."
        )
    return count


def listed(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the names that patterns match, as Transformers 5.23 matches `modules_to_not_convert`.

    A pattern is a suffix of a name, or a regular expression that matches from its start up to a `.` or its end.

    Examples:
        >>> listed(["layers.1"], ["layers.1.mlp", "layers.11.mlp"])
        {'layers.1.mlp'}
    """
    patterns, names = tuple(patterns), list(names)
    matched = matching(patterns, names, _BOUNDARY).values()
    return {name for name in names if name.endswith(patterns)}.union(*matched)


def left_out(selectors: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the names that `modules_to_not_convert` selects.

    A plain entry that selects nothing is matched by `listed`, as earlier versions of this package matched every entry:
    saved models hold such entries. In a user's own configuration `check_choice` refuses them.

    Examples:
        >>> sorted(left_out(["mlp", "layers.[0-2]"], ["layers.0.mlp", "layers.1.attn", "layers.3.attn"]))
        ['layers.0.mlp', 'layers.1.attn']
    """
    names = list(names)
    selected = select(selectors, names)
    unused = [entry for entry, matches in selected.items() if not matches and not entry.startswith(EXPRESSION)]
    return listed(unused, names).union(*selected.values())


def format_of(override: Override) -> Format | None:
    """Return the format of an override, or None if it leaves the weight in float."""
    if override is None:
        return None
    return get_format({"format": override} if isinstance(override, str) else override)


def check_overrides(overrides: Any) -> dict[str, Any]:
    """Return a copy of overrides, empty for None, after a check of each."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(
            "overrides", "a dict of names to formats", repr(overrides), 'E.g. {"re:.*down_proj": "int8"}.'
        )
    checked = _checked_formats("overrides", overrides or {})
    with named("overrides"):
        select(checked, ())
    return checked


def check_plan(plan: Any) -> dict[str, Any] | None:
    """Return a copy of a plan, or None, after a check of each format."""
    if plan is None:
        return None
    if not isinstance(plan, Mapping) or not all(isinstance(value, str | Mapping) for value in plan.values()):
        raise ConfigError("plan", "a dict of names to formats", repr(plan)[:200], "Leave it out: it is made from bits.")
    return _checked_formats("plan", plan)


def shortest(form: Format) -> str | dict[str, Any]:
    """Return the value of an override or a plan for a format: its name alone, if its parameters are the default ones.

    Examples:
        >>> shortest(get_format({"format": "int4", "group_size": 32})), shortest(get_format({"format": "int8"}))
        ({'format': 'int4', 'group_size': 32}, 'int8')
    """
    return form.name if get_format({"format": form.name}) == form else form.get_config()


def _checked_formats(option: str, formats: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a copy of an option's formats, by name or selector, after a check of each."""
    for selector, override in formats.items():
        where = f"{option}[{selector!r}]"
        if not isinstance(selector, str) or not isinstance(override, str | Mapping | None):
            allowed = f"one of {', '.join(FORMATS)}, a dict with a format, or None"
            raise ConfigError(where, allowed, repr(override), "None leaves the weight alone.")
        with named(where):
            format_of(override)
    return {selector: dict(value) if isinstance(value, Mapping) else value for selector, value in formats.items()}


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Let a ConfigError of the block name the option that is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(where, error.expected, error.found, error.next_step) from error


def in_order(overrides: dict[str, Any] | None, order: object) -> dict[str, Any] | None:
    """Return overrides in the order that a configuration names: the first of several matching expressions wins."""
    if order is None:
        return overrides
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(overrides or ()):
        expected, next_step = "the keys of overrides, each once", "Repair it, or restore config.json from a copy."
        raise ConfigError(OVERRIDE_ORDER, expected, repr(order)[:200], next_step)
    return {selector: (overrides or {})[selector] for selector in order}


def right_argument(name: str, value: object, allowed: Sequence[str]) -> str:
    """Return advice for an argument that does not exist here: most of them belong to another library."""
    bits = {"load_in_4bit": 4, "load_in_8bit": 8}.get(name, value if name in _BITS else None)
    if bits in (4, 8):
        return f'Write TrainWeightsConfig("int{bits}").'
    return did_you_mean(name, allowed, _ADVICE.get(name, "Leave it out."))


def check_names(names: Sequence[str] | None) -> list[str] | None:
    """Return `modules_to_not_convert` as a list, or None, after a check of each entry."""
    if names is None:
        return None
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "modules_to_not_convert",
            "a list of module names",
            repr(names),
            'Write ["lm_head"], even for a single name.',
        )
    with named("modules_to_not_convert"):
        left_out(names, ())
    return sorted(names) if isinstance(names, set) else list(names)


def check_unknown(key: str, value: Any, allowed: Sequence[str], is_attribute: bool) -> None:
    """Check that the configuration can keep a key which this version does not know, and log the key."""
    if key == "dequantize" and value:
        raise ConfigError(key, "no such key", repr(value), "Load the model, then call model.dequantize().")
    names = ", ".join(allowed)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(key, f"one of {names}, or a JSON value to keep", repr(value), "Leave it out.") from error
    if is_attribute:
        raise ConfigError(key, f"one of {names}", "the name of a method", "Leave it out.")
    _logger.warning("TrainWeightsConfig keeps %s=%r but does not use it: it knows %s.", key, value, names)
