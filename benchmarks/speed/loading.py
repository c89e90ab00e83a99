"""Loads and saves, each in a process of its own: seconds of CPU, and memory that no file backs."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.memory import Peak, anonymous_bytes
from benchmarks.speed.methods import Method, one_line
from benchmarks.speed.models import load
from benchmarks.speed.rounds import significant
from hf_trainweights import get_model_size_in_bytes


def loading(path: Path, methods: Sequence[Method], rounds: int, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Measure quantizing on load, saving, and loading what was saved.

    Args:
        path: The saved float model.
        methods: What is compared; the float model is loaded, saved and reloaded as well.
        rounds: How often each, one after the other.
        failures: Filled with what could not run, and why.

    Returns:
        One row per method: medians of CPU seconds and of bytes; `ratio` is the reload's seconds over the float's.
    """
    taken: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        for _ in range(rounds):
            for method in methods:
                saved = Path(directory) / method.name.replace(" ", "-").replace(",", "")
                result = _in_child(_load_and_save, path, saved, method)
                if "error" not in result:
                    result |= _in_child(_reload, path, saved, method)
                if "error" in result:
                    failures[f"{method.name}, loading"] = str(result["error"])
                taken.setdefault(method.name, []).append({k: v for k, v in result.items() if k != "error"})
    rows = []
    for name, results in taken.items():
        keys = set.intersection(*(set(result) for result in results))
        medians = {key: significant(statistics.median(result[key] for result in results)) for key in sorted(keys)}
        rows.append({"name": name, **medians})
    return rows


def _in_child(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run a function in a fork of this process, which has imported everything and holds no model."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def target() -> None:
        try:
            torch.set_num_threads(1)
            writer.send_bytes(json.dumps(function(*args)).encode())
        except Exception as error:
            writer.send_bytes(json.dumps({"error": one_line(error)}).encode())

    child = context.Process(target=target)
    child.start()
    writer.close()
    result = reader.recv_bytes() if reader.poll(300) else b'{"error": "nothing after 300 s"}'
    child.join(10)
    child.kill()
    return json.loads(result)


def _load_and_save(path: Path, saved: Path, method: Method) -> dict[str, Any]:
    model, load_figures = _measured(lambda: load(path, method))
    figures = {f"load_{name}": value for name, value in load_figures.items()}
    figures["payload_bytes"] = get_model_size_in_bytes(model)
    start = time.process_time()
    try:
        model.save_pretrained(saved)
    except Exception as error:
        return {**figures, "error": one_line(error)}
    figures["save_seconds"] = time.process_time() - start
    figures["disk_bytes"] = sum(file.stat().st_size for file in saved.iterdir())
    return figures


def _reload(path: Path, saved: Path, method: Method) -> dict[str, float]:
    del path
    _, figures = _measured(lambda: AutoModelForCausalLM.from_pretrained(saved, dtype=method.dtype))
    return {f"reload_{name}": value for name, value in figures.items()}


def _measured(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    gc.collect()
    # Memory that was freed but not given back would hide what the load takes.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, start = anonymous_bytes(), time.process_time()
    with Peak() as peak:
        result = function()
    seconds = time.process_time() - start - peak.own_seconds
    gc.collect()
    resident = anonymous_bytes() - before
    return result, {"seconds": seconds, "peak_bytes": peak.increase_bytes, "resident_bytes": resident}
