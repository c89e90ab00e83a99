"""TrainWeightsConfig: the user's choices, validated once and kept in a model's config.json."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Never

from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.selectors import most_exact, select
from hf_trainweights.formats import get_format, parameters_of
from hf_trainweights.formats.base import Format
from hf_trainweights.models.choosing.config_values import (
    OVERRIDE_ORDER,
    Budget,
    check_left_to_budget,
    check_names,
    check_overrides,
    check_plan,
    check_target,
    check_unknown,
    format_of,
    in_order,
    right_argument,
)

QUANT_METHOD = "trainweights"
CONFIG_VERSION = 1
# The version of a model with coded tensors: a package that does not know these says that it is too old.
CODED_VERSION = 2
DEFAULT_FORMAT = "int8"
# Keys that config.json has only if they are set, because earlier versions do not know them.
_ONLY_IF_SET = {"bits", "size", "plan", "column_scale", "compress", "calibration_sha256", "for_target"}

# The name of a format of the package, which editors complete, or of a registered one.
FormatName = Literal["int8", "int4", "float8_e4m3", "coded"] | str


class TrainWeightsConfig(QuantizationConfigMixin):
    """Which weights to quantize, and to which format.

    Args:
        format: Name of the format for all weights that no override names, one of `FORMATS`; int8 if it is None and
            neither `bits` nor `size` is given.
        group_size: Weights that share a scale; None for the format's default (int4: 128, int8: a whole row).
        modules_to_not_convert: Selectors of modules or parameters to leave alone beside the output head and
            routers of experts.
        overrides: Another format for some modules or parameters. Each key is a selector; each value is a format's name,
            a dict such as `{"format": "int8", "group_size": 64}`, or None to leave the weight alone. Overrides win over
            `modules_to_not_convert`.
        include_embeddings: Whether to quantize the input embeddings and the output head too; tied ones stay tied.
        activations: "int8" to round activations to int8 too, for speed: dynamically, with one scale per token, in every
            product on a CPU. Only with format "int8" and no groups; the error of a product is about four times that of
            bfloat16. "float8" to round them to float8, only with format "float8_e4m3": it is fast on GPUs that multiply
            float8, and slower than without on a CPU.
        column_scale: Whether each input column has a factor of its own, chosen so that the columns of a group are of
            one size. It costs 16 bits a column, and a multiplication of the input in each product.
        bits: Bits per weight to choose formats for, scales included, in place of `format`: each weight gets the format
            by which the model loses least. The mean is at most this, and counts the weights that `overrides` and
            `modules_to_not_convert` except too. For format "coded" it is the bits of a weight in a file, from 2 to 8,
            4 if it is None.
        size: Bytes to choose formats for, in place of `format`, as a number or a text such as `"1.2GB"` or `"900MiB"`:
            the weight files that `save_pretrained` writes take at most this, float weights and headers included.
        plan: The formats that were chosen for `bits` or `size`, by the weights' full names. It is set when a model is
            quantized and saved in config.json; with it, nothing is chosen again.
        base_model: Hub id of the float model; a model that is loaded from the Hub by this configuration has it in its
            own copy, so that cards of later saves can name it.
        calibration_sha256: Digest of the inputs that the codes were chosen with. It is set when a model is quantized
            with calibration and saved in config.json, for the record.
        for_target: With `bits` or `size`, "gguf" or "compressed-tensors" to choose among the formats that this export
            can hold. Other exports hold every format.
        version: Version of this configuration's layout.
        quant_method: The name of this method in config.json.
        compress: Whether saved files keep all weights entropy-coded, without loss, where that saves 2 % or more. Files
            need this version of the package or a newer one.

    A selector is the full name of a module or parameter (`lm_head`), or whole parts of such names (`down_proj`,
    `layers.0`, `mlp.down_proj`), or `re:` and a regular expression for a full name. A module is selected with all that
    it holds. If several overrides select a weight, the most exact wins: a full name before parts of one, parts before
    an expression; among these a parameter before a module, then more parts before fewer, then the first. A selector
    that selects nothing in the model to be quantized is an error.

    Raises:
        ConfigError: A value is not allowed, and the message lists the allowed ones; or there is no such argument.

    Examples:
        >>> config = TrainWeightsConfig("int4", group_size=32, overrides={"re:.*down_proj": "int8", "lm_head": None})
        >>> config.format_for(["model.layers.0.mlp.down_proj"])
        (Int8(group_size=None, activations=None), True)
        >>> TrainWeightsConfig(bits=5.5).budget
        Budget(bits=5.5, size_bytes=None)
    """

    def __init__(
        self,
        format: FormatName | None = None,  # noqa: A002
        group_size: int | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        overrides: Mapping[str, str | Mapping[str, Any] | None] | None = None,
        include_embeddings: bool = False,
        activations: Literal["int8", "float8"] | str | None = None,
        base_model: str | None = None,
        column_scale: bool = False,
        bits: float | None = None,
        size: str | int | None = None,
        compress: bool = False,
        plan: Mapping[str, str | Mapping[str, Any]] | None = None,
        calibration_sha256: str | None = None,
        for_target: Literal["gguf", "compressed-tensors"] | str | None = None,
        version: int = CONFIG_VERSION,
        quant_method: str = QUANT_METHOD,
        **unknown: Never,
    ):
        for name, value in unknown.items():
            names = _argument_names()
            raise ConfigError(name, f"one of {', '.join(names)}", repr(value), right_argument(name, value, names))
        if quant_method != QUANT_METHOD:
            raise ConfigError("quant_method", repr(QUANT_METHOD), repr(quant_method), "Use that method's own class.")
        self.quant_method = quant_method  # type: ignore[assignment]
        if type(version) is not int or version not in (CONFIG_VERSION, CODED_VERSION):
            raise ConfigError(
                "version",
                f"{CONFIG_VERSION} or {CODED_VERSION}",
                repr(version),
                "Install the hf_trainweights that wrote this model, or newer.",
            )
        self.column_scale, self.activations = column_scale, activations
        self.bits, self.size, self.plan = bits, size, check_plan(plan)
        self.format, self.group_size, self.for_target = format, group_size, check_target(for_target, bits, size)
        if self.needs_plan:
            check_left_to_budget(
                format=format, group_size=group_size, activations=activations, column_scale=column_scale or None
            )
        else:
            # A weight without a format of its own in a file has this one, so a configuration with a plan needs it too.
            self.format = DEFAULT_FORMAT if format is None else format
            chosen = self.default_format.get_config()
            self.group_size, self.bits = chosen.get("group_size"), chosen.get("bits", bits)
        self.modules_to_not_convert = check_names(modules_to_not_convert)
        self.overrides = check_overrides(overrides)
        if not isinstance(base_model, str | None):
            raise ConfigError("base_model", "the id of a repository or None", repr(base_model), "Leave it out.")
        self.base_model = base_model
        for name, value in (("include_embeddings", include_embeddings), ("compress", compress)):
            if type(value) is not bool:
                raise ConfigError(name, "True or False", repr(value), "Pass one of these.")
        self.include_embeddings, self.compress = include_embeddings, compress
        if not isinstance(calibration_sha256, str | None):
            raise ConfigError("calibration_sha256", "a digest or None", repr(calibration_sha256), "Leave it out.")
        self.calibration_sha256 = calibration_sha256
        self.version = self._needed_version()

    def _needed_version(self) -> int:
        """Return the lowest version of the layout that can hold this configuration."""
        formats = [self.default_format, *map(format_of, (self.overrides or {}).values())]
        coded = self.compress or any(form is not None and form.is_coded_in_files for form in formats)
        return CODED_VERSION if coded else CONFIG_VERSION

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
            The configuration; if `return_unused_kwargs=True`, also a dict of the `kwargs` that are no arguments of it.

        Raises:
            ConfigError: A value is not allowed.

        Examples:
            >>> TrainWeightsConfig.from_dict({"format": "int4", "group_size": 32}).default_format
            Int4(group_size=32)
        """
        arguments = {key: value for key, value in config_dict.items() if key in _argument_names()}
        try:
            result = super().from_dict(arguments, **kwargs)
            config: Any = result[0] if isinstance(result, tuple) else result
            config.overrides = in_order(config.overrides, config_dict.get(OVERRIDE_ORDER))
            for key in config_dict.keys() - arguments.keys() - {OVERRIDE_ORDER}:
                check_unknown(key, config_dict[key], _argument_names(), hasattr(cls, key))
                setattr(config, key, config_dict[key])
        except ConfigError as error:
            where = f"quantization_config (in config.json, or passed as a dict): {error.where}"
            raise ConfigError(where, error.expected, error.found, error.next_step) from error
        return result

    @classmethod
    def of(cls, config: TrainWeightsConfig | FormatName | Mapping[str, Any]) -> TrainWeightsConfig:
        """Return the configuration that a caller means.

        Args:
            config: A configuration, the name of a format, or a dict as `from_dict` takes it.

        Raises:
            ConfigError: It is none of these, or a value is not allowed.

        Examples:
            >>> TrainWeightsConfig.of("int4").group_size
            128
        """
        if isinstance(config, TrainWeightsConfig):
            return config
        if isinstance(config, str):
            return cls(config)
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        expected = "a TrainWeightsConfig or the name of a format"
        raise ConfigError("config", expected, type(config).__name__, 'Write TrainWeightsConfig("int8"), or "int8".')

    @property
    def budget(self) -> Budget | None:
        """The limit of bits or bytes that formats are chosen for; None if the user names the format."""
        bits = None if self.format is not None and "bits" in parameters_of(self.format) else self.bits
        return Budget.of(bits, self.size)

    @property
    def needs_plan(self) -> bool:
        """Whether formats are still to be chosen for `bits` or `size`."""
        return self.budget is not None and self.plan is None

    def but(self, **values: Any) -> TrainWeightsConfig:
        """Return a copy of this configuration with other values, which are not checked.

        Args:
            values: Arguments of a configuration.

        Examples:
            >>> TrainWeightsConfig("int4").but(base_model="me/small").base_model
            'me/small'
        """
        config = copy.copy(self)
        vars(config).update(values)
        return config

    def check_quantizing(self) -> None:
        """Check that a float model can be quantized by this configuration.

        Raises:
            ConfigError: A key is unknown: another version's, or misspelt. Or a format holds weights of files alone.
        """
        overrides = {f"overrides[{name!r}]": value for name, value in (self.overrides or {}).items()}
        for where, value in {"format": self.default_format.get_config(), **overrides}.items():
            form = format_of(value)
            if form is not None and (refusal := form.import_only_refusal()):
                raise ConfigError(where, *refusal)
        names = _argument_names()
        unknown = sorted(vars(self).keys() - names)
        if unknown:
            next_step = right_argument(unknown[0], vars(self)[unknown[0]], names)
            raise ConfigError("quantization_config", f"keys among {', '.join(names)}", ", ".join(unknown), next_step)

    @property
    def default_format(self) -> Format:
        """The format of every weight that no override names."""
        name = self.format or DEFAULT_FORMAT
        # If the format has no parameter `bits`, these are the budget that the plan was made for.
        parameters = ("group_size", "activations", "column_scale", *(["bits"] if "bits" in parameters_of(name) else []))
        values = {parameter: getattr(self, parameter) for parameter in parameters}
        return get_format({"format": name, **{key: value for key, value in values.items() if value is not None}})

    def format_for(
        self, names: Iterable[str], selected: Mapping[str, Collection[str]] | None = None
    ) -> tuple[Format | None, bool]:
        """Return the format for a weight and whether an override chose it.

        Args:
            names: The names of the weight: its module's and its own, under each of its ties.
            selected: The names that each override's key selects, if the caller knows them for all weights already.

        Returns:
            The format, or None to leave the weight alone; and True if an override says so.

        Raises:
            ConfigError: A regular expression takes too long.
        """
        names = list(names)
        selector = most_exact(select(self.overrides, names) if selected is None else selected, names)
        if selector is not None:
            return format_of(self.overrides[selector]), True
        planned = next((self.plan[name] for name in names if name in self.plan), None) if self.plan else None
        return (self.default_format if planned is None else format_of(planned)), False

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values, as config.json holds it.

        Returns:
            A new dict that shares nothing with this object. JSON files sort its keys, so the dict names the order of
            the overrides if that is not the sorted one.
        """
        saved = copy.deepcopy(self.__dict__)
        values = {key: value for key, value in saved.items() if key not in _ONLY_IF_SET or value not in (None, False)}
        order = list(self.overrides or ())
        return values if order == sorted(order) else {**values, OVERRIDE_ORDER: order}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainWeightsConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def _argument_names() -> list[str]:
    return [name for name in inspect.signature(TrainWeightsConfig).parameters if name != "unknown"]
