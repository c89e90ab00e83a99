"""How a quantized weight travels between ranks: stored tensor by stored tensor; importing this module registers it.

`DTensor.full_tensor` gathers the rows of all ranks, and `distribute_tensor` scatters them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.tensor  # defines the functional collectives
from torch import Tensor

from hf_trainweights.formats.arithmetic import as_bytes
from hf_trainweights.tensor.dispatch import HANDLERS, implements, unsupported_collective
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_functional = torch.ops._c10d_functional


@implements(_functional.all_gather_into_tensor.default)
def _gather(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    # It waits at once. PyTorch would wait for the wrapper, which no collective writes, and read the codes too early.
    def gather(stored: Tensor) -> Tensor:
        gathered = func(as_bytes(stored.contiguous()), *args, **kwargs)
        return _functional.wait_tensor.default(gathered).view(stored.dtype)

    return tensor.join({name: gather(stored) for name, stored in tensor.tensors.items()}, tensor.dtype)


# PyTorch 2.8 has no `_wrap_tensor_autograd`.
_WAITING = [
    getattr(_functional, name) for name in ("wait_tensor", "_wrap_tensor_autograd") if hasattr(_functional, name)
]


@implements(*(op.default for op in _WAITING))
def _wait(func: Any, tensor: QuantizedTensor) -> Any:
    del func
    alias = torch.ops.aten.alias.default
    return HANDLERS[alias](alias, tensor)


@implements(torch.ops.c10d.scatter_.default)
def _scatter(func: Any, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], *args: Any) -> Any:
    """Let the first rank send the others their rows: `distribute_tensor`, with which a full state dict is loaded."""
    weights = [*outputs, *(weight for row in inputs for weight in row)]
    if not all(isinstance(weight, QuantizedTensor) for weight in weights):
        raise unsupported_collective(func)
    works = []
    for name in outputs[0].format.tensor_names:
        received = [as_bytes(output.tensors[name]) for output in outputs]
        sent = [[as_bytes(weight.tensors[name].contiguous()) for weight in row] for row in inputs]
        works.append(func(received, sent, *args)[1])
    for work in works:
        torch.distributed.Work.unbox(work).wait()
    return outputs, works[-1]
