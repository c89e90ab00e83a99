"""Selectors: how a user names modules and parameters in overrides, in modules_to_not_convert and in rules.

A selector that begins with `re:` is a regular expression; it selects the modules and parameters whose full names it
matches. Any other selector selects the module or parameter of that full name. If there is none of that name, it selects
every name that contains it as a run of dotted parts: `mlp.down_proj` selects `layers.0.mlp.down_proj.weight`. A
selected module brings all modules and parameters inside it.

Expressions may come out of a file, such as the config.json of somebody else's model. A short one can keep `re` busy
without end. `regex` has a timeout, but takes gigabytes to compile some short ones. So `re` matches them in a process of
its own, which is ended when it takes too long and may take little memory. Plain names and the commonest expressions,
`.*name` and `name.*`, cannot do harm and need no process.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_trainweights.errors import ConfigError, UnsupportedError, did_you_mean
from hf_trainweights.files.expression_worker import MAX_BYTES

EXPRESSION = "re:"

# The most names that are compared with a misspelt selector; more would take seconds.
_MAX_COMPARED = 20_000

# The time in which the worker must match all expressions; its memory is limited by MAX_BYTES.
_MAX_SECONDS = 10.0
_WORKER = Path(__file__).with_name("expression_worker.py")

# Expressions that `re` matches in time linear in a name. They need the process only if the answers, one for each
# expression and name, are more than _MAX_ANSWERS.
_HARMLESS = re.compile(r"(?:\.\*)?(?:[\w-]|\\?\.)*(?:\.\*)?")
_MAX_ANSWERS = 1_000_000
_MAX_SHOWN = 200


def select(selectors: Iterable[str], names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the names that each selector selects.

    Examples:
        >>> select(["re:.*up_proj", "up_proj", "proj"], ["layers.0.up_proj"])["up_proj"]
        frozenset({'layers.0.up_proj'})
    """
    selectors, names = list(selectors), frozenset(names)
    expressions = {text: text.removeprefix(EXPRESSION) for text in selectors if text.startswith(EXPRESSION)}
    matched, plain = matching(expressions.values(), sorted(names)), _select_plain({*selectors} - {*expressions}, names)
    return {
        selector: _with_contents(matched[expressions[selector]], names) if selector in expressions else plain[selector]
        for selector in selectors
    }


def name_and_modules(name: str) -> list[str]:
    """Return a name and the names of all modules around it; the outermost module has no name and is left out.

    Examples:
        >>> name_and_modules("mlp.up.weight")
        ['mlp', 'mlp.up', 'mlp.up.weight']
    """
    return [*itertools.accumulate(name.split("."), "{}.{}".format)]


def _with_contents(modules: frozenset[str], names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if "" in modules or not modules.isdisjoint(name_and_modules(name)))


def _select_plain(selectors: set[str], names: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return the names that each selector without an expression selects, in one pass over all names."""
    as_full_name: dict[str, set[str]] = {selector: set() for selector in selectors}
    as_run: dict[str, set[str]] = {selector: set() for selector in selectors}
    counts = {selector.count(".") + 1 for selector in selectors}
    for name in names:
        parts = name.split(".")
        for count in counts:
            for start, run in enumerate(_runs(parts, count)):
                if run in selectors:
                    (as_run if start else as_full_name)[run].add(name)
    # The outermost module has the name "", and all names are inside it.
    return {text: frozenset(as_full_name[text] or as_run[text] if text else names) for text in selectors}


def most_exact(selected: Mapping[str, Collection[str]], names: Iterable[str]) -> str | None:
    """Return the selector that decides for a parameter.

    Full names win over runs of parts, and runs over expressions. Then parameters win over modules, more parts over
    fewer, and the first selector over later ones. Among expressions the first wins. `names` are the names of the
    parameter and of its module; a tied parameter has several of both.

    Examples:
        >>> names = ["mlp", "mlp.weight"]
        >>> most_exact(select(["re:.*", "mlp", "mlp.weight"], names), names)
        'mlp.weight'
    """
    names = frozenset(names)
    candidates = (selector for selector in selected if not names.isdisjoint(selected[selector]))
    return min(candidates, key=lambda selector: _rank(selector, names), default=None)


def _rank(selector: str, names: frozenset[str]) -> tuple[int, bool, int]:
    if selector.startswith(EXPRESSION):
        return 2, False, 0
    """Return the key by which the selector sorts; the smallest decides."""
    kind = 0 if not selector or any(selector in name_and_modules(name) for name in names) else 1
    # A parameter is a name whose module is among the names, too.
    parameters = (name for name in names if name.rpartition(".")[0] in names)
    is_module = not any(f".{name}".endswith(f".{selector}") for name in parameters)
    return kind, is_module, -len(selector.split(".")) if selector else 0


def require_used(where: str, selected: Mapping[str, Collection[str]], names: Iterable[str]) -> None:
    """Check that each selector selects something; ConfigError: one does not, and is most likely misspelt."""
    for selector, selected_names in selected.items():
        if not selected_names:
            raise ConfigError(
                f"{where}[{selector!r}]",
                "a module, a parameter or whole parts of their names, or re: and an expression for a whole name",
                "nothing that it selects",
                _correction(selector, list(names)),
            )


def _correction(selector: str, names: list[str]) -> str:
    default = "Look at the names in model.named_parameters()."
    parts = {component for name in names for component in name.split(".")}
    if selector.startswith(EXPRESSION):
        unknown = (word for word in re.findall(r"[A-Za-z_]{3,}", selector[len(EXPRESSION) :]) if word not in parts)
        return next((step for word in unknown if (step := did_you_mean(word, parts, "")) != ""), default)
    if re.search(r"[^\w.-]", selector):
        return f'Write "{EXPRESSION}" before a regular expression. {default}'
    count = len(selector.split("."))
    runs = dict.fromkeys(run for name in names for run in _runs(name.split("."), count))
    return did_you_mean(selector, list(runs)[:_MAX_COMPARED], default)


def _runs(parts: list[str], count: int) -> list[str]:
    """Return all runs of `count` neighbouring parts of a name."""
    return [".".join(parts[start : start + count]) for start in range(len(parts) - count + 1)]


def matching(expressions: Iterable[str], names: Iterable[str], ending: str = "") -> dict[str, frozenset[str]]:
    r"""Return the names that each regular expression, with `ending` behind it, matches from beginning to end.

    ConfigError: an expression is not valid, even if there are no names, or all take more than 10 seconds or 512 MiB.

    Examples:
        >>> matching([r"layers\.[0-3]\..*"], ["layers.2.mlp", "layers.7.mlp"])
        {'layers\\.[0-3]\\..*': frozenset({'layers.2.mlp'})}
    """
    distinct = tuple(dict.fromkeys(expressions))
    return dict(zip(distinct, _match(distinct, tuple(dict.fromkeys(names)), ending), strict=True))


# Cached, because a load matches the same expressions several times.
@functools.lru_cache(maxsize=16)
def _match(expressions: tuple[str, ...], names: tuple[str, ...], ending: str) -> tuple[frozenset[str], ...]:
    whole = [f"(?:{expression}){ending}" if ending else expression for expression in expressions]
    harmless = all(map(_HARMLESS.fullmatch, expressions)) and len(expressions) * len(names) <= _MAX_ANSWERS
    if harmless:
        return tuple(frozenset(filter(re.compile(expression).fullmatch, names)) for expression in whole)
    matched: list[frozenset[str]] = []
    for expression, answer in itertools.zip_longest(expressions, _ask(whole, names)):
        shown = repr(expression if len(expression) < _MAX_SHOWN else f"{expression[:_MAX_SHOWN]}...")
        if answer is None:
            expected = f"a regular expression that {len(names)} names are matched with in {_MAX_SECONDS:.0f} seconds"
            next_step = "Write it without repetitions inside of repetitions, or write the names out."
            raise ConfigError("expression", f"{expected} and {MAX_BYTES >> 20} MiB", shown, next_step)
        if "invalid" in answer:
            fault = f"{shown} ({answer['invalid']})"
            raise ConfigError("expression", "a regular expression", fault, "Escape what is meant literally.")
        matched.append(frozenset(names[index] for index in answer["matched"]))
    return tuple(matched)


def _ask(expressions: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Start the worker, and return its answers in order, up to the first expression that takes too much."""
    request = json.dumps({"expressions": expressions, "names": names}).encode()
    try:
        # Isolated and without site packages: Python starts within 20 ms, and imports no file beside the worker.
        command = [sys.executable, "-I", "-S", str(_WORKER)]
        done = subprocess.run(command, input=request, capture_output=True, timeout=_MAX_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired as late:
        done = late.stdout or b""
    except OSError as error:
        next_step = "Write full names instead of regular expressions."
        raise UnsupportedError("expression", "a process to match it in", str(error), next_step) from error
    return [json.loads(line) for line in done.splitlines(keepends=True) if line.endswith(b"\n")]
