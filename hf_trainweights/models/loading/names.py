"""Whether the names in a model's weight files lead to its parameters, before anything is loaded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.models.choosing.selection import aliases_of
from hf_trainweights.models.host.checkpoints import (
    MISSING,
    QuantizerOp,
    expect_unused,
    make_converter,
    names_of_load,
)
from hf_trainweights.models.host.renaming import StoredNames, conversions_to_load
from hf_trainweights.models.loading.stored_weights import check_weight_files, read_skeletons
from hf_trainweights.tensor.guards import NOTICE_NAME
from hf_trainweights.tensor.stored_names import stored_suffixes


class _Skeleton(QuantizerOp):
    """Stands for a weight's stored tensors: the weight that a skeleton, a model on the meta device, has already."""

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Any]:
        """Return the parameter that is there already."""
        return {full_layer_name: model.get_parameter_or_buffer(full_layer_name)}


def wrong_names(
    cls: type[PreTrainedModel], config: PretrainedConfig, files: Sequence[Path], directory: Path
) -> dict[str, str]:
    """Return the names that a load of weight files would get wrong, each with its problem.

    CorruptFileError: a file is damaged, or a quantized weight in it.
    """
    weights = check_weight_files(files, directory)
    stored = [name for name, weight in weights.items() if weight.is_stored]
    tensors: dict[str, Tensor] = {name: tensor for file in files for name, tensor in read_skeletons(file).items()}
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = cls(config)
    aliases = aliases_of(model)
    expect_unused(model, NOTICE_NAME)
    conversions = conversions_to_load(model)
    find = StoredNames(model, conversions, stored).find
    ours = make_converter(find, stored_suffixes(), _Skeleton())
    wrong = names_of_load(model, tensors, [ours, *conversions])
    missing = {name for name, problem in wrong.items() if problem == MISSING}
    # A checkpoint needs only one of the names of a tied parameter.
    tied = {name for name in missing if not missing.issuperset(aliases.get(name, [name]))}
    return {name: problem for name, problem in wrong.items() if name not in tied}
