"""The codecs that each mode chooses for a tensor; policy.py shows them as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec
from hf_trainweights.checkpoint.codecs.log_rank1 import LogRank1
from hf_trainweights.checkpoint.codecs.planes_delta import PlanesDelta
from hf_trainweights.checkpoint.codecs.planes_rank1 import PlanesRank1
from hf_trainweights.checkpoint.codecs.update_space import UpdateSpace

# Tensors with fewer elements are always exact.
SIZE_FLOOR = 4096


@dataclass(frozen=True)
class LossyMode:
    """How much a mode may round.

    Args:
        steps_per_rms: Into how many steps the root mean square of a weight's first difference is divided.
        exp_avg: Codec of Adam's first moment.
        exp_avg_sq: Codec of its second.
    """

    steps_per_rms: int
    exp_avg: Codec
    exp_avg_sq: Codec


LOSSY_MODES = {
    "near-lossless": LossyMode(4, UpdateSpace(step=0.25), LogRank1(step=1)),
    "compact": LossyMode(1, UpdateSpace(step=0.5), LogRank1(step=2)),
}
MODES = ("lossless", *LOSSY_MODES)
# What editors complete; the values are checked where they arrive.
ModeName = Literal["lossless", "near-lossless", "compact"] | str

# Tensors of an optimizer's state that a mode treats by name; Adam keeps them for each parameter.
MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})


def allowed_codecs(choice: str | Codec, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the codec that a rule names as a candidate for a tensor; none for exact, or to round a small one."""
    if isinstance(choice, Codec) and (choice.lossless or tensor.numel() >= SIZE_FLOOR):
        return (choice,)
    return ()


def exact_delta_codecs(choice: str | Codec, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the candidates for a weight or buffer that is in the anchor, before any step is measured."""
    return allowed_codecs(choice, tensor) if isinstance(choice, Codec) else (PlanesDelta(),)


def lossy_mode_of(choice: str | Codec, role: str, tensor: Tensor) -> LossyMode | None:
    """Return the mode that may round a weight, or None if the weight is exact or a rule names its codec."""
    is_small = tensor.numel() < SIZE_FLOOR
    if isinstance(choice, Codec) or role == "buffer" or is_small or tensor.dtype not in LOSSY_DTYPES:
        return None
    return LOSSY_MODES.get(choice)


def state_codecs(choice: str | Codec, role: str, tensor: Tensor) -> tuple[Codec, ...]:
    """Return the codecs to try for a tensor of an optimizer's state; nothing means exact."""
    if isinstance(choice, Codec):
        return allowed_codecs(choice, tensor)
    if role not in MOMENTS or tensor.numel() < SIZE_FLOOR:
        return ()
    if choice not in LOSSY_MODES:
        return (PlanesRank1(),) if role == "exp_avg_sq" else ()
    mode = LOSSY_MODES[choice]
    return (mode.exp_avg if role == "exp_avg" else mode.exp_avg_sq,)
