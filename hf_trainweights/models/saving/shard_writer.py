"""How the safetensors files of a save are written: once, while Transformers runs the save."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.tensor.guards import name_in_file


class ShardWriter:
    """Writes the files of one save: guards under the plain names of their weights, int8 codes aligned.

    Attributes:
        digests: The SHA-256 of each file that was written, by its name.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def write(
        self, tensors: Mapping[str, Tensor], file: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write one file; the arguments are those of `safetensors.torch.save_file`."""
        file, to_write = Path(file), {name: TensorToWrite.of(tensor) for name, tensor in tensors.items()}
        self.digests[file.name] = write_safetensors(file, to_write, metadata or {}, name_in_file)

    def finish(self, directory: Path) -> None:
        """Rename guards in the index, and write again what a class with a `save_pretrained` of its own has written."""
        for file in directory.glob("*.safetensors"):
            if file.name not in self.digests:
                self._write_again(file)
        for file in directory.glob("model.safetensors.index*.json"):
            index = json.loads(file.read_text(encoding="utf-8"))
            index["weight_map"] = {name_in_file(name): shard for name, shard in index["weight_map"].items()}
            file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _write_again(self, file: Path) -> None:
        with safe_open(file, framework="pt") as shard:
            # Mapped, not copied.
            tensors, metadata = {name: shard.get_tensor(name) for name in shard.keys()}, shard.metadata()  # noqa: SIM118
        file.unlink()
        self.write(tensors, file, metadata)
