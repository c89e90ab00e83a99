"""`import_directory`: write a model of another quantizer as a directory of this package.

The files are converted one module at a time into a directory beside the target. The converted model is then loaded and
saved like any other model. So a model of which Transformers cannot load every tensor is refused before the target
appears, and the target follows every convention of `save_pretrained`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.exports.refusals import require
from hf_trainweights.files.digests import CONFIG_NAME
from hf_trainweights.files.reading import read_json_object
from hf_trainweights.formats.base import Format
from hf_trainweights.imports.conversion import Skeleton, Source, convert, text_alone
from hf_trainweights.imports.gguf.sources import find_gguf
from hf_trainweights.imports.layouts import layout_of
from hf_trainweights.imports.layouts.base import AGAIN
from hf_trainweights.imports.layouts.quanto import MAP_NAME
from hf_trainweights.models.choosing.description import config_of
from hf_trainweights.models.choosing.summary import Summary
from hf_trainweights.models.loading.saved_models import (
    check_config,
    download,
    load_saved,
    read_config,
    refuse_adapter,
    refuse_file,
)
from hf_trainweights.models.loading.stored_weights import saved_class
from hf_trainweights.models.saving.new_directories import copy_companions, new_directory, require_vacant_directory

# Keys of config.json that describe a quantized model. compressed-tensors used the second before Transformers knew it.
_KEYS = ("quantization_config", "compression_config")
# MLX's key, whose description has no `quant_method`.
_MLX_KEY = "quantization"
# MLX leaves out the other parts of a model of several parts. The names of the text's tensors begin so.
_MLX_TEXT = "language_model."
# Older models of GPTQ, AWQ and ModelOpt describe it in a file of their own. If the file names no `quant_method`, the
# method is the value here.
_DESCRIPTIONS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    MAP_NAME: "quanto",
}
# AWQ's names of two settings in its file, and their names in config.json.
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


def import_directory(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    file: str | None = None,
    base_model: str | os.PathLike[str] | None = None,
) -> Summary:
    """Write a model that another program quantized in this package's layout, without quantizing it again.

    Codes and scales are copied, so the weights have the same values as before. Settings for activations and caches are
    left out. The source stays as it is, and no code in it is executed.

    Args:
        source: Directory or Hub id of a model in a layout of compressed-tensors, GPTQ, AWQ, AutoRound, bitsandbytes,
            MLX, HQQ, ModelOpt, Quanto, torchao, or Transformers' own MXFP4, float8, BitNet and Gemma; or of GGUF
            files; or one file of these.
        out: A new or empty directory.
        file: For GGUF, the name or a pattern of the one file to read, such as `"*Q4_K_M*"`; None if there is one alone.
        base_model: For GGUF, a directory or Hub id whose configuration and tokenizer to take; None for those beside the
            file, or else in it.

    Returns:
        The choice for each parameter.

    Raises:
        ConfigError: `out` is not empty; or the source is missing, cannot be read, has an adapter, is of no class of
            Transformers, lacks weights, or has an unknown layout; or `file` selects none or several.
        CorruptFileError: A file of the source is damaged, or tensors do not fit each other.
        UnsupportedError: No format of this package can hold a weight exactly, or the model's class lacks a parameter
            for a tensor that is not zero. The error names the tensor. Or the package gguf is not installed.
        SaveError: `out` cannot be written.

    Examples:
        >>> import_directory("models/llama-gptq", "models/llama-int4")  # doctest: +SKIP
        >>> import_directory("models/llama-gguf", "models/llama", file="*Q4_K_M*")  # doctest: +SKIP
    """
    require_vacant_directory(Path(out))
    local = local_source(source, file)
    base = None if base_model is None or local.is_dir() else local_source(base_model, None)
    return import_local(local, Path(out), base)


def import_local(local: Path, out: Path, base: Path | None) -> Summary:
    """Import as `import_directory` does, from a source and a base model that `local_source` has found."""
    opened = _open_directory(local) if local.is_dir() else _open_gguf(local, base)
    with new_directory(out) as temporary:
        converted = temporary.with_name(f"{temporary.name}.converted")
        converted.mkdir()
        config, default = opened.convert(converted)
        _write_config(converted, config, default)
        opened.add_companions(converted)
        copy_companions(converted, temporary)
        model = _load(opened.where, converted)
        model.save_pretrained(temporary)
    quantizer: Any = model.hf_quantizer
    return quantizer.summary()


class _Opened(NamedTuple):
    """A source that has been checked.

    Args:
        where: Its path, for errors.
        convert: Writes its tensors in this package's layout into a directory, and returns its configuration and the
            format of most weights.
        add_companions: Writes the files beside its weights into a directory.
    """

    where: Path
    convert: Callable[[Path], tuple[dict[str, Any], Format]]
    add_companions: Callable[[Path], None]


def local_source(source: str | os.PathLike[str], file: str | None) -> Path:
    """Return the GGUF file that `file` selects, or the directory of a model; one on the Hub is downloaded.

    ConfigError: there is none of them, or there are several files; or the directory has an adapter.
    """
    return find_gguf(source, file) or _folder(source)


def _open_directory(folder: Path) -> _Opened:
    described, config = _read_json(folder)
    files = Source(folder)
    check_config(config, len(files.names), files.size_bytes, str(folder / CONFIG_NAME))
    saved = read_config(folder)
    if described.get("quant_method") == "mlx" and all(name.startswith(_MLX_TEXT) for name in files.names):
        files.drop_prefix(_MLX_TEXT)
        described = {key.removeprefix(_MLX_TEXT): value for key, value in described.items()}
        saved = text_alone(saved) or saved
        config = json.loads(saved.to_json_string(use_diff=False))
    name, cls = saved_class(saved)
    if cls is None:
        expected, next_step = "a class of Transformers in config.json's architectures", "Other models are not read."
        raise ConfigError(str(folder), expected, name, next_step)
    skeleton = Skeleton(cls, saved, files.size_bytes)
    # torchao's metadata uses the model's names of tensors, which may differ from the names in the checkpoint.
    described_names = skeleton.names_in_checkpoint(files.metadata)
    metadata = {described_names.get(name, name): text for name, text in files.metadata.items()}
    layout = layout_of(described, metadata, skeleton.matrix_shapes())

    def write(target: Path) -> tuple[dict[str, Any], Format]:
        return config, convert(files, layout, skeleton, target).most_common(1)[0][0]

    return _Opened(folder, write, partial(copy_companions, folder))


def _open_gguf(file: Path, base: Path | None) -> _Opened:
    require("gguf", "gguf")
    from hf_trainweights.imports.gguf.model import GgufModel

    folder = file.parent if base is None else base.parent if base.is_file() else base
    model = GgufModel(file, folder)

    def add_companions(target: Path) -> None:
        copy_companions(folder, target)
        model.save_tokenizer(target)

    return _Opened(file, model.convert, add_companions)


def _folder(source: str | os.PathLike[str]) -> Path:
    refuse_file(source)
    refuse_adapter(source)
    if os.path.isdir(source):
        return Path(source)
    try:
        return download(str(source))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        # For a path that does not exist the Hub complains of an invalid repository name, which would mislead the user.
        is_name = "/" in str(source) and not isinstance(error, HFValidationError)
        failure = reason if os.path.lexists(source) or is_name else "nothing there"
        next_step = "Give a directory, or the name of a repository on the Hub."
        raise ConfigError(str(source), "a quantized model", failure, next_step) from error


def _read_json(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description of the quantized weights, and the configuration without this description."""
    file = folder / CONFIG_NAME
    try:
        config = read_json_object(file, AGAIN)
    except OSError as error:
        raise ConfigError(str(file), "the configuration of a model", str(error), AGAIN) from error
    descriptions = {key: config.pop(key) for key in (*_KEYS, _MLX_KEY) if config.get(key) is not None}
    described, mlx = next(iter(descriptions.values()), None), descriptions.get(_MLX_KEY)
    if isinstance(mlx, dict):
        # MLX repeats its description under the usual key, or leaves there that of the model it has converted.
        described = {**mlx, "quant_method": "mlx", "model_type": config.get("model_type")}
    if described is None:
        described = _read_description(folder)
    if not isinstance(described, dict):
        raise ConfigError(str(file), "an object as quantization_config", repr(described)[:200], AGAIN)
    return {_OLD_NAMES.get(key, key): value for key, value in described.items()}, config


def _read_description(folder: Path) -> dict[str, Any]:
    """Read the description of the quantized weights from the separate file of older GPTQ and AWQ models."""
    for name, method in _DESCRIPTIONS.items():
        if (folder / name).is_file():
            return {"quant_method": method} | read_json_object(folder / name, AGAIN)
    expected = f"a quantization_config, or {' or '.join(_DESCRIPTIONS)} beside it"
    next_step = (
        "Quantize a float model with quantize_directory. If these weights are quantized already, write that file, with "
        "the bits and the group_size that they were made with."
    )
    raise ConfigError(str(folder / CONFIG_NAME), expected, "none", next_step)


def _write_config(directory: Path, config: dict[str, Any], default: Format) -> None:
    """Write config.json with this package's description of the weights."""
    quantization = config_of(default).to_dict()
    text = json.dumps({**config, "quantization_config": quantization}, indent=2)
    (directory / CONFIG_NAME).write_text(text, encoding="utf-8")


def _load(folder: Path, converted: Path) -> PreTrainedModel:
    try:
        return load_saved(converted, every_tensor=True)
    except (ConfigError, CorruptFileError, UnsupportedError) as error:
        # The error names converted files, which are deleted before the user reads it. Name the source instead.
        file = rf"{re.escape(str(converted))}(/model[^:/]*)?"
        where = re.sub(file, lambda _: str(folder), error.where)
        raise type(error)(where, error.expected, error.found, error.next_step) from error
