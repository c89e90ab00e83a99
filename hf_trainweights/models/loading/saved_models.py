"""Saved models, loaded as the class that saved them; their weights are views of the memory-mapped files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_trainweights.errors import ConfigError, CorruptFileError, TrainWeightsError, UnsupportedError
from hf_trainweights.files.spill import Spill
from hf_trainweights.files.weight_files import ENTRY_POINTS, FOREIGN_WEIGHTS, shard_names
from hf_trainweights.models.choosing.config import QUANT_METHOD
from hf_trainweights.models.host.checkpoints import checkpoint_tensors
from hf_trainweights.models.host.models import adapter_file, base_prefix, quant_method
from hf_trainweights.models.loading.conversion import loading_to_write
from hf_trainweights.models.loading.stored_weights import (
    check_is_float,
    check_weight_files,
    is_zero,
    parameter_names,
    saved_class,
    weight_files,
)

_FOREIGN = (*FOREIGN_WEIGHTS, "onnx/*", "openvino/*")
_TORCH = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Tensors that are no weights: other quantizers' scales of activations and caches, and values that older classes saved.
_NO_WEIGHTS = re.compile(
    r"(.*\.)?(([kvq]|input|output|activation)_(scale|zero_point)(_ub)?|inv_freq|masked_bias|position_ids)"
)
_SHOWN = 3

# Keys of sizes and of numbers of modules in a configuration. Values up to these limits are believed for any files.
_SIZES = re.compile(r".*(size|dim|d_model|d_ff|embd|inner|head|channel|position|rank).*")
_MODULES = re.compile(r".*(layer|expert).*")
_LARGE, _MANY = 1 << 27, 1000


def load_quantized(source: str | os.PathLike[str], spill: Spill | None = None) -> PreTrainedModel:
    """Load a saved quantized model as `load_saved` does. ConfigError: this package has not quantized it."""
    method = quant_method(read_config(source))
    if method != QUANT_METHOD:
        other = f"one of {method}" if method else "a float model"
        raise ConfigError(str(source), "a model that this package has quantized", other, "Choose another one.")
    return load_saved(source, spill=spill)


def download(repository: str) -> Path:
    """Download the files to read of a model on the Hub, and return its snapshot in the cache. OSError: it is not there.

    A repository may hold its weights twice. Its torch files are downloaded only if it has no safetensors files, which
    loaders prefer.
    """
    snapshot = Path(snapshot_download(repository, ignore_patterns=[*_FOREIGN, *_TORCH]))
    if any(snapshot.rglob("*.safetensors")):
        return snapshot
    return Path(snapshot_download(repository, ignore_patterns=[*_FOREIGN]))


def load_saved(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    spill: Spill | None = None,
    every_tensor: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a saved model as the class that its config.json names, with all its weights, to write or compare them.

    `dtype` and `options` are arguments of `from_pretrained`. Weights that need no conversion are views of the
    memory-mapped files. Weights that are quantized or decoded go into `spill`, or stay in memory if it is None.
    UnsupportedError: a layer of the class has no place for a tensor that the files hold for it. A class may lack entire
    parts that the files have, such as the heads of another task, which Transformers names in its log; `every_tensor`
    makes that an error too.
    """
    saved = read_config(source)
    name, cls = saved_class(saved)
    if cls is None:
        next_step = (
            "Load and save a model with code of its own in Python. Pass trust_remote_code=True to from_pretrained."
        )
        raise ConfigError(str(source), "a class of Transformers in config.json's architectures", name, next_step)
    _check_index(Path(source))
    if type(saved) is not cls.config_class:
        # A borrowed class, see `registered_classes`, would read config.json as its own type of configuration.
        options["config"] = saved
    try:
        with loading_to_write(spill):
            model, report = cls.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    except (TrainWeightsError, Warning):
        raise
    except Exception as error:
        # Faults in a model's files make Transformers raise errors of any type.
        raise _cannot_load(source, error) from error
    check_is_float(source, report["unexpected_keys"], model)
    _check_none_is_lost(source, model, report["unexpected_keys"], every_tensor)
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        next_step = "Transformers would start these from random numbers. Save the whole model."
        raise ConfigError(str(source), f"weights for all of {name}", f"none for {missing}", next_step)
    return model


def _check_none_is_lost(
    source: str | os.PathLike[str], model: PreTrainedModel, unexpected: Iterable[str], every_tensor: bool
) -> None:
    """Check that a save of the model would lose no tensor of the files, unless it holds only zeros or no weights."""
    made_by_the_class = {name for name, _ in model.named_buffers()}
    lost = {name for name in unexpected if name not in made_by_the_class and not _NO_WEIGHTS.fullmatch(name)}
    if not every_tensor:
        lost = {name for name in lost if _is_of_a_layer(name, model)}
    if lost:
        folder = Path(source)
        lost -= _zeros(lost, model, folder if folder.is_dir() else download(str(source)))
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        next_step = (
            "Save the model with the class that it was trained as, or take these tensors out if they are no use."
        )
        expected = f"places in {type(model).__name__} for all weights of its files"
        raise UnsupportedError(str(source), expected, f"none for {', '.join(sorted(lost)[:_SHOWN])}{more}", next_step)


def _is_of_a_layer(name: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a module that has weights and no modules in it, such as a linear layer."""
    modules, owner = dict(model.named_modules()), name.rpartition(".")[0]
    while owner not in modules:
        owner = owner.rpartition(".")[0]
    module = modules[owner]
    return not any(module.children()) and any(True for _ in module.parameters())


def _zeros(names: Collection[str], model: PreTrainedModel, folder: Path) -> set[str]:
    """Return the names of tensors, as the model calls them, that hold only zeros in its files."""
    stored, prefix = check_weight_files(weight_files(folder), folder), base_prefix(model)
    zeros = set()
    for name in names:
        spellings = [name, prefix + name, name.removeprefix(prefix)]
        # A conversion may fail, because its operations expect other shapes. Then the files hold several tensors for
        # this name, and it does not count as zero.
        with contextlib.suppress(Exception):
            spellings += checkpoint_tensors(model, {name: torch.empty(0, device="meta")})
        in_file = next((spelling for spelling in spellings if spelling in stored), "")
        if in_file and stored[in_file].kind == "float" and is_zero(stored[in_file].file, in_file):
            zeros.add(name)
    return zeros


def load_tokenizer(source: str | os.PathLike[str], where: str, next_step: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a saved model. Errors name `where`, the argument that gives texts to read."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except Warning:
        raise
    except Exception as error:
        # Faults in a tokenizer's files make Transformers raise errors of any type.
        raise ConfigError(where, f"a tokenizer in {source}", "none that loads", next_step) from error


def saved_parameter_names(directory: str | os.PathLike[str]) -> set[str] | None:
    """Return all names of a saved model's parameters; None if no config.json tells how to make it."""
    try:
        saved = AutoConfig.from_pretrained(directory)
        _, cls = saved_class(saved)
        return None if cls is None else parameter_names(cls, saved)
    except Exception:
        # Wrong values lead to errors of any type.
        return None


def read_config(source: str | os.PathLike[str]) -> PretrainedConfig:
    """Return the configuration of a saved model. ConfigError: it is missing or unreadable, or has an adapter."""
    refuse_file(source)
    refuse_adapter(source)
    try:
        return AutoConfig.from_pretrained(source)
    except (TrainWeightsError, Warning):
        raise
    except Exception as error:
        raise _cannot_load(source, error) from error


def check_config(config: Mapping[str, Any], tensors: int, size_bytes: int, where: str) -> None:
    """Check that a configuration asks for no larger layers, and no more layers or experts, than files can fill.

    A model is built before its files are read, and 10^9 layers keep a process busy until it runs out of memory.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_config(value, tensors, size_bytes, f"{where}: {key}")
        elif type(value) is not int:
            continue
        elif _SIZES.fullmatch(key) and value > max(size_bytes, _LARGE):
            expected = f"a size that {size_bytes} bytes of weights can fill"
            raise CorruptFileError(f"{where}: {key}", expected, f"{value}", "Download config.json again.")
        elif _MODULES.fullmatch(key) and not _SIZES.fullmatch(key) and value > max(tensors, _MANY):
            expected = f"a number of modules that {tensors} tensors can fill"
            raise CorruptFileError(f"{where}: {key}", expected, f"{value}", "Download config.json again.")


def refuse_file(source: str | os.PathLike[str]) -> None:
    """Raise a ConfigError that names the directory to give, if a file is given in place of a model's directory."""
    if Path(source).is_file():
        raise ConfigError(str(source), "the directory of a model", "a file", f"Give {Path(source).absolute().parent}.")


def refuse_adapter(source: str | os.PathLike[str]) -> None:
    """Raise a ConfigError if a saved model has an adapter: Transformers would apply it, and save it alone.

    It is unknown whether the weights beside it are those that it was trained on, or have it merged in already.
    """
    try:
        adapter = adapter_file(os.fspath(source))
    except (OSError, ValueError):  # no name of a repository, which reading its configuration tells
        return
    if adapter is not None:
        next_step = (
            "Load it with PEFT, call merge_and_unload, save the model to another directory and give that. If the "
            "weights beside it are to be read without it, move adapter_config.json out of the directory."
        )
        raise ConfigError(str(source), "a model by itself", "an adapter (adapter_config.json)", next_step)


def _check_index(source: Path) -> None:
    """Check the index of the shards, if Transformers will use one: it would report damage by odd errors."""
    # The entry points behind the first four are adapters.
    first = next((source / name for name in ENTRY_POINTS[:4] if (source / name).is_file()), None)
    if first is not None and first.suffix == ".json":
        shard_names(first)


def _cannot_load(source: str | os.PathLike[str], error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    if not isinstance(error, OSError | ValueError | RuntimeError):
        reason = f"{type(error).__name__}: {reason}"  # such as a KeyError, whose text is only a key
    if reason.startswith("Repo id") and not os.path.lexists(source):
        reason = "nothing there"
    elif not os.path.lexists(source):
        reason = f"nothing there, and of the Hub: {reason}"
    next_step = "Give the directory of a saved model, or the name of a repository on the Hub."
    if isinstance(error, PermissionError):
        next_step = "Check the permissions of its files."
    return ConfigError(str(source), "a model that Transformers loads", reason, next_step)
