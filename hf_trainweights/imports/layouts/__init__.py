"""The layouts of other quantizers, by the `quant_method` in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.imports.layouts.auto_round import auto_round
from hf_trainweights.imports.layouts.awq import Awq
from hf_trainweights.imports.layouts.base import FROM_FLOAT, WHERE, Layout
from hf_trainweights.imports.layouts.bitnet import BitNet
from hf_trainweights.imports.layouts.bitsandbytes import BitsAndBytes
from hf_trainweights.imports.layouts.compressed_tensors import CompressedTensors
from hf_trainweights.imports.layouts.float8 import Float8
from hf_trainweights.imports.layouts.gemma import Gemma
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
    "bitnet": BitNet,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "gemma": Gemma,
    "gptq": Gptq,
    "hqq": Hqq,
    "metal": Metal,
    "mlx": Mlx,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "mxfp8": Float8,
    "quanto": Quanto,
    "torchao": TorchAO,
}

# The other methods of Transformers, and the reason why each is not read.
REFUSED = {
    "aqlm": "sums of vectors from codebooks, and no codes with scales",
    "eetq": "int8 in an order that depends on the GPU it was made for",
    "fouroversix": "weights for a GPU kernel, which were not tried",
    "fp_quant": "rotated weights",
    "gguf": "blocks of GGUF in files that are none",
    "higgs": "rotated weights of a lattice",
    "nvfp4": "weights that Transformers quantizes at each load and does not save",
    "quark": "several layouts, which were not tried",
    "sinq": "a second scale for each column",
    "spqr": "outliers in sparse matrices beside the codes",
    "vptq": "vectors from codebooks, and no codes with scales",
}


def layout_of(config: Mapping[str, Any], metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, int]]) -> Layout:
    """Return the layout that a `quantization_config` describes.

    ConfigError: no such method is known. UnsupportedError: it is one of `REFUSED`.
    `metadata` is the metadata in the headers of the safetensors files, and `shapes` as in `Layout`.
    """
    method = config.get("quant_method")
    if isinstance(method, str) and method in REFUSED:
        expected = "codes with scales, which formats here can hold"
        raise UnsupportedError(f"{WHERE}: quant_method", expected, f"{method}: {REFUSED[method]}", FROM_FLOAT)
    if not isinstance(method, str) or method not in LAYOUTS:
        methods = ", ".join(LAYOUTS)
        raise ConfigError(f"{WHERE}: quant_method", f"one of {methods}", repr(method), "Load other models as they are.")
    layout = LAYOUTS[method](config, metadata)
    layout.shapes = shapes
    return layout
