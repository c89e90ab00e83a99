"""A model as exporters want to call it: in eval mode, with outputs that a reader knows without Transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.exports.example_inputs import Inputs


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Hold a model in eval mode within the context; afterwards each module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class NamedCall(nn.Module):
    """A model of Transformers that takes tensors by name and returns a dict of tensors.

    Its options are arguments that are no tensors, the same at every call.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[str, Any]):
        super().__init__()
        self.model, self._options = model, dict(options)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Call the model; what it returns besides tensors, such as a cache, is left out."""
        return dict(_named_tensors(self.model(**inputs, **self._options)))


def _named_tensors(outputs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's outputs, those within others, such as of the parts of SigLIP, by both names."""
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _named_tensors(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            yield from _named_tensors({str(index): each for index, each in enumerate(value)}, f"{prefix}{name}.")


class OrderedCall(nn.Module):
    """A model of Transformers that takes tensors in the order of `names` and returns a tuple, as C++ calls it."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str], options: Mapping[str, Any]):
        super().__init__()
        self._call, self._names = NamedCall(model, options), tuple(names)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the model."""
        return tuple(self._call(**dict(zip(self._names, inputs, strict=True))).values())


def split_inputs(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments of a model of Transformers that are tensors, and the others, both by name."""
    tensors = {name: value for name, value in inputs.kwargs.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in inputs.kwargs.items() if name not in tensors}
