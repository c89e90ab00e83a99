"""Which weights each rank reads whole and cuts itself, and whether the plan can cut them at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hf_trainweights.models.host.models import base_prefix
from hf_trainweights.models.host.tensor_parallel import plan_of
from hf_trainweights.models.loading.load_state import LoadState
from hf_trainweights.tensor.distributed.placements import Placed, check_parts
from hf_trainweights.tensor.distributed.shards import has_own_codes


def cut_plans(
    model: PreTrainedModel, state: LoadState, parameters: Mapping[str, Any], pre_quantized: bool
) -> Mapping[str, str]:
    """Return the weights that every rank reads whole, with what cuts them; `state` keeps it.

    Of a quantized checkpoint these are the quantized weights. Of a float one they are those whose codes depend on more
    than this rank's part: of the others Transformers reads the part alone, which is then quantized. UnsupportedError: a
    part would be empty, or would end within a group.
    """
    plans = {}
    for name, parameter in parameters.items():
        choice, plan = state.choices.get(name), plan_of(model, name)
        if pre_quantized:
            # Its format is known when its stored tensors are there.
            if _is_stored_quantized(model, state, name):
                plans[name] = plan
        elif choice is not None and choice.format is not None:
            placed = Placed(name, choice.format, choice.transposed, parameter, plan)
            check_parts(placed)
            if not has_own_codes(placed):
                plans[name] = plan
    state.plans = plans
    return plans


def _is_stored_quantized(model: PreTrainedModel, state: LoadState, name: str) -> bool:
    """Return whether a checkpoint has a weight quantized; where it has another name for it, what was chosen tells."""
    prefix = base_prefix(model)
    for stored_name in (name, name.removeprefix(prefix), prefix + name):
        if stored_name in state.stored:
            return state.stored[stored_name].kind == "quantized"
    return name in state.choices
