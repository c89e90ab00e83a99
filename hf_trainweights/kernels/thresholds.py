"""The constants by which the kernels choose between their ways, from thresholds.json.

Python reads the section `python` of that file. hatch_build.py writes native/thresholds.h from the section `native`, and
`python -m benchmarks.tables` writes docs/measured/thresholds.md from both. Each constant has three fields: its `value`,
its `meaning` in a sentence, and as `measured` the figures behind the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

THRESHOLDS_FILE = Path(__file__).with_name("thresholds.json")


def _read() -> dict[str, int]:
    constants = json.loads(THRESHOLDS_FILE.read_text(encoding="utf-8"))["python"]
    return {name: constant["value"] for name, constant in constants.items()}


THRESHOLDS: Mapping[str, int] = _read()
