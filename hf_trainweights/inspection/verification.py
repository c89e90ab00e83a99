"""Verifies a saved model: no file has changed since the save, and a load finds every parameter in the files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from hf_trainweights.errors import ConfigError, TrainWeightsError
from hf_trainweights.files.digests import CONFIG_NAME, ModelReport, verify_files
from hf_trainweights.files.reading import read_json_object
from hf_trainweights.files.weight_files import entry_point_rank, shard_names
from hf_trainweights.models.loading.names import wrong_names
from hf_trainweights.models.loading.saved_models import check_config, read_config
from hf_trainweights.models.loading.stored_weights import check_weight_files, saved_class

_SHOWN = 3


def verify_model(path: str | os.PathLike[str]) -> ModelReport:
    """Read every weight file of a saved model and compare it with its digest; a single flipped bit is found.

    A change of `quantization_config` in config.json, which tells how to read the weights, is found too. Then compare
    the names in the weight files with the names of the model's class: no name may be missing or unexpected. If
    Transformers does not have the class, `unchecked` says so.

    Args:
        path: A directory that `save_pretrained` of a quantized model wrote, or a snapshot of a pushed one.

    Returns:
        The report; `report.ok` if nothing is damaged, missing or foreign.

    Raises:
        ConfigError: It is no directory, or one without digests.
        OSError: The directory itself cannot be read. Problems with the files in it are in the report.

    Examples:
        >>> verify_model("llama-int8").ok  # doctest: +SKIP
        True
    """
    report = verify_files(path)
    if not report.ok:
        return dataclasses.replace(report, unchecked="the files are not those that were saved")
    problems: dict[str, str] = {}
    unchecked = ""
    for name in report.files:
        # An entry point is a file that loaders open first: a single file of weights, or an index of shards.
        if entry_point_rank(name) is not None:
            try:
                problem = _problem(report.path, name)
            except ConfigError as error:
                unchecked = f"{error.found}, and {error.expected} was expected"
                continue
            if problem:
                problems[name] = problem
    return dataclasses.replace(report, problems=problems, unchecked=unchecked)


def _problem(directory: Path, name: str) -> str:
    """Return why a load would not find the model in one weight file, or in the shards of an index; "" if it would.

    Raise ConfigError if Transformers does not have the model's class.
    """
    saved = read_config(directory)
    class_name, cls = saved_class(saved)
    if cls is None:
        raise ConfigError(CONFIG_NAME, "a class of Transformers", class_name, "Load the model to see whether it fits.")
    entry = directory / name
    try:
        files = [directory / shard for shard in shard_names(entry)] if entry.suffix == ".json" else [entry]
        size_bytes = sum(file.stat().st_size for file in files)
        config = read_json_object(directory / CONFIG_NAME, "Save the model again.")
        tensors = check_weight_files(files, directory)
        # A configuration may not ask for more than the files can fill.
        check_config(config, len(tensors), size_bytes, CONFIG_NAME)
        wrong = wrong_names(cls, saved, files, directory)
    except TrainWeightsError as error:
        return str(error)
    except Exception as error:
        # Wrong values in config.json can cause any error.
        return f"does not fit {class_name}: {type(error).__name__}: {error}"
    shown = [f"{wrong_name} {problem}" for wrong_name, problem in sorted(wrong.items())]
    more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"does not load as {class_name}: {', '.join(shown[:_SHOWN])}{more}" if shown else ""
