"""How to encode which tensor of a tree: the value that a policy makes and the encoder follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.encoded.key_paths import KeyPath


@dataclass(frozen=True)
class TensorPlan:
    """How to encode one tensor.

    Args:
        role: What it is, for the report.
        name: Its parameter's name, for the report.
        candidates: Codecs to try: the smallest result wins, the earlier one in a tie. A codec drops out if a
            reference named below is missing, if it refuses the tensor, or if it is lossy and the tensor is not
            contiguous or shares its memory. If none is left the tensor is stored exactly.
        anchor: Name of its reference in the anchor.
        exp_avg_sq: Path of its second moment in the same tree.
    """

    role: str
    name: str
    candidates: tuple[Codec, ...]
    anchor: str | None = None
    exp_avg_sq: KeyPath | None = None


Plan = Mapping[KeyPath, TensorPlan]
