"""Selectors: how a user names modules and parameters in overrides, in modules_to_not_convert and in rules.

`re:` and a regular expression selects the modules and parameters whose full names it matches as a whole. Any other
selector selects the module or parameter of that full name; or, if nothing has that name, everything whose name contains
it as a run of whole parts: `mlp.down_proj` selects `layers.0.mlp.down_proj.weight`. A module is selected with all that
it holds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from hf_trainweights.errors import ConfigError, did_you_mean
from hf_trainweights.files.expressions import matching

EXPRESSION = "re:"

# Names that are compared with a misspelt one; more would take seconds.
_MAX_COMPARED = 20_000


def select(selectors: Iterable[str], names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return which of some names each selector selects.

    Examples:
        >>> select(["re:.*up_proj", "up_proj", "proj"], ["layers.0.up_proj"])["up_proj"]
        frozenset({'layers.0.up_proj'})
    """
    selectors, names = list(selectors), frozenset(names)
    expressions = {each: each.removeprefix(EXPRESSION) for each in selectors if each.startswith(EXPRESSION)}
    matched, plain = matching(expressions.values(), sorted(names)), _select_plain({*selectors} - {*expressions}, names)
    return {
        each: _with_contents(matched[expressions[each]], names) if each in expressions else plain[each]
        for each in selectors
    }


def name_and_modules(name: str) -> list[str]:
    """Return a name and those of all modules around it, but for the outermost one that has no name.

    Examples:
        >>> name_and_modules("mlp.up.weight")
        ['mlp', 'mlp.up', 'mlp.up.weight']
    """
    return [*itertools.accumulate(name.split("."), "{}.{}".format)]


def _with_contents(modules: frozenset[str], names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if "" in modules or not modules.isdisjoint(name_and_modules(name)))


def _select_plain(selectors: set[str], names: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return what selectors without an expression select, in one pass over all names."""
    within: dict[str, set[str]] = {each: set() for each in selectors}
    inside: dict[str, set[str]] = {each: set() for each in selectors}
    counts = {each.count(".") + 1 for each in selectors}
    for name in names:
        parts = name.split(".")
        for count in counts:
            for start, run in enumerate(_runs(parts, count)):
                if run in selectors:
                    (inside if start else within)[run].add(name)
    # The outermost module has the name "".
    return {each: frozenset(within[each] or inside[each] if each else names) for each in selectors}


def _is_within(selector: str, name: str) -> bool:
    """Return whether the selector is the full name, or that of a module around it; the outermost has the name ""."""
    return not selector or name == selector or name.startswith(f"{selector}.")


def most_exact(selected: Mapping[str, Collection[str]], names: Iterable[str]) -> str | None:
    """Return the selector that decides for a parameter; `names` are its own and its module's, under each of its ties.

    Full names win over runs of parts, and these over expressions; then parameters over modules, more parts over fewer,
    and the first over later ones. Among expressions the first wins.

    Examples:
        >>> names = ["mlp", "mlp.weight"]
        >>> most_exact(select(["re:.*", "mlp", "mlp.weight"], names), names)
        'mlp.weight'
    """
    names = frozenset(names)
    candidates = (each for each in selected if not names.isdisjoint(selected[each]))
    return min(candidates, key=lambda each: _rank(each, names), default=None)


def _rank(selector: str, names: frozenset[str]) -> tuple[int, bool, int]:
    if selector.startswith(EXPRESSION):
        return 2, False, 0
    kind = 0 if any(_is_within(selector, name) for name in names) else 1
    own = (name for name in names if name.rpartition(".")[0] in names)
    is_module = not any(f".{name}".endswith(f".{selector}") for name in own)
    return kind, is_module, -len(selector.split(".")) if selector else 0


def require_used(where: str, selected: Mapping[str, Collection[str]], names: Iterable[str]) -> None:
    """Check that each selector selects something: one that does not is most likely misspelt."""
    for selector, found in selected.items():
        if not found:
            raise ConfigError(
                f"{where}[{selector!r}]",
                "a module, a parameter or whole parts of their names, or re: and an expression for a whole name",
                "nothing that it selects",
                _correction(selector, list(names)),
            )


def _correction(selector: str, names: list[str]) -> str:
    default = "Look at the names in model.named_parameters()."
    parts = {part for name in names for part in name.split(".")}
    if selector.startswith(EXPRESSION):
        unknown = (word for word in re.findall(r"[A-Za-z_]{3,}", selector[len(EXPRESSION) :]) if word not in parts)
        return next((step for word in unknown if (step := did_you_mean(word, parts, "")) != ""), default)
    if re.search(r"[^\w.-]", selector):
        return f'Write "{EXPRESSION}" before a regular expression. {default}'
    count = len(selector.split("."))
    runs = dict.fromkeys(run for name in names for run in _runs(name.split("."), count))
    return did_you_mean(selector, list(runs)[:_MAX_COMPARED], default)


def _runs(parts: list[str], count: int) -> list[str]:
    """Return the runs of `count` parts of a name."""
    return [".".join(parts[start : start + count]) for start in range(len(parts) - count + 1)]
