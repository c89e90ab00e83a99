"""What figures were measured on: the processor, and the versions of what was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

_CPU_FILE = Path("/proc/cpuinfo")  # of Linux


def describe_machine() -> str:
    """Return the processor and its number of cores, as people read them."""
    lines = _CPU_FILE.read_text(encoding="utf-8", errors="replace").splitlines() if _CPU_FILE.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, "") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def describe_versions() -> str:
    """Return the versions of this package, PyTorch and Transformers."""
    return ", ".join(f"{name} {version(name)}" for name in ("hf_trainweights", "torch", "transformers"))
