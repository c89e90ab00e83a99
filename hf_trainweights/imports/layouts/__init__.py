"""The layouts of other quantizers, by the `quant_method` in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_trainweights.errors import ConfigError
from hf_trainweights.imports.layouts.auto_round import auto_round
from hf_trainweights.imports.layouts.awq import Awq
from hf_trainweights.imports.layouts.base import WHERE, Layout
from hf_trainweights.imports.layouts.bitsandbytes import BitsAndBytes
from hf_trainweights.imports.layouts.compressed_tensors import CompressedTensors
from hf_trainweights.imports.layouts.float8 import Float8
from hf_trainweights.imports.layouts.gptq import Gptq
from hf_trainweights.imports.layouts.hqq import Hqq
from hf_trainweights.imports.layouts.mlx import Metal, Mlx
from hf_trainweights.imports.layouts.modelopt import ModelOpt
from hf_trainweights.imports.layouts.mxfp4 import Mxfp4
from hf_trainweights.imports.layouts.quanto import Quanto
from hf_trainweights.imports.layouts.torchao import TorchAO

LAYOUTS: dict[str, Callable[[Mapping[str, Any], Mapping[str, str]], Layout]] = {
    "auto-round": auto_round,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "gptq": Gptq,
    "hqq": Hqq,
    "metal": Metal,
    "mlx": Mlx,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "quanto": Quanto,
    "torchao": TorchAO,
}


def layout_of(config: Mapping[str, Any], metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, int]]) -> Layout:
    """Return the layout that a `quantization_config` describes; ConfigError: `LAYOUTS` has no such layout.

    `metadata` is the metadata in the headers of the safetensors files, and `shapes` as in `Layout`.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in LAYOUTS:
        methods = ", ".join(LAYOUTS)
        raise ConfigError(f"{WHERE}: quant_method", f"one of {methods}", repr(method), "Load other models as they are.")
    layout = LAYOUTS[method](config, metadata)
    layout.shapes = shapes
    return layout
