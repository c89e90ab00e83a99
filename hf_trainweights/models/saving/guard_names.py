"""Gives guards their names in the files that Transformers has written: the plain names of the weights."""

from __future__ import annotations

import json
from pathlib import Path

from hf_trainweights.files.safetensors_file import rename_tensors
from hf_trainweights.tensor.guards import name_in_file


def name_guards(directory: Path) -> None:
    """Rename the guards in each safetensors file and in the index.

    Args:
        directory: Where they lie.

    Raises:
        OSError: A file cannot be written.
    """
    # Of any name: a class with a save_pretrained of its own may write others.
    for file in directory.glob("*.safetensors"):
        rename_tensors(file, name_in_file)
    for file in directory.glob("model.safetensors.index*.json"):
        index = json.loads(file.read_text(encoding="utf-8"))
        index["weight_map"] = {name_in_file(name): shard for name, shard in index["weight_map"].items()}
        file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
