"""A quantized weight that behaves as the float weight.

`QuantizedTensor` shows the shape and dtype of the float weight and holds the few plain tensors of its format. Views
along every dimension but K stay quantized. Products read the codes or dequantize block by block. An op without a
handler dequantizes the weight and is counted in `FALLBACKS` (logged if TRAINWEIGHTS_LOG_FALLBACK=1 is set before the
import). In-place ops raise: rounding an update into codes would lose it silently. A view along K and a single row are
float values that cannot be written to (`read_only`), because the write would not reach the weight.

The class here has the functions by which PyTorch and others ask a weight. `HeldTensor`, the base of its base, makes
weights (`quantize`, `from_held`, `map`) and holds the stored tensors: `held` is the object that keeps them, and
`tensors` is `held.tensors`. `ShardedTensor` adds to every weight the hooks that FSDP2 looks for.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.tensor.dispatch import AT_ONCE, REPLACEMENTS, dispatch
from hf_trainweights.tensor.distributed.sharding import ShardedTensor
from hf_trainweights.tensor.held_tensor import Held
from hf_trainweights.tensor.read_only import dlpack_of_copy

# Dtypes that a quantized weight can show; it is quantized from the first three only.
SHOWN_DTYPES = (*FLOAT_DTYPES, torch.float64)


@dataclass(frozen=True, eq=False)
class Identity:
    """The result of `data_ptr` of a quantized weight: it tells weights apart, and refuses any other use.

    If it were a number, safetensors and Triton kernels would read the float weight's bytes there, far past `qdata`.
    """

    address: int

    def _refuse(self, *_: object) -> Any:
        raise UnsupportedError(
            "data_ptr",
            "a plain tensor",
            "a quantized weight, whose float values are nowhere in memory",
            "To save it, call hf_trainweights.save_file, torch.save or the model's save_pretrained; of accelerate, "
            "save_state(directory, safe_serialization=False). For anything else call dequantize() first.",
        )

    def __eq__(self, other: object) -> bool:
        # safetensors compares the address with 0 before it hands it to ctypes, which would hide the error in another.
        if type(other) is int and other == 0:
            self._refuse()
        return isinstance(other, Identity) and self.address == other.address

    def __ne__(self, other: object) -> bool:
        return not (isinstance(other, Identity) and self.address == other.address)

    def __hash__(self) -> int:
        return hash((Identity, self.address))

    def __mod__(self, divisor: int) -> int:
        # Transformers asks whether expert weights are aligned before it chooses how to multiply them.
        return self.address % divisor

    __int__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = _refuse
    _as_parameter_ = property(_refuse)


class QuantizedTensor(ShardedTensor):
    """A float weight stored in a quantized format.

    The stored weight is `[*, N, K]` with groups along K. If a layer keeps its weight the other way round (GPT-2's
    Conv1D, some expert layouts) it is stored transposed and `transposed` is set; the shape shown is always the layer's.

    Args:
        tensors: The stored tensors under the names of `format.tensor_names`; they are not copied. Or a weight that is
            to become a parameter: accelerate calls the class of a parameter that it moves in this way.
        format: The format of the stored tensors.
        shape: Shape of the stored weight, `[*, N, K]`.
        dtype: Float dtype that the tensor shows and computes in.
        transposed: Whether the shape shown is the stored one with its last two dimensions exchanged.

    Raises:
        CorruptFileError: The stored tensors do not fit format and shape, or are not plain, contiguous and on one
            device.

    Examples:
        >>> weight = QuantizedTensor.quantize(torch.ones(4, 8), get_format({"format": "int8"}))
        >>> weight.shape, weight.qdata.dtype
        (torch.Size([4, 8]), torch.int8)
    """

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedTensor:  # type: ignore[override]
        """Return self, frozen as it was. Warn of True for a parameter: a quantized weight takes no gradient."""
        # No warning for other tensors: `load_state_dict(assign=True)` passes True before it makes them parameters.
        if requires_grad and isinstance(self, nn.Parameter):
            warnings.warn(
                "A quantized weight takes no gradient and stays frozen. To train it in full, name its layer in PEFT's "
                "modules_to_save or in modules_to_not_convert, or dequantize() the model first.",
                stacklevel=2,
            )
        return self

    def data_ptr(self) -> Identity:  # type: ignore[override]
        """Return an object by which accelerate recognizes tied weights. A wrapper's own address would always be 0."""
        return Identity(self.held.tensors["qdata"].data_ptr())

    def share_memory_(self) -> QuantizedTensor:  # type: ignore[override]
        """Move the stored tensors to shared memory, in place; the wrapper's own storage cannot be moved."""
        for tensor in self.held.tensors.values():
            tensor.share_memory_()
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return dlpack_of_copy(self.dequantize(), *args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return self.flattened

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], metadata: tuple[Any, ...], outer_size: object, outer_stride: object
    ) -> QuantizedTensor:
        del outer_size, outer_stride
        # `held_qdata` is the name of the attribute for `qdata`, and so on.
        held = Held({name.removeprefix("held_"): tensor for name, tensor in inner_tensors.items()})
        return QuantizedTensor.from_held(held, *metadata)

    def _stable_hash_for_caching(self) -> str:
        """Return the properties on which compiled code depends; torch.compile keys its cache of graphs by them."""
        return f"{self.format}:{self.stored_shape}:{self.dtype}:{self.transposed}"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        del protocol
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        # PyTorch cannot load float8 from a plain pickle or from a file older than zip, so its bytes are pickled.
        tensors = {name: t.view(torch.uint8) if _is_float8(t.dtype) else t for name, t in tensors.items()}
        is_parameter = isinstance(self, nn.Parameter)
        metadata = (self.format.get_config(), self.stored_shape, self.dtype, self.transposed, is_parameter)
        return rebuild_quantized_tensor, (tensors, *metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            copied = self.map(torch.clone)
            memo[id(self)] = nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        del tensor_contents
        shape, transposed = tuple(self.shape), ", transposed" * self.transposed
        return f"QuantizedTensor({self.format}, shape={shape}, dtype={self.dtype}, device={self.device}{transposed})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        at_once = AT_ONCE.get(func)
        if at_once is not None:
            result = at_once(*args) if kwargs is None else at_once(*args, **kwargs)
            if result is not None:
                return result
        # TorchScript would save garbage for this tensor, and `__torch_dispatch__` can no longer tell that it traces.
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]  (documented)
            raise unsupported_by_torchscript()
        kwargs = kwargs or {}
        # Otherwise each look at the weight's shape would come here again: 1.5 us, several times a product.
        with torch._C.DisableTorchFunctionSubclass():
            result = REPLACEMENTS[func](*args, **kwargs) if func in REPLACEMENTS else NotImplemented
            return func(*args, **kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.is_view:
            # A view of a normal tensor must be a normal tensor, and tensors made in this mode are not.
            with torch.inference_mode(False), torch.no_grad():
                return dispatch(func, args, kwargs)
        return dispatch(func, args, kwargs)


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
    """Rebuild a pickled tensor: the only function of this module that `torch.load(weights_only=True)` may call.

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
