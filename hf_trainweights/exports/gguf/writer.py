"""Write a GGUF file aside, tensor by tensor, and put it in its place at the end."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.gguf.architectures import architecture_of
from hf_trainweights.exports.gguf.metadata import describe_model, describe_pooling, describe_source, vocabulary_size
from hf_trainweights.exports.gguf.tensors import FileTensor, Kind, lay_out
from hf_trainweights.exports.gguf.tokenizer import describe_tokenizer, load_tokenizer
from hf_trainweights.exports.sources import tensors_to_write
from hf_trainweights.files.atomic import make_directories, replace_file, save_errors
from hf_trainweights.files.staging import clean_up

# The label of a file by the quantized type that takes most bytes. Readers show it.
_Label = gguf.LlamaFileType
_FILE_TYPES = {
    Kind.Q8_0: _Label.MOSTLY_Q8_0,
    Kind.Q4_0: _Label.MOSTLY_Q4_0,
    Kind.Q4_1: _Label.MOSTLY_Q4_1,
    Kind.Q5_0: _Label.MOSTLY_Q5_0,
    Kind.Q5_1: _Label.MOSTLY_Q5_1,
    Kind.Q2_K: _Label.MOSTLY_Q2_K,
    Kind.Q3_K: _Label.MOSTLY_Q3_K_M,
    Kind.Q4_K: _Label.MOSTLY_Q4_K_M,
    Kind.Q5_K: _Label.MOSTLY_Q5_K_M,
    Kind.Q6_K: _Label.MOSTLY_Q6_K,
    Kind.IQ4_NL: _Label.MOSTLY_IQ4_NL,
    Kind.IQ4_XS: _Label.MOSTLY_IQ4_XS,
    Kind.MXFP4: _Label.MOSTLY_MXFP4_MOE,
}


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: str | os.PathLike[str] | None,
    target: Path,
) -> None:
    """Write a quantized model, with this tokenizer, or if it is None with the one in `source`."""
    state_dict, architecture = tensors_to_write(model), architecture_of(model)
    tensors = lay_out(model, state_dict, architecture)
    if tokenizer is None and source is None:
        next_step = "Pass it: export_gguf(model, out, tokenizer)."
        raise ConfigError("tokenizer", "the tokenizer of the model", "none", next_step)
    writer = gguf.GGUFWriter(None, architecture.name)
    directory = Path(source) if source is not None and Path(source).is_dir() else None
    describe_source(writer, model, directory)
    describe_model(writer, model, architecture)
    if architecture.encoder:
        describe_pooling(writer, directory)
    tokenizer = load_tokenizer(str(source)) if tokenizer is None else tokenizer
    describe_tokenizer(writer, tokenizer, model.config, vocabulary_size(model))
    sizes: Counter[Kind] = Counter()
    for tensor in tensors.values():
        sizes[tensor.kind] += tensor.nbytes
    writer.add_file_type(_FILE_TYPES[max(_FILE_TYPES, key=lambda kind: sizes[kind])])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    with save_errors(target, "Nothing was changed there."):
        make_directories(target.parent)
        clean_up(target.parent)
        _write(writer, tensors, target)


def _write(writer: gguf.GGUFWriter, tensors: Mapping[str, FileTensor], target: Path) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor_info(name, tensor.byte_shape, np.dtype(np.uint8), tensor.nbytes, tensor.kind)
    with replace_file(target) as file:
        header = _header(writer)
        file.write(header)
        end = len(header)
        for tensor in tensors.values():
            file.write(bytes(-end % writer.data_alignment))
            file.write(tensor.make().cpu().flatten().numpy().data)
            end = tensor.nbytes  # counted from its aligned start, which gives the same padding
        file.write(bytes(-end % writer.data_alignment))


def _header(writer: gguf.GGUFWriter) -> bytes:
    """Return all bytes before the tensors, by way of a temporary file, because gguf writes them only to a path."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "header"
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return file.read_bytes()
