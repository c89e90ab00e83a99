"""How many bytes a model takes in the safetensors files of a save: its weights, and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import nn

from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.tensor.guards import NOTICE_NAME, guarded_names
from hf_trainweights.tensor.stored_names import FORMAT_SUFFIX, stored_name

# What a header has at most for a tensor beside its name: dtype, shape and offsets in JSON.
_ENTRY_BYTES = 110
# The header's own length and its metadata, and what aligns the tensors.
_HEADER_BYTES = 128


def file_bytes_in(choice: Choice, form: Format) -> int:
    """Return how many bytes a weight takes in a file in any format, its entries in the header included, at most."""
    weight = getattr(choice.module, choice.name.rpartition(".")[2])
    *lead, N, K = weight.shape
    shape = (*lead, K, N) if choice.transposed else (*lead, N, K)
    return _quantized_bytes(choice, form, form.stored_bytes(shape, weight.dtype))


def file_bytes(choice: Choice) -> int:
    """Return how many bytes a parameter takes in a file as it was chosen to lie there, at most."""
    if choice.format is not None:
        return _quantized_bytes(choice, choice.format, choice.bytes_after)
    weight = getattr(choice.module, choice.name.rpartition(".")[2])
    # Experts in float are saved one by one.
    entries = weight.shape[0] if weight.dim() == 3 else 1
    return choice.bytes_after + entries * (len(choice.name.encode()) + _ENTRY_BYTES)


def rest_bytes(module: nn.Module, names: Sequence[str]) -> int:
    """Return the bytes in a file beside the parameters: buffers, guards of the quantized `names`, header, at most."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict(keep_vars=True).items()
    buffers = [(name, each.nbytes) for name, each in state if name not in parameters and hasattr(each, "nbytes")]
    guards = [(name, 1) for name in (NOTICE_NAME, *guarded_names(names))]
    return _HEADER_BYTES + sum(len(name.encode()) + _ENTRY_BYTES + count for name, count in (*buffers, *guards))


def _quantized_bytes(choice: Choice, form: Format, stored_bytes: int) -> int:
    described = len(json.dumps(form.get_config() | {"transposed": True, "dtype": "bfloat16"}))
    names = [stored_name(choice.name, suffix) for suffix in (*form.tensor_names, FORMAT_SUFFIX)]
    return stored_bytes + described + sum(len(name.encode()) + _ENTRY_BYTES for name in names)
