"""Forks of the process that runs tests. A child ends with its work, whatever that raises, and runs no other tests."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork(work: Callable[[], object]) -> int:
    """Call a function in a fork, which has imported all there is to import, and return its process id.

    The child ends with 0, with the code of a SystemExit, or with 1 after another error, which it prints.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    code: object = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def exit_code_of(child: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
