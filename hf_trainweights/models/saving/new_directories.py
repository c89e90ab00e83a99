"""New directories of models: each is written under a temporary name, then put in place.

Files beside the weights are copied, such as tokenizer and licence. The configuration is written anew.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError
from hf_trainweights.files.atomic import create_directory, save_errors, sync_tree
from hf_trainweights.files.digests import CONFIG_NAME
from hf_trainweights.files.reading import is_safe_name, open_regular_file
from hf_trainweights.files.staging import clean_up
from hf_trainweights.files.weight_files import FOREIGN_WEIGHTS
from hf_trainweights.models.host.checkpoints import save_remote_code
from hf_trainweights.models.host.models import configurations_within

_UNCHANGED = "It is as it was."
# Files that are not copied: files that the quantized model writes itself, float weights, and training state.
_LEFT_BEHIND = (
    *FOREIGN_WEIGHTS,
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.index*.json", "config.json", "README.md", ".*"),
    *("*.anchor", "trainer_state.json", "trainweights*.json", "_trainweights*"),
    # Descriptions of weights that another quantizer wrote.
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
    # Files of accelerate and DeepSpeed.
    *("random_states_*.pkl", "custom_checkpoint_*.pkl", "latest", "zero_to_fp32.py"),
)
_CHUNK_BYTES = 1 << 20
# Folders of tokenizers and processors, and of modules that sentence-transformers puts after the model.
_FOLDERS = ("additional_chat_templates", "*tokenizer", "speaker_embeddings", "[0-9]_*")
# In this file sentence-transformers names the folders of these modules.
_MODULES_NAME = "modules.json"
_MODULES_AGAIN = "Download it again, or save the model again with sentence-transformers."
_SHOWN_CHARACTERS = 200


def require_vacant_directory(out: Path) -> None:
    """Check that a directory is new or empty, so that nothing is lost by writing a model to it."""
    with save_errors(out, _UNCHANGED):
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(str(out), "a new or empty directory", "something there", "Choose another one.")


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out`, durably; if the block raises, it is removed."""
    with contextlib.suppress(OSError):  # remove remains of killed calls, but not another user's
        clean_up(out.parent)
    with save_errors(out, _UNCHANGED), create_directory(out) as temporary:
        try:
            yield temporary
        except SaveError as error:
            # The temporary directory is gone when the user reads the message.
            where = error.where.replace(str(temporary), str(out))
            raise SaveError(where, error.expected, error.found, error.next_step) from error
        sync_tree(temporary)


def copy_companions(source: str | os.PathLike[str], out: Path) -> None:
    """Copy the files beside the weights of a model: tokenizer, processor, licence, generation configuration."""
    folder = Path(source)
    with _reading(source):
        if not folder.is_dir():
            folder = Path(snapshot_download(str(source), ignore_patterns=[*_LEFT_BEHIND, "*/*"]))
            names = [*_FOLDERS, *map(glob.escape, _module_folders(folder))]
            # huggingface_hub 1 asks the Hub about a commit even in offline mode, unless told not to.
            snapshot_download(
                str(source),
                revision=folder.name,
                allow_patterns=[f"{name}/*" for name in names],
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        files = companions(folder)
    for path in files:
        target = out / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(path, target)


def companions(folder: Path) -> list[Path]:
    """Return the files that `copy_companions` copies, sorted; CorruptFileError: one lies outside of the model."""
    folders = {path for name in _FOLDERS for path in folder.glob(name)}
    folders |= {folder / name for name in _module_folders(folder)}
    names = [path.name for path in folder.iterdir() if path.is_file()]
    files = {folder / name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_BEHIND)}
    for path in (*files, folder / CONFIG_NAME):
        _require_own(path, folder)
    for below in sorted(folders):
        files.update(_files_below(below, folder))
    return sorted(files)


def _module_folders(folder: Path) -> list[str]:
    """Return the folders of modules that sentence-transformers puts after the model, as its modules.json names them."""
    file = folder / _MODULES_NAME
    if not file.is_file():
        return []
    _require_own(file, folder)
    with open_regular_file(file) as opened:
        try:
            names = [module["path"] for module in json.load(opened)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            expected, problem = "a list of modules, each with a path", repr(error)[:_SHOWN_CHARACTERS]
            raise CorruptFileError(str(file), expected, problem, _MODULES_AGAIN) from error
    for name in names:
        if not isinstance(name, str) or (name and not is_safe_name(name)):
            expected = f"paths of folders in {folder}"
            raise CorruptFileError(str(file), expected, repr(name)[:_SHOWN_CHARACTERS], _MODULES_AGAIN)
    return [name for name in names if name]


def _files_below(directory: Path, model: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files in and below a directory of a model, except hidden ones and links back to a directory above."""
    above |= {directory.resolve()}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith(".") or path.resolve() in above:
            continue
        if path.is_file():
            _require_own(path, model)
            yield path
        yield from _files_below(path, model, above)


def _require_own(path: Path, folder: Path) -> None:
    """Check that a file is the model's own: a link could put any file of this machine into a copy that is shared."""
    home, target = folder.resolve(), path.resolve()
    # In the Hub's cache all snapshots of a repository link to files in one folder.
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(target.is_relative_to(root) for root in (home, *blobs)):
        next_step = "Put a copy of the file in its place if it belongs to the model, else remove the link."
        raise CorruptFileError(str(path), f"a file in {folder}", f"a link to {target}", next_step)


def _copy(path: Path, target: Path) -> None:
    with target.open("wb") as copied, contextlib.ExitStack() as stack:
        with _reading(path):
            original = stack.enter_context(open_regular_file(path))
        more = True
        while more:
            with _reading(path):
                more = original.read(_CHUNK_BYTES)
            copied.write(more)


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a ConfigError where the source cannot be read; `save_errors` explains errors of writing."""
    try:
        yield
    except OSError as error:
        next_step = "Check its permissions and the disk that it lies on."
        raise ConfigError(str(path), "a file or directory that can be read", str(error), next_step) from error


def write_config(
    model: PreTrainedModel, directory: Path, quantization_config: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    """Write the configuration of a model, its generation configuration, and the files of its own code."""
    config = copy.deepcopy(model.config)
    # Parts of the model that were quantized before it was put together have a quantization_config each.
    for part_config in configurations_within(config):
        vars(part_config).pop("quantization_config", None)
    if quantization_config is not None:
        config.quantization_config = quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if model.is_remote_code():
        save_remote_code(model, directory, config)
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
