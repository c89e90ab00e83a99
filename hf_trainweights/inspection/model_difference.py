"""Compares two saved models weight by weight, quantized or not: what quantizing costs each weight."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hf_trainweights.inspection.difference import Comparison, compare_tensors
from hf_trainweights.inspection.stored_tensors import StoredTensor
from hf_trainweights.models.choosing.summary import Calibrated
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def compare_models(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compare the weights of two saved models, each as Transformers loads it.

    Weights therefore have the names of their modules, experts are merged in both models, and tied weights count once.

    Args:
        a: Directory or Hub id of a model, float or quantized.
        b: The model to compare it with.

    Returns:
        The differences, and what calibration was worth; bytes are those of the stored tensors.

    Raises:
        ConfigError: Transformers has no class for a model, or weights are missing.
        CorruptFileError: A file is damaged.

    Examples:
        >>> comparison = compare_models("llama", "llama-int8")
        >>> comparison.totals[0].is_equal
        False
    """
    found = compare_tensors([("weights", _weights(a), _weights(b))], (str(a), str(b)))
    return replace(found, calibrated=Calibrated.beside(Path(b)) or Calibrated.beside(Path(a)))


def _weights(source: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    found: dict[int, StoredTensor] = {}
    for name, tensor in load_saved(source).state_dict(keep_vars=True).items():
        stored_bytes = tensor.stored_bytes if isinstance(tensor, QuantizedTensor) else tensor.nbytes
        # A tied weight is one object under several names.
        found.setdefault(id(tensor), StoredTensor(name, tensor, stored_bytes, Path(source)))
    return {stored.key: stored for stored in found.values()}
