"""Which parameter of a model each stored tensor of a quantized weight belongs to, although Transformers renames them.

A model's class may have renamings, which give the tensors of a checkpoint the names of its modules, and converters,
which also join, split or transpose tensors. Both were written for float weights. A renaming of `q.weight` mostly fits
`q.weight_scale` as well. A converter must not see stored tensors: it would join the codes of several weights. So a save
renames stored tensors and converts only float tensors, and a load takes stored tensors out before any converter of the
model sees them.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from transformers import PreTrainedModel

from hf_trainweights.models.host import private, unsupported
from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.tensor.stored_names import parse_stored_name, stored_name, stored_suffixes

try:
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
except ImportError as error:
    raise unsupported("transformers.core_model_loading") from error


class StoredNames:
    """The parameters of a model that the stored tensors of a checkpoint belong to.

    A renaming may miss a stored name, or match a name that needs no renaming. Transformers then loads a float tensor
    by its original name, and this class treats stored tensors alike.

    Args:
        model: The model, or its skeleton.
        conversions: The renamings and converters of the load.
        weights: Names of the quantized weights in the checkpoint.
    """

    def __init__(self, model: PreTrainedModel, conversions: Iterable[Any], weights: Iterable[str] = ()):
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._tensor_names = {name for name, _ in tensors}
        self._prefix = base_prefix(model)
        # Copies, because they note their use: a save reverts the renamings that the load itself has used.
        self._renamings = [copy.deepcopy(item) for item in conversions if isinstance(item, WeightRenaming)]
        self._weights = tuple(weights)

    def find(self, renamed_key: str) -> tuple[str, str] | None:
        """Return parameter and suffix of a stored tensor by its renamed name; None for any other name.

        The parameter may have the base model's prefix or lack it, as Transformers accepts both.
        """
        if renamed_key in self._tensor_names:
            return None
        parsed = parse_stored_name(renamed_key)
        if parsed is not None and self._own_name(parsed[0]) is not None:
            return parsed
        return self._by_renamed_name.get(renamed_key, parsed)

    def parameter_of_stored(self, key: str) -> str | None:
        """Return the parameter that a stored tensor of this name in a checkpoint belongs to, or None."""
        parsed, renamed = parse_stored_name(key), parse_stored_name(self._rename(key))
        candidates = [renamed[0]] if renamed else []
        if parsed is not None:
            candidates += [self._rename(parsed[0]), parsed[0]]
        return next((own for own in map(self._own_name, candidates) if own is not None), None)

    def parameter_of_float(self, key: str) -> str | None:
        """Return the parameter that a float tensor of this name in a checkpoint is loaded into, or None."""
        return self._own_name(self._rename(key)) or self._own_name(key)

    @functools.cached_property
    def _by_renamed_name(self) -> dict[str, tuple[str, str]]:
        """Parameter and suffix of each stored tensor, by its renamed name."""
        parameters: dict[str, tuple[str, str]] = {}
        for weight in self._weights:
            for suffix in stored_suffixes():
                key = stored_name(weight, suffix)
                parameter = self.parameter_of_stored(key)
                if parameter is not None:
                    parameters[self._rename(key)] = parameter, suffix
        return parameters

    def _rename(self, key: str) -> str:
        return _renamed(key, self._renamings)

    def _own_name(self, name: str) -> str | None:
        """Return the name in the model, with or without the base model's prefix, or None."""
        options = (name, name.removeprefix(self._prefix), self._prefix + name)
        return next((option for option in options if option in self._tensor_names), None)


def conversions_of_class(model: PreTrainedModel) -> list[Any]:
    """Return the renamings and converters by which Transformers loads a model of this class, without outdated ones."""
    return private("conversion_mapping", "get_model_conversion_mapping")(model, add_legacy=False)


def conversions_to_revert(model: PreTrainedModel) -> list[Any]:
    """Return the renamings and converters that a save of a model reverts."""
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return used
    # A model that was not loaded has no checkpoint whose prefix a save would restore.
    return [conversion for conversion in conversions_of_class(model) if not isinstance(conversion, PrefixChange)]


def conversions_to_load(model: PreTrainedModel) -> list[Any]:
    """Return the renamings and converters that load a save of a model, a user's `key_mapping` first.

    Those that the model was loaded with, but that its class has not, come from a `key_mapping`.
    """
    of_class = private("conversion_mapping", "get_model_conversion_mapping")(model)
    return [*without(conversions_to_revert(model), of_class), *of_class]


def without(conversions: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the conversions that are not among others. Those with the same patterns and submodel count as equal."""
    patterns = {(other.scope_prefix, *other.source_patterns) for other in others}
    return [item for item in conversions if (item.scope_prefix, *item.source_patterns) not in patterns]


def renames_float_alone(renaming: Any, weights: Iterable[str]) -> bool:
    """Return whether the inverse of a renaming matches the name of a float weight, but not of its stored tensors."""
    if isinstance(renaming, PrefixChange):
        return False
    rename = renaming.reverse_transform().rename_source_key
    return any(rename(name)[1] and not rename(stored_name(name, "qdata"))[1] for name in weights)


def joined_by_save(model: PreTrainedModel, names: Iterable[str]) -> list[set[str]]:
    """Return the groups of parameters that a save of a float model joins into one tensor each."""
    reverts = [conversion.reverse_transform() for conversion in conversions_to_revert(model)[::-1]]
    converters = [conversion for conversion in reverts if isinstance(conversion, WeightConverter)]
    joined: dict[str, set[str]] = defaultdict(set)
    for name in names if converters else ():
        for converter in converters:
            saved_name, pattern = converter.rename_source_key(name)
            if pattern is not None:
                joined[saved_name].add(name)
                break
    return [group for group in joined.values() if len(group) > 1]


def renamed_by_load(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the names that a load of this class gives to tensors of a checkpoint that no converter takes."""
    renamings = [item for item in conversions_to_load(model) if isinstance(item, WeightRenaming)]
    return {name: _renamed(name, renamings) for name in names}


def merged_by_load(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the parameter of each tensor of a checkpoint that a converter of weights merges or changes."""
    renamed = renamed_by_load(model, names)
    parameters: dict[str, str] = {}
    for converter in _converters_of_weights(model):
        for name in renamed.keys() - parameters.keys():
            parameter, pattern = converter.rename_source_key(renamed[name])
            if pattern is not None:
                parameters[name] = parameter
    return parameters


def splits_on_load(model: PreTrainedModel) -> list[str]:
    """Return the patterns of the weights that a load of this class splits into several."""
    splits = [item for item in _converters_of_weights(model) if len(item.target_patterns) > 1]
    return [pattern for item in splits for pattern in item.source_patterns]


def _converters_of_weights(model: PreTrainedModel) -> list[Any]:
    converters = [item for item in conversions_to_load(model) if isinstance(item, WeightConverter)]
    return [item for item in converters if all(source.endswith(".weight") for source in item.source_patterns)]


def renamed_by_save(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the names that a save gives to tensors that it only renames."""
    reverts = [conversion.reverse_transform() for conversion in conversions_to_revert(model)[::-1]]
    renamings = [conversion for conversion in reverts if isinstance(conversion, WeightRenaming)]
    return {name: _renamed(name, renamings) for name in names}


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def spare_from_save(model: PreTrainedModel, unconverted: Collection[str], unchanged: Collection[str]) -> None:
    """Exclude tensors from the conversions of a later save of this very object.

    The save only renames the `unconverted` ones, and keeps the names of the `unchanged` ones.
    """
    model._weight_conversions = [  # pyright: ignore[reportArgumentType]  (nn.Module takes any attribute)
        _SparingConverter(item, unconverted) if isinstance(item, WeightConverter) else _SparingRenaming(item, unchanged)
        for item in conversions_to_revert(model)
    ]


class _SparingRenaming(WeightRenaming):
    """A renaming that leaves some names as they are.

    Transformers calls only the methods below of it, so the other attributes of its class stay unset.
    """

    __slots__ = ("inner", "spared")

    def __init__(self, inner: Any, spared: Collection[str]):
        self.inner, self.spared = inner, spared

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name that a tensor is to have, and the pattern that matches."""
        return (source_key, None) if source_key in self.spared else self.inner.rename_source_key(source_key)

    def reverse_transform(self) -> Any:
        """Return the inverse, which leaves the same names as they are."""
        return type(self)(self.inner.reverse_transform(), self.spared)


class _SparingConverter(WeightConverter):
    """A converter that does not take the tensors of some names.

    Transformers collects tensors in a deep copy of a converter, one for each result. The copy is of the inner
    converter, which has the attributes that stay unset here. Names were spared before.
    """

    __slots__ = ("inner", "spared")

    def __init__(self, inner: Any, spared: Collection[str]):
        self.inner, self.spared, self.source_patterns = inner, spared, inner.source_patterns

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)

    rename_source_key = _SparingRenaming.rename_source_key
    reverse_transform = _SparingRenaming.reverse_transform
