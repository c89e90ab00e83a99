"""TrainWeightsConfig: the user's choices, validated once and kept in a model's config.json."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.selectors import most_exact, select
from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.models.overrides import check_overrides, format_of, left_out, named

QUANT_METHOD = "trainweights"
CONFIG_VERSION = 1

_logger = logging.getLogger(__name__)


class TrainWeightsConfig(QuantizationConfigMixin):
    """Which weights to quantize, and to which format.

    Args:
        format: Name of the format for all weights that no override names: one of `FORMATS`.
        group_size: Weights that share a scale; None for the format's default (int4: 128, int8: a whole row).
        modules_to_not_convert: Selectors of modules or parameters to leave alone beside the output head.
        overrides: Another format for some modules or parameters. Each key is a selector; each value is a format's name,
            a dict such as `{"format": "int8", "group_size": 64}`, or None to leave the weight alone. Overrides win over
            `modules_to_not_convert`.
        include_embeddings: Whether to quantize the input embeddings and the output head too; tied ones stay tied.
        activations: "int8" to round activations to int8 too, for speed: dynamically, with one scale per token. Small
            weights, and a few tokens of 16 bits, keep float activations, because integers are not faster there. Only
            with format "int8" and no groups; the error of a product is about four times that of bfloat16.
        base_model: Hub id of the float model; a model that is loaded from the Hub by this configuration has it in its
            own copy, so that cards of later saves can name it.
        version: Version of this configuration's layout.
        quant_method: The name of this method in config.json.

    A selector is the full name of a module or parameter (`lm_head`), or whole parts of such names (`down_proj`,
    `layers.0`, `mlp.down_proj`), or `re:` and a regular expression for a full name. A module is selected with all that
    it holds. Of several overrides the most exact wins: a full name before parts of one, parts before an expression;
    among these a parameter before a module, then more parts before fewer, then the first. A selector that selects
    nothing in the model to be quantized is an error.

    Raises:
        ConfigError: A value is not allowed, and the message lists those that are; or there is no such argument.

    Example:
        >>> config = TrainWeightsConfig("int4", group_size=32, overrides={"re:.*down_proj": "int8", "lm_head": None})
        >>> config.format_for(["model.layers.0.mlp.down_proj"])
        (Int8(group_size=None, activations=None), True)
    """

    def __init__(
        self,
        format: str = "int8",  # noqa: A002
        group_size: int | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        overrides: Mapping[str, str | Mapping[str, Any] | None] | None = None,
        include_embeddings: bool = False,
        activations: str | None = None,
        base_model: str | None = None,
        version: int = CONFIG_VERSION,
        quant_method: str = QUANT_METHOD,
    ):
        if quant_method != QUANT_METHOD:
            raise ConfigError("quant_method", repr(QUANT_METHOD), repr(quant_method), "Use that method's own class.")
        self.quant_method = quant_method  # type: ignore[assignment]
        if type(version) is not int or version != CONFIG_VERSION:
            raise ConfigError(
                "version",
                f"{CONFIG_VERSION}",
                repr(version),
                "Install the hf_trainweights that wrote this model, or newer.",
            )
        self.version = version
        self.format = format
        self.activations = activations
        self.group_size = _format_of(format, group_size, activations).get_config().get("group_size")
        self.modules_to_not_convert = _check_names(modules_to_not_convert)
        self.overrides = check_overrides(overrides)
        if type(include_embeddings) is not bool:
            raise ConfigError("include_embeddings", "True or False", repr(include_embeddings), "Pass one of these.")
        self.include_embeddings = include_embeddings
        if not isinstance(base_model, str | None):
            raise ConfigError("base_model", "the id of a repository or None", repr(base_model), "Leave it out.")
        self.base_model = base_model

    @classmethod
    def from_dict(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base returns a tuple where it is asked to)
        cls, config_dict: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """Return the configuration that a dict holds: `quantization_config` of a config.json, or the user's own.

        Args:
            config_dict: JSON values as `to_dict` returns them. Keys that only a newer version knows are kept, written
                back, and logged.
            kwargs: As for Transformers: values that replace those of the dict, and `return_unused_kwargs`.

        Returns:
            The configuration; with `return_unused_kwargs=True` also a dict of the `kwargs` that it does not have.

        Raises:
            ConfigError: A value is not allowed.

        Example:
            >>> TrainWeightsConfig.from_dict({"format": "int4", "group_size": 32}).default_format
            Int4(group_size=32)
        """
        known = {key: value for key, value in config_dict.items() if key in _known_keys()}
        try:
            result = super().from_dict(known, **kwargs)
            config = result[0] if isinstance(result, tuple) else result
            for key in config_dict.keys() - known.keys():
                _check_unknown(key, config_dict[key])
                setattr(config, key, config_dict[key])
        except ConfigError as error:
            where = f"quantization_config (in config.json, or passed as a dict): {error.where}"
            raise ConfigError(where, error.expected, error.found, error.next_step) from error
        return result

    def check_quantizing(self) -> None:
        """Check that a float model can be quantized by this configuration.

        Raises:
            ConfigError: A key is unknown: another version's, or misspelt.
        """
        unknown = ", ".join(sorted(vars(self).keys() - _known_keys()))
        if unknown:
            raise ConfigError("quantization_config", f"keys among {', '.join(_known_keys())}", unknown, "Leave it out.")

    @property
    def default_format(self) -> Format:
        """The format of every weight that no override names."""
        return _format_of(self.format, self.group_size, self.activations)

    def format_for(
        self, names: Iterable[str], selected: Mapping[str, Collection[str]] | None = None
    ) -> tuple[Format | None, bool]:
        """Return the format for a weight and whether an override chose it.

        Args:
            names: The names of the weight: its module's and its own, under each of its ties.
            selected: Each override's key to the names that it selects, where these are known for all weights already.

        Returns:
            The format, or None to leave the weight alone; and True if an override says so.

        Raises:
            ConfigError: A regular expression takes too long.
        """
        names = list(names)
        selector = most_exact(select(self.overrides, names) if selected is None else selected, names)
        return (self.default_format, False) if selector is None else (format_of(self.overrides[selector]), True)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values, as config.json holds it.

        Returns:
            A new dict that shares nothing with this object.
        """
        return copy.deepcopy(self.__dict__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainWeightsConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def _known_keys() -> list[str]:
    return list(inspect.signature(TrainWeightsConfig).parameters)


def _format_of(name: str, group_size: int | None, activations: str | None) -> Format:
    parameters = {"group_size": group_size, "activations": activations}
    return get_format({"format": name, **{key: value for key, value in parameters.items() if value is not None}})


def _check_names(names: Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "modules_to_not_convert",
            "a list of module names",
            repr(names),
            'Write ["lm_head"], even for a single name.',
        )
    with named("modules_to_not_convert"):
        left_out(names, ())
    return list(names)


def _check_unknown(key: str, value: Any) -> None:
    if key == "dequantize" and value:
        raise ConfigError(key, "no such key", repr(value), "Load the model, then call model.dequantize().")
    known = ", ".join(_known_keys())
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(key, f"one of {known}, or a JSON value to keep", repr(value), "Leave it out.") from error
    if hasattr(TrainWeightsConfig, key):
        raise ConfigError(key, f"one of {known}", "the name of a method", "Leave it out.")
    _logger.warning("TrainWeightsConfig keeps %s=%r but does not use it: it knows %s.", key, value, known)
