"""A weight held in a quantized dtype that behaves as the float tensor it stands for.

`QuantizedTensor` shows the shape and dtype of the float weight and holds the few plain tensors of its format. Views
along every dimension but K stay quantized, products dequantize what they need, and an op without a handler
dequantizes and is counted in `FALLBACKS` (logged when TRAINWEIGHTS_LOG_FALLBACK=1 is set before the import).
In-place ops raise: rounding an update into codes would lose it silently. A view along K and a single row are float
copies: writing to one does not change the weight.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import FLOAT_DTYPES, Format
from hf_trainweights.tensor.identity import Identity

# Dtypes that a quantized weight can show; it is quantized from the first three only.
SHOWN_DTYPES = (*FLOAT_DTYPES, torch.float64)

# How often each op without a handler has dequantized its weights in this process.
FALLBACKS: Counter[str] = Counter()

# What each op does with quantized arguments; a handler returns NotImplemented for a case it leaves to the fallback.
HANDLERS: dict[Any, Callable[..., Any]] = {}

# The handlers that take a kernel's private layout as it is; all others get the weight in its canonical one.
ANY_LAYOUT: set[Any] = set()

# What assigns to a weight without being an op, and what it does to a quantized one.
ASSIGNMENTS: dict[Any, Callable[..., None]] = {}

# What a function does without its ops where nothing but its result is asked for; NotImplemented leaves it to the ops.
SHORTCUTS: dict[Any, Callable[..., Any]] = {}

_logger = logging.getLogger(__name__)
_LOG_FALLBACKS = os.environ.get("TRAINWEIGHTS_LOG_FALLBACK") == "1"


class QuantizedTensor(Tensor):
    """A float weight stored in a quantized format.

    The stored weight is `[*, N, K]` with groups along K. Where a layer keeps its weight the other way round (GPT-2's
    Conv1D, some expert layouts) it is stored transposed and `transposed` is set; the shape shown is always the layer's.

    Args:
        tensors: The stored tensors, named as `format.tensor_names` says; kept, not copied. Each is an attribute of
            that name (`qdata`, `scale`).
        format: The format they are in.
        shape: Shape of the stored weight, `[*, N, K]`.
        dtype: Float dtype that the tensor shows and computes in.
        transposed: Whether the shape shown is the stored one with its last two dimensions exchanged.
        requires_grad: Ignored: a quantized weight takes no gradient. Accelerate passes it.

    Raises:
        CorruptFileError: The stored tensors do not fit format and shape.

    Example:
        >>> weight = QuantizedTensor.quantize(torch.ones(4, 8), get_format({"format": "int8"}))
        >>> weight.shape, weight.qdata.dtype
        (torch.Size([4, 8]), torch.int8)
    """

    qdata: Tensor
    scale: Tensor
    format: Format
    stored_shape: tuple[int, ...]
    transposed: bool
    few_rows: tuple[Tensor, Callable[[Tensor, Tensor | None], Tensor | None] | None] | None  # by `quantized_products`

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        tensors: Mapping[str, Tensor] | Tensor,
        format: Format | None = None,  # noqa: A002
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
        requires_grad: bool = False,
    ) -> Any:
        """Build the tensor, or wrap a ready one as a parameter, the way accelerate rebuilds parameters on a move."""
        if isinstance(tensors, Tensor):
            return nn.Parameter(tensors, requires_grad=requires_grad)
        assert format is not None
        assert shape is not None
        assert dtype is not None
        strides = torch.empty(tuple(shape), device="meta").stride()
        size = list(shape)
        if transposed:
            size[-2:] = size[-1], size[-2]
            strides = (*strides[:-2], strides[-1], strides[-2])
        # No storage: with the usual one, without an address, torch.jit.save would write garbage or crash the process.
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size, strides=strides, dtype=dtype, device=tensors["qdata"].device, requires_grad=False, storage_size=0
        )

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Tensor,
        format: Format | None = None,  # noqa: A002
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
        requires_grad: bool = False,
    ):
        del dtype, requires_grad
        if isinstance(tensors, Tensor):
            return
        assert format is not None
        assert shape is not None
        format.check(tensors, shape)
        for name in format.tensor_names:
            setattr(self, name, tensors[name])
        self.format = format
        self.stored_shape = tuple(shape)
        self.transposed = transposed
        self.few_rows = None

    @classmethod
    def quantize(
        cls,
        weight: Tensor,
        format: Format,  # noqa: A002
        transposed: bool = False,
        name: str = "weight",
    ) -> QuantizedTensor:
        """Quantize a float weight.

        Args:
            weight: Float32, bfloat16 or float16, `[*, N, K]`, or `[*, K, N]` if `transposed`. It is not changed.
            format: The format to use; where it cannot hold the shape, its fallback is.
            transposed: Whether the reduction runs along the last dimension but one.
            name: What errors call the weight.

        Returns:
            A new tensor that shows the weight's shape and dtype and shares no memory with it.

        Raises:
            QuantizationError: The weight is not a float matrix or holds NaN or Inf.
        """
        stored = weight.detach().transpose(-1, -2) if transposed else weight.detach()
        chosen = format.fallback(stored.shape)
        return cls(chosen.quantize(stored, name), chosen, stored.shape, weight.dtype, transposed)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name; no copies."""
        return {name: getattr(self, name) for name in self.format.tensor_names}

    @property
    def stored_bytes(self) -> int:
        """Bytes that the stored tensors take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the float weight this tensor stands for.

        Args:
            dtype: Dtype to return; the tensor's own if None.

        Returns:
            A new plain tensor of this tensor's shape, each value rounded once.

        Raises:
            CorruptFileError: The stored tensors do not fit the format.
        """
        weight = self.format.dequantize(self.tensors, self.stored_shape, dtype or self.dtype)
        return weight.transpose(-1, -2) if self.transposed else weight

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        """Return the tensor with `function` applied to every stored tensor; it must keep their shapes and dtypes.

        Args:
            function: From a stored tensor to its replacement, e.g. a move to another device.
            dtype: Float dtype that the result shows; this tensor's own if None.
        """
        tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        return QuantizedTensor(tensors, self.format, self.stored_shape, dtype or self.dtype, self.transposed)

    def in_layout(self, form: Format) -> QuantizedTensor:
        """Return the same codes and scales in another memory layout.

        Args:
            form: A format with the same canonical format as this tensor's.

        Returns:
            `self` where it has that format already, else a new tensor.
        """
        if form == self.format:
            return self
        tensors = form.from_canonical(self.format.to_canonical(self.tensors))
        return QuantizedTensor(tensors, form, self.stored_shape, self.dtype, self.transposed)

    def canonical(self) -> QuantizedTensor:
        """Return the tensor in the layout of files: `self`, unless a kernel's private layout holds it."""
        return self.in_layout(self.format.canonical)

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedTensor:  # type: ignore[override]
        """Return self, frozen as it was; True for a parameter is warned of, a quantized weight takes no gradient."""
        # For another tensor `load_state_dict(assign=True)` passes True, to make it a parameter.
        if requires_grad and isinstance(self, nn.Parameter):
            warnings.warn(
                "A quantized weight takes no gradient and stays frozen. To train it in full, as by modules_to_save of "
                "PEFT, name its layer in modules_to_not_convert, or dequantize() the model first.",
                stacklevel=2,
            )
        return self

    def data_ptr(self) -> Identity:  # type: ignore[override]
        """Return what tells tied weights apart: accelerate keys them by it, and a wrapper's own address is always 0."""
        return Identity(self.qdata.data_ptr())

    def share_memory_(self) -> QuantizedTensor:  # type: ignore[override]
        """Move the stored tensors to shared memory, in place; a wrapper's own storage cannot be moved."""
        for tensor in self.tensors.values():
            tensor.share_memory_()
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dequantize().__dlpack__(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.format.tensor_names), (self.format, self.stored_shape, self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], metadata: tuple[Any, ...], outer_size: object, outer_stride: object
    ) -> QuantizedTensor:
        del outer_size, outer_stride
        return QuantizedTensor(inner_tensors, *metadata)

    def _stable_hash_for_caching(self) -> str:
        """Return what compiled code depends on; torch.compile keys its cache of whole graphs by it."""
        return f"{self.format}:{self.stored_shape}:{self.dtype}:{self.transposed}"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        del protocol
        is_parameter = isinstance(self, nn.Parameter)
        stored = self.canonical()
        metadata = (stored.format.get_config(), self.stored_shape, self.dtype, self.transposed, is_parameter)
        # PyTorch cannot load float8 from a plain pickle or from a file older than zip, so its bytes are pickled.
        tensors = {name: t.view(torch.uint8) if _is_float8(t.dtype) else t for name, t in stored.tensors.items()}
        return rebuild_quantized_tensor, (tensors, *metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            copied = self.map(torch.clone)
            memo[id(self)] = nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        del tensor_contents
        form, shape, transposed = self.format.canonical, tuple(self.shape), ", transposed" * self.transposed
        return f"QuantizedTensor({form}, shape={shape}, dtype={self.dtype}, device={self.device}{transposed})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below this level a trace no longer shows, and what it would save of this tensor is garbage.
        if torch._C._get_tracing_state():
            raise unsupported_by_torchscript()
        if func in SHORTCUTS and not torch.compiler.is_compiling():
            # Without it each look at the weight's shape comes here again: 1.5 us, several times a product.
            with torch._C.DisableTorchFunctionSubclass():
                result = SHORTCUTS[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func in ASSIGNMENTS and isinstance(args[0], QuantizedTensor):
            return ASSIGNMENTS[func](*args)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.is_view:
            # A view of a normal tensor must be a normal tensor, and whatever is made in this mode is not.
            with torch.inference_mode(False), torch.no_grad():
                return _dispatch(func, args, kwargs)
        return _dispatch(func, args, kwargs)


def unsupported_by_torchscript() -> UnsupportedError:
    """Return the error for torch.jit.trace and torch.jit.script, which store only plain tensors."""
    return UnsupportedError(
        "torch.jit",
        "a module of plain tensors",
        "quantized weights, which TorchScript would save as garbage",
        "Call model.dequantize() or hf_trainweights.dequantize_(module) first, or use torch.compile or torch.export.",
    )


def rebuild_quantized_tensor(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transposed: bool,
    is_parameter: bool,
) -> QuantizedTensor:
    """Rebuild a pickled tensor; the one function of this module that `torch.load(weights_only=True)` may call.

    Args:
        tensors: The stored tensors by name.
        config: The format's `get_config()`.
        shape: Shape of the stored weight.
        dtype: Float dtype to show.
        transposed: As for `QuantizedTensor`.
        is_parameter: Whether to return it as an `nn.Parameter`.

    Raises:
        CorruptFileError: The arguments are not those of a quantized tensor.
        ConfigError: The format or one of its parameters is unknown.
    """
    dimensions = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    plain = isinstance(tensors, dict) and "qdata" in tensors and all(type(t) is Tensor for t in tensors.values())
    if not (plain and isinstance(config, dict) and dimensions and len(shape) >= 2 and dtype in SHOWN_DTYPES):
        raise CorruptFileError(
            "pickled QuantizedTensor",
            "stored plain tensors, a format, a shape and a float dtype",
            f"{type(tensors).__name__}, {config!r}, {shape!r}, {dtype!r}",
            "The file is damaged; save it again from the source.",
        )
    form = get_format(config)
    specs = form.tensor_specs(shape, dtype)
    float8 = {name: stored for name, (_, stored) in specs.items() if _is_float8(stored)}
    tensors = {
        name: tensor.view(float8[name]) if name in float8 and tensor.dtype == torch.uint8 else tensor
        for name, tensor in tensors.items()
    }
    tensor = QuantizedTensor(tensors, form, shape, dtype, bool(transposed))
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor  # type: ignore[return-value]


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = HANDLERS.get(func)
    if handler is not None and func not in ANY_LAYOUT:
        args = tuple(value.canonical() if isinstance(value, QuantizedTensor) else value for value in args)
    result = handler(func, *args, **kwargs) if handler is not None else NotImplemented
    return _fall_back(func, args, kwargs) if result is NotImplemented else result


def _fall_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for value in tree_leaves(args[position] if position < len(args) else kwargs.get(argument.name)):
                if isinstance(value, QuantizedTensor):
                    raise unsupported_in_place(str(func), value)
    # Under inference_mode an op such as mT or narrow comes whole, not as the transpose or slice that has a handler.
    result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    FALLBACKS[str(func)] += 1
    if _LOG_FALLBACKS:
        _logger.warning("%s has no handler for quantized weights: dequantized (%d)", func, FALLBACKS[str(func)])
    return compute_dequantized(func, *args, **kwargs)


def unsupported_in_place(where: str, weight: QuantizedTensor) -> UnsupportedError:
    """Return the error for what would change a quantized weight in place.

    Args:
        where: The op or assignment.
        weight: The weight.
    """
    return UnsupportedError(
        where,
        "an op that leaves the quantized weight as it is",
        f"an in-place op on {weight!r}",
        "Change the float weight, model.dequantize() gives it back, then quantize it again.",
    )


def compute_dequantized(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op on dequantized arguments.

    Args:
        func: The op.
        args: Its arguments; quantized ones, at any depth, are dequantized.
        kwargs: Likewise.
    """
    args, kwargs = tree_map_only(QuantizedTensor, lambda tensor: tensor.dequantize(), (args, kwargs))
    return func(*args, **kwargs)
