"""`pytorch_model.bin` and its shards, made of safetensors files: Transformers 5 writes no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_trainweights.files.reading import DigestedFile
from hf_trainweights.files.weight_files import bin_name, safetensors_files


def rewrite_as_bin(directory: Path) -> dict[str, str]:
    """Replace each model*.safetensors file, and the index, by its `.bin` twin; return the SHA-256 of each twin."""
    digests = {}
    for file in safetensors_files(directory):
        with safe_open(file, framework="pt") as shard:
            # Mapped, not copied: a shard may be larger than the free memory.
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        # Through an open file: torch.save writes the name of a path into the bytes.
        with (directory / bin_name(file.name)).open("wb") as stream:
            digested: Any = DigestedFile(stream)
            torch.save(tensors, digested)
        digests[bin_name(file.name)] = digested.sha256()
        file.unlink()
    for file in sorted(directory.glob("model.safetensors.index*.json")):
        index = json.loads(file.read_text(encoding="utf-8"))
        index["weight_map"] = {name: bin_name(shard) for name, shard in index["weight_map"].items()}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / bin_name(file.name)).write_text(text, encoding="utf-8")
        file.unlink()
    return digests
