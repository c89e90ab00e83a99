"""The choice for each parameter of a module: quantized or left alone, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.files.digests import read_calibration
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.notebook import html_table
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Why embeddings and heads are left alone.
EMBEDDING = "embedding (include_embeddings=True quantizes it)"
HEAD = "output head (include_embeddings=True quantizes it)"

# The largest parameters that a summary names.
_LARGEST = 3
# The share of the bytes that a token reads above which a float head is remarked on.
_LARGE_HEAD = 0.2
_HEAD = ("parameter", "format", "bits", "bytes", "reason")


def stored_shape(weight: Tensor, transposed: bool) -> tuple[int, ...]:
    """Return the shape `[*, N, K]` in which a weight is stored, unsharded even if this rank holds only a part."""
    *lead, N, K = weight.shape
    return (*lead, K, N) if transposed else (*lead, N, K)


@dataclass(frozen=True)
class Choice:
    """The choice for one parameter.

    Args:
        name: Full name of the parameter.
        module: The module that owns it.
        format: The format to quantize it to, None to leave it alone.
        reason: Why it is left alone, or why the format is not the configured one; empty if it is.
        transposed: Whether the module keeps the weight as `[*, K, N]`.
        numel: Number of weights.
        bytes_before: Bytes of the float weight.
        bytes_after: Bytes of the parameter after quantizing.
        file_bytes: About how many bytes it takes in a file, without `compress`.
    """

    name: str
    module: nn.Module = field(repr=False)  # of a large model it is a page long
    format: Format | None
    reason: str
    transposed: bool
    numel: int
    bytes_before: int
    bytes_after: int
    file_bytes: int

    @classmethod
    def of(
        cls, name: str, module: nn.Module, parameter: Tensor, form: Format | None, reason: str, transposed: bool
    ) -> Choice:
        """Return the choice of a format for a parameter of a module, with its sizes in that format."""
        numel, before = parameter.numel(), parameter.numel() * parameter.element_size()
        if form is None:
            return cls(name, module, None, reason, transposed, numel, before, before, before)
        weight, shape = local_tensor(parameter), stored_shape(parameter, transposed)
        dtype = weight.scale_dtype if isinstance(weight, QuantizedTensor) else parameter.dtype
        after, in_file = form.stored_bytes(shape, dtype), form.file_bytes(shape, dtype)
        return cls(name, module, form, reason, transposed, numel, before, after, in_file)

    @property
    def weight(self) -> Any:
        """The parameter, as the module has it now."""
        return getattr(self.module, self.name.rpartition(".")[2])

    def stored_bytes_in(self, form: Format) -> int:
        """Return the bytes that the parameter takes in memory in a format, scales included."""
        return form.stored_bytes(self.stored_shape, self.weight.dtype)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape `[*, N, K]` in which it is stored."""
        return stored_shape(self.weight, self.transposed)

    def quantize(self, weight: Tensor) -> QuantizedTensor:
        """Quantize values of the parameter to its format. The codes depend on these values only, not on calibration."""
        assert self.format is not None
        return QuantizedTensor.quantize(weight, self.format, self.transposed, self.name)


@dataclass(frozen=True)
class Calibrated:
    """The effect of calibration on errors.

    Args:
        tokens: Number of tokens that the codes were chosen with.
        error_before: How far the outputs of the last block are off when all blocks are quantized without calibration,
            as the norm of the error over the norm of the outputs.
        error_after: The same with the codes that were chosen.
        blocks: Both errors of each block, by its name in the model.
    """

    tokens: int
    error_before: float
    error_after: float
    blocks: Mapping[str, tuple[float, float]]

    @classmethod
    def beside(cls, directory: Path) -> Calibrated | None:
        """Return the record beside a saved model; None if it is not calibrated, or its file of digests is damaged."""
        try:
            record: Any = read_calibration(directory)
            if record is None:
                return None
            blocks = {str(name): (float(before), float(after)) for name, (before, after) in record["blocks"].items()}
            return cls(int(record["tokens"]), float(record["error_before"]), float(record["error_after"]), blocks)
        # The file of digests is damaged, which `verify_model` reports, or another program wrote it.
        except (CorruptFileError, AttributeError, KeyError, TypeError, ValueError):
            return None

    def __str__(self) -> str:
        errors = f"{100 * self.error_before:.3g} % without, {100 * self.error_after:.3g} % with it"
        return f"calibrated with {self.tokens:,} tokens: the last block's outputs are off by {errors}"


@dataclass(frozen=True, repr=False)
class Summary:
    """All choices for a module: a line as text, totals in a console or a notebook, and each choice by iteration.

    Args:
        tensors: A choice for every parameter; a tied one once.
        calibrated: The effect of calibration, if the weights have just been quantized with it.
    """

    tensors: tuple[Choice, ...]
    calibrated: Calibrated | None = None

    @property
    def quantized(self) -> tuple[Choice, ...]:
        """The parameters that are quantized."""
        return tuple(choice for choice in self.tensors if choice.format is not None)

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters as floats."""
        return sum(choice.bytes_before for choice in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters after quantizing."""
        return sum(choice.bytes_after for choice in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits of a parameter's element after quantizing, scales included; 0 if there are no elements."""
        return 8 * self.bytes_after / max(1, sum(choice.numel for choice in self.tensors))

    @property
    def file_bytes(self) -> int:
        """About how many bytes all parameters take in a file, without `compress`."""
        return sum(choice.file_bytes for choice in self.tensors)

    @property
    def large_head(self) -> str:
        """The share of a float head in the bytes that a token reads, and a remedy; empty up to a fifth."""
        heads = [choice for choice in self.tensors if choice.reason == HEAD]
        # A token reads only one row of an embedding.
        read = sum(choice.bytes_after for choice in self.tensors if choice.reason != EMBEDDING)
        head = sum(choice.bytes_after for choice in heads)
        if head / max(1, read) <= _LARGE_HEAD:
            return ""
        smaller = {choice.name.removesuffix(".weight"): "int8" for choice in heads}
        times = head / sum(choice.numel for choice in heads)  # int8 takes a byte for each
        share = f"the output head in float is {100 * head / read:.0f} % of what a token reads"
        return f"{share}; overrides={smaller} makes it {times:.0f} times smaller"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the whole module: a large head that is left in float, and the effect of calibration."""
        return tuple(str(remark) for remark in (self.large_head, self.calibrated) if remark)

    def table(self) -> str:
        """Return a line for each parameter: name, format, bits per weight, bytes, and why it is left alone."""
        rows = [_HEAD, *map(_row, self.tensors)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(cells).rstrip() for cells in padded)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __str__(self) -> str:
        done = Counter(f"{choice.format}{_because(choice)}" for choice in self.quantized)
        left = Counter(choice.reason for choice in self.tensors if choice.format is None)
        quantized = ", ".join(f"{count} {what}" for what, count in done.items()) or "none"
        alone = ", ".join(f"{count} {why}" for why, count in left.items()) or "none"
        line = f"quantized: {quantized}; left alone: {alone}; {self._sizes()}"
        return "; ".join([line, *self.remarks])

    def __repr__(self) -> str:
        lines = [
            self._caption(),
            *self.remarks,
            *("  " + "  ".join(row) for row in self._totals()),
        ]
        largest = sorted(self.tensors, key=lambda choice: choice.bytes_after, reverse=True)[:_LARGEST]
        lines += ["largest:", *(f"  {choice.name}  {_megabytes(choice.bytes_after)}" for choice in largest)]
        return "\n".join([*lines, "Each parameter: print(summary.table()), or iterate over the summary."])

    def _repr_html_(self) -> str:
        totals = html_table(self._caption(), ("parameters", "format", "before", "after"), self._totals())
        return totals + html_table("each parameter", _HEAD, map(_row, self.tensors), folded=True)

    def _caption(self) -> str:
        bits = f"{self.bits_per_weight:.2f} bits per weight"
        if self.file_bytes != self.bytes_after:
            in_file = 8 * self.file_bytes / max(1, sum(choice.numel for choice in self.tensors))
            bits = f"{bits} in memory, {in_file:.2f} in a file"
        return f"{len(self)} parameters, {self._sizes()}, {bits}"

    def _sizes(self) -> str:
        sizes = f"{_megabytes(self.bytes_before)} -> {_megabytes(self.bytes_after)}"
        if self.file_bytes == self.bytes_after:
            return sizes
        return f"{sizes} in memory, {_megabytes(self.file_bytes)} in a file"

    def _totals(self) -> list[tuple[str, ...]]:
        """Return rows of number, format and reason, and sizes, each for all parameters with one format and reason."""
        groups: dict[str, list[Choice]] = defaultdict(list)
        for choice in sorted(self.tensors, key=lambda choice: choice.format is None):
            groups[f"{choice.format or 'left alone'}{_because(choice)}"].append(choice)
        return [
            (
                str(len(members)),
                what,
                _megabytes(sum(choice.bytes_before for choice in members)),
                _megabytes(sum(choice.bytes_after for choice in members)),
            )
            for what, members in groups.items()
        ]


def summary(model: nn.Module) -> Summary:
    """Return which weights of a model are quantized, to which format, and why the others are not.

    Args:
        model: A Transformers model, an adapter's model around one, or any module that `quantize_` quantized.

    Returns:
        `model.hf_quantizer.summary()` for a Transformers model. For another module, the formats that its weights have.

    Raises:
        ConfigError: The model is being loaded.
        QuantizationError: A lazy layer has no weights yet.

    Examples:
        >>> from hf_trainweights import quantize_
        >>> layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> _ = quantize_(layers, TrainWeightsConfig("int8"))
        >>> print(summary(layers))
        quantized: 1 int8; left alone: 1 float32; 0.0 MB -> 0.0 MB
    """
    method = getattr(getattr(model, "hf_quantizer", None), "summary", None)
    result = method() if callable(method) else None
    return result if isinstance(result, Summary) else Summary(tuple(_actual_choices(model)))


def _actual_choices(module: nn.Module) -> Iterator[Choice]:
    """Yield a choice for each parameter as it is, without reasons: there is no configuration to give them."""
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, parameter in module.named_parameters():
        check_has_shape(name, parameter)
        owner, weight = owners[name.rpartition(".")[0]], local_tensor(parameter)
        if isinstance(weight, QuantizedTensor):
            yield Choice.of(name, owner, parameter, weight.format, "", weight.transposed)
        else:
            yield Choice.of(name, owner, parameter, None, str(parameter.dtype).removeprefix("torch."), False)


def check_has_shape(name: str, parameter: Tensor) -> None:
    """Check that a parameter has a shape. A parameter of a lazy layer gets it from the first inputs."""
    if is_lazy(parameter):
        expected, next_step = "a weight with a shape and values", "Run the module on inputs once, then quantize it."
        raise QuantizationError(name, expected, "a parameter of a lazy layer that no inputs have reached", next_step)


def _row(choice: Choice) -> tuple[str, ...]:
    bits = f"{8 * choice.bytes_after / max(1, choice.numel):.2f}"
    return choice.name, str(choice.format or "float"), bits, str(choice.bytes_after), choice.reason


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _because(choice: Choice) -> str:
    return f" ({choice.reason})" if choice.reason else ""


def check_not_empty(summary: Summary, config: TrainWeightsConfig) -> None:
    """Check that something is quantized."""
    if not summary.quantized:
        raise ConfigError(
            "model",
            f"at least one weight to quantize to {config.default_format}",
            str(summary),
            "Quantized are nn.Linear, Conv1D and expert weights; check modules_to_not_convert and overrides.",
        )
