"""`trainweights_files.json`: size and SHA-256 of each weight file of a saved model, and the versions that wrote them.

One JSON object that carries its own digest, see `reading.sign_json`:

    {
      "files": {"model.safetensors": {"sha256": "...", "size_bytes": 123}},
      "format": "trainweights-files",
      "format_version": 1,
      "quantization_config_sha256": "...",
      "sha256": "...",
      "versions": {"hf_trainweights": "...", "safetensors": "...", "torch": "...", "transformers": "..."}
    }

`quantization_config_sha256` is the digest of `quantization_config` in config.json, as canonical JSON. That part says
how the codes are read; people edit the rest. Files by the first versions of this package lack it. A calibrated model
also has `calibration`: the number of tokens, and the errors of its blocks' outputs without texts and with them. The
weight files of a variant have a file of digests of their own, `trainweights_files.<variant>.json`. Digests find damage,
not forgery.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.reading import open_regular_file, read_json_object, require_regular_file, sign_json
from hf_trainweights.files.weight_files import may_be_loaded

CONFIG_NAME = "config.json"
_STEM = "trainweights_files"
_FORMAT = "trainweights-files"
_FORMAT_VERSION = 1
_PACKAGES = ("hf_trainweights", "safetensors", "torch", "transformers")
_CONFIG_KEY = "quantization_config_sha256"
_CALIBRATION_KEY = "calibration"
_MAX_BYTES = 16 << 20  # about 150 bytes a file; the largest models have a few hundred


@dataclass(frozen=True)
class ModelReport:
    """The result of comparing the weight files of a saved model with their digests.

    Args:
        path: The directory.
        files: Names of the weight files that were saved, sorted.
        versions: Package to the version that wrote the files; if variants differ, to all versions with commas between.
        problems: File name to a description of its damage; a damaged file of digests is listed too.
        foreign: Names of weight files that have no digest, sorted; a loader may prefer them.
        covers_config: Whether all files of digests cover `quantization_config` of config.json, which is compared then.
        unchecked: Why the names in the weight files were not compared with the model's; empty if they were compared.
    """

    path: Path
    files: tuple[str, ...]
    versions: Mapping[str, str]
    problems: Mapping[str, str]
    foreign: tuple[str, ...]
    covers_config: bool
    unchecked: str = "only the files were compared"

    @property
    def ok(self) -> bool:
        """Whether the weight files are intact and there are no others, and config.json and the model fit them."""
        return not self.problems and not self.foreign


def digests_name(variant: str | None = None) -> str:
    """Return the name of the file that holds the digests of a variant's weight files.

    Examples:
        >>> digests_name(), digests_name("fp16")
        ('trainweights_files.json', 'trainweights_files.fp16.json')
    """
    return f"{_STEM}.{variant}.json" if variant else f"{_STEM}.json"


def write_digests(
    directory: Path,
    names: Iterable[str],
    variant: str | None = None,
    known: Mapping[str, str] | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Write digests of files beside them, taken from `known` or by reading the file; equal files give equal bytes.

    The weight files of a `variant` have a file of digests of their own. `calibration` is JSON for the record.
    """
    known_sha256s = known or {}
    content: dict[str, Any] = {
        "files": {name: _entry(directory / name, known_sha256s.get(name)) for name in names},
        "versions": package_versions(),
        _CONFIG_KEY: _quantization_sha256(directory),
        _CALIBRATION_KEY: calibration,
    }
    (directory / digests_name(variant)).write_bytes(_signed(content))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that determine the content of a weight file, by name."""
    return {package: importlib.metadata.version(package) for package in _PACKAGES}


def verify_files(path: str | os.PathLike[str]) -> ModelReport:
    """Read every weight file of a saved model and compare it with its digest, so that a single flipped bit is found.

    It also finds a change of `quantization_config` in config.json, which says how the weights are read. ConfigError: it
    is no directory, or one without digests. OSError: the directory itself cannot be read.

    Examples:
        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> _ = (directory / "model.safetensors").write_bytes(b"weights")
        >>> write_digests(directory, ["model.safetensors"])
        >>> verify_files(directory).ok
        True
        >>> _ = (directory / "model.safetensors").write_bytes(b"weighty")
        >>> verify_files(directory).problems
        {'model.safetensors': 'has another SHA-256 than when it was saved'}
    """
    directory = Path(path)
    sources = digest_files(directory)
    if not sources:
        actual = "none" if directory.is_dir() else "no directory"
        next_step = "Save the model with hf_trainweights, quantized; other models carry no digests."
        raise ConfigError(str(directory), f"a directory with {digests_name()}", actual, next_step)
    files: dict[str, Mapping[str, Any]] = {}
    versions: dict[str, set[str]] = defaultdict(set)
    problems: dict[str, str] = {}
    configs: list[str | None] = []
    for source in sources:
        try:
            content = _read(source)
        except (CorruptFileError, OSError) as error:
            problems[source.name] = str(error)
            continue
        files |= content["files"]
        configs.append(content.get(_CONFIG_KEY))
        for package, version in content["versions"].items():
            versions[package].add(version)
    outcomes = {name: _problem(directory / name, entry) for name, entry in files.items()}
    outcomes[CONFIG_NAME] = _config_problem(directory, configs)
    problems |= {name: problem for name, problem in outcomes.items() if problem}
    present = [path.name for path in directory.iterdir() if may_be_loaded(path.name)]
    return ModelReport(
        directory,
        tuple(sorted(files)),
        {package: ", ".join(sorted(several)) for package, several in sorted(versions.items())},
        problems,
        tuple(sorted(set(present) - files.keys())),
        bool(configs) and None not in configs,
    )


def read_calibration(directory: Path) -> Mapping[str, Any] | None:
    """Return the record of calibration that `write_digests` wrote; None for a model without calibration."""
    contents = map(_read, digest_files(directory))
    return next((content[_CALIBRATION_KEY] for content in contents if _CALIBRATION_KEY in content), None)


def read_quantization_config(directory: Path) -> dict[str, Any] | None:
    """Return the `quantization_config` of a directory's config.json; None if it has none or the file is missing."""
    file, next_step = directory / CONFIG_NAME, "Restore it from a copy, or save the model again from its source."
    try:
        described = read_json_object(file, next_step).get("quantization_config")
    except FileNotFoundError:
        return None
    if described is None or type(described) is dict:
        return described
    raise CorruptFileError(f"{file}, quantization_config", "an object", repr(described)[:200], next_step)


def _quantization_sha256(directory: Path) -> str | None:
    """Return the SHA-256 of `quantization_config` as sorted JSON without spaces, in ASCII; None if it is missing."""
    described = read_quantization_config(directory)
    if described is None:
        return None
    return hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_files(directory: Path) -> list[Path]:
    """Return the files of digests in a directory, sorted: one for each variant; empty if the directory is missing."""
    return sorted([*directory.glob(digests_name()), *directory.glob(digests_name("*"))])


def _entry(file: Path, known_sha256: str | None = None) -> dict[str, Any]:
    with open_regular_file(file) as stream:
        sha256 = known_sha256 or hashlib.file_digest(stream, "sha256").hexdigest()
        return {"sha256": sha256, "size_bytes": file.stat().st_size}


def _problem(file: Path, entry: Mapping[str, Any]) -> str | None:
    """Describe the damage of a file, None if it is intact. Links are followed: the Hub's cache consists of them."""
    try:
        require_regular_file(file)
        size_bytes = file.stat().st_size
        if size_bytes != entry["size_bytes"]:
            return f"has {size_bytes} bytes, not {entry['size_bytes']} as when it was saved"
        if _entry(file) != entry:
            return "has another SHA-256 than when it was saved"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except CorruptFileError as error:
        return f"is {error.found}, not {error.expected}"
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def _config_problem(directory: Path, saved: Iterable[str | None]) -> str | None:
    """Describe a change of config.json; None if it still has the digests `saved`, which earlier versions left out."""
    saved_sha256s = {sha256 for sha256 in saved if sha256 is not None}
    try:
        if saved_sha256s and saved_sha256s != {_quantization_sha256(directory)}:
            return "has another quantization_config than when the model was saved"
    except CorruptFileError as error:
        return f"is {error.found}, not {error.expected}"
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a file of digests, after checking that `write_digests` may have written it."""
    next_step = "Compare the model with its source: nothing vouches for it now."
    with open_regular_file(file) as stream:
        text = stream.read(_MAX_BYTES + 1)
    try:
        content = json.loads(text)
        version = content["format_version"]
        intact = version == _FORMAT_VERSION and _signed(content) == text and _is_valid(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFileError(str(file), "digests of weight files", repr(error)[:200], next_step) from error
    if version != _FORMAT_VERSION:
        expected = f"digests of version {_FORMAT_VERSION}"
        raise CorruptFileError(str(file), expected, f"version {version}", "Install a newer hf_trainweights.")
    if not intact:
        raise CorruptFileError(str(file), "the text that was written", "another text", next_step)
    return content


def _signed(content: Mapping[str, Any]) -> bytes:
    fields = {key: content[key] for key in ("files", "versions")}
    fields |= {key: content[key] for key in (_CONFIG_KEY, _CALIBRATION_KEY) if content.get(key) is not None}
    return sign_json({**fields, "format": _FORMAT, "format_version": _FORMAT_VERSION})


def _is_valid(content: Mapping[str, Any]) -> bool:
    """Return whether all names are names of weight files, without a directory, and all values have the right types."""
    types = {"sha256": str, "size_bytes": int}
    texts = [*content["versions"].values(), content.get(_CONFIG_KEY, "")]
    return all(isinstance(text, str) for text in texts) and all(
        may_be_loaded(name) and Path(name).name == name and {key: type(value) for key, value in entry.items()} == types
        for name, entry in content["files"].items()
    )
