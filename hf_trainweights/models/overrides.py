"""Exceptions from the configured format: which names they match, which format they give, whether they are valid."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import FORMATS, get_format
from hf_trainweights.formats.base import Format

# Another format for what a selector matches: a name or parameters of one, None to leave it in float.
Override = str | Mapping[str, Any] | None

_EXPRESSION = "re:"


def matches(selector: str, names: Collection[str]) -> bool:
    """Return whether a selector matches one of several names.

    Args:
        selector: A full name, or `re:` and a regular expression for the whole name.
        names: The names.

    Example:
        >>> matches("re:.*up_proj", ["layers.0.up_proj"]), matches("up_proj", ["layers.0.up_proj"])
        (True, False)
    """
    if selector.startswith(_EXPRESSION):
        return any(re.fullmatch(selector.removeprefix(_EXPRESSION), name) for name in names)
    return selector in names


def find_override(overrides: Mapping[str, Override], names: Iterable[str]) -> str | None:
    """Return the selector that decides: an exact name wins, then the first expression that matches.

    Args:
        overrides: Selectors to overrides.
        names: The names of one weight, those that win first.
    """
    names = list(names)
    exact = (name for name in names if name in overrides)
    expressions = (each for each in overrides if each.startswith(_EXPRESSION) and matches(each, names))
    return next(itertools.chain(exact, expressions), None)


def format_of(override: Override) -> Format | None:
    """Return the format that an override gives, None where it leaves the weight in float.

    Args:
        override: The override.

    Raises:
        ConfigError: There is no such format, or not with these parameters.
    """
    if override is None:
        return None
    return get_format({"format": override} if isinstance(override, str) else override)


def check_overrides(overrides: Any) -> dict[str, Any]:
    """Return a copy of overrides that are valid.

    Args:
        overrides: What the user passed as overrides, or None.

    Raises:
        ConfigError: Selectors, expressions or formats are not valid.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(
            "overrides", "a dict of names to formats", repr(overrides), 'E.g. {"re:.*down_proj": "int8"}.'
        )
    checked: dict[str, Any] = {}
    for selector, override in (overrides or {}).items():
        _check_override(f"overrides[{selector!r}]", selector, override)
        checked[selector] = dict(override) if isinstance(override, Mapping) else override
    return checked


def _check_override(where: str, selector: Any, override: Any) -> None:
    if not isinstance(selector, str) or not (override is None or isinstance(override, str | Mapping)):
        allowed = f"one of {', '.join(FORMATS)}, a dict with a format, or None"
        raise ConfigError(where, allowed, repr(override), "None leaves the weight alone.")
    if selector.startswith(_EXPRESSION):
        check_expression(where, selector.removeprefix(_EXPRESSION))
    try:
        format_of(override)
    except ConfigError as error:
        raise ConfigError(where, error.expected, error.found, error.next_step) from error


def check_expression(where: str, expression: str) -> None:
    """Check that a regular expression is valid.

    Args:
        where: The option that it is a value of.
        expression: The expression.

    Raises:
        ConfigError: It is not.
    """
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(
            where, "a regular expression", f"{expression!r} ({error})", "Escape what is meant literally."
        ) from error
