"""Products with quantized weights on NVIDIA GPUs: kernels read the codes for few rows of x, and dequantize for many.

`gpu_tables` says which kernel is the fastest. Before a kernel is used for the first time on a device, its results with
small weights there are compared with exact ones. If they differ, a warning says so and the next kernel serves, or at
last PyTorch's operations.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda_driver, few_rows, gpu_tables, triton_launch
from hf_trainweights.kernels.arguments import MultiplyFew
from hf_trainweights.kernels.cpu_features import is_rounding
from hf_trainweights.kernels.gpu_tables import Rule
from hf_trainweights.kernels.triton_launch import Run, Stored

_logger = logging.getLogger(__name__)

# float32 has no product by tensor cores.
_TILE_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (*_TILE_DTYPES, torch.float32)
"""The dtypes in which there are kernels."""

# x is rounded from this many rows on: for fewer, a product takes as long as reading the weight. The other two numbers
# divide N and K, or rows of codes would begin where tensor cores cannot load them.
_ROUNDED_ROWS, _INTEGER_ALIGNMENT, _FLOAT8_ALIGNMENT = 17, 8, 16
# GPUs from here on multiply float8.
_FLOAT8_CAPABILITY = (8, 9)

# Weights of this many elements are dequantized at a time, 128 MB of bfloat16; memory is the only bound.
DEQUANTIZED_ELEMENTS = 1 << 26

# A weight keeps products for this many different numbers of rows, and a process rules for this many kinds of products.
_KEPT_RUNS, _KEPT_RULES = 64, 4096
# Kernels load this many bytes at once, so they depend on the remainder of the codes' address by this number.
_LOAD_BYTES = 16

# The most that a product in float32 may be off, relative to its norm. In 16 bits it is the unit of the dtype.
_FLOAT32_ERROR = 1e-6


class Checked(Protocol):
    """A kernel and its use, which is checked once; `str` names it in the warning."""

    @property
    def device(self) -> torch.device:
        """Where the kernel runs."""
        ...

    @property
    def limit(self) -> float:
        """The largest error, relative to the norm of the results."""
        ...

    def difference(self) -> float:
        """Return the error of the kernel's results with a small problem."""
        ...


class Case(NamedTuple):
    """A product whose kernel is checked: its name in `_MAKE`, tile, rows M of x, dtypes, device and format.

    `experts` is the number of experts that the rows are for, 0 for the product with one weight.
    """

    way: str
    tile: tuple[tuple[str, int], ...]
    M: int
    experts: int
    dtype: torch.dtype
    scale_dtype: torch.dtype
    device: torch.device
    form: Format

    def __str__(self) -> str:
        return f"`{self.way}` for {self.form}, {self.dtype} and {self.M} rows"

    @property
    def limit(self) -> float:
        """The largest error."""
        return max(torch.finfo(self.dtype).eps, _FLOAT32_ERROR)

    def difference(self) -> float:
        """Return the error with small weights of one block of K and of several."""
        span = math.lcm(self.form.column_step, getattr(self.form, "group_size", None) or 1, _LANE_COLUMNS)
        # A sum and not the larger one, because a sum is NaN if one of them is.
        return sum(_difference(self, 80, K) for K in (2 * span, 1024 + 2 * span))


# Experts of the weight with which a kernel is checked that multiplies several.
_CHECKED_EXPERTS = 3
# A lane of few_rows.cu loads 16 bytes of a row at once: at most 32 columns, of 4 bits.
_LANE_COLUMNS = 32

_DEQUANTIZE = Rule("dequantize", {})

# Some kernels round x to codes, whose largest is 127 or, in float8, 448. The check gives them an x of integers that
# this rounding leaves unchanged; the largest in each row is this one. 127 / 127 and 448 / 14 are powers of two, so
# scaling is exact. Integers up to 14 have no more than the four significant bits of float8.
_LARGEST_CODE = {"integers": 127, "float8": 14}

# The results of `_check`.
_CHECKED: dict[Checked, bool] = {}
# The rules for products that ops of compiled programs have asked for.
_CHOSEN: dict[Any, Rule] = {}

# Each function takes a weight, M, the dtype of x and a tile. It returns a function that multiplies, except that of
# `dequantize`, which returns a function that makes the float weight; `_make` adds the product.
_MAKE: dict[str, Callable[[Stored, int, torch.dtype, Mapping[str, int]], Any]] = {
    "few_rows": lambda weight, M, dtype, tile: few_rows.multiply(weight.tensors, weight.form, weight.K, dtype, tile),
    "row": triton_launch.multiply_row,
    "tiles": triton_launch.multiply_tiles,
    "integers": triton_launch.multiply_integers,
    "float8": triton_launch.multiply_float8,
    "dequantize": triton_launch.dequantize,
}


def serves(form: Format, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Return whether a weight is on a GPU for which there are kernels that read it and compute in `dtype`."""
    qdata, scale = tensors["qdata"], tensors["scale"]
    if qdata.device.type != "cuda" or dtype not in DTYPES:
        return False
    return _takes_triton(form, qdata, scale, dtype) or _takes_few_rows(form, tensors, dtype)


def _takes_triton(form: Format, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    if not isinstance(form, (Int8, Int4)) or torch.promote_types(scale.dtype, dtype) != dtype:
        return False
    size = form.group_size
    return (size is None or (size >= 8 and size.bit_count() == 1)) and has_triton(qdata.device.index)


def _takes_few_rows(form: Format, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    K, qdata = form.shape_of(tensors["qdata"])[-1], tensors["qdata"]
    reads = few_rows.macros_of(form, K, dtype, tensors["scale"].dtype) is not None
    return reads and _has_driver(qdata.device.index)


@functools.cache
def has_triton(index: int | None) -> bool:
    """Return whether a device runs Triton's kernels."""
    # Triton is not imported here: the import takes a second and is left to the first product.
    is_installed = importlib.util.find_spec("triton") is not None and torch.version.cuda is not None
    return is_installed and torch.cuda.is_available() and capability(index) >= (8, 0)


@functools.cache
def _has_driver(index: int | None) -> bool:
    return torch.cuda.is_available() and capability(index) >= (8, 0) and cuda_driver.is_available()


@functools.cache
def capability(index: int | None) -> tuple[int, int]:
    """Return the compute capability of a device."""
    return torch.cuda.get_device_capability(index)


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, form: Format) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and a weight that `serves`; None if no kernel is right.

    The rule for products of one kind is kept: to find it takes longer than a launch.
    """
    if x.numel() == 0 or tensors["scale"].numel() == 0:
        return None
    K, qdata = x.shape[-1], tensors["qdata"]
    weight, M = Stored(tensors, form, K), x.numel() // K
    layout, offset_bytes = few_rows.layout_of(tensors), qdata.data_ptr() % _LOAD_BYTES
    kind = form, x.dtype, tensors["scale"].dtype, M, layout, offset_bytes, x.device
    with torch.cuda.device_of(x):
        rule = _CHOSEN.get(kind) or _choose(weight, x.dtype, M)
        if rule is None:
            return None
        _keep(_CHOSEN, kind, rule, _KEPT_RULES)
        return _make(rule, weight, x.dtype, M)(x.contiguous(), None if bias is None else bias.contiguous())


def _keep(choices: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Keep a value, unless a CUDA graph is captured: no kernel is checked then, so a later call may find a better."""
    if key not in choices and not torch.cuda.is_current_stream_capturing():
        if len(choices) >= most:
            choices.clear()
        choices[key] = value


def prepare(tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype) -> MultiplyFew:
    """Return `linear` of one weight, for contiguous x and bias of a dtype on its device: 20 us less of Python.

    The function remembers the kernel for each number of rows.
    """
    weight, runs = Stored(tensors, form, K), dict[int, Run]()

    def multiply_prepared(x: Tensor, bias: Tensor | None) -> Tensor | None:
        M = x.numel() // K
        with torch.cuda.device_of(x):
            run = runs.get(M)
            if run is None:
                rule = _choose(weight, dtype, M)
                if rule is None:
                    return None
                run = _make(rule, weight, dtype, M)
                _keep(runs, M, run, _KEPT_RUNS)
            return run(x, bias)

    return multiply_prepared


def _takes(way: str, weight: Stored, dtype: torch.dtype, M: int) -> bool:
    """Return whether a kernel, by its name in `_MAKE`, multiplies M rows of a dtype with a weight."""
    form, K, N, qdata, scale = weight.form, weight.K, weight.N, weight.tensors["qdata"], weight.tensors["scale"]
    if N == 0 or K == 0:
        return False
    if way == "few_rows":
        return (
            M <= few_rows.MOST_ROWS and _takes_few_rows(form, weight.tensors, dtype) and few_rows.reads(weight.tensors)
        )
    if way == "float8":
        is_aligned = M >= _ROUNDED_ROWS and N % _FLOAT8_ALIGNMENT == K % _FLOAT8_ALIGNMENT == 0
        is_rounded = isinstance(form, Float8E4M3) and form.activations == "float8" and dtype == torch.bfloat16
        return is_aligned and is_rounded and capability(qdata.device.index) >= _FLOAT8_CAPABILITY
    if not _takes_triton(form, qdata, scale, dtype):
        return False
    if way == "integers":
        return M >= _ROUNDED_ROWS and is_rounding(form) and N % _INTEGER_ALIGNMENT == K % _INTEGER_ALIGNMENT == 0
    if way == "tiles":
        return K % 4 == 0 and dtype in _TILE_DTYPES
    return M == 1 if way == "row" else N * K <= DEQUANTIZED_ELEMENTS


def _choose(weight: Stored, dtype: torch.dtype, M: int) -> Rule | None:
    """Return the rule of the fastest kernel; None if all failed their checks or the weight is too large."""
    for rule in _rules(weight, M):
        if _takes(rule.way, weight, dtype, M) and is_right(_case(rule, weight, dtype)):
            return rule
    return None


def _make(rule: Rule, weight: Stored, dtype: torch.dtype, M: int) -> Run:
    made = _MAKE[rule.way](weight, M, dtype, rule.tile)
    return functools.partial(_multiply_made, made) if rule.way == "dequantize" else made


def _multiply_made(make: Callable[[], Tensor], x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, make(), bias)


def _rules(weight: Stored, M: int) -> list[Rule]:
    qdata, groups = weight.tensors["qdata"], getattr(weight.form, "group_size", None) is not None
    bits = 4 if qdata.dtype == torch.int32 else 8
    return gpu_tables.rules_for(capability(qdata.device.index), bits, groups, M, weight.N)


def _case(rule: Rule, weight: Stored, dtype: torch.dtype, experts: int = 0) -> Case:
    """Return the case that has to be right before a rule is followed."""
    tile = rule.tile
    most = {"few_rows": tile.get("COLUMN_TILES", 0) * 8, "row": 1, "tiles": tile.get("BLOCK_M", 0), "dequantize": 0}
    qdata, scale, tiles = weight.tensors["qdata"], weight.tensors["scale"], tuple(sorted(tile.items()))
    M = most.get(rule.way, _ROUNDED_ROWS)
    return Case(rule.way, tiles, M, experts, dtype, scale.dtype, qdata.device, weight.form)


def dequantize_rows(tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype) -> Tensor | None:
    """Return the same bits as `form.dequantize_rows` for a matrix; None if no kernel computes them."""
    qdata, scale, weight = tensors["qdata"], tensors["scale"], Stored(tensors, form, K)
    if qdata.dim() != 2 or qdata.numel() == 0 or qdata.device.type != "cuda" or dtype not in DTYPES:
        return None
    if not _takes_triton(form, qdata, scale, dtype):
        return None
    with torch.cuda.device_of(qdata):
        right = is_right(_case(_DEQUANTIZE, weight, dtype))
        return triton_launch.dequantize(weight, 0, dtype, {})() if right else None


def serves_experts(form: Format, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Return whether one launch multiplies rows of x with experts of a format, on an NVIDIA GPU."""
    return tensors["qdata"].device.type == "cuda" and _takes_few_rows(form, tensors, dtype)


def multiply_experts(x: Tensor, tensors: Mapping[str, Tensor], form: Format, ends: Tensor) -> Tensor | None:
    """Return the products of rows of x with their experts by one launch; None if its kernel is not right.

    Args:
        x: `[M, K]`, contiguous.
        tensors: The stored tensors of experts `[E, N, K]` for which `serves_experts`.
        form: Their format.
        ends: Int32 `[E]`: expert e multiplies the rows before `ends[e]`. The CPU does not read it, so it does not wait.
    """
    weight = Stored(tensors, form, x.shape[-1])
    if not few_rows.reads(tensors) or ends.dtype != torch.int32 or x.numel() == 0 or tensors["scale"].numel() == 0:
        return None
    kind = form, x.dtype, tensors["scale"].dtype, few_rows.layout_of(tensors), x.device
    with torch.cuda.device_of(x):
        rule = _CHOSEN.get(kind) or _choose_for_experts(weight, x.dtype)
        if rule is None:
            return None
        _keep(_CHOSEN, kind, rule, _KEPT_RULES)
        return few_rows.multiply(tensors, form, weight.K, x.dtype, rule.tile)(x, None, ends.contiguous())


def _choose_for_experts(weight: Stored, dtype: torch.dtype) -> Rule | None:
    rules = (rule for rule in _rules(weight, few_rows.MOST_ROWS) if rule.way == "few_rows")
    return next((rule for rule in rules if is_right(_case(rule, weight, dtype, experts=_CHECKED_EXPERTS))), None)


def is_right(case: Checked) -> bool:
    """Return whether a kernel passes its check. While a CUDA graph is captured a new check is impossible: False."""
    if case not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[case] = _check(case)
    return _CHECKED[case]


def _check(case: Checked) -> bool:
    """Compare a kernel's results with exact ones."""
    try:
        difference = case.difference()
    # Whatever goes wrong inside a compiler or the driver: another kernel or PyTorch serves.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        if difference <= case.limit:
            return True
        reason = f"its results differ by {difference:.2g} of their norm"
    _logger.warning(
        "The kernel %s fails on %s (%s). Another one or PyTorch's operations serve, which are slower.",
        *(case, case.device, reason),
    )
    return False


def _difference(case: Case, N: int, K: int) -> float:
    # The sines of squares are as good as random here, and do not change the state of torch's generators.
    numbers = torch.arange(max(case.M, N, 1) * K, dtype=torch.float64, device=case.device).square_()
    tensors = _sample(case, N, K, numbers)
    weight = Stored(tensors, case.form, K)
    exact = case.form.dequantize_rows(tensors, K, torch.float64)
    if case.experts:
        tensors = {name: tensor.expand(case.experts, *tensor.shape) for name, tensor in tensors.items()}
        weight = weight._replace(tensors=tensors)
    run = _MAKE[case.way](weight, case.M, case.dtype, dict(case.tile))
    arguments: tuple[Tensor | None, ...] = ()
    if case.way != "dequantize":
        x = numbers.mul(0.3).cos_()[: case.M * K].view(case.M, K)
        if case.way in _LARGEST_CODE:  # multiples of a power of two, and one largest element: no rounding
            largest = _LARGEST_CODE[case.way]
            x = x.mul_(largest - 1).round_().div_(64)
            x[:, 0] = largest / 64
        x = x.to(case.dtype)
        exact = x.double() @ exact.t()
        if case.experts:
            ends = [case.M * (expert + 1) // case.experts for expert in range(case.experts)]
            arguments = x, None, torch.tensor(ends, dtype=torch.int32, device=case.device)
        else:
            arguments, exact = (x, x.new_ones(N)), exact + 1
    run(*arguments)
    # From the second call on `triton_launch` launches Triton's compiled kernel itself.
    result = run(*arguments)
    return ((result.double() - exact).norm() / exact.norm()).item()


def _sample(case: Case, N: int, K: int, numbers: Tensor) -> dict[str, Tensor]:
    """Return stored tensors of a weight that is as good as random, and of a size that 16-bit dtypes hold."""
    values = numbers.mul(0.7).sin_()
    if not case.form.is_import_only:
        return case.form.quantize(values[: N * K].view(N, K).to(case.scale_dtype))
    tensors = case.form.empty((N, K), case.scale_dtype, case.device)
    for name, tensor in tensors.items():
        octets = tensor.view(torch.uint8) if not tensor.is_floating_point() else tensor
        any_values = values[: octets.numel()].view(octets.shape)
        if name == "scale" and getattr(case.form, "scales", "") == "e8m0":
            any_values = any_values.mul(8).add_(118)  # exponents: scales from 2**-17 to 2**-1
        elif tensor.dtype == torch.float8_e4m3fn:
            any_values = any_values.abs().add(0.1)  # scales above 0
        elif not tensor.is_floating_point():
            any_values = any_values.mul(127).add_(128)  # any byte but 0
        elif "group_scale" in tensors:
            any_values = any_values.mul(0.01)  # small, because they are multiplied by bytes of group_scale
        octets.copy_(any_values)
    return tensors
