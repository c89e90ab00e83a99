"""What the tensors of a DCP directory are: the weights of a model, and the states of optimizers, by their own names."""

from __future__ import annotations

from collections.abc import Mapping

from hf_trainweights.checkpoint.dcp.contents import ShardedContents
from hf_trainweights.checkpoint.dcp.roles import models, optimizer_states

_MODEL_KEY = "model"


def model_weights(contents: ShardedContents) -> dict[str, str]:
    """Return the weights of the one model, or of the one under a key `model`: names in it to DCP's names.

    Empty if there are none, or several models and none is called `model`.
    """
    by_model = _models(contents)
    named = [names for prefix, names in by_model.items() if prefix.rpartition(".")[2] == _MODEL_KEY]
    candidates = named or list(by_model.values())
    return candidates[0] if len(candidates) == 1 else {}


def all_weights(contents: ShardedContents) -> dict[str, str]:
    """Return what is no state of an optimizer, as `model_weights` does; by DCP's names where there is no one model."""
    names = [name for several in _models(contents).values() for name in several.values()]
    of_model = model_weights(contents)
    return of_model if len(of_model) == len(names) else {name: name for name in names}


def optimizer_tensors(contents: ShardedContents) -> dict[str, str]:
    """Return the states of optimizers: `state.<parameter>.<key>` to DCP's names."""
    states = optimizer_states(contents.metadata.state_dict_metadata)
    return {f"state.{state.parameter}.{state.key}": name for name, state in states.items() if name in contents.tensors}


def _models(contents: ShardedContents) -> Mapping[str, dict[str, str]]:
    states = optimizer_states(contents.metadata.state_dict_metadata)
    names = [name for name in contents.tensors if name not in states]
    return models(names, {name: contents.path_of(name) for name in names})
