"""The weights outside a run that its files are stored against: where they are found, and read one tensor at a time.

They lie in the run, in the Hub's cache, or in a directory that the caller names. What a file says about its base is
believed only as far as it cannot do harm. It may name a repository and a commit, which lead into the Hub's cache and
nowhere else, and digests, under which the run may keep the base's files. It cannot name a path: a base that lies
elsewhere is opened only where the caller has named its directory in this process, with `register_base` or as `anchor`.
Wherever a file lies, its digest is compared before anything reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES
from hf_trainweights.checkpoint.encoded.reader import anchor_paths, is_encoded, load_file, sha256_once
from hf_trainweights.checkpoint.encoded.structure import Base, anchor_file_name, is_repository
from hf_trainweights.checkpoint.encoded.tree import corrupt
from hf_trainweights.errors import ConfigError, CorruptFileError, MissingAnchorError
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
        found = "no file" if not file.is_file() else "an encoded file" if is_encoded(file) else "a file"
        if found != "a file" or not name.endswith((".safetensors", ".bin")):
            next_step = "Pass the model that the run starts from, or make this checkpoint plain by restore_directory."
            raise ConfigError("anchor", "plain files of weights, .safetensors or .bin", f"{found} at {file}", next_step)
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
        except CorruptFileError as error:
            changed = error
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


class BaseWeights:
    """The weights of a base, read one at a time; they serve as an `Anchor` does, and `files` are paths by name.

    A checkpoint directory may keep the files. CorruptFileError: one has changed, or holds something else than plain
    tensors. MissingAnchorError: one is nowhere.
    """

    def __init__(self, base: Base, directory: Path):
        self.base, self.sha256 = base, base.sha256
        self.files = find_base(base, directory)
        self._readers: dict[str, Callable[[], Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, path in self.files.items():
            self._open(name, path)
        self._stored_names = {name: name for name in self._readers}

    def __contains__(self, name: object) -> bool:
        return name in self._stored_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor has in the base's files."""
        return self._stored_names[name]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored, contiguous on the CPU, not to be written to: it may be mapped from a file."""
        if name not in self._stored_names:
            raise corrupt(str(self.base), f"a base that holds {name}", "others only")
        try:
            return self._readers[self._stored_names[name]]().detach().contiguous()
        except SafetensorError as error:
            raise corrupt(f"{self.base}, {name}", "a readable tensor", error) from error

    def named_as(self, weights: Mapping[str, Any]) -> Self:
        """Give the tensors the names that they have in a checkpoint's flat state dict; the others go.

        A model with a head has the weights of its base model under a prefix, and the other way round. A name goes
        before a name without or with the prefix, and a shape must fit. Of tied weights one is enough.
        """
        shapes = {name: tuple(each.shape) for name, each in weights.items() if isinstance(each, Tensor)}
        names = matching_names(shapes, self._shapes)
        places = {weights[name].data_ptr(): stored for name, stored in names.items() if weights[name].data_ptr()}
        tied = {name: places[weights[name].data_ptr()] for name in shapes if weights[name].data_ptr() in places}
        self._stored_names = {name: stored for name, stored in tied.items() if shapes[name] == self._shapes[stored]}
        self._stored_names |= names
        return self

    def _open(self, name: str, path: Path) -> None:
        if not name.endswith(".safetensors"):
            self._open_torch_file(path)
            return
        try:
            file = safe_open(path, framework="pt")
            for each in file.keys():  # noqa: SIM118 (it is no dict)
                self._readers[each] = lambda each=each: file.get_tensor(each)
                self._shapes[each] = tuple(file.get_slice(each).get_shape())
        except SafetensorError as error:
            raise corrupt(f"{name} of {self.base}", "a safetensors file", error) from error

    def _open_torch_file(self, path: Path) -> None:
        state = None if is_encoded(path) else load_file(path, mmap=True)
        if not isinstance(state, dict):
            raise corrupt(f"{path} of {self.base}", "a plain state dict", type(state).__name__)
        for name, tensor in state.items():
            if isinstance(name, str) and type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in ALL_DTYPES:
                self._readers[name] = lambda tensor=tensor: tensor
                self._shapes[name] = tuple(tensor.shape)


def matching_names(weights: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return which weights of a checkpoint other files have, by shape and name, which may differ by one prefix.

    Both arguments are shapes by name; the result is the name in the other files by that in the checkpoint.

    Examples:
        >>> matching_names({"bert.pooler.weight": (2, 2), "head.weight": (3, 2)}, {"pooler.weight": (2, 2)})
        {'bert.pooler.weight': 'pooler.weight'}
    """
    # One prefix for all: a name that happens to end like another would be a bad reference.
    (more, added), (less, removed) = _commonest_prefix(weights, stored), _commonest_prefix(stored, weights)
    found = {}
    for name, shape in weights.items():
        renamed = name.removeprefix(added) if more > less else removed + name
        stored_name = name if stored.get(name) == shape else renamed
        if stored.get(stored_name) == shape:
            found[name] = stored_name
    return found


def _commonest_prefix(longer: Mapping[str, tuple[int, ...]], shorter: Mapping[str, tuple[int, ...]]) -> tuple[int, str]:
    """Return the prefix that most names in `longer` have before a name in `shorter`, and how many have it."""
    prefixes: Counter[str] = Counter()
    for name, shape in longer.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            if shorter.get(".".join(parts[count:])) == shape:
                prefixes[".".join(parts[:count]) + "."] += 1
    return max(((count, prefix) for prefix, count in prefixes.items()), default=(0, ""))
