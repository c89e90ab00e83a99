"""Checks the sources and targets of commands: directories, models on the Hub, and paths that must be new."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_trainweights.errors import ConfigError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of a quantized model.")]
NewDirectory = Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory.")]


def local_copy(source: str) -> Path:
    """Return the path of a source; if it is a model on the Hub, download it and return its snapshot in the cache."""
    if os.path.lexists(source):
        return Path(source)
    require_source(source)
    from hf_trainweights.models.loading.saved_models import download

    try:
        return download(source)
    except OSError as error:
        raise _not_found(source, _reason(error)) from error


def require_source(source: str) -> None:
    """Raise ConfigError unless a source is an existing path or can be the id of a model on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if os.path.lexists(source):
        return
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise _not_found(source, "nothing there") from error


@contextlib.contextmanager
def saying_where_it_was_looked_for(source: str) -> Iterator[None]:
    """Raise a ConfigError that names path and Hub if the block looks for a source and finds nothing."""
    from hf_trainweights.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        if os.path.lexists(source) or error.where != source or not isinstance(error.__cause__, OSError):
            raise
        raise _not_found(source, _reason(error.__cause__)) from error


def require_nothing_at(*paths: Path) -> None:
    """Raise ConfigError unless each path is new or an empty directory, so that a command overwrites no file."""
    from hf_trainweights.errors import ConfigError

    for path in paths:
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise ConfigError(str(path), "a new name", "something there", "Choose another one, or remove it first.")


def _not_found(source: str, found: str) -> ConfigError:
    from hf_trainweights.errors import ConfigError

    return ConfigError(source, "a path, or the id of a model on the Hub", found, "Check its spelling.")


def _reason(error: OSError) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "no such path here, and on the Hub a gated model that this account may not read"
    if isinstance(error, RepositoryNotFoundError):
        return "no such path here, and no such model on the Hub that this account may read"
    if isinstance(error, LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub does not answer"
        return f"no such path here, and no copy in the cache of the Hub ({why})"
    return f"no such path here, and an error of the Hub: {str(error).partition(chr(10))[0]}"


def read_texts(file: Path, option: str) -> list[str]:
    """Return the lines of a file, each a text; `option` names the option in an error."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint=option) from error
