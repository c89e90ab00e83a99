"""The methods that a quantized model has instead of Transformers' own.

save_pretrained and push_to_hub write either serialization, all files or none. Transformers 5 writes safetensors only.
So its own save_pretrained writes the plain tensors of each weight into a temporary directory beside the old files. If
`.bin` is asked for, each shard is then rewritten as a `.bin` file of the same tensors. At the end every file is renamed
into place. A file that the saved model itself has memory-mapped is replaced, never overwritten.

`train` warns if next to nothing would train. `resize_token_embeddings` keeps the codes of old rows, and quantizes new
rows in the same format.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.files.digests import digests_name, write_digests
from hf_trainweights.files.safetensors_file import name_shards
from hf_trainweights.files.spill import Spill
from hf_trainweights.files.staging import staged_files
from hf_trainweights.files.weight_files import is_weight_file
from hf_trainweights.models.choosing.config import QUANT_METHOD
from hf_trainweights.models.choosing.summary import Calibrated
from hf_trainweights.models.host.checkpoints import writing_files_by
from hf_trainweights.models.host.models import forget_method, shallow_copy
from hf_trainweights.models.host.ranks import gather_on_first_rank, is_in_parts, on_first_rank, without_ranks
from hf_trainweights.models.saving.hub import (
    CARD_NAME,
    Push,
    begin_push,
    calibrated_of,
    choose_card,
    is_generated,
    read_card,
)
from hf_trainweights.models.saving.saved_tensors import SaveRequest, ShardWriter, get_memory_footprint
from hf_trainweights.tensor.modules import as_parameter, is_quantized, parameter_places, put_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.requantizing import requantize

# The arguments of save_pretrained; if push_to_hub=True, all others are for the Hub.
_SAVE_ARGUMENTS = inspect.signature(PreTrainedModel.save_pretrained)


def attach_methods(model: PreTrainedModel) -> None:
    """Give one model the methods that a quantized model has instead of Transformers' own; its class stays as it is."""
    for function in (save_pretrained, push_to_hub, get_memory_footprint, resize_token_embeddings, train):
        # A partial, because a pickle of a bound method would name the method of the class.
        setattr(model, function.__name__, functools.partial(function, model))


def save_pretrained(
    self: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    *args: Any,
    safe_serialization: bool | None = None,
    **kwargs: Any,
) -> None:
    """Save a quantized model, in safetensors or as `pytorch_model.bin`, all files or none.

    If ranks hold parts of the model, all of them must call this. Rank 0 writes the same files as one process would.

    Args:
        self: The model.
        save_directory: Where to; made if missing. Weight files of an earlier save are removed at the end.
        args: As for Transformers.
        safe_serialization: False for `pytorch_model.bin`; None or True for safetensors.
        kwargs: As for Transformers: `max_shard_size`, `variant`, `state_dict`, ...; if `push_to_hub=True` also
            `repo_id` (default: the directory's name) and the other arguments of `model.push_to_hub`.

    Raises:
        SaveError: The directory cannot be written, the disk is full, or another save into it is running; the old files
            are untouched. Or the upload failed, after the files were written.
        Exception: The Hub's client refuses, before anything is written; see `push_to_hub`.
        UnsupportedError: `distributed_checkpoint` with `safe_serialization=False`, or of a model that ranks hold
            quantized parts of.
    """
    # Not the signature of the model's own class: some classes override it with *args.
    options = {**_SAVE_ARGUMENTS.bind(self, save_directory, *args).arguments, **kwargs}
    del options["self"], options["save_directory"]
    safe = safe_serialization is None or safe_serialization
    if options.get("distributed_checkpoint") and not safe:
        raise UnsupportedError("save_pretrained", "safetensors", "distributed_checkpoint as .bin", "Leave one out.")
    in_parts = is_in_parts(self, options.get("state_dict"))
    if in_parts and options.get("distributed_checkpoint"):
        raise UnsupportedError(
            "save_pretrained",
            "a model that ranks hold quantized parts of to be saved whole",
            "distributed_checkpoint=True",
            "Leave it out: the parts are gathered as codes and scales, and rank 0 writes them.",
        )
    # Other processes write nothing, or only their own part: they must not lock the directory.
    if options.get("distributed_checkpoint") or not (in_parts or options.get("is_main_process", True)):
        type(self).save_pretrained(self, save_directory, **options)
        return
    directory = Path(save_directory)
    push_options = None
    if options.pop("push_to_hub", False):
        push_options = {key: options.pop(key) for key in options.keys() - _SAVE_ARGUMENTS.parameters.keys()}
        push_options |= {"repo_id": push_options.get("repo_id", directory.name), "token": options.pop("token", None)}
    _save_together(self, directory, safe, options, push_options)


def push_to_hub(
    self: PreTrainedModel,
    repo_id: str,
    *,
    safe_serialization: bool = True,
    max_shard_size: int | str = "50GB",
    **kwargs: Any,
) -> CommitInfo | None:
    """Push a quantized model to the Hub, in either serialization, with a model card.

    A card that someone wrote or edited is kept. Weight files of an earlier push are removed in the same commit. If
    ranks hold parts of the model, all of them must call this, and rank 0 pushes.

    Args:
        self: The model.
        repo_id: Name of the repository; it is made if missing.
        safe_serialization: False for `pytorch_model.bin`.
        max_shard_size: As for `save_pretrained`.
        kwargs: As for Transformers: `private`, `token`, `revision` (a branch, made if missing), `create_pr`, `tags`,
            `commit_message`, `commit_description`.

    Returns:
        The commit, a string with its URL; None on a rank that does not push.

    Raises:
        SaveError: The upload failed, or the files could not be written before it.
        Exception: The Hub's client refuses, before anything is written: `HFValidationError` for a name that cannot be
            one, `HfHubHTTPError` if no token may write there.
    """
    options, push_options = {"max_shard_size": max_shard_size}, {"repo_id": repo_id, **kwargs}
    with tempfile.TemporaryDirectory() as directory:
        return _save_together(self, Path(directory), safe_serialization, options, push_options)


def forget_if_float(module: nn.Module) -> None:
    """Make a model of Transformers or diffusers a float model again if none of its weights is quantized any more.

    A model on the meta device stays as it is: it has not got its weights yet.
    """
    if any(is_quantized(parameter) or parameter.is_meta for parameter in module.parameters()):
        return
    if isinstance(module, PreTrainedModel):
        forget_method(module, QUANT_METHOD)
    elif callable(forget := getattr(getattr(module, "hf_quantizer", None), "forget", None)):
        forget(module)


def _save_together(
    model: PreTrainedModel, directory: Path, safe: bool, options: dict[str, Any], push_options: dict[str, Any] | None
) -> CommitInfo | None:
    """Save and push a model; if ranks hold parts of it, all ranks must call this, and the first rank writes."""
    forget_if_float(model)
    if not is_in_parts(model, options.get("state_dict")):
        return _save(model, directory, safe, options, begin_push(**push_options) if push_options else None)
    writes = options.pop("is_main_process", True)
    push = on_first_rank(lambda: begin_push(**push_options) if push_options and writes else None)
    state_dict = gather_on_first_rank(model, options.pop("state_dict", None))

    def write() -> CommitInfo | None:
        gathered_options = {**options, "state_dict": state_dict}
        return _save(without_ranks(model), directory, safe, gathered_options, push) if writes else None

    return on_first_rank(write)


def _save(
    model: PreTrainedModel, directory: Path, safe: bool, options: dict[str, Any], push: Push | None
) -> CommitInfo | None:
    """Save a model and, if there is a push, upload the files."""
    variant = options.get("variant")
    card = calibrated = None
    with staged_files(directory, lambda name: is_replaced(name, variant)) as staged:
        staging, writer = staged.path, ShardWriter()
        with writing_files_by(writer.write):
            handed_over = _handing_over(model, options.get("state_dict"), Spill(staging))
            type(model).save_pretrained(handed_over, staging, **options)
        sha256s = name_shards(staging, writer.finish(staging, as_bin=not safe))
        weights = sorted(file.name for file in staging.iterdir() if is_weight_file(file.name, variant))
        if weights and hasattr(model, "hf_quantizer"):
            calibrated = calibrated_of(model)
            write_digests(staging, weights, variant, sha256s, None if calibrated is None else asdict(calibrated))
        if push is not None:
            card = _write_card(model, push, directory, staging, calibrated)
    if push is None or card is None:
        return None
    stale = (name for name in push.present if weights and is_replaced(name, variant))
    return push.commit(directory, staged.names, card, remove=stale)


def _write_card(
    model: PreTrainedModel, push: Push, directory: Path, staging: Path, calibrated: Calibrated | None
) -> str:
    """Return the card to upload, and write it to `staging` unless the user has a card of their own in `directory`."""
    beside = read_card(directory / CARD_NAME)
    card = choose_card(model, push, beside, calibrated)
    if beside is None or is_generated(beside):
        (staging / CARD_NAME).write_bytes(card.encode())
    return card


def _handing_over(model: PreTrainedModel, state_dict: Mapping[str, Any] | None, spill: Spill) -> PreTrainedModel:
    """Return a shallow copy of a model for Transformers to save, whose quantizer hands the tensors over.

    Transformers ignores a state dict that a caller passes for a quantized model. So a copy of the quantizer hands
    `state_dict` over, or the model's own if it is None.
    """
    if not hasattr(model, "hf_quantizer"):
        return model
    quantizer: Any = copy.copy(model.hf_quantizer)
    quantizer.save_request = SaveRequest(state_dict, spill)
    saved_model = shallow_copy(model)
    saved_model.hf_quantizer = quantizer
    return saved_model


def is_replaced(name: str, variant: str | None) -> bool:
    """Return whether a save of weights writes files of this name, so that the next save replaces or removes them."""
    return is_weight_file(name, variant) or name == digests_name(variant)


def train(self: PreTrainedModel, mode: bool = True) -> PreTrainedModel:
    """Set training mode, and warn if the user has not chosen which parameters train.

    Transformers' Trainer evaluates a quantized model only if its quantizer says that it can train. So the quantizer
    cannot refuse a model without adapters, of which only norms, biases and the like would train, and this method warns.
    """
    if mode and not self.training and _trains_leftovers(self):
        warnings.warn(
            "The quantized weights of this model stay frozen, and it has no adapters: training changes only its float "
            "parameters, such as norms and biases. Attach adapters, for example with PEFT. If these parameters are "
            "meant, freeze one of them: then what trains is taken for your choice.",
            stacklevel=2,
        )
    return type(self).train(self, mode)


def _trains_leftovers(model: PreTrainedModel) -> bool:
    """Return whether all float parameters would train, as after a load.

    If one is frozen, adapters or the user have frozen it, and the choice of the others is on purpose.
    """
    parameters = list(model.parameters())
    quantized = [parameter for parameter in parameters if is_quantized(parameter)]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return bool(quantized and trainable) and len(quantized) + len(trainable) == len(parameters)


def resize_token_embeddings(
    self: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Resize the embeddings and the output head of a quantized model; return the input embeddings.

    A quantized table is float while Transformers draws new rows and copies the old ones. If Transformers refuses, the
    tables stay unchanged.
    """
    places = parameter_places(self)
    weights = [getattr(module, "weight", None) for module in _tables(self)]
    quantized = {id(weight): weight for weight in weights if isinstance(weight, QuantizedTensor)}
    for key, weight in quantized.items():
        put_parameter(places[key], nn.Parameter(weight.dequantize(), requires_grad=False))
    try:
        result = type(self).resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
    except BaseException:
        for key, weight in quantized.items():
            put_parameter(places[key], weight)  # type: ignore[arg-type]
        raise
    # Transformers may have made a new head. Tied tables come twice, and are quantized the first time.
    resized = parameter_places(self)
    for module, weight in zip(_tables(self), weights, strict=True):
        values = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor) and isinstance(values, Tensor) and id(values) not in quantized:
            new: Any = weight if values.shape == weight.shape else as_parameter(requantize(weight, values))
            put_parameter(resized[id(values)], new)
            quantized[id(new)] = new
    return result


def _tables(model: PreTrainedModel) -> list[nn.Module | None]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]
