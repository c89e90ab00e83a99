"""`ModelState`: a model as torch.distributed.checkpoint saves and loads it, quantized weights as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import (
    FORMAT_SUFFIX,
    flatten_weight,
    group_stored,
    parse_stored_name,
    stored_name,
    unflatten_weight,
)


class ModelState:
    """A wrapper of a model with the methods that `torch.distributed.checkpoint` expects of a `Stateful`.

    Quantized weights are saved as the plain tensors that stand for them in files, sharded as they are, and loaded back
    into the model. Any reader can load the names and tensors of such a checkpoint; it does not need this package.

    Args:
        model: A module, plain or wrapped by FSDP2; it may hold no quantized weight at all.

    Examples:
        >>> import warnings, torch.distributed.checkpoint as dcp
        >>> from hf_trainweights import TrainWeightsConfig, quantize_
        >>> from hf_trainweights.distributed import TrainWeightsReader, TrainWeightsWriter
        >>> warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized")  # one process, and we mean it
        >>> saved, loaded = (torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(2))
        >>> for model in (saved, loaded):
        ...     _ = quantize_(model, TrainWeightsConfig("int8"))
        >>> _ = dcp.save({"model": ModelState(saved)}, storage_writer=TrainWeightsWriter("quantized"), no_dist=True)
        >>> dcp.load({"model": ModelState(loaded)}, storage_reader=TrainWeightsReader("quantized"), no_dist=True)
        >>> torch.equal(saved[0].weight.qdata, loaded[0].weight.qdata)
        True
    """

    def __init__(self, model: nn.Module):
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, with the stored tensors of each quantized weight under their names in files.

        Raises:
            UnsupportedError: A quantized weight is sharded along its columns.
        """
        flat: dict[str, Any] = {}
        for name, tensor in get_model_state_dict(self._model).items():
            local = _local(tensor)
            if local is None:
                flat[name] = tensor
                continue
            stored: dict[str, Tensor] = flatten_weight(name, local, None, plain=True)
            if isinstance(tensor, DTensor):
                stored = {key: _shard_as(tensor, value, local, key) for key, value in stored.items()}
            flat |= stored
        return flat

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the tensors of a state dict, which has the names and shapes of `state_dict()`, into the model.

        Args:
            state_dict: Names to tensors.

        Raises:
            CorruptFileError: The tensors of a quantized weight are missing, or of another format.
        """
        tensors = get_model_state_dict(self._model).items()
        weights = {name: local for name, tensor in tensors if (local := _local(tensor)) is not None}
        stored = group_stored(state_dict)
        quantized_names = {stored_name(name, suffix) for name in weights for suffix in stored.get(name, ())}
        plain = {name: tensor for name, tensor in state_dict.items() if name not in quantized_names}
        set_model_state_dict(self._model, plain, options=StateDictOptions(strict=False))
        for name, weight in weights.items():
            _put(name, weight, stored.get(name, {}))


def _put(name: str, local: QuantizedTensor, stored: Mapping[str, Tensor]) -> None:
    plain = {key: tensor.to_local() if isinstance(tensor, DTensor) else tensor for key, tensor in stored.items()}
    folded = unflatten_weight(name, plain, local.dtype, None)
    if not isinstance(folded, QuantizedTensor) or folded.__tensor_flatten__() != local.__tensor_flatten__():
        next_step = "Quantize the model as it was when it was saved."
        raise CorruptFileError(name, repr(local), repr(folded), next_step)
    with torch.no_grad():
        for key, tensor in local.tensors.items():
            tensor.copy_(folded.tensors[key])


def _local(tensor: object) -> QuantizedTensor | None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local if isinstance(local, QuantizedTensor) else None


def _shard_as(weight: DTensor, stored: Tensor, local: QuantizedTensor, name: str) -> DTensor:
    """Return a stored tensor as a DTensor: cut like the rows of the weight, or the same on all ranks."""
    if any(not isinstance(placement, Replicate) and placement != Shard(0) for placement in weight.placements):
        next_step = "Save a model that is sharded along rows, as FSDP2 does it, or gather it first."
        raise UnsupportedError(name, "shards of whole rows", str(weight.placements), next_step)
    parsed = parse_stored_name(name)
    shared = {FORMAT_SUFFIX, *local.format.shared_names}
    mesh, placements, shape = weight.device_mesh, weight.placements, (weight.shape[0], *stored.shape[1:])
    if parsed is None or parsed[1] in shared:
        placements, shape = [Replicate()] * mesh.ndim, stored.shape
    full = torch.empty(shape, device="meta")
    return DTensor.from_local(stored, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
