"""The plain tensors that stand for quantized weights in a file, and their names.

The weight `<module>.<parameter>` is stored as `<module>._<parameter>_qdata`, `<module>._<parameter>_scale` and so on,
one for each tensor of its format. `<module>._<parameter>_format` holds the format and the transposed flag as JSON in a
uint8 tensor. A weight has that if it is transposed, or if its format is not the one that the model's configuration
names. In a file without a configuration every weight has it. The leading underscore keeps Transformers' renaming
patterns off.

One entropy-coded tensor may stand for others, if the format is stored so or if it is smaller:
`<module>._<parameter>_coded` for all tensors of a weight but its format, and `<module>._<parameter>_float_coded` for a
weight that is not quantized.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.coded_tensors import CODED_DTYPES, CodedTensors, encode_tensors
from hf_trainweights.formats import FORMATS, WRAPPERS, get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.kernels.arguments import check_stored
from hf_trainweights.tensor.distributed.placements import is_distributed, local_tensor, with_local
from hf_trainweights.tensor.distributed.shards import cut
from hf_trainweights.tensor.guards import is_guard, is_notice
from hf_trainweights.tensor.held_tensor import Held
from hf_trainweights.tensor.quantized_tensor import SHOWN_DTYPES, QuantizedTensor

FORMAT_SUFFIX = "format"
# Suffixes of the coded tensor for all stored tensors of a quantized weight, and of the one for a float weight.
CODED_SUFFIX, CODED_FLOAT_SUFFIX = "coded", "float_coded"
CODED_SUFFIXES = (CODED_SUFFIX, CODED_FLOAT_SUFFIX)

# Dtypes that a weight may have shown when it was saved.
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SHOWN_DTYPES}

_FLOAT_NAME = "values"
# A tensor is coded only if that saves 2 %, to be worth the time of decoding, and only from 16 KiB on: the header of a
# small tensor is as large as the savings.
_LEAST_GAIN, _LEAST_BYTES = 0.02, 1 << 14


def stored_suffixes() -> tuple[str, ...]:
    """Return the suffixes that stored names may have: those of each registered format, and those common to all."""
    tensor_names = {*WRAPPERS, *(name for form in FORMATS.values() for name in form.tensor_names)}
    return (*sorted(tensor_names), FORMAT_SUFFIX, *CODED_SUFFIXES)


def stored_name(parameter_name: str, suffix: str) -> str:
    """Return the name under which one stored tensor of a weight lies in a file.

    Examples:
        >>> stored_name("layers.0.q_proj.weight", "scale")
        'layers.0.q_proj._weight_scale'
    """
    module, dot, parameter = parameter_name.rpartition(".")
    return f"{module}{dot}_{parameter}_{suffix}"


def parse_stored_name(name: str) -> tuple[str, str] | None:
    """Return weight name and suffix of a stored tensor's name, or None if it is not one.

    Examples:
        >>> parse_stored_name("layers.0.q_proj._weight_scale")
        ('layers.0.q_proj.weight', 'scale')
    """
    match = _stored_name_pattern(stored_suffixes()).fullmatch(name)
    return (match["module"] + match["parameter"], match["suffix"]) if match else None


@functools.cache
def _stored_name_pattern(suffixes: tuple[str, ...]) -> re.Pattern[str]:
    # The shortest parameter matches, so that the suffix is the longest: "zero_point" of "_weight_zero_point".
    suffix = "|".join(map(re.escape, suffixes))
    return re.compile(rf"(?P<module>.*\.|)_(?P<parameter>[^.]+?)_(?P<suffix>{suffix})", re.DOTALL)


def flatten_weight(
    name: str, weight: QuantizedTensor, default: Format | None, compress: bool = False, plain: bool = False
) -> dict[str, Tensor]:
    """Return the plain tensors that stand for one weight in a file, by their names there; contiguous ones are shared.

    `default` is the format that the model's configuration names. A weight in another format has a tensor that names it.
    `compress` codes the tensors of any format if that makes them smaller. `plain` never codes, even in formats that are
    stored coded: ranks put a sharded weight together from plain tensors.
    """
    stored = {key: tensor.contiguous() for key, tensor in weight.tensors.items()}
    coded = None if plain else encode_stored(stored, weight.format, compress)
    stored = stored if coded is None else {CODED_SUFFIX: coded}
    flat = {stored_name(name, key): tensor for key, tensor in stored.items()}
    if _needs_format(weight, default):
        config = weight.format.get_config() | ({"transposed": True} if weight.transposed else {})
        if default is None and weight.dtype != weight.scale_dtype:
            config["dtype"] = str(weight.dtype).removeprefix("torch.")
        text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
        flat[stored_name(name, FORMAT_SUFFIX)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return flat


def _needs_format(weight: QuantizedTensor, default: Format | None) -> bool:
    return weight.format != default or weight.transposed


def unflatten_weight(
    name: str,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    default: Format | None,
    shape: Sequence[int] | None = None,
    values: bool = True,
) -> Tensor:
    """Return the weight whose tensors in a file are given by suffix: a quantized one, or a float one that was coded.

    The tensors are not copied. `dtype` is the dtype of the weight, None for the one it was saved with.
    `default` is the format that the model's configuration names. A coded weight is decoded only if it has `shape`, None
    for any. If not `values`, only its header is read, and the result is on the meta device. CorruptFileError: a tensor
    is missing or misfits.
    """
    tensors = dict(tensors)
    if CODED_FLOAT_SUFFIX in tensors:
        weight = decode_float(name, _only(name, tensors, CODED_FLOAT_SUFFIX), shape, values)
        return weight.to(dtype or weight.dtype)
    form, transposed, saved_dtype = _read_format(name, tensors.pop(FORMAT_SUFFIX, None), default)
    if CODED_SUFFIX in tensors:
        coded_shape = (*shape[:-2], shape[-1], shape[-2]) if shape is not None and transposed else shape
        tensors = _decode_stored(name, _only(name, tensors, CODED_SUFFIX), form, coded_shape, values)
    qdata = tensors.get("qdata")
    if qdata is None or qdata.dim() < 2:
        description = "no qdata" if qdata is None else f"qdata of shape {tuple(qdata.shape)}"
        raise CorruptFileError(
            name, "qdata of at least 2 dimensions", description, "The file is damaged; save it again from the source."
        )
    stored_shape = form.shape_of(qdata)
    check_stored(tensors, form, stored_shape, name)
    held = Held({key: tensors[key] for key in form.tensor_names})
    shown = dtype or saved_dtype or tensors["scale"].dtype
    # Not all scales are floats.
    shown = shown if shown in SHOWN_DTYPES else torch.float32
    return QuantizedTensor.from_held(held, form, stored_shape, shown, transposed)


def _only(name: str, tensors: Mapping[str, Tensor], suffix: str) -> Tensor:
    """Return the coded tensor, after checking that it is the weight's only tensor."""
    if len(tensors) > 1:
        next_step = "The file was edited; save it again from the source."
        raise CorruptFileError(name, f"{suffix} without other tensors", ", ".join(sorted(tensors)), next_step)
    return tensors[suffix]


def _read_format(name: str, encoded: Tensor | None, default: Format | None) -> tuple[Format, bool, torch.dtype | None]:
    """Return the format, whether the weight is transposed, and the dtype it showed if its scales have another."""
    if encoded is None:
        if default is None:
            next_step = "Keep the config.json beside it that lay there, or load the model with from_pretrained."
            raise CorruptFileError(name, "its format in the file or in a config.json", "neither", next_step)
        return default, False, None
    try:
        config = json.loads(bytes(encoded.cpu().tolist()))
        transposed, dtype = config.pop("transposed", False), config.pop("dtype", None)
        return get_format(config), transposed is True, None if dtype is None else _DTYPES[dtype]
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(
            stored_name(name, FORMAT_SUFFIX),
            f"JSON that names one of the formats {', '.join(FORMATS)}",
            f"{encoded.numel()} bytes that do not ({error})",
            "The file is damaged or was written by a newer version of hf_trainweights.",
        ) from error


def encode_stored(tensors: Mapping[str, Tensor], form: Format, compress: bool) -> Tensor | None:
    """Return one coded tensor for the stored tensors of a weight; None if they are to be stored as they are.

    They are coded if the format is coded in files, or if `compress` is set and saves 2 %.
    """
    if form.is_coded_in_files:
        return encode_tensors(tensors)
    return _encode_where_smaller(tensors) if compress else None


def encode_float(tensor: object) -> Tensor | None:
    """Return a float weight as a coded tensor; None if that does not save 2 %, or if it is no float weight."""
    if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.dtype not in CODED_DTYPES:
        return None
    return _encode_where_smaller({_FLOAT_NAME: tensor})


def _encode_where_smaller(tensors: Mapping[str, Tensor]) -> Tensor | None:
    plain_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if plain_bytes < _LEAST_BYTES or not all(tensor.dtype in CODED_DTYPES for tensor in tensors.values()):
        return None
    coded = encode_tensors(tensors)
    return coded if coded.nbytes <= (1 - _LEAST_GAIN) * plain_bytes else None


def _decode_stored(
    name: str, coded: Tensor, form: Format, shape: Sequence[int] | None, values: bool
) -> dict[str, Tensor]:
    """Decode the tensors of `encode_stored` on the device of `coded`; if not `values`, return them on the meta device.

    Another format or `shape` (None for any) raises a CorruptFileError before anything is decoded.
    """
    reader = CodedTensors(coded, name)
    metas = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in reader.specs.items()}
    if metas.keys() != set(form.tensor_names):
        raise _misfit(name, ", ".join(form.tensor_names), ", ".join(metas))
    stored_shape = form.shape_of(metas["qdata"])
    if shape is not None and tuple(shape) != stored_shape:
        raise _misfit(name, f"a weight of shape {tuple(shape)}", f"{stored_shape}")
    form.check(metas, stored_shape, name)
    return {key: reader.read(key).to(coded.device) for key in reader.specs} if values else metas


def decode_float(name: str, coded: Tensor, shape: Sequence[int] | None = None, values: bool = True) -> Tensor:
    """Decode a weight of `encode_float` that has `shape` (None for any); if not `values`, it is on the meta device."""
    reader = CodedTensors(coded, name)
    spec = reader.specs.get(_FLOAT_NAME)
    if spec is None or len(reader.specs) != 1 or not spec.dtype.is_floating_point:
        raise _misfit(name, f"{_FLOAT_NAME} of a float dtype", ", ".join(reader.specs))
    if shape is not None and tuple(shape) != spec.shape:
        raise _misfit(name, f"shape {tuple(shape)}", f"{spec.shape}")
    return (
        reader.read(_FLOAT_NAME).to(coded.device)
        if values
        else torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    )


def _misfit(name: str, expected: str, found: str) -> CorruptFileError:
    next_step = "The file is damaged or belongs to another model; save it again from the source."
    return CorruptFileError(f"{name}, coded", expected, found, next_step)


def flatten_state_dict(state_dict: Mapping[str, Any], default: Format | None, compress: bool = False) -> dict[str, Any]:
    """Return a new state dict in which plain tensors stand for each quantized weight, as in a file.

    `default` is the format that the model's configuration names. `compress` codes every weight, quantized or float, if
    that saves 2 % or more.
    """
    flat: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        if isinstance(tensor, QuantizedTensor):
            flat |= flatten_weight(name, tensor, default, compress)
        else:
            coded = encode_float(tensor) if compress else None
            flat |= {name: tensor} if coded is None else {stored_name(name, CODED_FLOAT_SUFFIX): coded}
    return flat


def group_stored(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group the stored tensors of weights: from weight name to suffix to value. Names of other tensors are left out.

    Examples:
        >>> group_stored({"a._weight_qdata": 1, "a._weight_scale": 2, "a.bias": 3})
        {'a.weight': {'qdata': 1, 'scale': 2}}
    """
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in names.items():
        if parsed := parse_stored_name(name):
            groups[parsed[0]][parsed[1]] = value
    return dict(groups)


class FoldStoredTensors:
    """A load_state_dict pre-hook that lets a quantized model load the plain tensors of its own files.

    Trainer resumes by `model.load_state_dict(tensors, strict=False)`, shard by shard, which would otherwise skip
    quantized weights and only warn. A weight that is not complete yet waits for the next shard.

    Args:
        default: The format that the model's configuration names.
    """

    def __init__(self, default: Format):
        self.default = default
        self.pending: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace the stored tensors of each complete weight by the weight, in `state_dict`."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if is_notice(name) or (
                is_guard(state_dict[key]) and isinstance(local_tensor(_parameter(module, name)), QuantizedTensor)
            ):
                del state_dict[key]
                continue
            parsed = parse_stored_name(name)
            parameter = _parameter(module, parsed[0]) if parsed else None
            is_quantized = isinstance(local_tensor(parameter), QuantizedTensor)
            if parsed and (is_quantized or (parameter is not None and parsed[1] == CODED_FLOAT_SUFFIX)):
                self.pending[parsed[0]][parsed[1]] = state_dict.pop(key)
        for name, tensors in list(self.pending.items()):
            parameter = _parameter(module, name)
            if parameter is not None and _is_complete(local_tensor(parameter), tensors, self.default):
                weight: Any = unflatten_weight(name, tensors, parameter.dtype, self.default, parameter.shape)
                if isinstance(weight, QuantizedTensor):
                    shard = cut(weight, parameter, name) if is_distributed(parameter) else weight
                    shard = shard.map(lambda stored, device=parameter.device: stored.to(device))
                    weight = with_local(parameter, shard) if is_distributed(parameter) else shard
                state_dict[prefix + name] = weight
                del self.pending[name]


def _is_complete(weight: Tensor, tensors: Collection[str], default: Format) -> bool:
    """Return whether `tensors` contains every tensor that `flatten_weight` stores for a weight."""
    if not isinstance(weight, QuantizedTensor):
        return True
    stored = [CODED_SUFFIX] if CODED_SUFFIX in tensors else weight.format.tensor_names
    return {*stored, *([FORMAT_SUFFIX] if _needs_format(weight, default) else [])} <= set(tensors)


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    owner, _, leaf = name.rpartition(".")
    try:
        return getattr(module.get_submodule(owner), leaf, None)
    except AttributeError:
        return None
