"""What Transformers' own parallelism asks of a quantizer: how it reads weights, wraps parts and runs modules."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_trainweights.models.host.models import shallow_copy
from hf_trainweights.tensor.distributed.placements import is_distributed, local_tensor
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class LocalPart:
    """A rank's part of a weight on its way into the model, where Transformers wraps it as a DTensor.

    Transformers calls `contiguous` on it, which of a weight that is stored transposed would make float values. The
    stored tensors are contiguous already.
    """

    def __init__(self, part: Tensor):
        self.part = part

    @property
    def shape(self) -> torch.Size:
        """Shape of the part."""
        return self.part.shape

    def to(self, device: Any) -> LocalPart:
        """Return the part on another device."""
        return LocalPart(self.part.to(device))

    def contiguous(self) -> Tensor:
        """Return the part itself."""
        return self.part


def is_loaded_by_ranks(model: PreTrainedModel) -> bool:
    """Return whether Transformers distributes a model over ranks while it loads it; False where a version cannot."""
    return getattr(model.config, "distributed_config", None) is not None


def read_whole(model: PreTrainedModel, choose: Callable[[Mapping[str, Any]], Iterable[str]]) -> RemovableHandle:
    """Make Transformers read some weights whole on every rank while it loads a model, and not this rank's part alone.

    Transformers asks the model's state dict what is a DTensor, and cuts what it reads for it as the values of a float
    weight lie. Stored tensors of a quantized weight lie otherwise. `choose` gets the distributed parameters by name and
    returns those to read whole. The handle that is returned ends it.
    """

    def show_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
        parts = {name: tensor for name, tensor in state_dict.items() if is_distributed(tensor)}
        for name in choose(parts) if parts and not prefix else ():
            state_dict[name] = torch.empty(parts[name].shape, dtype=parts[name].dtype, device="meta")

    return model.register_state_dict_post_hook(show_plain)


def plan_of(model: PreTrainedModel, name: str) -> str:
    """Return what cuts a weight: its style in the model's plan, or "its placements" where a version does not say."""
    plans: dict[str, str] = {**(getattr(model, "_ep_plan", None) or {}), **(getattr(model, "_tp_plan", None) or {})}
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    style = next((plans[key] for key in (name, pattern, pattern.rpartition(".")[0]) if key in plans), None)
    return "its placements" if style is None else f"the style {style!r} of the plan"


def run_on_parts(model: nn.Module) -> None:
    """Freeze the quantized parts of a model and make their modules multiply by them as they are, not by DTensors."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if is_distributed(parameter) and isinstance(local_tensor(parameter), QuantizedTensor):
                parameter.requires_grad_(False)
                # A table of embeddings is looked up as a DTensor, which leaves out the rows of other ranks.
                if not isinstance(module, nn.Embedding):
                    module._hf_quantized_needs_local_tp = True  # pyright: ignore[reportArgumentType]


def without_ranks(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares all with a model, but which Transformers saves like one that is not distributed."""
    alone = shallow_copy(model)
    alone.config = copy.copy(model.config)
    alone.config.distributed_config = None
    return alone
