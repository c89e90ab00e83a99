"""Asks one class everything, in a process of its own, which may crash or hang without harm to the others."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from every_architecture.cells import CELLS, Check, Subject
from every_architecture.comparing import DifferenceError
from every_architecture.inputs import find_inputs
from every_architecture.models import Architecture
from every_architecture.training import NotAskedError
from forks import fork

from hf_trainweights.errors import TrainWeightsError

SECONDS = 240
RIGHT, RED = "right", "RED"
# What is known of a class: whether it was built, why its forward was not run, and the outcome of each cell.
Answer = dict[str, Any]
# A save forces what it writes to the disk, for which a tiny model would wait as long as for all else.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def ask(architecture: Architecture, cells: Collection[str] = CELLS, seconds: float = SECONDS) -> Answer:
    """Return what a class answers, asked in a fork of this process.

    Args:
        architecture: The class and its configuration.
        cells: Keys of `CELLS`.
        seconds: After them the process is killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="every-", dir=_MEMORY))
    answer = folder / "answer.json"
    process = fork(partial(_run, architecture, cells, folder, answer))
    ended = _wait(process, time.monotonic() + seconds)
    result = json.loads(answer.read_bytes()) if answer.exists() else {"built": f"{RED}: {ended}", "cells": {}}
    if asking := result.pop("asking", None):
        result["cells"][asking] = f"{RED}: {ended}"
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _wait(process: int, deadline: float) -> str:
    """Wait for a child, kill it after a deadline, and return how it ended."""
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return f"the process ended with {os.waitstatus_to_exitcode(status)}"
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return "it did not end in time"
        time.sleep(0.02)


def _run(architecture: Architecture, cells: Collection[str], folder: Path, answer: Path) -> None:
    """Ask a class in this process, and write what it answers after each cell."""
    said = os.open(folder / "said", os.O_RDWR | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    silence()
    for result in answers(architecture, cells, folder):
        temporary = answer.with_suffix(".new")
        temporary.write_text(json.dumps(result))
        temporary.replace(answer)


def warm_up() -> None:
    """Import what every class needs, once for all forks of this process.

    The garbage collector does not look through it again, which would copy its memory in each fork.
    """
    silence()
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder, contextlib.redirect_stdout(None):
        for _ in answers(Architecture("bert", "BertForMaskedLM"), CELLS, Path(folder)):
            pass
    gc.freeze()


def silence() -> None:
    """Leave out the messages and the threads, which help nobody here."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def answers(architecture: Architecture, cells: Collection[str], folder: Path) -> Iterator[Answer]:
    """Yield the answer of a class as far as it is known, also before each step that may not end."""
    result: Answer = {"built": True, "cells": {}}
    yield {**result, "asking": "build"}
    try:
        model = architecture.build()
    except Exception as error:
        yield {**result, "built": one_line(error)}
        return
    result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    inputs, problem = find_inputs(model)
    if inputs is None:
        result["not run"] = problem
    subject = Subject(model, inputs, folder)
    try:
        if subject.not_read:
            result["not read by Transformers"] = sorted(subject.not_read)[:5]
    except Exception as error:
        yield {**result, "not reloaded by Transformers": one_line(error)}
        return
    for cell in cells:
        yield {**result, "asking": cell}
        result["cells"][cell] = _outcome(subject, *CELLS[cell])
        shutil.rmtree(subject.written, ignore_errors=True)
    yield result


def _outcome(subject: Subject, check: Check, config: dict[str, Any]) -> str:
    """Ask one question."""
    try:
        check(subject, config)
    except NotAskedError as error:
        return f"not asked: {error}"
    except TrainWeightsError as error:
        files = sum(path.is_file() for path in subject.written.rglob("*"))
        return f"{RED}, {files} files were written: {one_line(error)}" if files else f"refused: {one_line(error)}"
    except DifferenceError as error:
        return f"{RED}: {error}"
    except Exception as error:
        return f"{RED}: {one_line(error)}{_place(error)}"
    return RIGHT


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first 240 characters of its text."""
    text = re.sub(r"/\S*/every-\w+/|/dev/shm/tmp\w+/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:240]}"


def _place(error: BaseException) -> str:
    """Return where an error that nobody raised on purpose comes from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno})"
