"""Write a model in vLLM's layout compressed-tensors, which stock Transformers reads too.

int8 and int4 weights become `pack-quantized`, float8 weights `float-quantized`. These hold the same codes and scales
under other names, so no weight is rounded again. Each expert's matrices get their names of the float checkpoint. An
error names the weights that the layout or its reader in Transformers cannot hold.

Layout: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.sources import model_of, tensors_to_write
from hf_trainweights.files.safetensors_file import MAX_SHARD_SIZE, TensorToWrite, write_shards
from hf_trainweights.files.staging import staged_files
from hf_trainweights.formats.base import Format
from hf_trainweights.models.host.checkpoints import checkpoint_tensors, names_not_saved
from hf_trainweights.models.host.renaming import merged_by_load, renamed_by_load, splits_on_load
from hf_trainweights.models.saving.new_directories import copy_companions, write_config
from hf_trainweights.models.saving.saved_tensors import matrices_in_checkpoint
from hf_trainweights.models.saving.saving import is_replaced
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The layout's bits, type of codes and name for each format that it can hold.
_SCHEMES = {
    "int8": (8, "int", "pack-quantized"),
    "int4": (4, "int", "pack-quantized"),
    "float8_e4m3": (8, "float", "float-quantized"),
}

# The module of one expert in a checkpoint. If there are several groups of settings, Transformers reads experts by the
# one in whose targets "experts" stands.
_EXPERT_MODULE = r".*\.experts\.\d+\..*"

# Transformers takes tensors of matching names to be parts of quantized weights. It splits a name at the first match.
_SERIALIZED = re.compile(r"weight(_scale|_zero_point|_global_scale|_packed|_shape)?(?!\w)")

_BYTES_PER_WORD = 4


def export_compressed_tensors(
    model_or_directory: PreTrainedModel | str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a quantized model as a compressed-tensors checkpoint, which stock Transformers reads.

    Codes and scales are written as they are, so a reader gets the weights of `model.dequantize()`, bit for bit. One
    weight at a time is converted, so beside the model little is in memory.

    Args:
        model_or_directory: A quantized model, or the directory that one was saved to. The tokenizer and the other files
            beside the weights of a directory are copied.
        out: The directory to write; made if missing. Older weight files in it are removed at the end.
        max_shard_size: Bytes of one weight file at most, or a text such as `"5GB"`.

    Raises:
        ConfigError: The directory holds no complete model of a class of Transformers, no weight of the model is
            quantized, or `max_shard_size` is no size.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: The layout cannot hold a weight: an embedding, a weight that a layer keeps transposed (GPT-2),
            experts that the checkpoint keeps in one tensor or that have several formats. No file was written.
        SaveError: `out` cannot be written, the disk is full, or another save into it is running. Earlier files in it
            are untouched.
    """
    model = model_of(model_or_directory)
    tensors, quantization_config = lay_out(model)
    with staged_files(Path(out), lambda name: is_replaced(name, variant=None)) as staged:
        if not isinstance(model_or_directory, PreTrainedModel):
            copy_companions(model_or_directory, staged.path)
        write_config(model, staged.path, quantization_config, model.dtype)
        write_shards(tensors, staged.path, max_shard_size)


def lay_out(model: PreTrainedModel) -> tuple[dict[str, TensorToWrite], dict[str, Any]]:
    """Return the tensors of a checkpoint in the layout, and the `quantization_config` that describes them."""
    state_dict = tensors_to_write(model)
    quantized = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, QuantizedTensor)}
    _check_weights(model, quantized)
    left_out = {*quantized, *names_not_saved(model)}
    others = {name: tensor for name, tensor in state_dict.items() if name not in left_out}
    plain = checkpoint_tensors(model, others)
    _check_float_experts(model, plain)
    plain = _unmerged(model, others, plain)
    tensors = {name: TensorToWrite.of(tensor) for name, tensor in plain.items()}
    shapes = {name: weight.stored_shape for name, weight in quantized.items()}
    for name, matrices in matrices_in_checkpoint(model, shapes).items():
        if matrices is None:
            description = "weights that their checkpoint splits, merges or reorders"
            raise _unsupported([name], description, "Quantize the model again and leave these in float.")
        for saved_name, rows in matrices.items():
            named = _name_tensors(saved_name, quantized[name], rows)
            if quantized[name].dim() == 2 and not _is_found(model, name, saved_name, named):
                weight = quantized.pop(name)
                named = {saved_name: TensorToWrite(tuple(weight.shape), weight.dtype, weight.dequantize)}
            tensors |= named
    _check_reader(model, others)
    return dict(sorted(tensors.items())), _configure(model, quantized)


def _is_found(model: PreTrainedModel, name: str, saved_name: str, tensor_names: Iterable[str]) -> bool:
    """Return whether stock Transformers finds a matrix by the layout's names of its tensors.

    Some of Transformers' renamings match only the name of a float weight, for example `.gate.weight` of PhiMoE's
    routers. Such a weight is written in float, so that every reader finds it.
    """
    renamed = renamed_by_load(model, tensor_names)
    # Split anywhere else, the name would be that of another weight.
    first = _SERIALIZED.search(name)
    if first is None or name[first.start() :] != "weight":
        return False
    return all(renamed[tensor] == name + tensor.removeprefix(saved_name) for tensor in tensor_names)


def _unmerged(model: PreTrainedModel, own: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the float tensors of a checkpoint. Those that a load would merge have the model's own names.

    When Transformers loads a quantized model, it does not merge float tensors, but drops them. So they are written
    merged already. UnsupportedError: a merged tensor is not in `own`, or is one that a load would merge once more.
    """
    merged = merged_by_load(model, plain)
    names = set(merged.values())
    if not_read := [name for name in names if name not in own or merged_by_load(model, [name])]:
        next_step = "Load the directory of a save with this package instead."
        raise _unsupported(sorted(not_read), "float weights that a load merges", next_step)
    unmerged = {name: tensor for name, tensor in plain.items() if name not in merged}
    return unmerged | {name: own[name] for name in names}


def _check_reader(model: PreTrainedModel, others: Mapping[str, Tensor]) -> None:
    """Check that Transformers reads a quantized model of this class at all."""
    next_step = "Load the directory of a save with this package instead."
    if patterns := splits_on_load(model):
        raise _unsupported(patterns, "weights that a load splits", next_step)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := [name for name in others if name not in parameters and _SERIALIZED.search(name)]:
        raise _unsupported(buffers, "buffers that a reader takes for weights", next_step)


def pack(codes: Tensor) -> Tensor:
    """Pack int8 codes `[N, K]`, each + 128, into int32 words `[N, ceil(K / 4)]`. The first code is in the lowest bits.

    Examples:
        >>> codes = torch.tensor([[-128, -127, 0, 127]], dtype=torch.int8)
        >>> [f"{word & 0xFFFFFFFF:08X}" for word in pack(codes)[0].tolist()]
        ['FF800100']
    """
    # Flipping the sign bit of a byte adds 128.
    octets = F.pad(codes.view(torch.uint8) ^ 128, (0, -codes.shape[-1] % _BYTES_PER_WORD))
    return octets.view(torch.int32)


def _check_weights(model: PreTrainedModel, weights: Mapping[str, QuantizedTensor]) -> None:
    """Check that the layout can hold each quantized weight."""
    in_float = "Quantize the model again and leave these in float (modules_to_not_convert)."
    misfits: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, weight in weights.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        form = weight.format
        if form.name not in _SCHEMES or form.tensor_names != ("qdata", "scale"):
            misfits[f"weights in {form}", in_float].append(name)
        elif weight.numel() == 0:
            misfits["weights without elements", in_float].append(name)
        elif weight.transposed:
            misfits["weights that their layer keeps transposed", in_float].append(name)
        elif isinstance(owner, nn.Embedding):
            misfits["quantized embeddings", in_float].append(name)
        elif weight.scale_dtype != model.dtype:
            # A reader casts scales to the dtype of the model, which would change the weights.
            misfit = f"scales in {weight.scale_dtype} in a model in {model.dtype}"
            misfits[misfit, f"Load or cast the model in {weight.scale_dtype}."].append(name)
    if misfits:
        (misfit, next_step), names = next(iter(misfits.items()))
        raise _unsupported(names, misfit, next_step)
    experts = {name: weight.format for name, weight in weights.items() if weight.dim() == 3}
    if len(set(experts.values())) > 1:
        misfit = "experts in " + " and ".join(sorted({str(form) for form in experts.values()}))
        raise _unsupported(experts, misfit, "Quantize all experts to one format: Transformers reads all by one.")


def _check_float_experts(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Check that no expert of a merged weight is in float: Transformers drops float experts of a quantized model."""
    own = model.state_dict().keys()
    if experts := [name for name in names if re.fullmatch(_EXPERT_MODULE, name) and name not in own]:
        raise _unsupported(experts, "experts in float", "Quantize all experts to one format.")


def _unsupported(names: Iterable[str], found: str, next_step: str) -> UnsupportedError:
    # All layers and experts share one name, in which * stands for the number.
    where = ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    return UnsupportedError(where, "what the compressed-tensors layout holds", found, next_step)


def _name_tensors(name: str, weight: QuantizedTensor, rows: slice) -> dict[str, TensorToWrite]:
    """Return the layout's tensors of one matrix of a checkpoint: these rows of a weight, or of all experts' rows."""
    codes, scale = (weight.tensors[key].flatten(0, -2)[rows] for key in ("qdata", "scale"))
    if _SCHEMES[weight.format.name][2] == "float-quantized":
        return {name: TensorToWrite.of(codes), f"{name}_scale": TensorToWrite.of(scale)}
    packed = TensorToWrite.of(codes)
    if codes.dtype == torch.int8:
        packed = TensorToWrite(tuple(pack(codes.to("meta")).shape), torch.int32, lambda: pack(codes))
    shape = torch.tensor(weight.format.shape_of(codes), device="cpu")
    return {
        f"{name}_packed": packed,
        f"{name}_scale": TensorToWrite.of(scale),
        f"{name}_shape": TensorToWrite.of(shape),
    }


def _configure(model: PreTrainedModel, weights: Mapping[str, QuantizedTensor]) -> dict[str, Any]:
    """Return the configuration: a group for each format. The most frequent format's group is for all other Linears."""
    modules = {n.rpartition(".")[0]: weight.format for n, weight in weights.items() if weight.dim() == 2}
    experts = {weight.format for weight in weights.values() if weight.dim() == 3}
    counts = Counter(modules.values())
    formats = sorted(counts, key=lambda form: (-counts[form], str(form))) or [*experts]
    targets = [["Linear"], *([name for name in modules if modules[name] == form] for form in formats[1:])]
    if experts != {*formats}:
        # A group that names experts is for them alone: Transformers then reads dense weights by another one.
        formats += experts
        targets += [[f"re:{_EXPERT_MODULE}"] for _ in experts]
    groups = {f"group_{n}": _group(form, names) for n, (form, names) in enumerate(zip(formats, targets, strict=True))}
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [name for name, module in model.named_modules() if _is_float_matrix(module, name not in modules)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(form: Format, targets: list[str]) -> dict[str, Any]:
    bits, kind, layout = _SCHEMES[form.name]
    group_size = getattr(form, "group_size", None)
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
    }
    # If a group names no format, readers guess one from its weights.
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": layout,
    }


def _is_float_matrix(module: nn.Module, lacks_codes: bool) -> bool:
    """Return whether a module has a matrix that is written in float, such as a Linear that was not quantized.

    `lacks_codes` says that no codes are written for the module; it need not have a weight.
    """
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.dim() == 2
    is_float = lacks_codes or not isinstance(weight, QuantizedTensor)
    return matrix and is_float and not isinstance(module, nn.Embedding)
