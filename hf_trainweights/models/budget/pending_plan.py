"""A load whose formats are still to be chosen for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.models.host.tensor_parallel import is_loaded_by_ranks


class PendingPlan(NamedTuple):
    """What the choice of formats needs: the model on the meta device, and the files of its checkpoint."""

    model: PreTrainedModel
    files: Sequence[str]

    @classmethod
    def of(cls, model: PreTrainedModel, files: Sequence[str]) -> PendingPlan:
        """Check that a load is by one process and from files, and return what the choice needs of it."""
        if not files:
            next_step = "Load the float model, then call quantize_(model, config)."
            raise ConfigError("bits or size", "the files of a checkpoint", "a state dict", next_step)
        if is_loaded_by_ranks(model):
            next_step = "Quantize and save the model in one process; all ranks may then load what was saved."
            raise UnsupportedError("bits or size", "a load by one process", "a load by several ranks", next_step)
        return cls(model, files)
