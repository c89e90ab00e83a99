"""Runs programs as a fresh interpreter would, in forks of a server that has imported PyTorch, which takes seconds.

Where a system has no fork, a fresh interpreter runs them.

The server has imported neither this package nor Transformers nor the Hub's client, so these read the environment that a
program is given. It hashes strings by a seed of its own, so that no test of equal bytes depends on an order of a set.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forks import exit_code_of, fork

_SECONDS = 300  # after which a program is killed


def run_fresh(
    program: str, *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of Python, and return its exit code and what it printed.

    Args:
        program: The source, as `python -c` takes it.
        arguments: What it finds in `sys.argv[1:]`.
        cwd: Where it runs; by default where the tests do.
        environment: Variables that it has beside those of the tests.
    """
    variables = {**os.environ, **(environment or {})}
    if not hasattr(os, "fork"):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=variables)
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "errors")]
        request = {"program": program, "arguments": list(map(str, arguments)), "cwd": str(cwd or Path.cwd())}
        request |= {"environment": variables, "said": list(map(str, said))}
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        out, errors = (path.read_text(encoding="utf-8") for path in said)
    return subprocess.CompletedProcess([program, *arguments], code, out, errors)


def run_command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m hf_trainweights` with arguments; the options are those of `run_fresh`."""
    return run_fresh("import runpy; runpy.run_module('hf_trainweights', run_name='__main__')", *arguments, **options)


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    with server:  # closes what leads to it, and waits
        pass


def _serve() -> None:
    """Run programs until there is no more input, and print the exit code of each."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.export  # noqa: F401  (what Transformers imports of PyTorch)

    sys.path[0] = ""
    gc.freeze()  # a garbage collector that looks through all that copies it, in each fork
    for line in sys.stdin:
        print(exit_code_of(fork(functools.partial(_run, **json.loads(line)))), flush=True)


def _run(program: str, arguments: list[str], cwd: str, environment: dict[str, str], said: list[str]) -> None:
    """Run a program in this process."""
    signal.alarm(_SECONDS)
    for descriptor, path in enumerate((os.devnull, *said)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    _serve()
