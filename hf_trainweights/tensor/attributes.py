"""What a quantized weight's attributes and its values as arrays are, above the ops; importing this registers it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.dispatch import replaces, unsupported_in_place
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.read_only import HOW_TO_CHANGE, lost_write, read_only_storage


@replaces(Tensor.__setitem__)
def _set_item(tensor: Tensor, *index_and_value: Any) -> Any:
    del index_and_value
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    raise unsupported_in_place("__setitem__", tensor)


@replaces(Tensor.apply_, Tensor.map_, Tensor.map2_)
def _apply(tensor: Tensor, *others_and_function: Any) -> Any:
    """Refuse what would write to the address of a wrapper, which has no memory, and crash the process."""
    del others_and_function
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    raise unsupported_in_place("apply_, map_ or map2_", tensor)


@replaces(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(tensor: QuantizedTensor, requires_grad: bool) -> None:
    if requires_grad:
        raise UnsupportedError(
            "requires_grad",
            "False on a quantized weight, which takes no gradient",
            f"True on {tensor!r}",
            "Train an adapter, for example with PEFT, or model.dequantize() first.",
        )


@replaces(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(tensor: Tensor, data: Tensor) -> Any:
    """Take over shape, dtype and tensors of `data`; PEFT casts a model by `param.data = param.data.to(...)`."""
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    if not isinstance(data, QuantizedTensor):
        raise UnsupportedError(
            "data",
            "an op that leaves the quantized weight as it is",
            f"{data.dtype} values in place of {tensor!r}",
            f"{HOW_TO_CHANGE} FullyShardedDataParallel puts views of one float tensor there: use fully_shard, which is "
            "fsdp_version 2 of accelerate.",
        )
    Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined]
    return tensor.describe_(*data.flattened[1]).hold_(data.held)


@replaces(Tensor.numpy, Tensor.__array__)
def _numpy(tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Refuse: accelerate's disk_offload would store float arrays, and bring float weights back."""
    del args, kwargs
    raise UnsupportedError(
        "numpy", "a plain tensor", f"{tensor!r}, whose values are no array in memory", "Call dequantize() first."
    )


@replaces(Tensor.untyped_storage)
def _untyped_storage(tensor: QuantizedTensor) -> Any:
    # A compiler resizes the storage of the weight that it traces with.
    return NotImplemented if tensor.is_traced else read_only_storage(Tensor.untyped_storage(tensor))


@replaces(Tensor.storage)
def _storage(tensor: QuantizedTensor) -> torch.TypedStorage:
    del tensor
    raise lost_write("storage")
