"""What a tensor of a tree is, and how it is stored: the value that a policy makes and the encoder follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.encoded.storages import KeyPath

# A smaller mean change counts as none: its step would be too small for delta-uniform.
_SMALLEST_RMS = 2.0**-100


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
        steps_per_rms: Into how many steps a lossy mode divides the root mean square of a weight's first difference;
            0 for one that no mode rounds. The steps are filled in by `with_steps`.
        or_exact: Whether the candidates are tried beside these steps. Most bits of a half-precision weight do not
            change between saves, and an anchor may move so little that steps take more bits than floats.
    """

    role: str
    name: str
    candidates: tuple[Codec, ...]
    anchor: str | None = None
    exp_avg_sq: KeyPath | None = None
    steps_per_rms: int = 0
    or_exact: bool = False

    @property
    def uses_anchor(self) -> bool:
        """Whether the tensor may be stored as a difference to the anchor."""
        return any("anchor" in codec.references for codec in self.candidates)

    @property
    def is_lossless(self) -> bool:
        """Whether every element comes back as it is."""
        return not self.steps_per_rms and all(codec.lossless for codec in self.candidates)

    def with_steps(self, rms: float) -> TensorPlan:
        """Return the plan with steps for how far a weight drifts, as measured at the first difference to an anchor.

        The steps stay fixed from then on. A weight that did not move is exact.
        """
        if not self.steps_per_rms or rms < _SMALLEST_RMS:
            return self
        rounded = DeltaUniform(step=rms / self.steps_per_rms)
        return replace(self, candidates=(*(self.candidates if self.or_exact else ()), rounded))


Plan = Mapping[KeyPath, TensorPlan]


def with_steps(plan: Plan, drift_rms: Mapping[str, float]) -> Plan:
    """Return the plan of a file with steps for how far each weight drifts, by name; one without an entry is exact."""
    return {path: each.with_steps(drift_rms.get(each.name, 0.0)) for path, each in plan.items()}
