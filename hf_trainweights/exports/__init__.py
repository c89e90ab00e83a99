"""Write quantized models in layouts that other programs read without this package."""

from hf_trainweights.exports.compressed_tensors import export_compressed_tensors
from hf_trainweights.exports.gguf.export import export_gguf
from hf_trainweights.exports.onnx.model import OnnxModel, VerificationReport, verify_onnx_model
from hf_trainweights.exports.onnx.writer import export_onnx
from hf_trainweights.exports.pytorch import export_program, export_torchscript

__all__ = [
    "OnnxModel",
    "VerificationReport",
    "export_compressed_tensors",
    "export_gguf",
    "export_onnx",
    "export_program",
    "export_torchscript",
    "verify_onnx_model",
]
