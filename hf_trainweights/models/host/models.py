"""What a model of Transformers says about its own weights and purpose."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.models.host.versions import private_attribute


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the name of each parameter that a model ties, or will tie after its load, to that of its source."""
    return private_attribute(module, "all_tied_weights_keys") if isinstance(module, PreTrainedModel) else {}


def modules_kept_in_float(module: nn.Module, include_embeddings: bool) -> list[str]:
    """Return the modules that a model keeps in float: float32 ones, and head and tied embeddings unless included."""
    if not isinstance(module, PreTrainedModel):
        return []
    tied, head = tied_names(module), output_head(module)
    embeddings = {name.removesuffix(".weight") for name in (*tied, *tied.values())}
    embeddings |= {name for name, submodule in module.named_modules() if submodule is head}
    last = {name.removesuffix(".weight") for name in [name for name, _ in module.named_parameters()][-1:]}
    kept = last - embeddings if include_embeddings else last | embeddings
    # These hold for every dtype: a module that must not be float16 must not be int8 either.
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        kept |= set(private_attribute(module, attribute) or ())
    return sorted(kept)


def output_head(module: nn.Module) -> nn.Module | None:
    """Return the layer that makes a model's outputs of its last states, the one that is as long as its vocabulary."""
    return module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None


def shallow_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return another object of a model's class that shares all its parts and attributes.

    `copy.copy` cannot copy the class that `fully_shard` gives a model.
    """
    copied = object.__new__(type(model))
    copied.__setstate__(model.__dict__)
    return copied


def was_loaded(parameter: Tensor) -> bool:
    """Return whether a parameter came from a checkpoint; False where a version does not say."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def base_prefix(model: PreTrainedModel) -> str:
    """Return what stands before the base model's parameters in a model with a head, e.g. `model.`; empty if unknown."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether a model has adapters, so that saving it saves these alone."""
    loaded = getattr(model, "_hf_peft_config_loaded", None)
    return bool(getattr(model, "peft_config", None)) if loaded is None else loaded


def tasks_of(class_name: str) -> list[str]:
    """Return the tasks of the Hub that a class of Transformers is for; none where a version has no table of them."""
    tables = getattr(import_module("transformers.modelcard"), "TASK_MAPPING", {})
    return [
        task
        for task, classes in tables.items()
        if any(class_name in ([names] if isinstance(names, str) else names) for names in classes.values())
    ]
