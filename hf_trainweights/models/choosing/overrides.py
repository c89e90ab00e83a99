"""Exceptions from the configured format: the formats of overrides, and what stays in float."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.selectors import EXPRESSION, matching, select
from hf_trainweights.formats import FORMATS, get_format
from hf_trainweights.formats.base import Format

# Another format for what a selector matches: a name or parameters of one, None to leave it in float.
Override = str | Mapping[str, Any] | None

# Where a pattern may end in a name that it matches from the start.
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))(?s:.*)"


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

    A plain entry that selects nothing is matched as earlier versions of this package matched every entry, with
    `listed`: saved models hold such entries. Of a user's own configuration they are refused by `check_choice`.

    Examples:
        >>> sorted(left_out(["mlp", "layers.[0-2]"], ["layers.0.mlp", "layers.1.attn", "layers.3.attn"]))
        ['layers.0.mlp', 'layers.1.attn']
    """
    names = list(names)
    selected = select(selectors, names)
    earlier = [each for each, found in selected.items() if not found and not each.startswith(EXPRESSION)]
    return listed(earlier, names).union(*selected.values())


def format_of(override: Override) -> Format | None:
    """Return the format that an override gives, None where it leaves the weight in float."""
    if override is None:
        return None
    return get_format({"format": override} if isinstance(override, str) else override)


def check_overrides(overrides: Any) -> dict[str, Any]:
    """Return a copy of overrides that are valid, empty for None."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(
            "overrides", "a dict of names to formats", repr(overrides), 'E.g. {"re:.*down_proj": "int8"}.'
        )
    checked: dict[str, Any] = {}
    for selector, override in (overrides or {}).items():
        _check_override(f"overrides[{selector!r}]", selector, override)
        checked[selector] = dict(override) if isinstance(override, Mapping) else override
    with named("overrides"):
        select(checked, ())
    return checked


def check_plan(plan: Any) -> dict[str, Any] | None:
    """Return a copy of a plan whose formats there are, None for none."""
    if plan is None:
        return None
    if not isinstance(plan, Mapping) or not all(isinstance(each, str | Mapping) for each in plan.values()):
        raise ConfigError("plan", "a dict of names to formats", repr(plan)[:200], "Leave it out: it is made from bits.")
    for name, override in plan.items():
        _check_override(f"plan[{name!r}]", name, override)
    return {name: dict(each) if isinstance(each, Mapping) else each for name, each in plan.items()}


def shortest(form: Format) -> str | dict[str, Any]:
    """Return how an override or a plan names a format: by its name alone, where it is the default of that name.

    Examples:
        >>> shortest(get_format({"format": "int4", "group_size": 32})), shortest(get_format({"format": "int8"}))
        ({'format': 'int4', 'group_size': 32}, 'int8')
    """
    return form.name if get_format({"format": form.name}) == form else form.get_config()


def _check_override(where: str, selector: Any, override: Any) -> None:
    if not isinstance(selector, str) or not (override is None or isinstance(override, str | Mapping)):
        allowed = f"one of {', '.join(FORMATS)}, a dict with a format, or None"
        raise ConfigError(where, allowed, repr(override), "None leaves the weight alone.")
    with named(where):
        format_of(override)


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Let a ConfigError of the block say in which option it lies."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(where, error.expected, error.found, error.next_step) from error
