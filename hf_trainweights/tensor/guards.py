"""Guards: one-byte tensors in a file, by which a loader fails that would take a quantized model for a float model.

Transformers without this package finds no weight under the name that it looks for, fills it with random numbers and
warns. A tensor of one element under that name does not fit the weight, so it raises instead. `docs/format.md`
specifies guards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

# The name of the notice: one more tensor of a byte, which no model has. Transformers lists its name among the unused
# ones, where people read which import is missing.
NOTICE_NAME = "import_hf_trainweights_before_loading"

_GUARD_SHAPE = (1,)
_SUFFIX = "_trainweights_guard"
# Names with the same beginning before their first number are one stack of layers.
_LAYER_NUMBER = re.compile(r"\.\d+\.")


def make_guard() -> Tensor:
    """Return a guard: one zero byte, a tensor of its own."""
    return torch.zeros(_GUARD_SHAPE, dtype=torch.uint8, device="cpu")


def is_guard(value: object) -> bool:
    """Return whether a value is a guard: a tensor of one byte, on any device and of any value."""
    return isinstance(value, Tensor) and value.dtype is torch.uint8 and tuple(value.shape) == _GUARD_SHAPE


def is_notice(name: str) -> bool:
    """Return whether a name is the notice's; a conversion of Transformers may put a prefix before it."""
    return name.rpartition(".")[2] == NOTICE_NAME


def guarded_names(names: Iterable[str]) -> list[str]:
    """Return the names of the weights that get a guard: the first of each stack of layers, and all outside of stacks.

    `names` are in the model's order. Every class that a checkpoint can be loaded as takes the first layer of a stack or
    none: `AutoModel` leaves out a head, an encoder leaves out the decoder, a shorter model leaves out the last layers.
    So each class that takes a quantized weight meets a guard.

    Examples:
        >>> guarded_names(["encoder.0.q.weight", "encoder.1.q.weight", "decoder.0.q.weight", "head.weight"])
        ['encoder.0.q.weight', 'decoder.0.q.weight', 'head.weight']
    """
    first: dict[str, str] = {}
    for name in names:
        # Transformers reads the tensors of a file in the order of their names. The stored tensors of a weight, whose
        # names begin with "_", have to come before its guard, because the weight is made of them.
        if name.rpartition(".")[2] > "_":
            first.setdefault(_LAYER_NUMBER.split(name, maxsplit=1)[0], name)
    return list(first.values())


def guards_of(names: Iterable[str]) -> dict[str, Tensor]:
    """Return the notice and the guards of a file with these weights, by name; {} if there are no weights."""
    guarded = guarded_names(names)
    return {name: make_guard() for name in ([NOTICE_NAME, *guarded] if guarded else [])}


def name_for_transformers(name: str) -> str:
    """Return the name under which Transformers gets a guard to save; `name_in_file` gives it its name in the file.

    Transformers' save would rename the plain name, and split the guard of merged experts. It does neither with a name
    that begins with an underscore.

    Examples:
        >>> name_for_transformers("layers.0.q_proj.weight")
        'layers.0.q_proj._weight_trainweights_guard'
    """
    module, dot, parameter = name.rpartition(".")
    return f"{module}{dot}_{parameter}{_SUFFIX}"


def name_in_file(name: str) -> str:
    """Return the name that a tensor has in a file: the plain name of the weight for a guard, else the name itself.

    Examples:
        >>> name_in_file("layers.0.q_proj._weight_trainweights_guard"), name_in_file("layers.0.q_proj._weight_scale")
        ('layers.0.q_proj.weight', 'layers.0.q_proj._weight_scale')
    """
    module, dot, parameter = name.rpartition(".")
    names_guard = parameter.startswith("_") and parameter.endswith(_SUFFIX)
    return f"{module}{dot}{parameter[1 : -len(_SUFFIX)]}" if names_guard else name
