"""Small weights and small training checkpoints for Hugging Face Transformers; importing it registers the quantizer.

Public are the names in `__all__` of this module, and of `hf_trainweights.checkpoint`, `hf_trainweights.distributed`,
`hf_trainweights.exports` and `hf_trainweights.formats`. `import hf_trainweights.diffusers` registers the quantizer with
diffusers. All other names and modules may change with any release.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.lazy import lazy as _lazy
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.quantize_in_place import dequantize_, quantize_
from hf_trainweights.models.quantize_in_place import settle as _settle
from hf_trainweights.models.quantizer import TrainWeightsHfQuantizer
from hf_trainweights.models.registration import register as _register
from hf_trainweights.tensor.modules import get_model_size_in_bytes
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor, rebuild_quantized_tensor

if TYPE_CHECKING:
    from hf_trainweights.cache.kv_cache import KVCache
    from hf_trainweights.checkpoint.directory import latest
    from hf_trainweights.checkpoint.loop.manager import CheckpointManager
    from hf_trainweights.checkpoint.trainer.callback import TrainWeightsCheckpointCallback
    from hf_trainweights.exports.compressed_tensors import export_compressed_tensors
    from hf_trainweights.exports.gguf.export import export_gguf
    from hf_trainweights.exports.onnx.model import OnnxModel, verify_onnx_model
    from hf_trainweights.exports.onnx.writer import export_onnx
    from hf_trainweights.exports.pytorch import export_program, export_torchscript
    from hf_trainweights.imports.cached import from_quantized
    from hf_trainweights.imports.directory import import_directory
    from hf_trainweights.inspection.difference import compare_checkpoints, compare_models
    from hf_trainweights.inspection.listing import inspect_weights
    from hf_trainweights.inspection.verification import verify_model
    from hf_trainweights.models.choosing.summary import summary
    from hf_trainweights.models.directory import dequantize_directory, quantize_directory
    from hf_trainweights.models.saving.single_file import load_file, save_file
    from hf_trainweights.report.write import write_report

__version__ = _version("hf_trainweights")

__all__ = [
    "CheckpointManager",
    "KVCache",
    "OnnxModel",
    "QuantizedTensor",
    "TrainWeightsCheckpointCallback",
    "TrainWeightsConfig",
    "TrainWeightsError",
    "TrainWeightsHfQuantizer",
    "compare_checkpoints",
    "compare_models",
    "dequantize_",
    "dequantize_directory",
    "export_compressed_tensors",
    "export_gguf",
    "export_onnx",
    "export_program",
    "export_torchscript",
    "from_quantized",
    "get_model_size_in_bytes",
    "import_directory",
    "inspect_weights",
    "latest",
    "load_file",
    "quantize_",
    "quantize_directory",
    "save_file",
    "summary",
    "verify_model",
    "verify_onnx_model",
    "write_report",
]

# A program that only loads a model does not need these names, so their modules are imported at their first use.
__getattr__ = _lazy(
    __name__,
    {
        "CheckpointManager": "checkpoint.loop.manager",
        "KVCache": "cache.kv_cache",
        "OnnxModel": "exports.onnx.model",
        "TrainWeightsCheckpointCallback": "checkpoint.trainer.callback",
        "compare_checkpoints": "inspection.difference",
        "compare_models": "inspection.difference",
        "dequantize_directory": "models.directory",
        "export_compressed_tensors": "exports.compressed_tensors",
        "export_gguf": "exports.gguf.export",
        "export_onnx": "exports.onnx.writer",
        "export_program": "exports.pytorch",
        "export_torchscript": "exports.pytorch",
        "from_quantized": "imports.cached",
        "import_directory": "imports.directory",
        "inspect_weights": "inspection.listing",
        "latest": "checkpoint.directory",
        "load_file": "models.saving.single_file",
        "quantize_directory": "models.directory",
        "save_file": "models.saving.single_file",
        "summary": "models.choosing.summary",
        "verify_model": "inspection.verification",
        "verify_onnx_model": "exports.onnx.model",
        "write_report": "report.write",
    },
)

# Importing the package changes Transformers and torch here (`models/registration.py` lists how): Transformers gets the
# quantizer, its `save_pretrained` and some other methods call `_settle` first, and `torch.load(weights_only=True)` may
# call the two functions, which encoded files and pickled weights name.
_register(TrainWeightsHfQuantizer, _settle, callable_by_files=(decode_file, rebuild_quantized_tensor))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
