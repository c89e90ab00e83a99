"""The interface of a quantized dtype: a pure function from a float weight to a few plain tensors, and back.

A format works on stored weights `[*, N, K]` (N = out_features, K = in_features; leading dimensions are experts) and
knows nothing of modules, files or devices. Groups run along K; G is the number of groups of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.formats.arithmetic import BLOCK_ELEMENTS, FLOAT_DTYPES, largest_magnitude
from hf_trainweights.formats.columns import ColumnCodes
from hf_trainweights.formats.unpacked import Unpacked

# Shape and dtype of each stored tensor, by name.
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]

# Layouts of other programs, to group sizes; None stands for whole rows.
TargetGroups = Mapping[str, tuple[int | None, ...]]


@dataclass(frozen=True)
class Format(ABC):
    """A quantized dtype as a value: functions that quantize and dequantize, and the layout of the tensors between them.

    Subclasses are frozen dataclasses whose fields are the parameters a user may choose. `tensor_specs` lists the stored
    tensors, `quantize_rows` fills them and `dequantize_rows` reads them. The first tensor is always called `qdata`.
    """

    name: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]] = ("qdata", "scale")
    # Names of the stored tensors that all rows share: `[*, 1, k]`, where the other stored tensors are `[*, N, k]`.
    shared_names: ClassVar[tuple[str, ...]] = ()
    # Names of the stored tensors with one code for each group, packed by `group_scales.pack_bits`, to bits of a code.
    bit_packed: ClassVar[Mapping[str, int]] = {}
    # Whether a file keeps the stored tensors entropy-coded, even if the configuration has not `compress=True`.
    is_coded_in_files: ClassVar[bool] = False
    # Layouts of other programs for which a budget may choose this format, to the group sizes that it may choose there.
    groups_for_targets: ClassVar[TargetGroups] = {}
    # Whether the codes of a row depend on that row alone, and not on other rows of the matrix.
    has_independent_rows: ClassVar[bool] = True
    # Whether some columns can be cut off if they are whole steps of `column_step`.
    has_cuttable_columns: ClassVar[bool] = True
    # Whether weights of this format come from files of other programs alone, so that `quantize` refuses.
    is_import_only: ClassVar[bool] = False

    def __str__(self) -> str:
        group_size = getattr(self, "group_size", None)
        return f"{self.name} g{group_size}" if group_size else self.name

    @property
    def column_step(self) -> int:
        """The step at which columns can be cut without rounding anew: columns of one step share a scale or a word.

        A format may have a step that it does not declare here: `can_cut_columns` tests each cut on a small weight.
        """
        return getattr(self, "group_size", None) or 1

    def groups_in(self, columns: int) -> int:
        """Return the number of groups in `columns` columns of a row."""
        return columns // (getattr(self, "group_size", None) or columns or 1)

    def check_group_size(self, allowed: Sequence[int], advice: str) -> None:
        """Check the parameter `group_size`; ConfigError: it is not one of the allowed sizes."""
        group_size = getattr(self, "group_size", None)
        if group_size not in allowed or type(group_size) is not int:
            expected = f"one of {', '.join(map(str, allowed))} for {self.name}"
            raise ConfigError("group_size", expected, repr(group_size), advice)

    def check_choice(self, parameter: str, allowed: Sequence[object]) -> None:
        """Check a parameter; ConfigError: it is not one of the allowed values."""
        value = getattr(self, parameter)
        if value not in allowed or type(value) not in map(type, allowed):
            expected = f"one of {', '.join(map(str, allowed))} for {self.name}"
            raise ConfigError(parameter, expected, repr(value), "Choose one of these.")

    def get_config(self) -> dict[str, Any]:
        """Return the JSON description from which `get_format` builds an equal format.

        Examples:
            >>> from hf_trainweights.formats import get_format
            >>> get_format({"format": "int4", "group_size": 32}).get_config()
            {'format': 'int4', 'group_size': 32}
        """
        return {"format": self.name, **asdict(self)}

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format if it can hold a stored weight of this shape, else a simpler one that can.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
        """
        del shape
        return self

    def import_only_refusal(self) -> tuple[str, str, str] | None:
        """Return the expectation, finding and advice of an error if this format is import-only, else None."""
        if not self.is_import_only:
            return None
        this_format = f"{self}, whose weights come from files of other programs"
        return "a format that floats are quantized to", this_format, f"Choose {self.for_new_values()}."

    def for_new_values(self) -> Format:
        """Return the format to which new values of a weight are quantized: this one unless it is import-only."""
        return self

    @abstractmethod
    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return shape and dtype of each stored tensor, in the order of `tensor_names`.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
            scale_dtype: Dtype of the weight when it was quantized.
        """

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return the shape of the stored weight that a `qdata` tensor holds.

        Args:
            qdata: The stored tensor of that name.
        """
        return tuple(qdata.shape)

    def fit(self, matrix: Tensor) -> Format:
        """Return the format that quantizes the rows of a matrix: this one if its rows are independent of each other.

        Args:
            matrix: In the weight's dtype, `[N, K]`, neither of them 0; any strides; it may hold NaN or Inf.
        """
        del matrix
        return self

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes | None:
        """Return an object that chooses the codes of a weight column by column; None if that gains the format nothing.

        Args:
            weight: Float, finite, of a shape that this format can hold, `[N, K]`.
            importance: Float32 `[K]`, above 0: how much a squared error in each column matters.
        """
        del weight, importance
        return None

    def group_magnitudes(self, rows: Tensor, groups: int) -> Tensor:
        """Return the largest magnitude of each group of contiguous rows `[n, K]`, float32 `[n, groups]`."""
        return largest_magnitude(rows.view(len(rows), groups, -1))

    @abstractmethod
    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Quantize a block of rows into the tensors of `out`.

        Args:
            rows: In the weight's dtype, `[n, K]`, contiguous, finite, n >= 1, K >= 1; not to be changed.
            amax: The largest magnitude of each group, float32 `[n, G]`, with the G of `scale`.
            out: The stored tensors of these rows, each `[n, ...]`, to be filled.
        """

    @abstractmethod
    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return rows `[*, n, K]` of `dtype` from their stored tensors, each value rounded as `scale_codes` does.

        Args:
            tensors: The stored tensors of these rows.
            K: Number of columns of the weight.
            dtype: Dtype to return.
        """

    def quantize(
        self, weight: Tensor, name: str = "weight", shared: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Quantize a weight.

        Args:
            weight: Float32, bfloat16 or float16, `[*, N, K]`, on any device; any strides. It is not changed.
            name: The name of the weight in errors.
            shared: Stored tensors of an earlier weight of the same K. The new weight takes the tensors of
                `shared_names` from there, so that equal rows get equal codes.

        Returns:
            New contiguous tensors on the weight's device, named and shaped as `tensor_specs` says. Scales have the
            weight's dtype.

        Raises:
            QuantizationError: The weight is not a float matrix, holds NaN or Inf, or has a shape that this format
                cannot hold (ask `fallback` first).

        Examples:
            >>> from hf_trainweights.formats import get_format
            >>> tensors = get_format({"format": "int8"}).quantize(torch.ones(2, 3))
            >>> tensors["qdata"].tolist()
            [[127, 127, 127], [127, 127, 127]]
        """
        del shared
        self.check_weight(weight, name)
        weight = weight.detach()
        out = self.empty(weight.shape, weight.dtype, weight.device)
        if weight.numel() == 0:
            return {key: tensor.zero_() for key, tensor in out.items()}
        N, K = weight.shape[-2:]
        block = max(1, BLOCK_ELEMENTS // K)
        matrices = weight.unsqueeze(0) if weight.dim() == 2 else weight.flatten(0, -3)
        flat = {key: t.reshape(-1, N, *t.shape[weight.dim() - 1 :]) for key, t in out.items()}
        for index, matrix in enumerate(matrices):
            form = self.fit(matrix)
            for start in range(0, N, block):
                rows = matrix[start : start + block].contiguous()
                amax = self.group_magnitudes(rows, flat["scale"].shape[-1])
                # A maximum is NaN or Inf if any value is, so this one number tells.
                if not amax.amax().isfinite():
                    raise QuantizationError(
                        name,
                        "finite values",
                        f"NaN or Inf in rows {start} to {start + len(rows) - 1}",
                        "Repair the checkpoint or leave this tensor out with modules_to_not_convert.",
                    )
                form.quantize_rows(rows, amax, {key: t[index, start : start + block] for key, t in flat.items()})
        return out

    def check_weight(self, weight: Tensor, name: str) -> None:
        """Check that a weight has a dtype and a shape that can be quantized to this format.

        Args:
            weight: The weight.
            name: Its name in errors.

        Raises:
            QuantizationError: It is not a float matrix, or has a shape that this format cannot hold.
        """
        if weight.dtype not in FLOAT_DTYPES or weight.dim() < 2:
            raise QuantizationError(
                name,
                f"a float32, bfloat16 or float16 weight of at least 2 dimensions to quantize to {self.name}",
                f"{weight.dtype} of shape {tuple(weight.shape)}",
                "Leave this tensor out with modules_to_not_convert.",
            )
        if refusal := self.import_only_refusal():
            raise QuantizationError(name, *refusal)
        if self.fallback(weight.shape) != self:
            raise QuantizationError(
                name,
                f"a shape that {self.get_config()} can hold",
                f"{tuple(weight.shape)}",
                "Quantize it with the format that fallback(shape) returns.",
            )

    def dequantize(self, tensors: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the float weight that stored tensors stand for.

        Args:
            tensors: Stored tensors as `quantize` returns them.
            shape: Shape of the stored weight, `[*, N, K]`.
            dtype: Dtype to return.

        Returns:
            A new contiguous tensor `[*, N, K]`: code times scale, computed exactly and rounded once to `dtype`. If
            scales are float32 and `dtype` is bfloat16 or float16, it is rounded to float32 on the way.

        Raises:
            CorruptFileError: A tensor is missing or has another shape or dtype than `tensor_specs` says.
        """
        self.check(tensors, shape)
        return self.dequantize_rows(tensors, shape[-1], dtype)

    def empty(self, shape: Sequence[int], scale_dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Return uninitialised stored tensors for a weight of this shape.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
            scale_dtype: Dtype of the weight to be quantized.
            device: Where to allocate.
        """
        specs = self.tensor_specs(shape, scale_dtype)
        return {key: torch.empty(size, dtype=dtype, device=device) for key, (size, dtype) in specs.items()}

    def stored_bytes(self, shape: Sequence[int], scale_dtype: torch.dtype) -> int:
        """Return the number of bytes that a quantized weight of this shape takes in memory.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
            scale_dtype: Dtype of the weight to be quantized.
        """
        specs = self.tensor_specs(shape, scale_dtype)
        return sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in specs.values())

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked | None:
        """Return a weight's codes, scales and zeros by plain ops, for exports and reports; None if it has no such ops.

        Args:
            tensors: Its stored tensors; for int32 and float8 ones also their bytes, `[*, n * itemsize]`.
        """
        del tensors
        return None

    def file_bytes(self, shape: Sequence[int], scale_dtype: torch.dtype) -> int:
        """Return the approximate number of bytes that a weight of this shape takes in a file.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
            scale_dtype: Dtype of the weight to be quantized.
        """
        return self.stored_bytes(shape, scale_dtype)

    def check(self, tensors: Mapping[str, Tensor], shape: Sequence[int], name: str = "weight") -> None:
        """Check that stored tensors have the shapes and dtypes that a weight of this shape has.

        Args:
            tensors: Stored tensors.
            shape: Shape of the stored weight, `[*, N, K]`.
            name: The name of the weight in errors.

        Raises:
            CorruptFileError: A tensor is missing or has another shape or dtype than `tensor_specs` says.
        """
        scale = tensors.get("scale")
        scale_dtype = torch.float32 if scale is None or scale.dtype not in FLOAT_DTYPES else scale.dtype
        for key, (size, dtype) in self.tensor_specs(shape, scale_dtype).items():
            tensor = tensors.get(key)
            if tensor is None or tuple(tensor.shape) != tuple(size) or tensor.dtype != dtype:
                actual = "no tensor" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise CorruptFileError(
                    name,
                    f"{key} to be {dtype} of shape {tuple(size)} for {self.get_config()}",
                    actual,
                    "The file is damaged or belongs to another model; save it again from the source.",
                )
