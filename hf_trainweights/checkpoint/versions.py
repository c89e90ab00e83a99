"""`VersionedModelSaver`: finished models under version numbers, with metadata and a hash that shows any damage."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_trainweights.checkpoint.encoded.reader import load_file, register_anchor_directory
from hf_trainweights.checkpoint.loop.module_state import (
    adopt_quantized_weights,
    load_module_state,
    load_transient_buffers,
    module_state,
    quantized_weights,
    state_sha256,
    transient_buffers,
)
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest, require_json
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.checkpoints import intact_manifest
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME, Weights
from hf_trainweights.checkpoint.whole.writer import save_new_directory
from hf_trainweights.errors import ConfigError, CorruptFileError, TrainWeightsError

if TYPE_CHECKING:
    from hf_trainweights.exports.sources import ExampleInputs

# Buffers that are not in the state dict, if there are any.
_BUFFERS_NAME = "buffers.pt"

# A copy that runs without the model's class, if the caller requested one.
_TORCHSCRIPT_NAME = "model.torchscript.pt"

# https://semver.org, with fewer or more than three numbers allowed.
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:\+[0-9A-Za-z.-]+)?")


class VersionedModelSaver:
    """Keeps versions of a model in `base_dir/<version>`: exact weights, JSON metadata, no code.

    Args:
        base_dir: The directory of the versions; the first save creates it.

    Examples:
        >>> import tempfile
        >>> saver = VersionedModelSaver(tempfile.mkdtemp())
        >>> metadata = saver.save(nn.Linear(3, 2), "1.2.0", {"in_features": 3, "out_features": 2})
        >>> model, metadata = saver.load("1.2.0", nn.Linear)
        >>> model.training, metadata["version"], saver.list_versions()
        (False, '1.2.0', ['1.2.0'])
    """

    def __init__(self, base_dir: str | Path):
        self._base_dir = Path(base_dir).absolute()

    def save(
        self,
        model: nn.Module,
        version: str,
        config: Any,
        metrics: Mapping[str, Any] | None = None,
        description: str = "",
        torchscript: bool = False,
        example_inputs: ExampleInputs | None = None,
    ) -> dict[str, Any]:
        """Write a new version, which appears complete or not at all.

        A TorchScript copy is `model.torchscript.pt` in the version's directory, for `torch.jit.load` and libtorch. If
        TorchScript cannot represent the model, a warning says so, `has_torchscript` in the metadata is False, and the
        version is complete without the copy. PyTorch deprecates TorchScript, and a FutureWarning says so.

        Args:
            model: Its parameters and buffers are stored exactly, also buffers that its state dict leaves out.
            version: A string like "1.10.0" or "2.0.0-rc.1"; an existing version is never overwritten.
            config: The arguments that `load` builds the model from: a dict of JSON values, a dataclass or an object
                with `to_dict`.
            metrics: A dict of JSON values; NaN is allowed.
            description: Free text.
            torchscript: Whether to store a TorchScript copy too.
            example_inputs: A tensor, a tuple or a dict of arguments, which the copy is traced with. None for text and
                image models of Transformers, and for modules whose code TorchScript can compile.

        Returns:
            The metadata, as `load` returns it.

        Raises:
            ConfigError: The version has another form, or config or metrics hold something that JSON cannot.
            SaveError: The version exists, or the disk is full or refuses; nothing is left behind.
        """
        config = _as_dict(config)
        require_json(config, "config")
        copies = _torchscript_copy(model, example_inputs) if torchscript else {}
        state, buffers = module_state(model), transient_buffers(model)
        manifest = save_new_directory(
            SaveJob(self._path(version), Policy("lossless")),
            Weights(state),
            {_BUFFERS_NAME: (buffers, {})} if buffers else {},
            as_they_are=copies,
            metrics=dict(metrics or {}),
            metadata={
                "version": version,
                "description": description,
                "config": config,
                "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
                "model_hash": state_sha256({**state, **buffers}),
                "has_torchscript": bool(copies),
                **({"quantized": quantized} if (quantized := quantized_weights(model)) else {}),
            },
        )
        return _metadata(manifest)

    def load(
        self,
        version: str,
        model_class: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Read a version.

        Args:
            version: The string that it was saved under.
            model_class: The model's class, or any function that returns a model. It is called with the stored config as
                keyword arguments; a class of Transformers with its `config_class` made from the config.
            device: The device of the model. Default: the one on which `model_class` makes it.
            **kwargs: Further arguments for `model_class`; they override those of the config.

        Returns:
            `(model, metadata)`: the model in eval mode with bit for bit the weights that were saved, and version,
            description, config, metrics, model_class, model_hash, has_torchscript, torch_version, package_version,
            timestamp and files. If there are quantized weights, `quantized` has their formats.

        Raises:
            ConfigError: The version does not exist, or `model_class` is missing.
            CorruptFileError: A file is damaged, or the model that was built is not the one that was saved.
        """
        path = self._path(version)
        manifest = intact_manifest(path)
        if manifest is None:
            versions = ", ".join(self.list_versions()) or "none yet"
            expected = f"one of those in {self._base_dir}: {versions}"
            raise ConfigError("version", expected, version, "Choose one of these.")
        metadata = _metadata(manifest)
        _require_version(path, metadata)
        if model_class is None:
            next_step = f"Pass it: the model was a {metadata['model_class']}. Classes are not stored with weights."
            raise ConfigError("model_class", "the model's class", "None", next_step)
        register_anchor_directory(path)
        state = load_file(path / WEIGHTS_NAME)
        if not isinstance(state, Mapping):
            raise _no_version(path / WEIGHTS_NAME, type(state).__name__)
        model = _build(model_class, metadata["config"], kwargs)
        if adopt_quantized_weights(model, state, metadata.get("quantized") or {}):
            # Importing hf_trainweights.models takes seconds, and a version without quantized weights does not need it.
            from hf_trainweights.models.quantize_in_place import adopt

            adopt(model)
        _adopt_dtypes(model, state)
        load_module_state(model, state)
        load_transient_buffers(model, load_file(path / _BUFFERS_NAME) if _BUFFERS_NAME in metadata["files"] else {})
        sha256 = state_sha256({**module_state(model), **transient_buffers(model)})
        if sha256 != metadata["model_hash"]:
            next_step = "Build the model as it was when it was saved, or restore the version from a copy."
            raise CorruptFileError(str(path), f"a model with hash {metadata['model_hash']}", sha256, next_step)
        return model.to(device).eval(), metadata

    def list_versions(self) -> list[str]:
        """List the existing versions in semantic order: "1.2.0" before "1.10.0-rc.1" before "1.10.0".

        Returns:
            Version strings as they were saved; a directory without a manifest is left out.

        Raises:
            OSError: `base_dir` cannot be read.
        """
        if not self._base_dir.is_dir():
            return []
        names = [path.name for path in self._base_dir.iterdir() if (path / MANIFEST_NAME).is_file()]
        return [match.string for match in sorted(filter(None, map(_VERSION.fullmatch, names)), key=_semantic_key)]

    def _path(self, version: str) -> Path:
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise ConfigError("version", 'one like "1.10.0" or "2.0.0-rc.1"', repr(version), "Write it so.")
        return self._base_dir / version


def _torchscript_copy(model: nn.Module, example_inputs: ExampleInputs | None) -> dict[str, bytes]:
    """Return the TorchScript file of a model by its name; if TorchScript cannot represent it, warn and return {}."""
    # This imports Transformers' modelling code, which most saves do not need.
    from hf_trainweights.exports.pytorch import DEPRECATION, torchscript_bytes

    warnings.warn(DEPRECATION, FutureWarning, stacklevel=3)
    try:
        return {_TORCHSCRIPT_NAME: torchscript_bytes(model, example_inputs)}
    except TrainWeightsError as error:
        warnings.warn(f"the version is saved without a TorchScript copy: {error}", stacklevel=3)
        return {}


def _require_version(path: Path, metadata: Mapping[str, Any]) -> None:
    """Check that a manifest is that of a version, not that of a checkpoint in a directory of its name."""
    types = {"model_class": str, "config": dict, "model_hash": str}
    for name, kind in types.items():
        if not isinstance(metadata.get(name), kind):
            raise _no_version(path / MANIFEST_NAME, f"{metadata.get(name)!r} as {name}"[:200])


def _no_version(path: Path, found: str) -> CorruptFileError:
    next_step = "Choose another version, or restore this one from a copy."
    return CorruptFileError(str(path), "what VersionedModelSaver.save wrote", found, next_step)


def _semantic_key(match: re.Match[str]) -> tuple[Any, ...]:
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:  # 1.0 and 1.0.0 have the same rank
        numbers.pop()
    identifiers = match[2].split(".") if match[2] else []
    # Numbers rank below words, a release above all its release candidates (semver.org, 11).
    ranks = [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in identifiers]
    return numbers, not identifiers, ranks, match.string


def _as_dict(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        return _string_keys(config.to_dict())  # Transformers' id2label has integers, which its from_dict restores
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    if isinstance(config, Mapping):
        return dict(config)
    raise ConfigError(
        "config", "a dict, a dataclass or an object with to_dict", repr(config)[:80], "Pass one of these."
    )


def _string_keys(value: Any) -> Any:
    """Return `value` with integer keys as strings, as JSON would write them."""
    if isinstance(value, Mapping):
        return {str(key) if type(key) is int else key: _string_keys(item) for key, item in value.items()}
    return value


def _build(model_class: Callable[..., nn.Module], config: Mapping[str, Any], kwargs: Mapping[str, Any]) -> nn.Module:
    config_class: Any = getattr(model_class, "config_class", None)
    if config_class is not None:
        return model_class(config_class.from_dict(dict(config)), **kwargs)
    return model_class(**{**config, **kwargs})


def _adopt_dtypes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Cast parameters and buffers to the dtypes they were saved with: a class builds float32, and copying casts."""
    cast: dict[Any, torch.Tensor] = {}  # by memory, so that tensors that share it go on doing so
    for name, tensor in model.state_dict(keep_vars=True).items():
        stored = state.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(stored, torch.Tensor) and tensor.dtype != stored.dtype:
            memory = tensor.data_ptr(), tensor.shape, tensor.stride(), stored.dtype
            tensor.data = cast.setdefault(memory, tensor.data.to(stored.dtype))


def _metadata(manifest: Manifest) -> dict[str, Any]:
    files = {name: {"size_bytes": entry.size_bytes, "sha256": entry.sha256} for name, entry in manifest.files.items()}
    return {
        **manifest.metadata,
        "metrics": dict(manifest.metrics),
        "timestamp": manifest.created,
        "torch_version": manifest.torch_version,
        "package_version": manifest.package_version,
        "files": files,
    }
