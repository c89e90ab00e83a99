"""The tensors of a quantized model as a save writes them: their names and rows in a checkpoint, and the files."""

from __future__ import annotations

import bisect
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.files.reading import DigestedFile
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.files.spill import Spill
from hf_trainweights.files.weight_files import bin_name, safetensors_files
from hf_trainweights.formats.base import Format
from hf_trainweights.models.host.checkpoints import checkpoint_tensors, load_offloaded
from hf_trainweights.models.host.models import has_adapters, names_tied_now
from hf_trainweights.models.host.renaming import (
    StoredNames,
    conversions_to_load,
    joined_by_save,
    renamed_by_save,
    spare_from_save,
)
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.guards import NOTICE_NAME, guarded_names, make_guard, name_for_transformers, name_in_file
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import CODED_SUFFIXES, flatten_state_dict, parse_stored_name


@dataclass(frozen=True)
class SaveRequest:
    """The part of one save that Transformers does not pass to the quantizer.

    Args:
        state_dict: The tensors to save, None for the model's own.
        spill: Files for coded tensors.
    """

    state_dict: Mapping[str, Any] | None
    spill: Spill


def flat_state_dict(
    model: PreTrainedModel, default: Format, compress: bool, request: SaveRequest | None
) -> dict[str, Any]:
    """Return the plain tensors of a model that its files are to hold, a tied weight once.

    Guards are among them if `save_pretrained` of this package makes the request; a guard has a name that Transformers
    does not change, and `name_in_file` returns its name in the file. Only coded tensors are new.
    """
    state_dict = whole_state_dict(model, request.state_dict if request else None)
    spill = request.spill if request else None
    compress = compress and not has_adapters(model)
    flat: dict[str, Any] = {}
    for name, weight in state_dict.items():
        stored = flatten_state_dict({name: weight}, default, compress)
        flat |= {key: spill.keep(tensor) if spill and _is_coded(key) else tensor for key, tensor in stored.items()}
    # Guards come first: there they open no shard of their own.
    return _guards_of(state_dict, flat) | flat if request and not has_adapters(model) else flat


def _is_coded(name: str) -> bool:
    _, suffix = parse_stored_name(name) or ("", "")
    return suffix in CODED_SUFFIXES


def _guards_of(state_dict: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return guards for the weights that the files do not hold under their own names."""
    names = [name_for_transformers(name) for name in guarded_names(name for name in state_dict if name not in flat)]
    return {name: make_guard() for name in [NOTICE_NAME, *names]} if names else {}


def revert_stored_apart(model: PreTrainedModel, flat: Mapping[str, Any]) -> None:
    """Make a save of this model rename stored tensors and guards, and convert only float tensors.

    A stored tensor or guard keeps its name if a load would not find the weight by the new one. A float tensor that a
    checkpoint joins with a quantized one is not converted either. UnsupportedError: no name leads back to a weight.
    """
    owners = {key: weight for key in flat if (weight := _stored_weight(key)) is not None}
    if has_adapters(model) or not owners:
        return
    own_names = {*flat.keys() - owners.keys(), *owners.values()}
    quantized = set(owners.values())
    beside = [group for group in joined_by_save(model, own_names) if not group.isdisjoint(quantized)]
    unconverted = owners.keys() | {name for group in beside for name in group}
    spare_from_save(model, unconverted, _lost_if_renamed(model, owners))


def _stored_weight(key: str) -> str | None:
    """Return the weight that a stored tensor or a guard belongs to; None for a float tensor."""
    parsed, guarded = parse_stored_name(key), name_in_file(key)
    return parsed[0] if parsed else guarded if guarded != key else None


def _lost_if_renamed(model: PreTrainedModel, owners: Mapping[str, str]) -> set[str]:
    """Return the tensors and guards of the weights that a load would not find by the names that a save gives them."""
    loaded, renamed = StoredNames(model, conversions_to_load(model)), renamed_by_save(model, owners)

    def owner(key: str) -> str | None:
        plain = name_in_file(key)
        return loaded.parameter_of_stored(key) if plain == key else loaded.parameter_of_float(plain)

    lost = {key for key, weight in owners.items() if owner(renamed[key]) != weight}
    # All tensors of a weight, and its guard, have names of one kind.
    weights = {owners[key] for key in lost}
    unrenamed = {key for key, weight in owners.items() if weight in weights}
    for key in unrenamed:
        if owner(key) != owners[key]:
            raise UnsupportedError(
                owners[key],
                "a name that the renamings of Transformers lead back to",
                f"{renamed[key]}, and none by its own name",
                "Quantize the model again and leave it in float (modules_to_not_convert).",
            )
    return unrenamed


def whole_state_dict(model: PreTrainedModel, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return all tensors of a model, offloaded ones too, a tied weight once, under the name that Transformers keeps."""
    state_dict = dict(model.state_dict(keep_vars=True) if state_dict is None else state_dict)
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            state_dict[name] = load_offloaded(model, name)
    for name, source in names_tied_now(model).items():
        tensor, other = state_dict.get(name), state_dict.get(source)
        if isinstance(tensor, Tensor) and isinstance(other, Tensor) and memory_key(tensor) == memory_key(other):
            del state_dict[name]
    return {k: v.detach() if hasattr(v, "detach") else v for k, v in state_dict.items()}


def memory_key(tensor: Tensor) -> object:
    """Return a key that two tensors share if they view the same memory in the same way."""
    tensor = local_tensor(tensor)
    if isinstance(tensor, QuantizedTensor):
        held = tuple((name, memory_key(stored)) for name, stored in tensor.held.tensors.items())
        return held, tensor.format, tensor.stored_shape, tensor.transposed, tensor.dtype
    # Tensors without elements have no address.
    address = tensor.data_ptr() if tensor.numel() else id(tensor)
    view = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return address, tensor.device, view


def get_memory_footprint(self: nn.Module, return_buffers: bool = True) -> int:
    """Return the bytes of the model in this process; a quantized weight counts by its stored tensors."""
    parameters = sum(
        p.stored_bytes if isinstance(p, QuantizedTensor) else p.numel() * p.element_size()
        for p in map(local_tensor, self.parameters())
    )
    return parameters + sum(b.numel() * b.element_size() for b in self.buffers() if return_buffers)


def matrices_in_checkpoint(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, dict[str, slice] | None]:
    """Return for each weight the names of its matrices in a checkpoint, and the rows of each among all its rows.

    `shapes` are stored shapes `[*, N, K]`; the rows of experts are counted through. The value is None for a weight that
    a checkpoint splits within a matrix, merges, reorders or joins with another one.
    """
    # All weights of such a group, also ones that `shapes` lacks, make one tensor of a checkpoint.
    own_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    joined = set().union(*joined_by_save(model, own_names))
    # A checkpoint splits weights by rows. So Transformers converts numbers of rows here, and no weight is copied. Each
    # number stands twice in its row: Transformers 5.17 drops all dimensions of size 1 where it splits experts.
    names, numbers, ends = [name for name in shapes if name not in joined], {}, [0]
    for name in names:
        *lead, _ = shapes[name]
        ends.append(ends[-1] + math.prod(lead))
        numbers[name] = torch.arange(ends[-2], ends[-1], device="cpu").repeat_interleave(2).view(*lead, 2)
    matrices: dict[str, dict[str, slice]] = defaultdict(dict)
    broken: set[str] = joined.intersection(shapes)
    for saved_name, rows in checkpoint_tensors(model, numbers).items():
        if not rows.numel():
            continue
        first, count = int(rows.flatten()[0]), rows.numel() // 2
        index = bisect.bisect_right(ends, first) - 1
        name, shape = names[index], shapes[names[index]]
        N = shape[-2]
        start = first - ends[index]
        consecutive = torch.arange(first, first + count, device=rows.device)
        in_order = torch.equal(rows.reshape(-1, 2), consecutive.view(count, 1).expand(count, 2))
        fits = count == N if len(shape) == 2 else start // N == (start + count - 1) // N
        if not (in_order and fits and saved_name.endswith(".weight")):
            broken.add(name)
        matrices[name][saved_name] = slice(start, start + count)
    return {name: None if name in broken else matrices[name] for name in shapes}


class ShardWriter:
    """Writes the files of one save: guards under the plain names of their weights, int8 codes aligned."""

    def __init__(self) -> None:
        # The SHA-256 of each file that was written, by its name.
        self._digests: dict[str, str] = {}

    def write(
        self, tensors: Mapping[str, Tensor], file: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write one file; the arguments are those of `safetensors.torch.save_file`."""
        file, to_write = Path(file), {name: TensorToWrite.of(tensor) for name, tensor in tensors.items()}
        self._digests[file.name] = write_safetensors(file, to_write, metadata or {}, name_in_file)

    def finish(self, directory: Path, as_bin: bool) -> dict[str, str]:
        """Rename guards in the index, and make `.bin` files if asked for; return the SHA-256 of each file by its name.

        A file that a class wrote by a `save_pretrained` of its own is written again.
        """
        for file in directory.glob("*.safetensors"):
            if file.name not in self._digests:
                tensors, metadata = _mapped(file)
                file.unlink()
                self.write(tensors, file, metadata)
        final_name = bin_name if as_bin else str
        for file in directory.glob("model.safetensors.index*.json"):
            index = json.loads(file.read_text(encoding="utf-8"))
            index["weight_map"] = {name_in_file(name): final_name(shard) for name, shard in index["weight_map"].items()}
            file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            file.rename(file.with_name(final_name(file.name)))
        return dict(map(_rewrite_as_bin, safetensors_files(directory))) if as_bin else self._digests


def _rewrite_as_bin(file: Path) -> tuple[str, str]:
    """Replace a safetensors file by a `.bin` file, as Transformers 5 writes none; return its name and SHA-256."""
    twin = file.with_name(bin_name(file.name))
    # torch.save refuses two tensors of different dtypes at one address, where those without elements lie in the map.
    tensors = {name: t if t.numel() else torch.empty_like(t) for name, t in _mapped(file)[0].items()}
    # torch.save gets an open file: it would write the name of a path into the bytes.
    with twin.open("wb") as stream:
        digested: Any = DigestedFile(stream)
        torch.save(tensors, digested)
    file.unlink()
    return twin.name, digested.sha256()


def _mapped(file: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Return the memory-mapped tensors of a file, which may be larger than the free memory, and its metadata."""
    with safe_open(file, framework="pt") as shard:
        return {name: shard.get_tensor(name) for name in shard.keys()}, shard.metadata()  # noqa: SIM118
