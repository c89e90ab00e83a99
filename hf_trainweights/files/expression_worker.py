"""The program of the process that selectors.py starts: it matches names, and cannot hurt the process that started it.

It imports only the standard library, because a process is started for every load that needs it.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any

MAX_BYTES = 512 << 20


def main() -> None:
    """Read a request from stdin, and write the answer for each expression as a line, as soon as it is ready."""
    # Windows has no such limit, and macOS refuses this one.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    request = json.load(sys.stdin)
    for expression in request["expressions"]:
        # If memory runs out, the process ends here, and its parent sees at which expression.
        print(json.dumps(_answer(expression, request["names"])), flush=True)


def _answer(expression: str, names: list[str]) -> dict[str, Any]:
    try:
        compiled = re.compile(expression)
        return {"matched": [index for index, name in enumerate(names) if compiled.fullmatch(name)]}
    except (re.error, OverflowError, RecursionError) as error:
        return {"invalid": str(error)}


if __name__ == "__main__":
    main()
