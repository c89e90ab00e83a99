"""Quantized dtypes: a new one is one file here and one line in `FORMATS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import float32_blocks, reciprocal, round_scale, scale_codes
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8

__all__ = ["FORMATS", "Format", "float32_blocks", "get_format", "reciprocal", "round_scale", "scale_codes"]

FORMATS: dict[str, type[Format]] = {
    "int8": Int8,
    "int4": Int4,
    "float8_e4m3": Float8E4M3,
}


def get_format(config: Mapping[str, Any]) -> Format:
    """Return the format that a JSON description names.

    Args:
        config: `{"format": name, **parameters}` as `Format.get_config` returns it; parameters may be left out.

    Raises:
        ConfigError: The name is not in `FORMATS`, or a parameter is unknown or has a value that is not allowed.

    Example:
        >>> get_format({"format": "int4", "group_size": 32})
        Int4(group_size=32)
    """
    parameters = dict(config)
    name = parameters.pop("format", None)
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigError(
            "format", f"one of {', '.join(FORMATS)}", repr(name), "Choose one of these, or register your own before."
        )
    known = [field.name for field in fields(FORMATS[name])]
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        allowed = ", ".join(known) or "no parameters"
        raise ConfigError(f"format {name}", allowed, ", ".join(unknown), "Leave out what this format does not have.")
    return FORMATS[name](**parameters)
