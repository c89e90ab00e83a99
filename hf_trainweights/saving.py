"""save_pretrained and push_to_hub of a quantized model: both serializations, all or nothing.

Transformers 5 writes safetensors only. So its own save_pretrained writes into a temporary directory beside the old
files, each shard is rewritten as a `.bin` of the same plain tensors where that is asked for, and then every file is
renamed into place. A file that is memory-mapped by the very model that is saved is replaced, never overwritten.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import inspect
import json
import os
import shutil
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from hf_trainweights.errors import SaveError, UnsupportedError
from hf_trainweights.formats.base import Format
from hf_trainweights.quantized_tensor import QuantizedTensor
from hf_trainweights.state_dict import flatten_state_dict
from hf_trainweights.weight_files import is_weight_file

try:
    import fcntl
except ImportError:  # Windows has no flock; a second save into one directory is not noticed there.
    fcntl = None

# Options that Transformers would drop on the way: its push_to_hub calls save_pretrained with max_shard_size alone, and
# for a quantized model save_pretrained replaces the state_dict it was given.
_OPTIONS: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "options", default=types.MappingProxyType({})
)

_PUSH_ARGUMENTS = {"repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags"}


def attach_saving(model: PreTrainedModel) -> None:
    """Give one model the save_pretrained and push_to_hub of this module; the class stays as it is.

    Args:
        model: A quantized model.
    """
    for function in (save_pretrained, push_to_hub, get_memory_footprint):
        setattr(model, function.__name__, types.MethodType(function, model))


def save_pretrained(
    self: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    *args: Any,
    safe_serialization: bool | None = None,
    **kwargs: Any,
) -> None:
    """Save a quantized model, in safetensors or as `pytorch_model.bin`, all files or none.

    Args:
        self: The model.
        save_directory: Where to; made if missing. Weight files of an earlier save are removed at the end.
        args: As for Transformers.
        safe_serialization: False for `pytorch_model.bin`; None or True for safetensors.
        kwargs: As for Transformers: `max_shard_size`, `variant`, `state_dict`, ... With `push_to_hub=True` also
            `repo_id` (default: the directory's name) and the other arguments of `model.push_to_hub`.

    Raises:
        SaveError: The directory cannot be written, the disk is full, or another save into it is running; what was
            there before is untouched.
        UnsupportedError: `distributed_checkpoint` with `safe_serialization=False`.
    """
    # Not the signature of the model's own class: some classes override it with *args.
    given = inspect.signature(PreTrainedModel.save_pretrained).bind(self, save_directory, *args).arguments
    options = {**_OPTIONS.get(), **given, **kwargs}
    del options["self"], options["save_directory"]
    serialization = options.pop("safe_serialization", True)
    safe = serialization if safe_serialization is None else safe_serialization
    if options.get("distributed_checkpoint") and not safe:
        raise UnsupportedError("save_pretrained", "safetensors", "distributed_checkpoint as .bin", "Leave one out.")
    # Other processes write nothing, or only their own part: they must not hold the directory.
    if options.get("distributed_checkpoint") or not options.get("is_main_process", True):
        type(self).save_pretrained(self, save_directory, **options)
        return
    pushing = options.pop("push_to_hub", False)
    push_options = {key: options.pop(key) for key in _PUSH_ARGUMENTS & options.keys()} if pushing else {}
    directory = Path(save_directory)
    with staged_directory(directory) as staging:
        with _passing(state_dict=options.get("state_dict")):
            type(self).save_pretrained(self, staging, **options)
        if not safe:
            _rewrite_as_bin(staging)
        move_into_place(staging, directory, options.get("variant"), quantized=hasattr(self, "hf_quantizer"))
    if pushing:
        push_options |= {key: options.pop(key) for key in ("max_shard_size", "token") if key in options}
        with _passing(**options):
            self.push_to_hub(push_options.pop("repo_id", directory.name), safe_serialization=safe, **push_options)


def push_to_hub(self: PreTrainedModel, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> str:
    """Push a quantized model to the Hub, in either serialization.

    Args:
        self: The model.
        args: As for Transformers: the repository.
        safe_serialization: False for `pytorch_model.bin`.
        kwargs: As for Transformers.

    Returns:
        The URL of the commit.

    Raises:
        SaveError: The files could not be written before the upload.
    """
    with _passing(safe_serialization=safe_serialization):
        return type(self).push_to_hub(self, *args, **kwargs)


@contextlib.contextmanager
def _passing(**options: Any) -> Iterator[None]:
    """Pass options to the calls below that Transformers does not hand them to."""
    token = _OPTIONS.set({**_OPTIONS.get(), **options})
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def get_memory_footprint(self: PreTrainedModel, return_buffers: bool = True) -> int:
    """Return the bytes that the model holds, quantized weights by their stored tensors.

    Args:
        self: The model.
        return_buffers: Whether to count buffers.
    """
    parameters = sum(
        p.stored_bytes if isinstance(p, QuantizedTensor) else p.numel() * p.element_size() for p in self.parameters()
    )
    return parameters + sum(b.numel() * b.element_size() for b in self.buffers() if return_buffers)


def flat_state_dict(model: PreTrainedModel, default: Format) -> dict[str, Any]:
    """Return the plain tensors of a model as they are to lie in a file, a tied weight once.

    Args:
        model: A quantized model; weights that accelerate keeps elsewhere are fetched.
        default: The format that the model's configuration names.
    """
    return flatten_state_dict(whole_state_dict(model, _OPTIONS.get().get("state_dict")), default)


def whole_state_dict(model: PreTrainedModel, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return all tensors of a model, a tied weight once, under the name that Transformers keeps.

    Args:
        model: A quantized model; weights that accelerate keeps elsewhere are fetched.
        given: The state dict to start from; the model's own if None.
    """
    state_dict = dict(model.state_dict(keep_vars=True) if given is None else given)
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            state_dict[name] = load_offloaded_parameter(model, name)
    for name, source in model.all_tied_weights_keys.items():
        if _is_same(state_dict.get(name), state_dict.get(source)):
            del state_dict[name]
    return {k: v.detach() if hasattr(v, "detach") else v for k, v in state_dict.items()}


def _is_same(tensor: object, other: object) -> bool:
    """Return whether two entries of a state dict are one weight."""
    if not isinstance(tensor, Tensor) or not isinstance(other, Tensor) or type(tensor) is not type(other):
        return False
    return tensor.data_ptr() == other.data_ptr()


@contextlib.contextmanager
def staged_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory to write into, on the same file system; remove it at the end, whatever happens.

    Args:
        directory: Where the files are to go; made if missing, and held against another save.

    Raises:
        SaveError: It cannot be written, or another save into it is running; what was there before is untouched.
    """
    with _typed_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory):
            staging = Path(tempfile.mkdtemp(prefix="_trainweights-", dir=directory))
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _typed_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        expected, next_step = "a directory that can be written to", "Check its permissions, or choose another one."
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            expected, next_step = "enough free disk space", "Free some space, or choose another directory."
        elif error.errno in {errno.EEXIST, errno.ENOTDIR, errno.EISDIR}:
            expected, next_step = "a directory of files", "Choose another name, or remove what is in the way."
        raise SaveError(str(directory), expected, str(error), f"Nothing was changed there. {next_step}") from error
    except Exception as error:
        # safetensors reports failed writes as its own SafetensorError, with the reason in the text alone.
        if type(error).__module__.startswith("safetensors"):
            raise SaveError(
                str(directory), "to write the weights", str(error), "Nothing was changed there. Check the free space."
            ) from error
        raise


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold the directory for one save; the system lets go of it if the process dies."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SaveError(
                str(directory), "one save at a time", "another save into it running", "Wait, or use another directory."
            ) from error
        except OSError:
            pass  # A file system without locks, such as Lustre with its defaults: as on Windows.
        yield
    finally:
        os.close(descriptor)


def _rewrite_as_bin(staging: Path) -> None:
    """Replace each model*.safetensors file, and the index, by its `.bin` twin."""
    for file in sorted(staging.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            # Mapped, not copied: a shard may be larger than the free memory.
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        # Through an open file: torch.save writes the name of a path into the bytes.
        with (staging / _bin_name(file.name)).open("wb") as stream:
            torch.save(tensors, stream)
        file.unlink()
    for file in sorted(staging.glob("model.safetensors.index*.json")):
        index = json.loads(file.read_text(encoding="utf-8"))
        index["weight_map"] = {name: _bin_name(shard) for name, shard in index["weight_map"].items()}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (staging / _bin_name(file.name)).write_text(text, encoding="utf-8")
        file.unlink()


def _bin_name(name: str) -> str:
    return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin", 1)


def move_into_place(staging: Path, directory: Path, variant: str | None, quantized: bool) -> None:
    """Rename every file into place and remove the weight files of earlier saves that the new ones do not replace.

    Args:
        staging: What `staged_directory` yielded.
        directory: Where the files go.
        variant: Of which weight files; None for those without one.
        quantized: Whether the weights need the new config.json to be read.

    Raises:
        IsADirectoryError: A directory has the name of a file; nothing was moved.
    """
    files = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    for file in files:
        if (directory / file).is_dir():
            raise IsADirectoryError(errno.EISDIR, "a directory has the name of a file to be written", str(file))
    weights = [file for file in files if is_weight_file(file.name, variant)]
    weights.sort(key=lambda file: file.suffix == ".json")  # an index comes after its shards
    others = [file for file in files if file not in weights]
    # Quantized weights beside the config.json of a float model load as random ones with but a warning, so at no moment
    # may these two lie there together. Any other mixture gives an error or the old weights.
    if quantized:
        _move(others, staging, directory)
    _move(weights, staging, directory)
    if weights:
        for old in directory.iterdir():
            if old.is_file() and is_weight_file(old.name, variant) and Path(old.name) not in weights:
                old.unlink()
    if not quantized:
        _move(others, staging, directory)


def _move(files: list[Path], staging: Path, directory: Path) -> None:
    for file in files:
        target = directory / file
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / file, target)
