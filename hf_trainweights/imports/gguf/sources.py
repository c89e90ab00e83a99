"""Find the one GGUF file that a user means: in a directory, in a repository on the Hub, or the file itself."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.weight_files import FOREIGN_WEIGHTS
from hf_trainweights.imports.gguf.file import SPLIT_FILE

_SUFFIX = ".gguf"
# Files that hold no text model: projectors, such as `mmproj-model-f16.gguf`, and statistics for a quantizer.
_PARTS = ("mmproj*", "*.mmproj*", "imatrix*")
_WEIGHTS = (*FOREIGN_WEIGHTS, "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN = 20
# The base class of all errors of the library that huggingface_hub sends requests with, which is httpx or httpx2.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]


def find_gguf(source: str | os.PathLike[str], pattern: str | None) -> Path | None:
    """Return the GGUF file to read of a source, downloaded if it is on the Hub; None if it is no source of GGUF files.

    ConfigError: the pattern selects no file or several; or there are several and no pattern, and no other weights.
    """
    path = Path(source)
    if path.is_file() and path.suffix == _SUFFIX and pattern is None:
        return path
    if os.path.lexists(path):
        names = (
            [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
        )
        name = _choose(str(source), names, pattern)
        return None if name is None else path / name
    try:
        names = _names_on_hub(str(source))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None  # the caller looks for a source of another kind, and says that nothing is there
    name = _choose(str(source), names, pattern)
    if name is None:
        return None
    folder = PurePosixPath(name).parent
    # The files beside the weights, such as the tokenizer's: those in the top folder of the repository, but no weights.
    snapshot_download(str(source), ignore_patterns=[*_WEIGHTS, "*/*"])
    files = [glob.escape(file) for file in _same_model(name, names)]
    # Then the weights. Both downloads go into the same snapshot, and the file keeps its folder there: the caller looks
    # for files beside the weights in that folder.
    return Path(snapshot_download(str(source), allow_patterns=files)) / folder / PurePosixPath(name).name


def _names_on_hub(repository: str) -> list[str]:
    """Return the names of a repository's files; without a network those of its snapshot in the cache."""
    try:
        if not constants.HF_HUB_OFFLINE:
            return HfApi().list_repo_files(repository)
    except HfHubHTTPError:  # the Hub answered
        raise
    except (OfflineModeIsEnabled, _HTTP_ERROR):
        pass
    snapshot = Path(snapshot_download(repository, local_files_only=True))
    return [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]


def _choose(source: str, names: Iterable[str], pattern: str | None) -> str | None:
    """Return the name of the one GGUF model among files.

    None if there is no pattern, and either no GGUF model or other weights, too. ConfigError: there are several models,
    or the pattern selects none.
    """
    names = list(names)
    models = [name for name in names if name.endswith(_SUFFIX) and _is_first(name)]
    if pattern is None:
        if any(fnmatch.fnmatch(name, weights) for name in names for weights in ("*.safetensors", "*.bin")):
            return None
        selected = [name for name in models if not _matches(name, _PARTS)]
    else:
        selected = [name for name in models if _matches(name, (pattern, f"*/{pattern}"))]
    if len(selected) == 1:
        return selected[0]
    if not models and pattern is None:
        return None
    listed = ", ".join(sorted(selected or models)[:_SHOWN]) or "none"
    expected = "one GGUF file" if pattern is None else f"one GGUF file that {pattern!r} selects"
    selection = f"{len(selected)}: {listed}" if selected else f"none among {listed}"
    raise ConfigError(
        source, expected, selection, 'Name one, or a pattern of its name: file="*Q4_K_M*", or --file "*Q4_K_M*".'
    )


def _is_first(name: str) -> bool:
    """Return whether a file stands for its model: of a split model only the first one does."""
    match = SPLIT_FILE.fullmatch(name)
    return match is None or int(match["number"]) == 1


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(option, pattern) for option in (name, PurePosixPath(name).name) for pattern in patterns)


def _same_model(name: str, names: Iterable[str]) -> list[str]:
    """Return the names of all files of the model that a file stands for."""
    match = SPLIT_FILE.fullmatch(name)
    if match is None:
        return [name]
    others = ((file, SPLIT_FILE.fullmatch(file)) for file in names)
    return [
        file for file, other in others if other and (other["stem"], other["count"]) == (match["stem"], match["count"])
    ]
