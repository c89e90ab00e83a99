"""What a quantized model may take: so many bits a weight, or so many bytes in all."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hf_trainweights.errors import ConfigError

_UNITS = {"": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
_UNITS["b"] = 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


TARGETS = ("gguf", "compressed-tensors")
"""Layouts of exports that do not hold every format."""


@dataclass(frozen=True)
class Budget:
    """A limit that formats are chosen for; one of the two is set.

    Args:
        bits: Mean bits of a weight, scales included.
        size_bytes: Bytes of the weight files that a save writes.
    """

    bits: float | None
    size_bytes: int | None

    @classmethod
    def of(cls, bits: object, size: object) -> Budget | None:
        """Return the budget that a user gives, None for none.

        Examples:
            >>> Budget.of(None, "1.2 GB")
            Budget(bits=None, size_bytes=1200000000)
        """
        if bits is None and size is None:
            return None
        if bits is not None and size is not None:
            raise ConfigError("bits", "either bits or size", f"bits={bits!r} and size={size!r}", "Leave one out.")
        if bits is None:
            return cls(None, _size_bytes(size))
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits < math.inf:
            raise ConfigError("bits", "a number of bits per weight", repr(bits), "4.0 is four bits a weight.")
        return cls(float(bits), None)


def check_left_to_budget(**options: object) -> None:
    """Check that a user who gives a budget does not give what is chosen for it."""
    for name, value in options.items():
        if value is not None:
            next_step = "Leave one out; overrides give single weights a format of their own."
            raise ConfigError(name, "None with bits or size, which choose the formats", repr(value), next_step)


def check_target(target: str | None, bits: object, size: object) -> str | None:
    """Return the layout to choose formats for; ConfigError: there is no such layout, or neither bits nor size."""
    if target is not None and target not in TARGETS:
        next_step = "Leave it out for ONNX, TorchScript and .pt2, which hold every format."
        raise ConfigError("for_target", f"one of {', '.join(TARGETS)}", repr(target), next_step)
    if target is not None and bits is None and size is None:
        next_step = "Give one of these; of a format that you name, the export says whether it holds it."
        raise ConfigError("for_target", "bits or size, for which formats are chosen", "neither", next_step)
    return target


def _size_bytes(size: object) -> int:
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None and match[2].lower() in _UNITS:
        count = int(float(match[1]) * _UNITS[match[2].lower()])
    else:
        count = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if count <= 0:
        raise ConfigError(
            "size", "a number of bytes, or a text such as '1.2GB' or '900MiB'", repr(size), "Give one of these."
        )
    return count
