"""Types and ranges of what a manifest says: a right digest proves the text whole, not that it makes sense."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_trainweights.errors import CorruptFileError

_NEXT_STEP = "Use another checkpoint, or restore this one from a copy."
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Kind:
    """What a field may hold.

    Args:
        expected: In words.
        fits: Whether a value does.
    """

    expected: str
    fits: Callable[[Any], bool]


def _optional(kind: Kind) -> Kind:
    return Kind(f"{kind.expected}, or null", lambda value: value is None or kind.fits(value))


_TEXT = Kind("a text", lambda value: type(value) is str)
_OBJECT = Kind("an object", lambda value: type(value) is dict)
_LIST = Kind("a list", lambda value: type(value) is list)
_INTEGER = Kind("an integer", lambda value: type(value) is int)
_NUMBER = Kind("a number", lambda value: type(value) in (int, float))
_AMOUNT = Kind(
    "a finite number of at least 0", lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max
)
_POSITIVE = Kind("an integer of at least 1", lambda value: type(value) is int and value >= 1)
# File systems count bytes in 64 bits with a sign.
_SIZE = Kind("a number of bytes", lambda value: type(value) is int and 0 <= value < 1 << 63)
_DIGEST = Kind("a SHA-256 in hexadecimal", lambda value: type(value) is str and bool(_SHA256.fullmatch(value)))
_BITS = Kind("a finite number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max)

MANIFEST = {
    "files": _OBJECT,
    "mode": _TEXT,
    "step": _optional(_INTEGER),
    "epoch": _optional(_NUMBER),
    "metrics": _OBJECT,
    "metadata": _OBJECT,
    "anchor": _optional(_OBJECT),
    "created": _TEXT,
    "package_version": _TEXT,
    "torch_version": _TEXT,
}
FILE = {"size_bytes": _SIZE, "sha256": _DIGEST, "report": _OBJECT}
_REPORT = {"anchor": _optional(_DIGEST), "tensors": _LIST}
_TENSOR = {
    "path": _TEXT,
    "name": _TEXT,
    "role": _TEXT,
    "codec": _TEXT,
    "params": _OBJECT,
    "bound": _optional(_AMOUNT),
    "bytes_in": _SIZE,
    "bytes_out": _SIZE,
}
_ANCHOR = {
    "sha256": _DIGEST,
    "saves": _POSITIVE,
    "first_bits": _optional(_BITS),
    "last_bits": _optional(_BITS),
    "delta_rms": _OBJECT,
    "interval_steps": _optional(_POSITIVE),
}


def require_fields(where: str, value: object, kinds: Mapping[str, Kind]) -> None:
    """Check that an object from JSON has fields of certain kinds; it may have others. CorruptFileError: it has not."""
    if not isinstance(value, Mapping):
        raise _corrupt(where, "an object", value)
    for name, kind in kinds.items():
        if name not in value:
            raise CorruptFileError(f"{where}.{name}", kind.expected, "nothing", _NEXT_STEP)
        if not kind.fits(value[name]):
            raise _corrupt(f"{where}.{name}", kind.expected, value[name])


def require_report(where: str, report: Mapping[str, Any]) -> None:
    """Check that the report of an encoded file is as the encoder writes it; empty, it is of a file stored as it is."""
    if not report:
        return
    require_fields(where, report, _REPORT)
    for index, tensor in enumerate(report["tensors"]):
        require_fields(f"{where}.tensors[{index}]", tensor, _TENSOR)


def require_anchor(where: str, record: object) -> None:
    """Check that the record of an anchor is as a save writes it (see `AnchorRecord`)."""
    require_fields(where, record, _ANCHOR)
    assert isinstance(record, Mapping)  # require_fields has checked it
    _require_amounts(f"{where}.delta_rms", record["delta_rms"])


def require_rounding(where: str, lost: object) -> None:
    """Check what a manifest says files had lost before they were encoded (see `Manifest.rounded_before`)."""
    require_fields(where, lost, {})
    assert isinstance(lost, Mapping)  # require_fields has checked it
    for name, amounts in lost.items():
        require_fields(f"{where}[{name!r}]", amounts, {})
        _require_amounts(f"{where}[{name!r}]", amounts)


def _require_amounts(where: str, amounts: Mapping[str, object]) -> None:
    for name, amount in amounts.items():
        if not _AMOUNT.fits(amount):
            raise _corrupt(f"{where}[{name!r}]", _AMOUNT.expected, amount)


def _corrupt(where: str, expected: str, found: object) -> CorruptFileError:
    return CorruptFileError(where[:300], expected, repr(found)[:200], _NEXT_STEP)
