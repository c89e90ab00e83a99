"""Whether the ranks of a distributed run hold the same quantized weights, asked before they depend on it.

FSDP2 cuts its rows from what each rank has. If ranks differ in a format or a size, their collectives do not fit each
other, and processes abort or wait forever; if they differ in values alone, the weights become a mixture.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from zlib_ng import zlib_ng

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def check_shardable(module: nn.Module, group: Any = None) -> None:
    """Check that all ranks hold the same quantized weights and that `fully_shard` can spread them over ranks.

    Every rank must call it, before `fully_shard`; what one rank would raise, all raise.

    Args:
        module: The module that is to be spread, with its weights still whole.
        group: The ranks that are asked; all if None.

    Raises:
        UnsupportedError: A weight is missing on a rank, or differs there in format, shape, dtype or values; or it is
            stored transposed, as in GPT-2's Conv1D, and its groups cannot be divided by the ranks.
    """
    own = {name: _describe(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, own, group=group)
    for name in sorted({name for described in of_ranks for name in described}):
        found = [described.get(name, "no weight") for described in of_ranks]
        if len(set(found)) > 1:
            other = next(rank for rank, text in enumerate(found) if text != found[0])
            raise UnsupportedError(
                name,
                "the same weight on all ranks",
                f"{found[0]} on rank 0 and {found[other]} on rank {other}",
                "Let all ranks load one checkpoint with one configuration, or set one seed before the model is made.",
            )
    ranks = dist.get_world_size(group)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, QuantizedTensor) and not parameter.can_be_cut(-(-parameter.shape[0] // ranks)):
            raise UnsupportedError(
                name,
                f"a first dimension that {ranks} ranks can share in groups of {parameter.format.column_step}",
                f"{parameter!r}",
                "Take another number of ranks, pass it as ignored_params, or name its layer in modules_to_not_convert.",
            )


def _describe(parameter: Tensor) -> str:
    """Return what must be the same on all ranks; of a float weight, which wrappers make equal, not the values."""
    if not isinstance(parameter, QuantizedTensor):
        return f"a {parameter.dtype} weight of shape {tuple(parameter.shape)}"
    stored = [] if parameter.is_meta else parameter.tensors.values()
    # A sum would not tell rows that are exchanged.
    digests = [zlib_ng.crc32(each.contiguous().view(torch.uint8).cpu().numpy()) for each in stored]
    transposed = ", transposed" * parameter.transposed
    shown = f"{parameter.dtype} with scales in {parameter.scale_dtype}, bytes of CRC-32 {digests}"
    return f"a weight in {parameter.format} of shape {tuple(parameter.shape)}{transposed}, {shown}"
