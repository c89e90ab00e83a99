"""Quantized models written in layouts that others read without this package."""

from hf_trainweights.exports.gguf.export import export_gguf
from hf_trainweights.exports.writer import export_compressed_tensors

__all__ = ["export_compressed_tensors", "export_gguf"]
