"""The tensors that a quantized weight holds, as they lie in files."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from hf_trainweights.formats.base import Format
from hf_trainweights.kernels.arguments import MultiplyFew, check_stored


class Held:
    """The stored tensors of a weight, and objects that were prepared from them for products.

    A weight replaces all of it at once, by one attribute, because another thread may multiply meanwhile. So `tensors`
    never changes, and everything else can be made of it again.
    """

    __slots__ = ("_aliases", "cast", "multiply_few", "tensors")

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors
        # The kernel's function for the few rows of a decoding step; None until the first such product.
        self.multiply_few: MultiplyFew | None = None
        # The weight in the dtype of autocast, with the same tensors; None until the first product in autocast.
        self.cast: HeldTensor | None = None
        self._aliases: list[nn.Parameter] | None = None

    @property
    def aliases(self) -> list[nn.Parameter]:
        """The stored tensors as parameters, in the same memory: Dynamo expects parameters to stay at their address."""
        if self._aliases is None:
            # Tensors that are made in inference mode could not be saved for a gradient later.
            with torch.inference_mode(False), torch.no_grad():
                self._aliases = [nn.Parameter(tensor, requires_grad=False) for tensor in self.tensors.values()]
        return self._aliases


def _stored_tensor(name: str) -> Any:
    """Return a property for one stored tensor, which checks a tensor that is assigned to it."""

    def write(weight: HeldTensor, tensor: Tensor) -> None:
        tensors = {**weight.tensors, name: tensor}
        check_stored(tensors, weight.format, weight.stored_shape)
        weight.hold_(Held(tensors))

    return property(functools.partial(_read, name), write, doc=f"The stored tensor `{name}`.")


def _read(name: str, weight: HeldTensor) -> Tensor:
    return weight.held.tensors[name]


class HeldTensor(Tensor):
    """The base of `QuantizedTensor` that holds the stored tensors and makes weights; see there for the arguments."""

    format: Format
    stored_shape: tuple[int, ...]
    transposed: bool
    held: Held
    # The result of `__tensor_flatten__`. A program of torch.compile asks each weight for it twice at every call, and
    # then for the attributes that it names. It would take 16 us to look up the dtype each time and the attributes by
    # `__getattr__`.
    flattened: tuple[list[str], tuple[Any, ...]]

    qdata = _stored_tensor("qdata")
    scale = _stored_tensor("scale")

    @overload
    def __new__(
        cls,
        tensors: Mapping[str, Tensor],
        format: Format,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> Self: ...

    @overload
    def __new__(cls, tensors: Tensor, *, requires_grad: bool = False) -> Any: ...

    def __new__(cls, tensors: Any, format: Any = None, shape: Any = (), *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Build a weight, or make a weight a parameter: accelerate calls the class of a parameter that it moves."""
        if isinstance(tensors, Tensor):
            return nn.Parameter(tensors, **kwargs)
        check_stored(tensors, format, shape)
        held = Held({name: tensors[name] for name in format.tensor_names})
        return cls.from_held(held, format, shape, *args, **kwargs)

    @classmethod
    def from_held(
        cls,
        held: Held,
        format: Format,  # noqa: A002
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> Self:
        """Return the weight with these stored tensors, which are neither copied nor checked."""
        strides = torch.empty(tuple(shape), device="meta").stride()
        size = list(shape)
        if transposed:
            size[-2:] = size[-1], size[-2]
            strides = (*strides[:-2], strides[-1], strides[-2])
        device = held.tensors["qdata"].device
        # No storage: the usual storage has no address, and torch.jit.save would write garbage or crash the process.
        weight: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size, strides=strides, dtype=dtype, device=device, requires_grad=False, storage_size=0
        )
        return weight.describe_(format, tuple(shape), dtype, transposed).hold_(held)

    def describe_(self, form: Format, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> Self:
        """Set the format, stored shape, dtype and orientation of the weight, in place; return self."""
        self.format, self.stored_shape, self.transposed = form, shape, transposed
        self.flattened = _attributes(form), (form, shape, dtype, transposed)
        return self

    def holding(self, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> Self:
        """Return a weight like this one with other stored tensors, of any shape, neither copied nor checked."""
        shape = self.format.shape_of(tensors["qdata"])
        return self.from_held(Held(tensors), self.format, shape, dtype or self.dtype, self.transposed)

    @classmethod
    def quantize(
        cls,
        weight: Tensor,
        format: Format,  # noqa: A002
        transposed: bool = False,
        name: str = "weight",
        beside: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Quantize a float weight.

        Args:
            weight: Float32, bfloat16 or float16, `[*, N, K]`, or `[*, K, N]` if `transposed`. It is not changed.
            format: The format to use, or its fallback if it cannot hold the shape.
            transposed: Whether a product sums over the last dimension but one.
            name: The name of the weight in errors.
            beside: Stored tensors of an earlier weight of this format. Those that all rows share are used again.

        Returns:
            A new tensor that shows the weight's shape and dtype and shares no memory with it.

        Raises:
            QuantizationError: The weight is not a float matrix or holds NaN or Inf.
        """
        stored = weight.detach().transpose(-1, -2) if transposed else weight.detach()
        chosen = format.fallback(stored.shape)
        held = Held(chosen.quantize(stored, name, beside))
        return cls.from_held(held, chosen, stored.shape, weight.dtype, transposed)

    @property
    def is_traced(self) -> bool:
        """Whether a compiler traces with the weight. Its stored tensors are of another class then, without values."""
        return any(type(tensor) is not Tensor for tensor in self.held.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name; no copies."""
        return self.held.tensors

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales."""
        return self.held.tensors["scale"].dtype

    def shared_along(self, dim: int) -> tuple[str, ...]:
        """Return the names of the stored tensors that all entries along a stored dimension share."""
        return self.format.shared_names if dim == len(self.stored_shape) - 2 else ()

    @property
    def stored_bytes(self) -> int:
        """Bytes that the stored tensors take."""
        return self.format.stored_bytes(self.stored_shape, self.scale_dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the float weight.

        Args:
            dtype: Dtype to return; the tensor's own if None.

        Returns:
            A new plain tensor of this tensor's shape, each value rounded once.

        Raises:
            CorruptFileError: The stored tensors do not fit the format.
        """
        weight = self.format.dequantize(self.tensors, self.stored_shape, dtype or self.dtype)
        return weight.transpose(-1, -2) if self.transposed else weight

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """Return the weight with `function` applied to every stored tensor; it must keep their shapes and dtypes.

        Args:
            function: From a stored tensor to its replacement, e.g. a move to another device.
            dtype: Float dtype that the result shows; this tensor's own if None.
        """
        held = Held({name: function(tensor) for name, tensor in self.tensors.items()})
        return self.from_held(held, self.format, self.stored_shape, dtype or self.dtype, self.transposed)

    def hold_(self, held: Held) -> Self:
        """Replace the stored tensors by others of this weight's format, shape and device, which are not copied."""
        # Objects that `held` has prepared for products are left out: they may be for a weight of another dtype.
        self.held = Held(held.tensors)
        for module in list(vars(self).get("_modules", ())):
            module._parameters.changed()
        return self

    @property
    def modules(self) -> weakref.WeakSet[Any]:
        """The modules that show Dynamo what the weight holds; see `traced_modules`."""
        return vars(self).setdefault("_modules", weakref.WeakSet())


@functools.lru_cache
def _attributes(form: Format) -> list[str]:
    """Return the attributes by which compilers reach the stored tensors of a format, and define them on the class."""
    names = {f"held_{name}": name for name in form.tensor_names}
    for attribute, name in names.items():
        setattr(HeldTensor, attribute, property(functools.partial(_read, name)))
    return list(names)
