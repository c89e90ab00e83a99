"""`from_quantized`: load a model that another program quantized; it is converted once, into a cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.atomic import make_directories, save_errors
from hf_trainweights.files.disk import lock_directory
from hf_trainweights.files.staging import remove_abandoned
from hf_trainweights.imports.directory import import_local, local_source

_CACHE_NAME, _MODEL_NAME = "trainweights", "model"
_GGUF_SUFFIX = ".gguf"
# Arguments of from_pretrained that would select other files than those that were converted, and the advice for each.
_NOT_TAKEN = {
    "gguf_file": "Pass file= instead.",
    "revision": "Download that revision with huggingface_hub.snapshot_download, and pass its directory.",
    "subfolder": "Pass the directory itself.",
}


def from_quantized(
    auto_class: Any,
    source: str | os.PathLike[str],
    *,
    file: str | None = None,
    base_model: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model that another program quantized, in any layout that `import_directory` reads.

    The first call converts the source into a directory below `HF_HOME`, as large as the source. Later calls load that,
    until a file of the source changes. To free the disk, delete `trainweights` in `HF_HOME`.

    Args:
        auto_class: A class with `from_pretrained`, such as `AutoModelForCausalLM`.
        source: As for `import_directory`.
        file: As for `import_directory`.
        base_model: As for `import_directory`.
        kwargs: Arguments of `from_pretrained`, such as `dtype`.

    Returns:
        The model, as `auto_class.from_pretrained` returns it.

    Raises:
        ConfigError: As for `import_directory`; or an argument of `from_pretrained` would select other files.
        CorruptFileError: As for `import_directory`.
        UnsupportedError: As for `import_directory`.
        SaveError: The cache cannot be written.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = from_quantized(
        ...     AutoModelForCausalLM, "someone/Llama-3.2-1B-GGUF", file="*Q4_K_M*"
        ... )  # doctest: +SKIP
    """
    if refused := [name for name in _NOT_TAKEN if name in kwargs]:
        name, expected = refused[0], "arguments of from_pretrained that select no files"
        raise ConfigError(name, expected, repr(kwargs[name]), _NOT_TAKEN[name])
    local, base = local_source(source, file), None if base_model is None else local_source(base_model, None)
    slot = Path(constants.HF_HOME, _CACHE_NAME, f"{_readable(local)}-{_key(local, base)}")
    converted = slot / _MODEL_NAME
    with save_errors(slot, "Nothing was left there that loads."):
        make_directories(slot)
        with lock_directory(slot, wait=True):
            if not converted.exists():
                remove_abandoned(slot)
                import_local(local, converted, base)
    return auto_class.from_pretrained(converted, **kwargs)


def _readable(path: Path) -> str:
    """Return a name for people who look into the cache."""
    if path.parent.name == "snapshots":  # of a repository in the Hub's cache
        path = path.parent.parent
    return re.sub(r"[^A-Za-z0-9.]+", "-", path.stem if path.is_file() else path.name)[:60].strip("-.") or _MODEL_NAME


def _key(*sources: Path | None) -> str:
    """Return a digest of the files that a conversion reads, by their names, sizes and times, and of this version."""
    described = [None if source is None else [str(source.resolve()), _files(source)] for source in sources]
    text = json.dumps([version("hf_trainweights"), *described])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _files(source: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file of a source. GGUF files of other models beside it are no part of it."""
    folder = source.parent if source.is_file() else source
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", source.stem)
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    own = (path for path in paths if path.suffix != _GGUF_SUFFIX or path.name.startswith(stem))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in own]
