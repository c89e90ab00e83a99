"""The check that all ranks of a distributed run hold the same quantized weights, made before FSDP2 cuts them.

FSDP2 cuts each rank's shard out of that rank's own weight. If ranks differ in a format or a size, their collectives do
not fit each other, and processes abort or wait forever. If they differ in values alone, the weights become a mixture.
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

    Every rank must call it, before `fully_shard`. An error for one rank is raised on all ranks.

    Args:
        module: The module that is to be sharded, with its weights still unsharded.
        group: The ranks that take part; all if None.

    Raises:
        UnsupportedError: A weight is missing on a rank, or differs there in format, shape, dtype or values. Or it is
            stored transposed, as in GPT-2's Conv1D, and its groups cannot be divided among the ranks.
    """
    own = {name: _describe(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, own, group=group)
    for name in sorted({name for described in of_ranks for name in described}):
        texts = [described.get(name, "no weight") for described in of_ranks]
        if len(set(texts)) > 1:
            other = next(rank for rank, text in enumerate(texts) if text != texts[0])
            raise UnsupportedError(
                name,
                "the same weight on all ranks",
                f"{texts[0]} on rank 0 and {texts[other]} on rank {other}",
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
    """Describe the properties that must be the same on all ranks; wrappers make the values of float weights equal."""
    if not isinstance(parameter, QuantizedTensor):
        return f"a {parameter.dtype} weight of shape {tuple(parameter.shape)}"
    stored = [] if parameter.is_meta else parameter.tensors.values()
    # A sum would not notice that rows are exchanged.
    digests = [zlib_ng.crc32(tensor.contiguous().view(torch.uint8).cpu().numpy()) for tensor in stored]
    transposed = ", transposed" * parameter.transposed
    shown = f"{parameter.dtype} with scales in {parameter.scale_dtype}, bytes of CRC-32 {digests}"
    return f"a weight in {parameter.format} of shape {tuple(parameter.shape)}{transposed}, {shown}"
