"""The layouts of other quantizers, by the `quant_method` in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_trainweights.errors import ConfigError
from hf_trainweights.imports.layouts.base import WHERE, Layout
from hf_trainweights.imports.layouts.compressed_tensors import CompressedTensors
from hf_trainweights.imports.layouts.torchao import TorchAO
from hf_trainweights.imports.layouts.uniform import Awq, BitsAndBytes, Float8, Gptq

LAYOUTS: dict[str, type[Layout]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "gptq": Gptq,
    "torchao": TorchAO,
}


def layout_of(config: Mapping[str, Any], metadata: Mapping[str, str]) -> Layout:
    """Return the layout that a `quantization_config` describes; ConfigError: `LAYOUTS` has no such layout.

    `metadata` is the metadata in the headers of the safetensors files.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in LAYOUTS:
        methods = ", ".join(LAYOUTS)
        raise ConfigError(f"{WHERE}: quant_method", f"one of {methods}", repr(method), "Load other models as they are.")
    return LAYOUTS[method](config, metadata)
