"""`DeltaPlan`: how weights are stored, against an anchor or as one, planned once; steps are filled in later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.encoded.key_paths import KeyPath
from hf_trainweights.checkpoint.encoded.plan import Plan

# A smaller mean change counts as none: its step would be too small for delta-uniform.
_SMALLEST_RMS = 2.0**-100


@dataclass(frozen=True)
class LossyDelta:
    """A weight that a lossy mode rounds to multiples of a step.

    Args:
        steps_per_rms: Into how many steps the root mean square of its first difference is divided.
        or_exact: Whether exact is tried as well. Most bits of a half-precision weight do not change between saves, and
            an anchor may move so little that steps take more bits than floats.
    """

    steps_per_rms: int
    or_exact: bool


@dataclass(frozen=True)
class DeltaPlan:
    """The plan of a weights file, without the steps of the lossy modes.

    Args:
        exact: How each weight is stored where it is not rounded, or by the codec that a rule names.
        lossy: What the mode rounds instead, by path.
    """

    exact: Plan
    lossy: Mapping[KeyPath, LossyDelta]

    @property
    def uses_anchor(self) -> bool:
        """Whether any weight may be stored as a difference to the anchor."""
        return any("anchor" in codec.references for each in self.exact.values() for codec in each.candidates)

    @property
    def is_lossless(self) -> bool:
        """Whether every weight is exact."""
        return not self.lossy and all(codec.lossless for each in self.exact.values() for codec in each.candidates)

    def with_steps(self, delta_rms: Mapping[str, float]) -> Plan:
        """Return the plan with steps for an rms of drift by name; a weight without one, or of 0, is exact.

        Against an anchor it is what `measure_delta_rms` returned at the first difference: the steps stay fixed from
        then on.
        """
        plan = dict(self.exact)
        for path, lossy in self.lossy.items():
            rms = delta_rms.get(plan[path].name, 0.0)
            if rms >= _SMALLEST_RMS:
                exact = plan[path].candidates if lossy.or_exact else ()
                rounded = DeltaUniform(step=rms / lossy.steps_per_rms)
                plan[path] = replace(plan[path], candidates=(*exact, rounded))
        return plan
