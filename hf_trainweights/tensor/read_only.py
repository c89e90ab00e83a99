"""Float values of a quantized weight that cannot be written to: the result of a view that cannot stay quantized.

`w[0]`, `w.view(-1)` and `w[:, :8]` of a float weight share its memory. If the weight is quantized, they are dequantized
values: code that fills them with zeros would change a copy and not the weight. So the first write raises.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_trainweights.errors import UnsupportedError

# The advice of errors about lost writes.
HOW_TO_CHANGE = (
    "To change a weight, dequantize() the model, change it, and quantize it again; to resize embeddings, do so before "
    "quantizing."
)

# Ops that return views although their schemas do not say so. `reshape` calls the first one also after it has copied;
# then its result is read-only without need.
_UNSAID_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}


class ReadOnlyTensor(Tensor):
    """Values that ops may read and not write. A view of it is of this class, too; every other result is a plain tensor.

    It has memory of its own, so all code that reads tensors can read it. Copies and pickles are plain tensors.
    """

    # A plain tensor with the same memory, on which the ops run.
    plain: Tensor

    # Otherwise PyTorch would make every result a tensor of this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, ReadOnlyTensor) for value in written(func, args, kwargs)):
            raise lost_write(str(func))
        plain_args, plain_kwargs = tree_map_only(ReadOnlyTensor, lambda tensor: tensor.plain, (args, kwargs))
        return views_as_read_only(func, func(*plain_args, **plain_kwargs))

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return the values as an array that cannot be written to."""
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as Python numbers, in lists."""
        return self.plain.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage, which cannot be written to."""
        return read_only_storage(self.plain.untyped_storage())

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values of the tensor, also read-only."""
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        raise lost_write("data")

    def apply_(self, *_: object) -> NoReturn:  # type: ignore[override]
        """Raise an UnsupportedError."""
        raise lost_write("apply_, map_ or map2_")

    map_ = map2_ = apply_  # type: ignore[assignment]

    def storage(self) -> NoReturn:
        """Raise: PyTorch's old storages write past every check."""
        raise lost_write("storage")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], metadata: object, outer_size: object, outer_stride: object
    ) -> ReadOnlyTensor:
        del metadata, outer_size, outer_stride
        return _read_only_sharing(inner_tensors["plain"])

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return dlpack_of_copy(self.plain, *args, **kwargs)

    def __format__(self, format_spec: str) -> str:
        return format(self.plain, format_spec)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        del tensor_contents
        return repr(self.plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The storage may hold the full dequantized weight, so only a clone of these values is pickled.
        return self.plain.clone().__reduce_ex__(protocol)


class ReadOnlyStorage(torch.UntypedStorage):
    """A storage that refuses the methods which write to it."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise lost_write("untyped_storage")

    fill_ = copy_ = resize_ = byteswap = __setitem__ = _refuse

    def clone(self) -> torch.UntypedStorage:
        """Return a copy, which can be written to."""
        return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self)


def read_only(tensor: Tensor) -> Tensor:
    """Return a read-only tensor that shares a plain tensor's memory.

    The tensors that a compiler traces with are returned as they are: it recognizes them by their class, and under its
    dispatch mode it makes plain ones its own.
    """
    if type(tensor) is not Tensor or torch._C._len_torch_dispatch_stack() != 0:
        return tensor
    return _read_only_sharing(tensor)


def _read_only_sharing(plain: Tensor) -> ReadOnlyTensor:
    if type(plain) is Tensor:
        result = Tensor._make_subclass(ReadOnlyTensor, plain)  # type: ignore[attr-defined]
    else:
        # A tensor that a compiler traces with has no memory to share.
        result = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            ReadOnlyTensor, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
    result.plain = plain
    return result


def views_as_read_only(func: Any, result: Any) -> Any:
    """Return the result of an op, made read-only if the op returns views of its arguments."""
    aliases = (value.alias_info for value in func._schema.returns)
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return tree_map_only(Tensor, read_only, result) if is_view or func in _UNSAID_VIEWS else result


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an op writes to."""
    values: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values += tree_leaves(args[position] if position < len(args) else kwargs.get(argument.name))
    return values


def read_only_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Make a storage refuse writes, in place, and return it. PyTorch keeps one Python object for each storage."""
    storage.__class__ = ReadOnlyStorage
    return storage


def dlpack_of_copy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the DLPack capsule of float values of a quantized weight; UnsupportedError: the caller wants no copy.

    A caller that gets no copy could write to the memory.
    """
    if not kwargs.get("copy"):
        raise lost_write("__dlpack__")
    return tensor.__dlpack__(*args, **kwargs)


def lost_write(where: str) -> UnsupportedError:
    """Return the error for a write to float values of a quantized weight."""
    return UnsupportedError(
        where,
        "float values of a quantized weight to be read only",
        "a write to them, which would not reach the weight",
        f"{HOW_TO_CHANGE} For values of your own, call .clone() first, or .dequantize() on a whole weight.",
    )
