"""Saved models in every format and serialization, and the ways in which their files are changed."""

from __future__ import annotations

import functools
import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load, save
from transformers import LlamaConfig, LlamaForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.files.reading import sign_json
from tests.fuzz.directories import Content, Tree, put_special, read_tree
from tests.fuzz.mutate_bytes import damage
from tests.fuzz.mutate_json import change_json
from tests.fuzz.mutate_pickle import change_pickle

DIGESTS = "trainweights_files.json"
_FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8-g32": {"format": "int8", "group_size": 32},
    "int4": {"format": "int4", "group_size": 32},
    "float8": {"format": "float8_e4m3"},
    "uint3": {"format": "uint3"},
}
_SERIALIZATIONS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "shards": {"max_shard_size": "20KB"},
    "bin": {"safe_serialization": False},
}
_DTYPES = ["F32", "F16", "BF16", "I8", "U8", "I32", "I64", "BOOL", "F8_E4M3", "F64", "U16", "F8_E5M2", "X", ""]
_SHAPES = [[], [0], [64], [64, 64], [1, 64], [1 << 40, 0], [-1], [1 << 62, 2], [2.0], "64"]
_KEYS = [
    *("dtype", "shape", "data_offsets", "format", "group_size", "overrides", "activations", "modules_to_not_convert"),
    *("quantization_config", "weight_map", "metadata", "files", "versions", "size_bytes", "sha256", "__metadata__"),
    *("model.layers.0.self_attn.q_proj._weight_format", "_weight_qdata", "lm_head._weight_scale", "version"),
]
_VALUES = [
    *(*_DTYPES, *_SHAPES, "int4", "int8", "float8_e4m3", "../int8/model.safetensors", "model.safetensors", ["lm_head"]),
    *({"re:.*": "int4"}, {"re:.*": None}, {"format": "int4", "group_size": 32}, "re:(", "model.safetensors.index.json"),
]
_FORMAT_TEXTS = [
    *(b'{"format":"int4","group_size":32}', b'{"format":"int8","group_size":null}', b'{"format":"float8_e4m3"}'),
    *(b'{"format":"uint3","group_size":16}', b'{"format":"uint6","group_size":32}'),
    *(b'{"format":"int8","transposed":true}', b"{}", b"[]", b"\xff", b"[" * 5000, b'{"format":["x"]}', b"NaN", b""),
    *(
        b'{"format":"int8","group_size":0}',
        b'{"format":"int8","group_size":1e3}',
        b'{"format":"int8_tiles"}',
        b"9" * 5000,
    ),
]


@functools.cache
def saved_models() -> dict[str, dict[str, Content]]:
    """Return the files of each saved model."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    trees = {}
    for format_name, choice in _FORMATS.items():
        model = _float_model()
        quantize_(model, TrainWeightsConfig(**choice, overrides={"model.layers.0.self_attn.q_proj": "int8"}))
        for name, options in _SERIALIZATIONS.items():
            with tempfile.TemporaryDirectory() as directory:
                model.save_pretrained(directory, **options)
                trees[f"{format_name}-{name}"] = read_tree(Path(directory))
    return trees


def _float_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).eval()


def weight_files(tree: Tree) -> list[str]:
    """Return the names of the files that hold weights."""
    return [name for name in tree if name.endswith((".safetensors", ".bin"))]


def change_tree(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> str:
    """Change one of the files of a saved model in `tree`, and return how."""
    changes = (change_header, change_header, change_tensors, change_tensors, change_config, change_listing, change_raw)
    change = rng.choice((*changes, change_kind))
    change(rng, saved, tree)
    return change.__name__


def change_raw(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> None:
    """Damage a file."""
    name = rng.choice(sorted(saved))
    tree[name] = damage(rng, _bytes(saved, name), _bytes(saved, rng.choice(sorted(saved))))


def change_kind(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> None:
    """Put something that is no file into the place of one that the package opens, not Transformers before it."""
    names = [name for name in sorted(saved) if name not in ("config.json", "generation_config.json")]
    put_special(rng, tree, rng.choice(names))


def change_config(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> None:
    """Change what the model's configuration says about the quantization."""
    config = json.loads(_bytes(saved, "config.json"))
    change_json(rng, config["quantization_config"], _KEYS, _VALUES)
    tree["config.json"] = json.dumps(config).encode()


def change_listing(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> None:
    """Change an index, or the digests, which then have a right digest themselves."""
    name = rng.choice([name for name in sorted(saved) if name.endswith(".index.json") or name == DIGESTS])
    listing = change_json(rng, json.loads(_bytes(saved, name)), _KEYS, _VALUES)
    try:
        tree[name] = sign_json(listing) if name == DIGESTS else json.dumps(listing).encode()
    except (TypeError, ValueError):  # no longer an object, or a text that UTF-8 cannot hold
        tree[name] = json.dumps(listing).encode()


def change_header(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> None:
    """Change the header of a safetensors file, all or one entry of it."""
    names = [name for name in weight_files(saved) if name.endswith(".safetensors")]
    if not names:
        return
    name = rng.choice(names)
    data = _bytes(saved, name)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    ours = [key for key in header if key.rpartition("_")[2] in ("qdata", "scale", "point", "format")]
    if rng.random() < 0.5 or len(ours) < 2:
        change_json(rng, header, (*_KEYS, *header), _VALUES)
    elif rng.random() < 0.5:
        change_json(rng, header[rng.choice(ours)], _KEYS, _VALUES)
    else:
        first, second = rng.sample(ours, 2)
        header[first], header[second] = header[second], header[first]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    tree[name] = struct.pack("<Q", len(text)) + text + data[8 + length :]


def change_tensors(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> None:
    """Store other tensors in a safetensors file that is well-formed, or change the pickle of another."""
    name = rng.choice(weight_files(saved))
    if name.endswith(".bin"):
        tree[name] = change_pickle(rng, _bytes(saved, name))
        return
    tensors = {key: tensor.clone() for key, tensor in load(_bytes(saved, name)).items()}
    ours = [key for key in tensors if key.rpartition("_")[2] in ("qdata", "scale", "point", "format")]
    key = rng.choice(ours or sorted(tensors))
    tensor = tensors[key]
    change = rng.randrange(12)
    if change < len(_TENSOR_CHANGES):
        tensors[key] = _TENSOR_CHANGES[change](tensor).contiguous().clone()
    elif change == 9:
        text = bytearray(rng.choice(_FORMAT_TEXTS))
        described = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        tensors[f"{key.rpartition('_')[0]}_format"] = described
    elif change == 10:
        del tensors[key]
    else:
        other = rng.choice(sorted(tensors))
        tensors[key], tensors[other] = tensors[other], tensors[key]
    tree[name] = save({key: tensor.clone() for key, tensor in tensors.items()}, {"format": "pt"})


_TENSOR_CHANGES = [
    lambda tensor: tensor[: max(1, len(tensor) // 2)] if tensor.dim() else tensor,
    lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    lambda tensor: tensor.flatten(),
    lambda tensor: tensor.float() if tensor.dtype != torch.float32 else tensor.half(),
    lambda tensor: torch.full_like(tensor, float("nan") if tensor.dtype.is_floating_point else 127),
    lambda tensor: tensor[:0] if tensor.dim() else tensor,
    lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2),
    lambda tensor: torch.zeros((), dtype=tensor.dtype),
    lambda tensor: tensor.view(torch.uint8) if tensor.dim() else tensor,
]


def _bytes(tree: Tree, name: str) -> bytes:
    content = tree[name]
    return content if isinstance(content, bytes) else b""
