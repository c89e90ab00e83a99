"""The choice for each parameter of a module: quantized or left alone, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.base import Format
from hf_trainweights.models.config import TrainWeightsConfig


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
    """

    name: str
    module: nn.Module
    format: Format | None
    reason: str
    transposed: bool
    numel: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Summary:
    """All choices for a module; `str()` of them is one line.

    Args:
        tensors: A choice for every parameter; a tied one once.
    """

    tensors: tuple[Choice, ...]

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

    def __str__(self) -> str:
        done = Counter(f"{choice.format}{_because(choice)}" for choice in self.quantized)
        left = Counter(choice.reason for choice in self.tensors if choice.format is None)
        quantized = ", ".join(f"{count} {what}" for what, count in done.items()) or "none"
        alone = ", ".join(f"{count} {why}" for why, count in left.items()) or "none"
        sizes = f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        return f"quantized: {quantized}; left alone: {alone}; {sizes}"


def _because(choice: Choice) -> str:
    return f" ({choice.reason})" if choice.reason else ""


def check_not_empty(summary: Summary, config: TrainWeightsConfig) -> None:
    """Check that something is quantized.

    Args:
        summary: The choices.
        config: The configuration.

    Raises:
        ConfigError: Nothing is quantized.
    """
    if not summary.quantized:
        raise ConfigError(
            "model",
            f"at least one weight to quantize to {config.default_format}",
            str(summary),
            "Quantized are nn.Linear, Conv1D and expert weights; check modules_to_not_convert and overrides.",
        )
