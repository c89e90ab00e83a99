"""Makes inputs for the forward of any model, from its signature and the sizes in its configuration."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator

import torch
from architectures import floating_tensors
from every_architecture.configurations import FIRST_SPECIAL, IMAGE, WIDTH
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = 12
ROWS = 2
# Patches of an image, in each direction.
_GRID = 4
_KINDS = ("decoder_input_ids", "input_features", "pixel_values", "input_ids", "bbox", "input_values")
_KINDS += ("input_boxes", "input_points")
# Arguments that some models take only together.
_TOGETHER = [
    ["input_ids", "pixel_values"],
    ["input_ids", "pixel_values", "pixel_attention_mask", "spatial_shapes"],
    ["input_ids", "visual_feats", "visual_pos"],
    ["flattened_patches", "decoder_input_ids"],
    ["input_ids"],
    ["pixel_values"],
]
# Sets of shapes that are tried of the same arguments.
_MOST_TRIED = 12
_BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "mel_dim", "n_mel_bins", "input_dim")
_BINS += ("feature_projection_input_dim",)


def find_inputs(model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, str]:
    """Return arguments that a model takes and gives finite outputs for, and "", or None and the first error."""
    problems = []
    for inputs in candidates(model):
        if not (problem := _problem(model, inputs)):
            return inputs, ""
        problems.append(problem)
    return None, problems[0] if problems else "no input of a kind that is known"


def _problem(model: PreTrainedModel, inputs: dict[str, Tensor]) -> str:
    """Return why a model does not take inputs; "" if it does, and a copy of it gives the same outputs."""
    try:
        outputs = run(model, inputs)
        again = run(copy.deepcopy(model), inputs)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    if not any(value.numel() for value in outputs):
        return "no output is a floating tensor"
    if not all(value.isfinite().all() for value in outputs):
        return "outputs are not finite"
    return "" if all(map(torch.equal, outputs, again)) else "a copy of the model gives other outputs"


def run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return every floating tensor that a model gives; random draws in its forward are the same each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        given = model(**inputs)
    return [value.clone() for value in floating_tensors(given if isinstance(given, dict | tuple | list) else [given])]


def candidates(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield sets of arguments, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    required = [
        each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    main = model.main_input_name
    first = [name for name in dict.fromkeys([*([main] if isinstance(main, str) else main), *required]) if name in names]
    further = [name for name in _KINDS if name in names and name not in first]
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in further:
        further.remove("decoder_input_ids")
        groups = [[*first, "decoder_input_ids"], first, *([*first, "decoder_input_ids", name] for name in further)]
    else:
        groups = [first, *([*first, name] for name in further)]
    groups += [*_TOGETHER, [*first, *further]]
    for number, group in enumerate(groups):
        if group and group not in groups[:number] and names.issuperset(group):
            yield from _with_shapes(model.config, group)


def _with_shapes(config: PreTrainedConfig, names: list[str]) -> Iterator[dict[str, Tensor]]:
    grids = [name for name in names if name.endswith("grid_thw")]
    if grids:
        # The patches of all images stand one after the other, and the grid says which are of which image.
        images = [name for name in names if name in ("pixel_values", "hidden_states")]
        patches, patch = _patches(config), _size(config, "patch_size", 8)
        for values in (patches, patches.unflatten(1, (-1, patch, patch))):
            yield dict.fromkeys(images, values) | dict.fromkeys(grids, torch.tensor([[1, _GRID, _GRID]]))
    kinds = [_tensors(config, name) for name in names]
    for values in itertools.islice(itertools.product(*kinds), _MOST_TRIED):
        yield {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _patches(config: PreTrainedConfig) -> Tensor:
    channels = _size(config, "num_channels", _size(config, "in_channels", 3))
    return _floats(_GRID**2, channels * _size(config, "temporal_patch_size", 1) * _size(config, "patch_size", 8) ** 2)


def _tensors(config: PreTrainedConfig, name: str) -> list[Tensor | None]:
    """Return tensors of the shapes that an argument of a name may have."""
    if name in _MAKERS:
        return _MAKERS[name](config)
    if name.endswith("_ids"):
        return _ids(config)
    if name.startswith("pixel_values"):
        return _pixels(config)
    if name.endswith("mask"):
        return [torch.ones(ROWS, TOKENS, dtype=torch.long)]
    if name.endswith(("embeds", "hidden_states", "features", "states")):
        return [_floats(ROWS, TOKENS, WIDTH), _floats(ROWS, WIDTH, TOKENS)]
    return [None]


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _ids(config: PreTrainedConfig) -> list[Tensor | None]:
    count = min(_size(config, "vocab_size", FIRST_SPECIAL), FIRST_SPECIAL)
    ids = torch.randint(min(3, count - 1), count, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return [ids, ids[:, :, None].expand(-1, -1, _size(config, "num_codebooks", 4)).contiguous()]


def _pixels(config: PreTrainedConfig) -> list[Tensor | None]:
    channels = _size(config, "num_channels", _size(config, "in_channels", 3))
    side, patch = _size(config, "image_size", IMAGE), _size(config, "patch_size", 8)
    frames = _size(config, "num_frames", 2)
    return [
        _floats(ROWS, channels, side, side),
        _floats(ROWS, frames, channels, side, side),
        _floats(ROWS, channels, 2 * side, 2 * side),
        _patches(config),
        _patches(config).unflatten(1, (-1, patch, patch)),
        _patches(config).expand(ROWS, -1, -1).contiguous(),
        _floats(ROWS, channels, 64, 64),
        _floats(ROWS, channels, 224, 224),
    ]


def _spectrogram(config: PreTrainedConfig) -> list[Tensor | None]:
    bins = next((size for name in _BINS if (size := _size(config, name, 0))), 80)
    lengths = (2 * _size(config, "max_source_positions", 32), 64, 128, 3000)
    return [_floats(ROWS, *shape) for length in lengths for shape in ((bins, length), (length, bins))]


def _wave(config: PreTrainedConfig) -> list[Tensor | None]:
    return [
        _floats(ROWS, 3840),
        _floats(ROWS, 1, 3840),
        _floats(ROWS, 1, 16000),
        _floats(ROWS, 16000),
        *_spectrogram(config),
    ]


def _boxes(_: PreTrainedConfig) -> list[Tensor | None]:
    return [torch.tensor([1, 2, 9, 8]).expand(ROWS, TOKENS, 4).contiguous()]


def _series(config: PreTrainedConfig) -> list[Tensor | None]:
    length, channels = _size(config, "context_length", 16), _size(config, "num_input_channels", 1)
    lags = max(getattr(config, "lags_sequence", [0]))
    return [_floats(ROWS, length + lags), _floats(ROWS, length, channels), _floats(ROWS, 32)]


def _time_features(config: PreTrainedConfig) -> list[Tensor | None]:
    length = _size(config, "context_length", 16) + max(getattr(config, "lags_sequence", [0]))
    return [_floats(ROWS, length, 0)]


def _observed(config: PreTrainedConfig) -> list[Tensor | None]:
    return [torch.ones_like(value) for value in _series(config) if value is not None]


_MAKERS = {
    "input_features": _spectrogram,
    "input_values": _wave,
    "audio_values": _wave,
    "bbox": _boxes,
    "flattened_patches": lambda config: [_floats(ROWS, _GRID**2, 3 * _size(config, "patch_size", 8) ** 2 + 2)],
    "past_values": _series,
    "pixel_attention_mask": lambda _: [torch.ones(ROWS, _GRID**2, dtype=torch.long)],
    "spatial_shapes": lambda _: [torch.full((ROWS, 2), _GRID)],
    "visual_feats": lambda config: [_floats(ROWS, 4, _size(config, "visual_feat_dim", WIDTH))],
    "visual_pos": lambda _: [_floats(ROWS, 4, 4).sigmoid()],
    "past_time_features": _time_features,
    "future_time_features": _time_features,
    "past_observed_mask": _observed,
}


def _size(config: PreTrainedConfig, name: str, default: int) -> int:
    """Return a size that a configuration has itself or in the configuration of a part."""
    values = vars(config)
    found = values.get(name)
    if isinstance(found, list | tuple) and found and isinstance(found[0], int):
        return found[0]
    if isinstance(found, int) and found > 0:
        return found
    inner = [value for value in values.values() if isinstance(value, PreTrainedConfig)]
    return next((size for each in inner if (size := _size(each, name, 0))), default)
