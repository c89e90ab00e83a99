"""The constants of thresholds.toml that Python reads: by them the kernels choose between their ways."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

THRESHOLDS_FILE = Path(__file__).with_name("thresholds.toml")


def _read() -> dict[str, int]:
    constants = tomllib.loads(THRESHOLDS_FILE.read_text(encoding="utf-8"))["python"]
    return {name: constant["value"] for name, constant in constants.items()}


THRESHOLDS: Mapping[str, int] = _read()
