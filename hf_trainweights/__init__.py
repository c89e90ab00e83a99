"""Small weights and small training checkpoints for Hugging Face Transformers; importing it registers the quantizer."""

import importlib.metadata

from torch.serialization import add_safe_globals
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer

from hf_trainweights import quantized_ops  # noqa: F401  (registers the ops)
from hf_trainweights.checkpoint.callback import TrainWeightsCheckpointCallback as TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint.discovery import latest as latest
from hf_trainweights.checkpoint.encoded import decode_file as decode_file
from hf_trainweights.config import QUANT_METHOD, StoredConfig
from hf_trainweights.config import TrainWeightsConfig as TrainWeightsConfig
from hf_trainweights.errors import TrainWeightsError as TrainWeightsError
from hf_trainweights.export import export_compressed_tensors as export_compressed_tensors
from hf_trainweights.modules import dequantize_ as dequantize_
from hf_trainweights.modules import get_model_size_in_bytes as get_model_size_in_bytes
from hf_trainweights.quantize import quantize_ as quantize_
from hf_trainweights.quantized_tensor import QuantizedTensor as QuantizedTensor
from hf_trainweights.quantized_tensor import rebuild_quantized_tensor as rebuild_quantized_tensor
from hf_trainweights.quantizer import TrainWeightsHfQuantizer as TrainWeightsHfQuantizer
from hf_trainweights.weight_digests import verify_model as verify_model

__version__ = importlib.metadata.version("hf_trainweights")

# A reload of this module must not register a second time: Transformers refuses that.
if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(QUANT_METHOD)(StoredConfig)
    register_quantizer(QUANT_METHOD)(TrainWeightsHfQuantizer)

# The two functions that files call. Files name them by the package alone, so that modules may move, and
# torch.load(weights_only=True) allows nothing else of this package.
for function in (decode_file, rebuild_quantized_tensor):
    function.__module__ = __name__
add_safe_globals([decode_file, rebuild_quantized_tensor])
