"""Saved models as directories: loaded as the class that saved them, quantized from one directory into another.

No whole file is read. The source's shards are memory-mapped, and each weight is quantized as it is read, so the process
needs memory for the quantized model and one weight of the source.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import ConfigError, TrainWeightsError
from hf_trainweights.files.atomic import create_directory, sync_tree
from hf_trainweights.files.save_errors import save_errors
from hf_trainweights.models.config import TrainWeightsConfig
from hf_trainweights.models.missing_weights import parameter_names, saved_class
from hf_trainweights.models.summary import Summary

# Files that are not copied: those that the quantized model writes itself, and float weights or training state.
_LEFT_BEHIND = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.gguf"),
    *("*.index*.json", "config.json", "trainer_state.json", "trainweights*.json", "README.md", ".*"),
)
# Tokenizers and processors have no other folder.
_FOLDERS = ("additional_chat_templates",)


def quantize_directory(
    source: str | os.PathLike[str], out: str | os.PathLike[str], config: TrainWeightsConfig
) -> Summary:
    """Quantize a saved model into another directory, with its tokenizer, processor and generation configuration.

    The weights are those of `from_pretrained(source, dtype="auto", quantization_config=config)` of the class that the
    model was saved as, written by `save_pretrained(out)`. The source stays as it is.

    Args:
        source: Directory or Hub id of a float model.
        out: A new or empty directory.
        config: Which weights to quantize, and to which format.

    Returns:
        The choice for each parameter.

    Raises:
        ConfigError: `out` is not empty; the model is quantized already, is of no class of Transformers, or lacks
            weights; or nothing would be quantized.
        CorruptFileError: A file of the source is damaged.
        QuantizationError: A weight holds NaN or Inf.
        SaveError: `out` cannot be written.
        OSError: A file cannot be read or copied.

    Example:
        >>> quantize_directory("models/llama", "models/llama-int4", TrainWeightsConfig("int4"))  # doctest: +SKIP
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(str(out), "a new or empty directory", "something there", "Choose another one.")
    saved = _read_config(source)
    if getattr(saved, "quantization_config", None) is not None:
        next_step = "Quantize the float model it was made from, or call model.dequantize() and save that."
        raise ConfigError(str(source), "a float model", "one that is quantized already", next_step)
    model = load_saved(source, quantization_config=config)
    with save_errors(out, "It is as it was."), create_directory(out) as temporary:
        copy_companions(source, temporary)
        model.save_pretrained(temporary)
        sync_tree(temporary)
    quantizer: Any = model.hf_quantizer
    return quantizer.summary()


def load_saved(source: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """Load a saved model as the class that its config.json names, in the dtypes it was saved in, with all its weights.

    Args:
        source: Directory or Hub id of a model, float or quantized.
        options: Further arguments of `from_pretrained`.

    Returns:
        The model; weights that need no conversion are views of the memory-mapped files.

    Raises:
        ConfigError: It is of no class of Transformers, or lacks weights.
        CorruptFileError: A file is damaged.
        TrainWeightsError: Quantizing on the fly failed.

    Example:
        >>> load_saved("models/llama-int4").device  # doctest: +SKIP
        device(type='cpu')
    """
    saved = _read_config(source)
    name, cls = saved_class(saved)
    if cls is None:
        next_step = "A model with code of its own is loaded and saved in Python, with trust_remote_code=True."
        raise ConfigError(str(source), "a class of Transformers in config.json's architectures", name, next_step)
    try:
        model, report = cls.from_pretrained(source, dtype="auto", output_loading_info=True, **options)
    except TrainWeightsError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise _cannot_load(source, error) from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        next_step = "Transformers would start these from random numbers. Save the whole model."
        raise ConfigError(str(source), f"weights for all of {name}", f"none for {missing}", next_step)
    return model


def saved_parameter_names(directory: str | os.PathLike[str]) -> set[str] | None:
    """Return the names of the parameters of a saved model, by its config.json: no weight is read.

    Args:
        directory: A saved model or a Trainer's checkpoint.

    Returns:
        Names of the parameters, all names of a tied one; None without a config.json that names a class of
        Transformers.

    Example:
        >>> saved_parameter_names("out/checkpoint-500")  # doctest: +SKIP
        {'lm_head.weight', 'model.embed_tokens.weight', ...}
    """
    try:
        saved = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError):
        return None
    _, cls = saved_class(saved)
    return None if cls is None else parameter_names(cls, saved)


def copy_companions(source: str | os.PathLike[str], out: Path) -> None:
    """Copy the files beside the weights of a model: tokenizer, processor, licence, generation configuration.

    Args:
        source: Directory or Hub id of a model.
        out: The directory to copy to; made if missing.

    Raises:
        OSError: A file cannot be read or written.
    """
    folder = Path(source)
    if not folder.is_dir():
        snapshot_download(str(source), allow_patterns=[f"{name}/*" for name in _FOLDERS])
        folder = Path(snapshot_download(str(source), ignore_patterns=[*_LEFT_BEHIND, "*/*"]))
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _LEFT_BEHIND):
            shutil.copyfile(path, out / path.name)
        elif path.is_dir() and path.name in _FOLDERS:
            shutil.copytree(path, out / path.name)


def _read_config(source: str | os.PathLike[str]) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _cannot_load(source, error) from error


def _cannot_load(source: str | os.PathLike[str], error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    next_step = "Give a directory that save_pretrained wrote, or the name of a repository on the Hub."
    return ConfigError(str(source), "a model that Transformers loads", reason, next_step)
