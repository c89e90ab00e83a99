"""The process that selectors.py starts: it matches names, and nothing it does can hurt the one that started it.

It runs this file alone, by the standard library, because it is started for every load that needs it.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any

MAX_BYTES = 512 << 20


def main() -> None:
    """Read a request from stdin, and write the answer for each expression in a line, as soon as it is known."""
    # Windows has no such limit, and macOS refuses this one.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    request = json.load(sys.stdin)
    for expression in request["expressions"]:
        # Without memory it ends here, and its parent knows by which expression.
        print(json.dumps(_answer(expression, request["names"])), flush=True)


def _answer(expression: str, names: list[str]) -> dict[str, Any]:
    try:
        compiled = re.compile(expression)
        return {"matched": [index for index, name in enumerate(names) if compiled.fullmatch(name)]}
    except (re.error, OverflowError, RecursionError) as error:
        return {"invalid": str(error)}


if __name__ == "__main__":
    main()
