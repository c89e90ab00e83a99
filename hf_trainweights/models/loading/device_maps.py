"""Modules on the "disk": refused while a float model is quantized, memory-mapped on the "cpu" for a quantized file.

Tensors of a quantized file are views of the memory-mapped file: on the "cpu" they take no memory until they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from hf_trainweights.errors import ConfigError

_logger = logging.get_logger(__name__)


def refuse_disk(device_map: Any) -> None:
    """Check that a device map keeps every weight that is quantized on the fly in memory."""
    if isinstance(device_map, Mapping) and "disk" in device_map.values():
        raise ConfigError(
            "device_map",
            "memory for every weight that is quantized on the fly",
            'modules on "disk", which Transformers would leave in float',
            "Save a quantized copy first (save_pretrained), then load that with this device_map.",
        )


def map_disk_to_cpu(device_map: Any) -> Any:
    """Return a new device map with "cpu" for "disk"; what is no dict comes back as it is."""
    if not isinstance(device_map, Mapping):
        return device_map
    if "disk" in device_map.values():
        _warn()
    return {name: "cpu" if device == "disk" else device for name, device in device_map.items()}


def lift_cpu_limit(max_memory_bytes: Mapping[Any, int], model_bytes: int) -> dict[Any, int]:
    """Return new limits that let the "cpu" take what the accelerators do not, so that nothing goes to the "disk"."""
    if sum(max_memory_bytes.values()) < model_bytes:
        _warn()
    return {**max_memory_bytes, "cpu": sys.maxsize}


def _warn() -> None:
    _logger.warning('Modules on "disk" are memory-mapped on "cpu" instead: nothing is copied until it is used.')
