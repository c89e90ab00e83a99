"""Trees to store, and what it means that one came back: types, bits, layout and sharing."""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, encode_file
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX

# What torch's Adam records in a group beside learning rate and betas. Files that name no class show Adam by it.
ADAM_SETTINGS = {"eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}


def fingerprint(value: Any) -> Any:
    """Something that is equal for two values only if they agree to the last bit, in type and in order."""
    if isinstance(value, Tensor):
        flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        data = flat.view(torch.uint8).numpy().tobytes()
        layout = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
        return type(value).__name__, layout, data
    if isinstance(value, dict):
        items = [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
        return type(value).__name__, items, fingerprint(getattr(value, "_metadata", None))
    if isinstance(value, list | tuple):
        return type(value).__name__, [fingerprint(item) for item in value]
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    return type(value).__name__, repr(value)


class Call:
    """What `torch.save` writes as one call of `decode_file`."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return decode_file, self.arguments


def encoded_bytes(encoded: EncodedFile) -> bytes:
    """The file as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(Call(encoded.payload, encoded.structure), file)
    return file.getvalue()


def written_bytes(tree: Any, plan: Any = None, **options: Any) -> bytes:
    """`tree` as an encoded file."""
    file = io.BytesIO()
    encode_file(tree, plan or {}, file, **options)
    return file.getvalue()


def stored(tree: Any, plan: Any = None, **options: Any) -> Any:
    """`tree` after a way through a file."""
    return torch.load(io.BytesIO(written_bytes(tree, plan, **options)), weights_only=True)


def trained(optimizer_name: str, *, dtype: torch.dtype = torch.float32, steps: int = 3) -> tuple[Any, Any, Any]:
    """A little model, its optimizer and its scheduler after a few steps; every weight but one is worth coding."""
    torch.manual_seed(0)
    layers = [("embed", torch.nn.Embedding(128, 64)), ("conv", torch.nn.Conv1d(64, 128, 1, bias=False))]
    layers += [("norm", torch.nn.BatchNorm1d(128)), ("head", torch.nn.Conv1d(128, 96, 1))]
    model = torch.nn.Sequential(OrderedDict(layers)).to(dtype)
    kinds = {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "AdamW-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    }
    optimizer = kinds[optimizer_name](list(model.named_parameters()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = model.embed(torch.randint(0, 128, (8, 16))).transpose(1, 2)
        model.head(model.norm(model.conv(hidden))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def small_tree() -> dict[str, Any]:
    """An optimizer's state, tied views and scalars in a few hundred bytes."""
    torch.manual_seed(0)
    weight = torch.randn(4, 3)
    adam = {"step": torch.tensor(3.0), "exp_avg": torch.randn(5), "exp_avg_sq": torch.rand(5)}
    return {"state": {0: adam}, "tied": [weight, weight[1:3].t()], "lr": 1e-3, "name": "x", "flag": True, "none": None}


def write_anchor(directory: Path, tree: Any) -> Path:
    """Stores `tree` as an anchor and returns its path."""
    data = written_bytes(tree)
    path = directory / f"{hashlib.sha256(data).hexdigest()}{ANCHOR_SUFFIX}"
    path.write_bytes(data)
    return path


def write_encoded(path: Path, tree: Any, plan: Any = None, **options: Any) -> Path:
    """Stores `tree` in a file and returns its path."""
    path.write_bytes(written_bytes(tree, plan, **options))
    return path


def each_flipped_bit(path: Path) -> Iterator[int]:
    """Flips one bit of a file after the other, in place, and yields which."""
    content = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for position in range(8 * len(content)):
            byte = content[position // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << position % 8]), position // 8)
            yield position
            os.pwrite(file.fileno(), bytes([byte]), position // 8)
