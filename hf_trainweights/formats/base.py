"""What a quantized dtype is: a pure function from a float weight to a few plain tensors, and back.

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
    """A quantized dtype as a value: two pure functions and the layout of what lies between them.

    Subclasses are frozen dataclasses whose fields are the parameters a user may choose; they say what they store in
    `tensor_specs` and how in `quantize_rows` and `dequantize_rows`. The first tensor is always called `qdata`.
    """

    name: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]] = ("qdata", "scale")
    # Stored tensors that serve all rows alike: `[*, 1, k]` where the others are `[*, N, k]`.
    shared_names: ClassVar[tuple[str, ...]] = ()
    # Stored tensors that hold one code a group, packed by `group_scales.pack_bits`, to the bits of a code.
    bit_packed: ClassVar[Mapping[str, int]] = {}
    # Whether a file keeps the stored tensors entropy-coded, whatever the configuration says.
    is_coded_in_files: ClassVar[bool] = False
    # Layouts of other programs that a budget may plan this format for, to the group sizes that it chooses from there.
    groups_for_targets: ClassVar[TargetGroups] = {}
    # Whether a row is quantized alike whichever rows of its matrix are quantized with it.
    has_independent_rows: ClassVar[bool] = True

    def __str__(self) -> str:
        group_size = getattr(self, "group_size", None)
        return f"{self.name} g{group_size}" if group_size else self.name

    @property
    def column_step(self) -> int:
        """The least number of columns that can be cut off without rounding anew: those that share a scale or a word.

        `can_cut_columns` proves each cut, so that a format that does not say it has no wrong parts.
        """
        return getattr(self, "group_size", None) or 1

    def check_group_size(self, allowed: Sequence[int], advice: str) -> None:
        """Check the parameter `group_size`; ConfigError: it is none of those that are allowed."""
        group_size = getattr(self, "group_size", None)
        if group_size not in allowed or type(group_size) is not int:
            expected = f"one of {', '.join(map(str, allowed))} for {self.name}"
            raise ConfigError("group_size", expected, repr(group_size), advice)

    def get_config(self) -> dict[str, Any]:
        """Return the JSON description from which `get_format` builds an equal format.

        Examples:
            >>> from hf_trainweights.formats import get_format
            >>> get_format({"format": "int4", "group_size": 32}).get_config()
            {'format': 'int4', 'group_size': 32}
        """
        return {"format": self.name, **asdict(self)}

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return the format that can hold a stored weight of this shape: this one wherever it fits.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.

        Returns:
            `self`, or a simpler format for shapes that this one cannot hold.
        """
        del shape
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
        """Return the format that quantizes the rows of a matrix: this one, where rows are independent of each other.

        Args:
            matrix: In the weight's dtype, `[N, K]`, neither of them 0; any strides; it may hold NaN or Inf.
        """
        del matrix
        return self

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes | None:
        """Return what chooses the codes of a weight column by column; None for a format that gains nothing by it.

        Args:
            weight: Float, finite, of a shape that this format can hold, `[N, K]`.
            importance: Float32 `[K]`, above 0: how much a squared error in each column matters.
        """
        del weight, importance
        return None

    @abstractmethod
    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Quantize a block of rows into the tensors of `out`.

        Args:
            rows: In the weight's dtype, `[n, K]`, contiguous, finite, n >= 1, K >= 1; not to be changed.
            amax: Float32, `[n, G]`, G as in `scale`: the largest magnitude of each group.
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
            name: What errors call the weight.
            shared: Stored tensors of an earlier weight of the same K; those of `shared_names` among them are kept, so
                that rows of one value get the same codes.

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
                amax = largest_magnitude(rows.view(len(rows), flat["scale"].shape[-1], -1))
                # It carries both NaN and Inf, so one number tells of either.
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
            name: What errors call it.

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
            A new contiguous tensor `[*, N, K]`: the exact product of code and scale, rounded once to `dtype`; from
            float32 scales to bfloat16 or float16 it is rounded to float32 on the way.

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
        """Return how many bytes a weight of this shape takes when it is quantized.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
            scale_dtype: Dtype of the weight to be quantized.
        """
        specs = self.tensor_specs(shape, scale_dtype)
        return sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in specs.values())

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked | None:
        """Return a weight taken apart by plain ops, for exports and reports; None for a format that does not tell.

        Args:
            tensors: Its stored tensors; int32 and float8 ones may be given as bytes, `[*, n]` as `[*, n * itemsize]`.
        """
        del tensors
        return None

    def file_bytes(self, shape: Sequence[int], scale_dtype: torch.dtype) -> int:
        """Return about how many bytes a weight of this shape takes in a file.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
            scale_dtype: Dtype of the weight to be quantized.
        """
        return self.stored_bytes(shape, scale_dtype)

    def check(self, tensors: Mapping[str, Tensor], shape: Sequence[int], name: str = "weight") -> None:
        """Check that stored tensors are those of a weight of this shape.

        Args:
            tensors: Stored tensors.
            shape: Shape of the stored weight, `[*, N, K]`.
            name: What errors call the weight.

        Raises:
            CorruptFileError: A tensor is missing or has another shape or dtype than `tensor_specs` says.
        """
        scale = tensors.get("scale")
        scale_dtype = torch.float32 if scale is None or scale.dtype not in FLOAT_DTYPES else scale.dtype
        for key, (size, dtype) in self.tensor_specs(shape, scale_dtype).items():
            tensor = tensors.get(key)
            if tensor is None or tuple(tensor.shape) != tuple(size) or tensor.dtype != dtype:
                found = "no tensor" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise CorruptFileError(
                    name,
                    f"{key} to be {dtype} of shape {tuple(size)} for {self.get_config()}",
                    found,
                    "The file is damaged or belongs to another model; save it again from the source.",
                )
