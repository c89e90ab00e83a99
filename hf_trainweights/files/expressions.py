r"""Regular expressions that come out of a file, such as the config.json of somebody else's model.

A short expression can keep `re` busy without end, and `regex`, which has a timeout, takes gigabytes to compile another.
So expressions are matched by `re` in a process of their own, which is ended when it takes too long, and may take little
memory. Names and the commonest expressions, `.*name` and `name.*`, cannot do harm and need no process.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.files.expression_worker import MAX_BYTES

_MAX_SECONDS = 10.0
_WORKER = Path(__file__).with_name("expression_worker.py")

# Matched in time linear in a name. Beyond this many answers even they go to the process.
_HARMLESS = re.compile(r"(?:\.\*)?(?:[\w-]|\\?\.)*(?:\.\*)?")
_MAX_ANSWERS = 1_000_000
_MAX_SHOWN = 200


def matching(expressions: Iterable[str], names: Iterable[str], ending: str = "") -> dict[str, frozenset[str]]:
    r"""Return which names each regular expression, with `ending` behind it, matches as a whole.

    ConfigError: one is not valid, even if there are no names, or all together take longer than 10 seconds or 512 MiB.

    Examples:
        >>> matching([r"layers\.[0-3]\..*"], ["layers.2.mlp", "layers.7.mlp"])
        {'layers\\.[0-3]\\..*': frozenset({'layers.2.mlp'})}
    """
    distinct = tuple(dict.fromkeys(expressions))
    return dict(zip(distinct, _match(distinct, tuple(dict.fromkeys(names)), ending), strict=True))


# A load asks the same several times.
@functools.lru_cache(maxsize=16)
def _match(expressions: tuple[str, ...], names: tuple[str, ...], ending: str) -> tuple[frozenset[str], ...]:
    whole = [f"(?:{expression}){ending}" if ending else expression for expression in expressions]
    harmless = all(map(_HARMLESS.fullmatch, expressions)) and len(expressions) * len(names) <= _MAX_ANSWERS
    if harmless:
        return tuple(frozenset(filter(re.compile(each).fullmatch, names)) for each in whole)
    matched: list[frozenset[str]] = []
    for expression, answer in itertools.zip_longest(expressions, _ask(whole, names)):
        shown = repr(expression if len(expression) < _MAX_SHOWN else f"{expression[:_MAX_SHOWN]}...")
        if answer is None:
            expected = f"a regular expression that {len(names)} names are matched with in {_MAX_SECONDS:.0f} seconds"
            next_step = "Write it without repetitions inside of repetitions, or write the names out."
            raise ConfigError("expression", f"{expected} and {MAX_BYTES >> 20} MiB", shown, next_step)
        if "invalid" in answer:
            found = f"{shown} ({answer['invalid']})"
            raise ConfigError("expression", "a regular expression", found, "Escape what is meant literally.")
        matched.append(frozenset(names[index] for index in answer["matched"]))
    return tuple(matched)


def _ask(expressions: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the worker's answers in order; that for an expression that takes too much is the first one missing."""
    request = json.dumps({"expressions": expressions, "names": names}).encode()
    try:
        # Isolated and without site packages: it starts within 20 ms, and no file beside it is imported.
        command = [sys.executable, "-I", "-S", str(_WORKER)]
        done = subprocess.run(command, input=request, capture_output=True, timeout=_MAX_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired as late:
        done = late.stdout or b""
    except OSError as error:
        next_step = "Write full names instead of regular expressions."
        raise UnsupportedError("expression", "a process to match it in", str(error), next_step) from error
    return [json.loads(line) for line in done.splitlines(keepends=True) if line.endswith(b"\n")]
