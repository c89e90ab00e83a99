"""Products of activations with quantized weights, computed by a kernel or with the weight dequantized in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights import kernels
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import experts
from hf_trainweights.kernels.arguments import MultiplyFew, is_bias, is_input, is_plain
from hf_trainweights.kernels.stored import multiply_dequantized, multiply_transpose
from hf_trainweights.tensor.dispatch import AT_ONCE, compute_dequantized, implements, replaces
from hf_trainweights.tensor.held_tensor import Held
from hf_trainweights.tensor.ops import set_data
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

aten = torch.ops.aten

# Stored tensors, format and shape `[N, K]` of one weight.
Expert = tuple[Mapping[str, Tensor], Format, Sequence[int]]


def multiply(
    x: Tensor, tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and a weight `[N, K]` that shows the dtype of x."""
    plain = is_plain(x)
    if not plain and torch.onnx.is_in_onnx_export():
        next_step = "Call hf_trainweights.export_onnx, which keeps the codes, or dequantize the module first."
        raise UnsupportedError("torch.onnx.export", "float weights", f"a weight in {form}", next_step)
    out = kernels.linear(x, tensors, form, bias)
    if out is not None:
        return out
    # A compiler traces with x. The blocks of `multiply_dequantized` would become many ops of its program.
    if not plain:
        return F.linear(x, form.dequantize(tensors, shape, x.dtype), bias)
    return multiply_dequantized(x, tensors, form, shape, bias)


def _fits(x: Tensor, weight: Tensor, transposed: bool, dim: int = -1) -> bool:
    """Return whether x is dense and the weight quantized, and x's last dimension fits the weight's stored `dim`."""
    return (
        isinstance(weight, QuantizedTensor)
        and not isinstance(x, QuantizedTensor)
        and weight.transposed == transposed
        and is_input(x, weight.stored_shape[dim], weight.dtype)
    )


def _fits_gradient(x: Tensor, weight: Tensor) -> bool:
    """Return whether x is a plain dense tensor `[*, N]`, and the weight a quantized one `[*, N, K]`, not transposed."""
    return is_plain(x) and not x.is_meta and x.dim() > 1 and _fits(x, weight, transposed=False, dim=-2)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the weight is a quantized matrix, and x and the bias have its sizes and dtype."""
    return weight.dim() == 2 and _fits(x, weight, transposed=False) and is_bias(bias, weight.shape[0], weight.dtype)


@implements(aten.linear.default)
def _linear(func: Any, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    if _takes(x, weight, bias):
        return multiply(x, weight.tensors, weight.format, weight.stored_shape, bias)
    return compute_dequantized(func, x, weight, bias)


@implements(aten.matmul.default, aten.mm.default)
def _matmul(func: Any, x: Tensor, weight: Any) -> Tensor:
    """Multiply with a stored matrix for a gradient, or with its transpose, which F.linear becomes below autograd."""
    if weight.dim() == 2 and _fits(x, weight, transposed=True):
        return multiply(x, weight.tensors, weight.format, weight.stored_shape)
    if x.dim() == weight.dim() == 2 and _fits_gradient(x, weight):
        return multiply_transpose(x, weight.tensors, weight.format, weight.stored_shape)
    return compute_dequantized(func, x, weight)


@implements(aten.addmm.default)
def _addmm(func: Any, bias: Tensor, x: Tensor, weight: Any, **factors: Any) -> Tensor:
    if not factors and _fits(x, weight, transposed=True) and is_bias(bias, weight.shape[1], weight.dtype):
        return multiply(x, weight.tensors, weight.format, weight.stored_shape, bias)
    return compute_dequantized(func, bias, x, weight, **factors)


@implements(aten.bmm.default)
def _bmm(func: Any, first: Any, second: Any) -> Tensor:
    """Multiply expert by expert, so that no float weight of all experts is made."""
    if not len(first):
        return compute_dequantized(func, first, second)
    if is_plain(first) and _fits(first, second, transposed=True):
        return torch.stack([multiply(x, *expert) for x, expert in zip(first, _experts(second), strict=True)])
    if is_plain(second) and _fits(second.mT, first, transposed=False):
        return torch.stack([multiply(x.t(), *expert).t() for x, expert in zip(second, _experts(first), strict=True)])
    if _fits_gradient(first, second):
        return torch.stack([multiply_transpose(x, *expert) for x, expert in zip(first, _experts(second), strict=True)])
    return compute_dequantized(func, first, second)


@implements(aten._grouped_mm.default)
def _grouped_mm(func: Any, x: Tensor, weight: Any, offs: Tensor | None = None, **others: Any) -> Tensor:
    """Multiply the rows of x with their experts; an expert without rows is not touched."""
    if offs is None or others or x.dim() != 2 or weight.dim() != 3:
        return compute_dequantized(func, x, weight, offs, **others)
    if _fits(x, weight, transposed=True) and (is_plain(x, offs) or _becomes_one_op(x, weight)):
        return kernels.multiply_experts(x, weight.tensors, weight.format, offs)
    if not (_fits_gradient(x, weight) and is_plain(offs)):
        return compute_dequantized(func, x, weight, offs)
    out, ends = x.new_zeros(x.shape[0], weight.shape[-1]), offs.tolist()
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            out[start:end] = multiply_transpose(x[start:end], *_expert(weight, index))
    return out


def _becomes_one_op(x: Tensor, weight: QuantizedTensor) -> bool:
    """Return whether the product with experts becomes one op in a program: in torch.compile, if the op serves."""
    is_exported = torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()
    return not is_exported and experts.serves(weight.format, weight.tensors, x.dtype)


def _expert(weight: QuantizedTensor, index: int) -> Expert:
    tensors = {name: tensor[index] for name, tensor in weight.tensors.items()}
    return tensors, weight.format, weight.stored_shape[1:]


def _experts(weight: QuantizedTensor) -> Iterator[Expert]:
    return (_expert(weight, index) for index in range(weight.stored_shape[0]))


# A product of experts that is never computed in codes. A handler that dequantizes is not counted in `FALLBACKS`.
implements(aten.baddbmm.default)(compute_dequantized)


def _linear_at_once(input: Any, weight: Any, bias: Any = None) -> Tensor | None:  # noqa: A002  (a caller's name for it)
    """Multiply without PyTorch's dispatcher, which takes as long as the product of one token.

    As an entry of `AT_ONCE` it is tried before any replacement. Return None if the dispatcher has to see the product,
    as for gradients, or if the weight has no function for it.
    """
    if type(weight) is not QuantizedTensor or (type(input) is not Tensor and not is_plain(input)):
        return None
    if (bias is not None and not is_plain(bias)) or _is_watched():
        return None
    held = weight.held
    return (held.multiply_few or _settle(weight, held))(input, bias)


AT_ONCE[F.linear] = _linear_at_once


@replaces(F.linear)
def _linear_beside_dispatcher(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    """Multiply if `_linear_at_once` has not: in autocast's dtype, or more rows than its function takes."""
    if type(weight) is not QuantizedTensor or not is_plain(input, bias):
        return NotImplemented
    if _is_watched():
        return _linear_in_autocast(input, weight, bias) if _is_cast_alone() else NotImplemented
    return _linear(F.linear, input, weight, bias)


def _linear_in_autocast(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Any:
    """Multiply in autocast's dtype, without the dispatcher if no gradient is wanted."""
    dtype = _autocast_dtype(weight)
    if dtype is None:
        return F.linear(x, weight, bias)
    cast = _shown_in(weight, dtype)
    if not torch.is_grad_enabled():
        device = weight.device.type
        x, bias = _cast_plain(x, dtype, device), None if bias is None else _cast_plain(bias, dtype, device)
        held = cast.held
        out = (held.multiply_few or _settle(cast, held))(x, bias)
        if out is not None:
            return out
    return F.linear(x, cast, bias)


def _multiply_in_autocast(product: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a product for which autocast casts, with weights that already have its dtype."""
    if not _is_cast_alone() or "out" in kwargs:
        return NotImplemented
    return product(*map(_cast_weight, args), **{name: _cast_weight(value) for name, value in kwargs.items()})


for _product in (torch.addmm, Tensor.addmm, torch.mm, Tensor.mm, torch.matmul, Tensor.matmul):
    replaces(_product)(functools.partial(_multiply_in_autocast, _product))


def _autocast_dtype(weight: QuantizedTensor) -> torch.dtype | None:
    """Return the dtype that autocast casts a weight to; None if it leaves the weight alone."""
    device = weight.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return None
    dtype = torch.get_autocast_dtype(device)
    return dtype if dtype in FLOAT_DTYPES and weight.dtype in FLOAT_DTYPES else None


def _cast_plain(tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """Return a plain tensor as the autocast of a device casts it."""
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device
    return tensor.to(dtype) if is_cast else tensor


def _cast_weight(weight: Any) -> Any:
    """Return a quantized weight in autocast's dtype, and anything else as it is."""
    dtype = _autocast_dtype(weight) if type(weight) is QuantizedTensor else None
    return weight if dtype is None else _shown_in(weight, dtype)


def _shown_in(weight: QuantizedTensor, dtype: torch.dtype) -> Any:
    """Return and keep a weight that shows a dtype, with the same stored tensors. Autocast would copy them."""
    if dtype == weight.dtype:
        return weight
    held = weight.held
    cast = held.cast
    if cast is None or cast.dtype != dtype:
        # A tensor that is made in inference mode could not be saved for a gradient later.
        with torch.inference_mode(False), torch.no_grad():
            shown = QuantizedTensor.from_held(held, weight.format, weight.stored_shape, dtype, weight.transposed)
            # `detach` shares the counter of writes with the weight, so that autograd refuses a gradient after a write.
            cast = held.cast = set_data(weight.detach(), shown)
    return cast


def _watch() -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Return two functions: whether something has to see each op, and whether autograd and autocast alone have to.

    Compilers, modes and transforms have to see each op, too. In doubt the answers are True and False.
    """
    try:
        is_compiling, has_gradients = torch.compiler.is_compiling, torch.is_grad_enabled
        is_casting, modes = torch._C._is_any_autocast_enabled, torch._C._len_torch_dispatch_stack
        transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
        is_recording = torch._C._is_tracing  # torch.jit.trace
        tangents = torch.autograd.forward_ad
        _ = tangents._current_level
    except AttributeError:  # another release of torch has other names
        return lambda: True, lambda: False

    # One expression and no inner function: each call takes .1 us of a product's 7.
    def is_watched() -> bool:
        return (
            has_gradients()
            or modes() != 0
            or transform() is not None
            or tangents._current_level >= 0
            or is_casting()
            or is_recording()
            or is_compiling()
        )

    def is_cast_alone() -> bool:
        watching = modes() or transform() is not None or tangents._current_level >= 0
        return is_casting() and not (watching or is_recording() or is_compiling())

    return is_watched, is_cast_alone


# Bound once: to look these names up at each product takes 3 % of a small product.
_is_watched, _is_cast_alone = _watch()


def _settle(weight: QuantizedTensor, held: Held) -> MultiplyFew:
    """Return the function that multiplies with a weight, and keep it in `held`.

    If another thread replaces `weight.held` meanwhile, the function stays with the tensors that it was made for.
    """
    multiply_few = None
    if weight.dim() == 2 and not weight.transposed:
        multiply_few = kernels.prepare_few_rows(held.tensors, weight.format, weight.dtype)
    held.multiply_few = multiply_few or _leave_to_linear
    return held.multiply_few


def _leave_to_linear(x: Tensor, bias: Tensor | None) -> None:
    del x, bias
