"""Guards: one-byte tensors in a file that make every loader fail which would take a quantized model for a float one.

Transformers without this package finds no weight under the name that it looks for, fills it with random numbers and
warns. A tensor of one element under that name does not fit the weight, so it raises instead. `docs/format.md`
specifies guards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

# Beside the guards lies one more tensor, whose name tells a reader of Transformers' report what to do.
NOTICE_NAME = "import_hf_trainweights_before_loading"

_GUARD_SHAPE = (1,)
_SUFFIX = "_trainweights_guard"
_LAYER_NUMBER = re.compile(r"\.\d+\.")


def make_guard() -> Tensor:
    """Return a guard: one zero byte, a tensor of its own."""
    return torch.zeros(_GUARD_SHAPE, dtype=torch.uint8, device="cpu")


def is_guard(value: object) -> bool:
    """Return whether a value is what `make_guard` returns, wherever its byte lies and whatever it is."""
    return isinstance(value, Tensor) and value.dtype is torch.uint8 and tuple(value.shape) == _GUARD_SHAPE


def is_notice(name: str) -> bool:
    """Return whether a name is that of the notice; a conversion of Transformers may put a prefix before it."""
    return name.rpartition(".")[2] == NOTICE_NAME


def guarded_names(names: Iterable[str]) -> list[str]:
    """Return which weights, in the model's order, get a guard: the first of each stack of layers, and all outside.

    Every class that a checkpoint can be loaded as takes whole stacks: `AutoModel` leaves out a head, an encoder leaves
    out the decoder, a shorter model leaves out the last layers. So each meets a guard if it takes a quantized weight.

    Examples:
        >>> guarded_names(["encoder.0.q.weight", "encoder.1.q.weight", "decoder.0.q.weight", "head.weight"])
        ['encoder.0.q.weight', 'decoder.0.q.weight', 'head.weight']
    """
    first: dict[str, str] = {}
    for name in names:
        # Transformers takes the tensors of a file in the order of their names, and a weight's stored tensors, whose
        # names begin with "_", have to come before its guard: they say how the weight is put together.
        if name.rpartition(".")[2] > "_":
            first.setdefault(_LAYER_NUMBER.split(name, maxsplit=1)[0], name)
    return list(first.values())


def guards_of(names: Iterable[str]) -> dict[str, Tensor]:
    """Return what stands before a file's tensors, if there are any weights: the notice, and their guards by name."""
    guarded = guarded_names(names)
    return {name: make_guard() for name in ([NOTICE_NAME, *guarded] if guarded else [])}


def name_for_transformers(name: str) -> str:
    """Return the name under which a guard is handed to Transformers, to be taken back in its file.

    Its save would rename the plain name, and split the guard of merged experts; the underscore keeps it off.

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
    is_guards = parameter.startswith("_") and parameter.endswith(_SUFFIX)
    return f"{module}{dot}{parameter[1 : -len(_SUFFIX)]}" if is_guards else name
