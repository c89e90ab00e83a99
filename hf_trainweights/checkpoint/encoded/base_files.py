"""Where the weights of a base are found: in the run, in the Hub's cache, or in a directory that the caller names.

What a file says about its base is believed only as far as it cannot do harm. It may name a repository and a commit,
which lead into the Hub's cache and nowhere else, and digests, under which the run may keep the base's files. It cannot
name a path: a base that lies elsewhere is opened only where the caller has named its directory in this process, with
`register_base` or as `anchor`. Wherever a file lies, its digest is compared before anything reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from hf_trainweights.checkpoint.encoded.anchor_files import (
    MissingAnchorError,
    anchor_file_name,
    anchor_paths,
    sha256_once,
)
from hf_trainweights.checkpoint.encoded.base_identity import Base, is_repository
from hf_trainweights.checkpoint.encoded.reader import is_encoded
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names

_directories: dict[Path, None] = {}  # in the order of registration


def register_base(path: str | Path) -> None:
    """Add a directory of weights in which the base of checkpoints may be found, for this process.

    Checkpoints that are stored against a model of the Hub need no such call: their base is found in the Hub's cache.

    Args:
        path: The directory, or one of its files. It need not exist. A file in it is used only if a checkpoint names its
            SHA-256.

    Examples:
        >>> register_base("models/mine")
    """
    path = Path(path).absolute()
    _directories[path.parent if path.is_file() else path] = None


def identify_base(path: Path) -> Base:
    """Return what identifies weights on the disk: repository and commit or path, and the digests of their files."""
    files = require_weights(path)
    digests = {name: sha256_once(file.resolve()) for name, file in files.items()}
    directory = next(iter(files.values())).parent
    repository, commit = _repository_of(directory)
    return Base(digests, repository, commit, None if repository else str(directory))


def require_weights(path: Path) -> dict[str, Path]:
    """Return the files of a directory, a file or an index of plain weights by name, and register their directory.

    ConfigError: there are no weights, or they are encoded ones of this package.
    """
    path = path.absolute()
    entry = next((path / name for name in ENTRY_POINTS if (path / name).is_file()), path)
    if not entry.is_file():
        expected = f"a directory with {ENTRY_POINTS[0]} or another file of weights"
        raise ConfigError("anchor", expected, str(path), "Pass the directory of the model that the run starts from.")
    names = shard_names(entry) if entry.name.endswith(".index.json") else [entry.name]
    files = {name: entry.parent / name for name in names}
    for name, file in files.items():
        if not name.endswith((".safetensors", ".bin")) or is_encoded(file):
            found = f"{file}, an encoded one" if is_encoded(file) else str(file)
            next_step = "Pass the model that the run starts from, or make this checkpoint plain by restore_directory."
            raise ConfigError("anchor", "plain files of weights, .safetensors or .bin", found, next_step)
    register_base(entry.parent)
    return files


def find_base(base: Base, directory: Path) -> dict[str, Path]:
    """Return the files of a base by name, digests compared; the checkpoint `directory`, if absolute, may keep them.

    CorruptFileError: a file in the Hub's cache is a link out of it, or all that were found have changed.
    MissingAnchorError: a file is nowhere. Both name repository and commit, and what to do.
    """
    return {name: _find_file(base, name, directory) for name in base.files}


def _find_file(base: Base, name: str, directory: Path) -> Path:
    sha256, changed = base.files[name], None
    for path in _candidates(base, name, directory):
        try:
            found = sha256_once(path)
        except OSError:
            continue
        if found == sha256:
            return path
        changed = CorruptFileError(str(path), f"{name} of {base}, SHA-256 {sha256}", found, base.next_step)
    if changed is not None:
        raise changed
    where = "the checkpoint, the Hub's cache or a registered directory"
    raise MissingAnchorError(f"base {base}", f"its file {name}", f"none in {where}", base.next_step)


def _candidates(base: Base, name: str, directory: Path) -> Iterator[Path]:
    sha256 = base.files[name]
    yield from anchor_paths(sha256, directory / anchor_file_name(sha256))
    if base.repository is not None and base.commit is not None:
        yield _cached_file(base.repository, base.commit, name)
    for registered in _directories:
        yield (registered / name).resolve()


def snapshot_path(repository: str, commit: str) -> Path:
    """Return where the Hub's cache keeps a commit: https://huggingface.co/docs/huggingface_hub/guides/manage-cache."""
    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def cached_snapshots(repository: str) -> list[Path]:
    """List the directories of a model's commits in the Hub's cache, that of its branch `main` first."""
    snapshots = snapshot_path(repository, "main").parent
    main = snapshots.parent / "refs" / "main"
    newest = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    found = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
    return sorted(found, key=lambda path: path.name != newest)


def _cached_file(repository: str, commit: str, name: str) -> Path:
    snapshot = snapshot_path(repository, commit)
    folder, file = snapshot.parent.parent.resolve(), (snapshot / name).resolve()
    if not file.is_relative_to(folder):
        next_step = "Someone has changed the cache: remove this snapshot, and download it again."
        raise CorruptFileError(f"{name} of {repository}", f"a file inside {folder}", f"a link to {file}", next_step)
    return file


def _repository_of(directory: Path) -> tuple[str, str] | tuple[None, None]:
    """Return repository and commit of a snapshot in the Hub's cache."""
    cache = Path(constants.HF_HUB_CACHE).resolve()
    resolved = directory.resolve()
    parts = resolved.relative_to(cache).parts if resolved.is_relative_to(cache) else ()
    if len(parts) == 3 and parts[0].startswith("models--") and parts[1] == "snapshots":
        repository = parts[0].removeprefix("models--").replace("--", "/")
        if is_repository(repository, parts[2]):
            return repository, parts[2]
    return None, None
