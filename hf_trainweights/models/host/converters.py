"""The operations and converters that Transformers turns tensors of a checkpoint into parameters with."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor

from hf_trainweights.models.host.versions import unsupported

try:
    from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
except ImportError as error:
    raise unsupported("transformers.core_model_loading") from error

# A tensor of a checkpoint that is not loaded yet: its name there, and the function that loads it, or None where it is
# for another rank.
NamedLoad = tuple[str, Callable[[], Tensor | None]]

_CONVERTER_ATTRIBUTES = (
    *("source_patterns", "_original_source_patterns", "_original_target_patterns", "scope_prefix", "base_model_prefix"),
    *("collected_tensors", "layer_targets", "quantization_operation", "operations", "force_cpu"),
)


class QuantizerOp(ConversionOps):
    """An operation of a quantizer. Transformers copies it for every weight; the copies are one object."""

    # From 5.21 on Transformers casts the tensors of a quantized checkpoint, unless their operation has this attribute.
    hf_quantizer = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Tensor | None:
        """Return the parameter that is made of several tensors, or None to leave the merging to Transformers.

        `parts` has for each pattern of the converter the tensors that match it.
        """
        return None


class Converter(WeightConverter):
    """A converter that Transformers copies cheaply: its deep copy shares the patterns and has nothing collected.

    Transformers copies a converter, patterns and all, for every tensor of a checkpoint: a tenth of a reload.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied


class MergingConverter(Converter):
    """A converter of experts that offers them to the quantizer's operation one by one, before they are merged."""

    __slots__ = ()

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collect a tensor together with its name in the checkpoint."""
        named: Any = (source_key, future)
        super().add_tensor(target_key, source_key, source_pattern, named)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        """Return the merged parameter: the one that the operation makes, else the one that Transformers makes."""
        collected: dict[str, list[Any]] = self.collected_tensors
        parts = [collected[pattern] for pattern in self.source_patterns if pattern in collected]
        operation = self.quantization_operation
        merged = operation.merge(layer_name, parts, model) if isinstance(operation, QuantizerOp) else None
        if merged is not None:
            collected.clear()
            return {layer_name: merged}
        for pattern, sources in collected.items():
            collected[pattern] = [load for _, load in sources]
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)


def make_converter(
    source_patterns: list[str], target_pattern: str, operation: QuantizerOp, on_cpu: bool = False
) -> WeightConverter:
    """Return a converter that makes one parameter of several tensors; the patterns are the ends of their names.

    Where a version lacks an attribute, Transformers' own converter does the same more slowly. With `on_cpu` the
    operation gets the tensors on the CPU, wherever the parameter is to be.
    """
    cls = Converter if _has_known_converters() else WeightConverter
    return cls(
        source_patterns=source_patterns, target_patterns=target_pattern, operations=[operation], force_cpu=on_cpu
    )


def offer_before_merging(conversion: Any) -> Any:
    """Return a converter that does the same as one of Transformers', but offers experts to the quantizer one by one.

    One that does anything but merge experts is returned itself, and so is every one where a version lacks an attribute:
    the result is the same, but all experts of a layer are in memory as floats.
    """
    if not merges_experts(conversion) or type(conversion) is not WeightConverter or not _has_known_converters():
        return conversion
    converter = MergingConverter(
        source_patterns=list(conversion._original_source_patterns),
        target_patterns=list(conversion._original_target_patterns),
        operations=conversion.operations,
        force_cpu=conversion.force_cpu,
    )
    converter.scope_prefix, converter.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return converter


def merges_experts(conversion: Any) -> bool:
    """Return whether a renaming or converter puts experts, which a checkpoint keeps one by one, into one parameter."""
    kinds = [(type(op), getattr(op, "dim", None)) for op in getattr(conversion, "operations", ())]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _has_known_converters() -> bool:
    # The attributes are slots, so the class has them too.
    return all(hasattr(WeightConverter, name) for name in _CONVERTER_ATTRIBUTES)
