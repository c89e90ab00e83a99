"""Quantized dtypes: a new one is one file here and one line in `FORMATS`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_trainweights.errors import ConfigError, did_you_mean
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.arithmetic import float32_blocks, reciprocal, round_scale, scale_codes
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.column_order import ColumnOrdered
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.formats.uint import UInt2, UInt3, UInt4, UInt5, UInt6
from hf_trainweights.formats.wrapper import Wrapper

__all__ = ["FORMATS", "Format", "float32_blocks", "get_format", "reciprocal", "round_scale", "scale_codes"]

FORMATS: dict[str, type[Format]] = {
    "int8": Int8,
    "int4": Int4,
    "float8_e4m3": Float8E4M3,
    "codebook4": Codebook4,
    "uint2": UInt2,
    "uint3": UInt3,
    "uint4": UInt4,
    "uint5": UInt5,
    "uint6": UInt6,
    "coded": Coded,
    "affine": Affine,
    "table4": Table4,
}

# Formats around another format, by the key that stands for them in its configuration.
WRAPPERS: dict[str, type[Wrapper]] = {wrapper.added_name: wrapper for wrapper in (ColumnScaled, ColumnOrdered)}

# Patterns of the names that other libraries give their formats, without punctuation: "nf4", "int4_weight_only", "q8_0".
_ELSEWHERE = {
    r"fp8|f8|float8|e4m3|e5m2": "float8_e4m3",
    r"q4k|hqq4|uint4|asym": "uint4",
    r"iq4|codebook": "codebook4",
    r"(?:nf|fp|i|u?int|w|q)4|4bit|mxfp4": "int4",
    r"(?:i|u?int|w|q)8|8bit": "int8",
    **{rf"(?:nf|i|u?int|iq|w|q|hqq){bits}|^{bits}bit": f"uint{bits}" for bits in (2, 3, 5, 6)},
}


def parameters_of(name: object) -> tuple[str, ...]:
    """Return the names of a format's parameters, and an empty tuple for a name that is not in `FORMATS`.

    Examples:
        >>> parameters_of("int4")
        ('group_size',)
    """
    return tuple(field.name for field in fields(FORMATS[name])) if isinstance(name, str) and name in FORMATS else ()


def get_format(config: Mapping[str, Any]) -> Format:
    """Return the format that a JSON description names.

    Args:
        config: `{"format": name, **parameters}` as `Format.get_config` returns it; parameters may be left out. Any
            format also takes one of `"column_scale": True`, which gives each input column a factor of its own, and
            `"column_order": True`, which stores columns in another order.

    Raises:
        ConfigError: The name is not in `FORMATS`, or a parameter is unknown or has a value that is not allowed.

    Examples:
        >>> get_format({"format": "int4", "group_size": 32})
        Int4(group_size=32)
    """
    if not isinstance(config, Mapping):
        raise ConfigError("format", 'a dict such as {"format": "int8"}', repr(config), "Pass one.")
    parameters = dict(config)
    name = parameters.pop("format", None)
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigError("format", f"one of {', '.join(FORMATS)}", repr(name), _nearest_format(name))
    wrappers = [wrapper for key, wrapper in WRAPPERS.items() if _is_true(parameters, key)]
    if len(wrappers) > 1:
        raise ConfigError(f"format {name}", f"at most one of {', '.join(WRAPPERS)}", "both", "Leave one out.")
    allowed_names = [field.name for field in fields(FORMATS[name])]
    unknown = sorted(set(parameters) - set(allowed_names))
    if unknown:
        allowed = ", ".join([*allowed_names, *WRAPPERS])
        raise ConfigError(f"format {name}", allowed, ", ".join(unknown), "Leave out what this format does not have.")
    form = FORMATS[name](**parameters)
    return wrappers[0](form) if wrappers else form


def _is_true(parameters: dict[str, Any], key: str) -> bool:
    """Take a parameter out of a format's parameters; ConfigError: it is neither True nor False."""
    value = parameters.pop(key, False)
    if type(value) is not bool:
        raise ConfigError(key, "True or False", repr(value), "Pass one of these.")
    return value


def _nearest_format(name: object) -> str:
    """Return the advice of the error about a wrong name; it translates the names that other libraries use."""
    default = "Choose one of these, or register your own before."
    spelt = re.sub(r"[^a-z0-9]", "", name.lower()) if isinstance(name, str) else ""
    elsewhere = (form for pattern, form in _ELSEWHERE.items() if re.search(pattern, spelt))
    return next((f'Did you mean "{form}"?' for form in elsewhere), did_you_mean(name, FORMATS, default))
