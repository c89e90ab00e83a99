"""Models of Transformers: facts about their weights, tasks and origin, and how they are made, copied and traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.models.host import private, private_attribute
from hf_trainweights.tensor.modules import is_quantized, parameter_places, put_parameter

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the argument by which `forward` may take a cache of earlier tokens: since Transformers 5.24, and before."""


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the names of parameters that a model ties, or will tie after its load, each with its source's name."""
    return private_attribute(module, "all_tied_weights_keys") if isinstance(module, PreTrainedModel) else {}


def models_within(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the outermost models of Transformers in a module, each after the prefix of its names there."""
    if isinstance(module, PreTrainedModel):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from models_within(child, f"{prefix}{name}.")


def weights_saved_elsewhere(module: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that sentence-transformers writes into files of its own, which hold float tensors.

    These parameters belong to its modules beside the Transformers model, such as `Dense`.
    """
    within_models = tuple(prefix for prefix, _ in models_within(module))
    for prefix, submodule in module.named_modules():
        if any(base.__module__.startswith("sentence_transformers.") for base in type(submodule).__mro__):
            names = (f"{prefix}.{name}".removeprefix(".") for name, _ in submodule.named_parameters())
            yield from (name for name in names if not name.startswith(within_models))


def names_tied_now(model: PreTrainedModel) -> dict[str, str]:
    """Return `tied_names`, and the names that `tie_weights` ties since a user changed the model's configuration."""
    return tied_names(model) | private_attribute(model, "get_expanded_tied_weights_keys")(all_submodels=True)


def modules_kept_in_float(module: nn.Module, include_embeddings: bool) -> list[str]:
    """Return the modules that stay in float: float32 ones, the last, and (unless included) head and embeddings."""
    if not isinstance(module, PreTrainedModel):
        return []
    tied, head = tied_names(module), output_head(module)
    embeddings = {name.removesuffix(".weight") for name in (*tied, *tied.values())}
    embeddings |= {name for name, submodule in module.named_modules() if submodule is head}
    # All names count: a tied parameter must be the last one both before and after the load that ties it.
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    last = {name.removesuffix(".weight") for name in names[-1:]}
    float_modules = last - embeddings if include_embeddings else last | embeddings
    # These lists count here for every dtype: a module that must not be float16 must not be int8 either.
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        float_modules |= set(private_attribute(module, attribute) or ())
    return sorted(float_modules)


def last_with_bias(model: PreTrainedModel) -> list[str]:
    """Return a list of the module whose bias ends a model; empty if the last parameter of the model is no bias."""
    last = next(reversed([name for name, _ in model.named_parameters(remove_duplicate=False)]), "")
    return [last.removesuffix(".bias")] if last.endswith(".bias") else []


def output_head(module: nn.Module) -> nn.Module | None:
    """Return the layer that makes a model's outputs of its last states, usually one per token of its vocabulary."""
    return module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None


def shallow_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return another object of a model's class that shares all submodules and attributes with it.

    `copy.copy` cannot copy the class that `fully_shard` gives a model.
    """
    copied = object.__new__(type(model))
    copied.__setstate__(model.__dict__)
    return copied


def was_loaded(parameter: Tensor) -> bool:
    """Return whether a parameter came from a checkpoint; False where a version does not say."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def base_prefix(model: PreTrainedModel) -> str:
    """Return the prefix of the base model's parameters in a model with a head, e.g. `model.`; empty if unknown."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether a model has adapters. A save of such a model writes only these."""
    loaded = getattr(model, "_hf_peft_config_loaded", None)
    return bool(getattr(model, "peft_config", None)) if loaded is None else loaded


def adapter_file(source: str) -> str | None:
    """Return the file that describes the adapter of a saved model, in a directory or on the Hub, or None."""
    return private("utils.peft_utils", "find_adapter_config_file")(source)


def tasks_of(class_name: str) -> list[str]:
    """Return the tasks of the Hub that a class of Transformers is for; empty where a version has no table of them."""
    tables = getattr(import_module("transformers.modelcard"), "TASK_MAPPING", {})
    return [
        task
        for task, classes in tables.items()
        if any(class_name in ([names] if isinstance(names, str) else names) for names in classes.values())
    ]


def registered_classes(config: Any) -> Iterator[Any]:
    """Yield the classes by which the auto classes make a model of a configuration, a user's own ones among them.

    A type of model may borrow the class of another one: InternLM3 is loaded as a `LlamaForCausalLM`.
    """
    table_class = private("models.auto.auto_factory", "_LazyAutoMapping")
    for table in vars(import_module("transformers.models.auto.modeling_auto")).values():
        if not isinstance(table, table_class) or type(config) not in table:
            continue
        # Some entries need a package that is missing, or name no class.
        with contextlib.suppress(ImportError, ValueError):
            registered = table[type(config)]
            yield from registered if isinstance(registered, tuple) else (registered,)


def model_origin(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the directory or name on the Hub that a model's weights came from, and the commit; None where unknown.

    Transformers 5.17 keeps the commit, 5.23 does not.

    Examples:
        >>> model_origin(nn.Linear(1, 1))
        (None, None)
    """
    get_base_model = getattr(model, "get_base_model", None)
    config = getattr(get_base_model() if callable(get_base_model) else model, "config", None)
    name, commit = (getattr(config, key, None) for key in ("_name_or_path", "_commit_hash"))
    return (name if isinstance(name, str) and name else None), (commit if isinstance(commit, str) else None)


def refuse_quantized_configurations(method: str) -> None:
    """Let `from_config` refuse the configuration of a quantized model, except on the meta device, for skeletons.

    Transformers asks no quantizer there. It would make a float model of random weights whose configuration says that it
    is quantized, and no loader could read a save of that model.
    """
    original: Any = getattr(PreTrainedModel, "_from_config", None)
    if original is None:
        return

    @functools.wraps(original.__func__)
    def from_config(cls: type[PreTrainedModel], config: Any, **kwargs: Any) -> Any:
        # `from_pretrained` makes models, and the models within them, on the meta device; `init_empty_weights` of
        # accelerate puts parameters there, and leaves the default device as it is.
        if quant_method(config) == method and not nn.LayerNorm(1).weight.is_meta:
            raise ConfigError(
                f"{cls.__name__}.from_config",
                "the configuration of a float model: its weights are random, and no quantizer is asked",
                f"one of a model that {method} has quantized",
                "Load the model with from_pretrained; for random weights, delete config.quantization_config first, and "
                "call quantize_ on the model.",
            )
        return original.__func__(cls, config, **kwargs)

    PreTrainedModel._from_config = classmethod(from_config)  # type: ignore[method-assign]


def hand_down_to_parts(method: str) -> None:
    """Let the configuration of a part of a quantized model, read from the file of the model, say that it is quantized.

    Transformers takes only the part's own values from the file, such as `text_config`, and would load float weights.
    """
    original: Any = getattr(PreTrainedConfig, "get_config_dict", None)
    if original is None:
        return

    @functools.wraps(original.__func__)
    def get_config_dict(cls: type[PreTrainedConfig], *args: Any, **kwargs: Any) -> Any:
        values, unused = original.__func__(cls, *args, **kwargs)
        described = values.get("quantization_config")
        is_ours = isinstance(described, dict) and described.get("quant_method") == method
        if is_ours and cls.model_type and values.get("model_type") != cls.model_type:
            # Its selectors name modules of the model, not of the part. The part needs none: a weight file names the
            # format of each weight that does not have the default one.
            for name, section in values.items():
                if isinstance(section, dict) and name != "quantization_config":
                    section["quantization_config"] = described
        return values, unused

    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)  # type: ignore[method-assign]


def hide_from_initialization() -> None:
    """Let Transformers write initial values to float weights only, because quantized weights have their values.

    Transformers marks weights that it has loaded, and its functions skip these. But a class may write to a row of a
    weight, which has no mark, or fill a table that it has made like the weight.
    """
    original: Any = getattr(PreTrainedModel, "initialize_weights", None)
    if original is None:
        return

    @functools.wraps(original)
    def initialize_weights(self: PreTrainedModel) -> None:
        hidden = {id(parameter): parameter for parameter in self.parameters() if is_quantized(parameter)}
        places = parameter_places(self) if hidden else {}
        for key, parameter in hidden.items():
            put_parameter(places[key], _initialized_stand_in(parameter))
        try:
            original(self)
        finally:
            for key, parameter in hidden.items():
                put_parameter(places[key], parameter)

    PreTrainedModel.initialize_weights = initialize_weights  # type: ignore[method-assign]


def _initialized_stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape that takes no memory and has Transformers' mark of a loaded one."""
    stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
    stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
    return stand_in


def adopt_before(names: Iterable[str], adopt: Callable[[PreTrainedModel], bool]) -> None:
    """Let methods of Transformers' models first call `adopt`, which returns True if it has replaced them in a model.

    A user may put quantized parts into a float model at any time, and nothing tells that it happens. So `adopt` looks
    for such parts at each call of a method that must treat them differently.
    """
    for name in names:
        original: Any = getattr(PreTrainedModel, name, None)
        if original is not None:
            setattr(PreTrainedModel, name, _after_adopting(name, original, adopt))


def _after_adopting(
    name: str, original: Callable[..., Any], adopt: Callable[[PreTrainedModel], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        method = functools.partial(original, self) if not adopt(self) else getattr(self, name)
        return method(*args, **kwargs)

    return call


def quant_method(config: Any) -> object:
    """Return the name of the quantization method in a configuration or a quantizer; None for a float model."""
    described = getattr(config, "quantization_config", None)
    return described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)


def configurations_within(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a model's configuration and those of its parts, at any depth."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from configurations_within(value)


def forget_method(model: PreTrainedModel, method: str) -> None:
    """Remove the marks of a quantization method from a model and the models in it, whose weights are float now."""
    for submodel in model.modules():
        if not isinstance(submodel, PreTrainedModel):
            continue
        for config in configurations_within(submodel.config):
            if quant_method(config) == method:
                vars(config).pop("quantization_config")
        if quant_method(getattr(submodel, "hf_quantizer", None)) == method:
            del submodel.hf_quantizer, submodel.quantization_method
            submodel.is_quantized = False  # type: ignore[assignment]


def onnx_graph(model: nn.Module, inputs: Mapping[str, Any], opset: int, dynamic_shapes: Any = None) -> Any:
    """Trace a model to an `onnx_ir.Model` whose dimensions are free wherever the model leaves them free."""
    exporter = private("exporters.exporter_onnx", "OnnxExporter")()
    make_options = private("exporters.configs", "OnnxConfig")
    options = make_options(dynamic=True, opset_version=opset, dynamic_shapes=dynamic_shapes)
    # Transformers' exporter sets the argument in the model's configuration alone; T5's decoder has its own.
    configs = (getattr(module, "config", None) for module in model.modules())
    caching = {id(config): config for config in configs if getattr(config, "use_cache", None)}
    with holding(caching.values() if inputs.get("use_cache") is False else (), "use_cache", False):
        exported = exporter.export(model, dict(inputs), options)
    # 5.17 returns PyTorch's program, 5.23 its own.
    return exported.program if hasattr(exported, "components") else exported.model


def cache_argument(model: nn.Module) -> str:
    """Return the name among `CACHE_ARGUMENTS` by which a model takes and returns its cache; "" if it has none."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in arguments), "")


def is_cache(value: object) -> bool:
    """Return whether a value is a cache of earlier tokens: every cache of Transformers has this method."""
    return hasattr(value, "get_seq_length")


def is_stateful(model: PreTrainedModel) -> bool:
    """Return whether a model's cache holds a state, as Mamba's does, and not only keys and values."""
    return private_attribute(model, "_is_stateful")


@contextlib.contextmanager
def holding(objects: Iterable[Any], attribute: str, value: object) -> Iterator[None]:
    """Set an attribute of objects to another value within the context."""
    before = [(owner, getattr(owner, attribute)) for owner in objects]
    try:
        for owner, _ in before:
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, original in before:
            setattr(owner, attribute, original)
