"""Loads the float model that the demo measures, or refuses it with a reason."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
)

from hf_trainweights.errors import ConfigError

_NEEDS_HEAD = "Perplexity and generation need a trained language-model head: give a checkpoint saved with one."


def check_causal_lm(model: str) -> None:
    """Check, before any weight is loaded, that a model is float and has a language-model head."""
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _cannot_load(model, error) from error
    architectures = config.architectures or []
    if architectures and not _causal_lms(config) & set(architectures):
        raise ConfigError(
            f"--model {model}",
            "a causal language model, whose config.json names an architecture such as LlamaForCausalLM",
            ", ".join(architectures),
            _NEEDS_HEAD,
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"--model {model}", "a float model", "one that is quantized already", "Give the model it was made from."
        )


def load_float(model: str, device_map: str) -> Any:
    """Load a float causal language model in the dtype it was saved in."""
    try:
        pair: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", device_map=device_map, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise _cannot_load(model, error) from error
    loaded, report = pair
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigError(
            f"--model {model}", f"weights for all of {type(loaded).__name__}", f"none for {missing}", _NEEDS_HEAD
        )
    return loaded


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _cannot_load(model, error) from error


def _causal_lms(config: PretrainedConfig) -> set[str]:
    """Return the names of the causal language models that Transformers has for a configuration."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    return {cls.__name__ for cls in (classes if isinstance(classes, tuple) else (classes,))}


def _cannot_load(model: str, error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    next_step = "Give the directory of a saved model, or the name of a repository on the Hub."
    return ConfigError(f"--model {model}", "a causal language model and its tokenizer", reason, next_step)
