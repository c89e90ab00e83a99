"""Checks of a model's weight files: before a load, whether the files and the quantized weights in them are intact.

After a load, whether the files had every quantized weight: Transformers would start others from random numbers.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.reading import is_safe_name, is_torch_zip, require_regular_file
from hf_trainweights.files.safetensors_file import read_safetensors_header
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names
from hf_trainweights.formats import FORMATS
from hf_trainweights.models.choosing.selection import NOT_IN_CHECKPOINT, ROUTER
from hf_trainweights.models.choosing.summary import Summary
from hf_trainweights.models.host.models import base_prefix, registered_classes, was_loaded
from hf_trainweights.tensor.guards import is_guard
from hf_trainweights.tensor.stored_names import (
    CODED_FLOAT_SUFFIX,
    CODED_SUFFIXES,
    group_stored,
    parse_stored_name,
    stored_name,
)

_AGAIN = "Download it again, or save it again from the source."
# Names of weight files that no loader looks for.
_SINGLE = ("*.safetensors.index.json", "*.safetensors", "gptq_model*.bin")
# Tensors by which other quantizers hold weights: GPTQ and AWQ, compressed-tensors, float8, LLM.int8, nf4.
_CODES = re.compile(r".*\.(qweight|weight_packed|weight_scale(_inv)?|SCB|weight\.quant_state\..*)")
_SHOWN = 3


class StoredWeight(NamedTuple):
    """The file that a weight lies in, and its size there.

    Args:
        file: The file, or one of them if its stored tensors lie in several.
        stored_bytes: Bytes of all its stored tensors.
        kind: Whether it is quantized; or a guard without its weight, see `hf_trainweights.tensor.guards`.
        is_coded: Whether it is entropy-coded there, see `hf_trainweights.tensor.stored_names`.
    """

    file: Path
    stored_bytes: int
    kind: Literal["float", "quantized", "guard"] = "float"
    is_coded: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether the file has it under the names of stored tensors, not under its own."""
        return self.is_coded or self.kind == "quantized"


def check_weight_files(
    files: Iterable[str | os.PathLike[str]], directory: str | os.PathLike[str] = ""
) -> dict[str, StoredWeight]:
    """Check that the files of a checkpoint and the quantized weights in them are intact, and return all weights.

    Keys are the names of weights in the checkpoint; a quantized weight has the name of its float weight. An index must
    not lead out of `directory`, if that is the model's directory and not an id on the Hub.
    """
    tensors: dict[str, StoredWeight] = {}
    files = [Path(file) for file in files]
    _check_paths(files, Path(directory))
    for file in files:
        if file.suffix == ".safetensors":
            for name, entry in _read_header(file).items():
                start, end = entry["data_offsets"]
                guard = (entry["dtype"], entry["shape"]) == ("U8", [1])
                tensors[name] = StoredWeight(file, end - start, "guard" if guard else "float")
        elif file.suffix == ".bin":
            for name, tensor in _read_bin(file).items():
                tensors[name] = StoredWeight(file, tensor.nbytes, "guard" if is_guard(tensor) else "float")
    weights = {name: stored for name, stored in tensors.items() if parse_stored_name(name) is None}
    for weight, stored in group_stored(tensors).items():
        present = next(iter(stored.values())).file
        if weight in weights and weights[weight].kind != "guard":
            expected = f"{weight} once, quantized or not"
            raise CorruptFileError(str(present), expected, "both", "The file was edited. " + _AGAIN)
        stored_bytes = sum(tensor.stored_bytes for tensor in stored.values())
        if stored.keys() & CODED_SUFFIXES:
            kind = "float" if CODED_FLOAT_SUFFIX in stored else "quantized"
            weights[weight] = StoredWeight(present, stored_bytes, kind, is_coded=True)
            continue
        # The tensors of some format must be complete. Whether it is the right format shows when they are loaded.
        missing = min((set(form.tensor_names) - stored.keys() for form in FORMATS.values()), key=len)
        for suffix in missing:
            raise CorruptFileError(
                str(present),
                f"{stored_name(weight, suffix)} beside the other tensors of {weight}",
                f"only {', '.join(sorted(stored))}",
                "A shard is missing or the file was edited. " + _AGAIN,
            )
        weights[weight] = StoredWeight(present, stored_bytes, "quantized")
    return weights


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that a loader reads of a model. ConfigError: there are no files that it looks for.

    A single file or index of another name is taken too, such as `gptq_model-4bit-128g.safetensors`.
    """
    candidates = [[directory / name for name in ENTRY_POINTS[:4] if (directory / name).exists()][:1]]
    candidates += [sorted(directory.glob(pattern)) for pattern in _SINGLE]
    entry = next((files[0] for files in candidates if len(files) == 1), None)
    if entry is None:
        next_step = "Rename a single file to model.safetensors; of a model in another layout download the original."
        raise ConfigError(str(directory), f"one of {', '.join(ENTRY_POINTS[:4])}", "none", next_step)
    files = [directory / name for name in shard_names(entry)] if entry.suffix == ".json" else [entry]
    _check_paths(files, directory)
    return files


def is_zero(file: Path, name: str) -> bool:
    """Return whether a float tensor of a weight file holds only zeros."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return not bool(opened.get_tensor(name).any())
    state_dict = torch.load(file, weights_only=True, map_location="cpu", mmap=is_torch_zip(file) or None)
    return not bool(state_dict[name].any())


def check_is_float(source: str | os.PathLike[str], names: Iterable[str], model: PreTrainedModel) -> None:
    """Raise a ConfigError if a tensor of the files is another quantizer's, by names that the model does not have."""
    own = {name.rpartition(".")[2] for name in model.state_dict()}
    codes = sorted(name for name in names if _CODES.fullmatch(name) and name.rpartition(".")[2] not in own)
    if codes:
        next_step = (
            "Read it with import_directory, if it says how it is quantized (in config.json, quantize_config.json or "
            "quant_config.json); or quantize the float model that it was made from."
        )
        raise ConfigError(str(source), "a float model", f"one that is already quantized, with {codes[0]}", next_step)


def read_skeletons(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file without values, on the meta device, in float32 if they are no bytes."""
    if file.suffix == ".bin":
        return _read_bin(file)
    entries = _read_header(file)
    dtypes = {name: torch.uint8 if entry["dtype"] == "U8" else torch.float32 for name, entry in entries.items()}
    return {name: torch.empty(entry["shape"], dtype=dtypes[name], device="meta") for name, entry in entries.items()}


def _check_paths(files: Sequence[Path], directory: Path) -> None:
    """Check that files exist, and lie in the model's directory if it is known, before any of them is opened."""
    for file in files:
        if directory.is_dir() and directory != Path() and not _is_inside(file, directory):
            raise CorruptFileError(str(file), f"a file in {directory}", "a path out of it in the index", _AGAIN)
        try:
            require_regular_file(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptFileError(str(file), "a shard, as the index says", "no such file", _AGAIN) from error


def _is_inside(file: Path, directory: Path) -> bool:
    return file.is_relative_to(directory) and is_safe_name(file.relative_to(directory).as_posix())


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    header = read_safetensors_header(file)
    try:
        # The reader of safetensors itself knows best which dtypes, shapes and offsets go together.
        with safe_open(file, framework="pt"):
            return header
    except SafetensorError as error:
        raise CorruptFileError(str(file), "a safetensors header", str(error), _AGAIN) from error


def _read_bin(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.bin` on the meta device, so that only the pickle is read."""
    zipped = is_torch_zip(file)
    try:
        if zipped:
            with zipfile.ZipFile(file):
                pass
        state_dict = torch.load(file, weights_only=True, map_location="meta", mmap=zipped or None)
    except pickle.UnpicklingError as error:
        raise CorruptFileError(
            str(file),
            "a pickle of plain tensors",
            _reason(error),
            "It is not loaded with weights_only=False: that would run whatever code it holds. Convert it where you "
            "trust it, to safetensors.",
        ) from error
    except Warning:
        raise
    except Exception as error:
        # Damaged bytes may be read as any operation of a pickle, and these raise errors of any type.
        raise CorruptFileError(str(file), "a file that torch.save wrote", _reason(error), _AGAIN) from error
    if not isinstance(state_dict, dict):
        raise CorruptFileError(str(file), "a dict of tensors", type(state_dict).__name__, _AGAIN)
    tensors = {str(name): tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CorruptFileError(str(file), "dense tensors", f"{name} in {tensor.layout}", _AGAIN)
    return tensors


def _reason(error: Exception) -> str:
    """Return the reason in an error, without torch's advice to trust the file."""
    lines = str(error).strip().splitlines()
    reasons = [line.strip().partition(". Please use")[0] for line in lines if "WeightsUnpickler error" in line]
    if not reasons:
        reasons = [line for line in lines[:1] if "weights_only" not in str(error) and "Weights only" not in line]
    return ": ".join([type(error).__name__, *reasons])


def saved_class(config: PretrainedConfig) -> tuple[str, Any]:
    """Return the name of the class that a model was saved as, and the class, or None if Transformers lacks it."""
    saved_as = config.architectures
    name = saved_as[0] if isinstance(saved_as, (list, tuple)) and saved_as else "none"
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if _is_model(cls) and isinstance(config, getattr(cls, "config_class", ())):
        return str(name), cls
    # The auto classes know of borrowed classes, and of classes that a user has registered.
    borrowed = (item for item in registered_classes(config) if item.__name__ == name and _is_model(item))
    # Classes of a part of the model, which take the part's configuration, are left out.
    parts = set((getattr(config, "sub_configs", None) or {}).values())
    return str(name), next((item for item in borrowed if item.config_class not in parts), None)


def _is_model(value: Any) -> bool:
    # PreTrainedModel itself is no model: an instance would leave marks on the class that change every other model.
    return isinstance(value, type) and issubclass(value, PreTrainedModel) and value.config_class is not None


def parameter_names(cls: type[PreTrainedModel], config: PretrainedConfig) -> set[str]:
    """Return all names of the parameters of a model, tied ones included, from a skeleton on the meta device."""
    with torch.device("meta"):
        return {name for name, _ in cls(copy.deepcopy(config)).named_parameters(remove_duplicate=False)}


def check_guards(model: PreTrainedModel, names: Iterable[str], stored: Mapping[str, StoredWeight]) -> None:
    """Check that the files have the stored tensors of each quantized weight whose guard they have."""
    prefix = base_prefix(model)
    guards = {name.removeprefix(prefix): weight.file for name, weight in stored.items() if weight.kind == "guard"}
    lost = {name: guards[name.removeprefix(prefix)] for name in names if name.removeprefix(prefix) in guards}
    for name, file in lost.items():
        expected = f"the stored tensors of {name} beside its guard"
        next_step = "The file was edited. Download the model again, or save it again from the source."
        raise CorruptFileError(str(file), expected, "none", next_step)


def check_none_is_missing(model: PreTrainedModel, summary: Summary, stored: Mapping[str, StoredWeight]) -> None:
    """Check that the checkpoint had every weight that was quantized in the saved model.

    A new head was no part of the saved model, and may start from random numbers.
    """
    files = sorted({str(weight.file.parent) for weight in stored.values()})
    if not summary.quantized:
        others = [name for name, weight in stored.items() if weight.kind == "quantized"]
        if others:
            expected = f"quantized weights of {type(model).__name__}"
            next_step = "Load the model as the class that it was saved as, and take its part."
            raise ConfigError(files[0], expected, f"weights of other names, such as {others[0]}", next_step)
        expected = "quantized weights, as the quantization_config in config.json says"
        next_step = "If its weights are float, take that entry out of config.json; else save the quantized model again."
        raise ConfigError(files[0] if files else "checkpoint", expected, str(summary), next_step)
    prefix = base_prefix(model)
    in_files = {name.removeprefix(prefix) for name, weight in stored.items() if weight.kind != "guard"}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [
        choice.name
        for choice in summary.tensors
        if choice.reason in (NOT_IN_CHECKPOINT, ROUTER)  # earlier versions quantized routers too
        and choice.name.removeprefix(prefix) not in in_files
        and not was_loaded(parameters[choice.name])
    ]
    if not missing:
        return
    # Parameters of the class that the model was saved as; empty if Transformers does not have that class.
    name, cls = saved_class(model.config)
    names = parameters if name == type(model).__name__ else parameter_names(cls, model.config) if cls else ()
    saved = {name.removeprefix(prefix) for name in names}
    lost = [name for name in missing if name.removeprefix(prefix) in saved]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise CorruptFileError(
            files[0] if files else "checkpoint",
            "the stored tensors of every quantized weight",
            f"none of {', '.join(lost[:_SHOWN])}{more}",
            "Transformers would start these from random numbers. Download the model again, or save it again from the "
            "source.",
        )
