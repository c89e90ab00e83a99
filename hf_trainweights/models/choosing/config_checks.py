"""What the values of a TrainWeightsConfig may be, and what to write in place of others."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from hf_trainweights.errors import ConfigError, did_you_mean
from hf_trainweights.models.choosing.overrides import left_out, named

# The key that names the order of the overrides in config.json.
OVERRIDE_ORDER = "override_order"

# Arguments of other libraries' configurations: those that tell the number of bits, and what to write for others.
_BITS = ("w_bit", "num_bits", "nbits")
_ELSEWHERE = {
    **dict.fromkeys(
        ("quant_type", "bnb_4bit_quant_type", "weights", "weights_dtype"),
        'Name the format: TrainWeightsConfig("int4").',
    ),
    **dict.fromkeys(("llm_int8_skip_modules", "ignore", "modules_to_exclude"), 'Write "modules_to_not_convert".'),
    **dict.fromkeys(("bnb_4bit_compute_dtype", "compute_dtype", "dtype"), "Pass dtype to from_pretrained."),
    "q_group_size": 'Write "group_size".',
}

_logger = logging.getLogger(__name__)


def in_order(overrides: dict[str, Any] | None, order: object) -> dict[str, Any] | None:
    """Return overrides in the order that a configuration names: of several expressions that match the first wins."""
    if order is None:
        return overrides
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(overrides or ()):
        expected, next_step = "the keys of overrides, each once", "Repair it, or restore config.json from a copy."
        raise ConfigError(OVERRIDE_ORDER, expected, repr(order)[:200], next_step)
    return {selector: (overrides or {})[selector] for selector in order}


def right_argument(name: str, value: object, known: Sequence[str]) -> str:
    """Return what to write in place of an argument that there is not: most are another library's."""
    bits = {"load_in_4bit": 4, "load_in_8bit": 8}.get(name, value if name in _BITS else None)
    if bits in (4, 8):
        return f'Write TrainWeightsConfig("int{bits}").'
    return did_you_mean(name, known, _ELSEWHERE.get(name, "Leave it out."))


def check_names(names: Sequence[str] | None) -> list[str] | None:
    """Return `modules_to_not_convert` as a list, or None."""
    if names is None:
        return None
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "modules_to_not_convert",
            "a list of module names",
            repr(names),
            'Write ["lm_head"], even for a single name.',
        )
    with named("modules_to_not_convert"):
        left_out(names, ())
    return sorted(names) if isinstance(names, set) else list(names)


def check_unknown(key: str, value: Any, known: Sequence[str], is_attribute: bool) -> None:
    """Check that a key which this version does not know may be kept, and log it."""
    if key == "dequantize" and value:
        raise ConfigError(key, "no such key", repr(value), "Load the model, then call model.dequantize().")
    listed = ", ".join(known)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(key, f"one of {listed}, or a JSON value to keep", repr(value), "Leave it out.") from error
    if is_attribute:
        raise ConfigError(key, f"one of {listed}", "the name of a method", "Leave it out.")
    _logger.warning("TrainWeightsConfig keeps %s=%r but does not use it: it knows %s.", key, value, listed)
