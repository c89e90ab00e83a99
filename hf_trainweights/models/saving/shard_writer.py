"""How the weight files of a save are written: once, while Transformers runs the save, and then as `.bin` if wanted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_trainweights.files.reading import DigestedFile
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.files.weight_files import bin_name, safetensors_files
from hf_trainweights.tensor.guards import name_in_file


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

        What a class with a `save_pretrained` of its own has written is written again.
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
    """Replace a safetensors file by its `.bin` twin, as Transformers 5 writes none; return name and SHA-256 of that."""
    twin = file.with_name(bin_name(file.name))
    # Through an open file: torch.save writes the name of a path into the bytes.
    with twin.open("wb") as stream:
        digested: Any = DigestedFile(stream)
        torch.save(_mapped(file)[0], digested)
    file.unlink()
    return twin.name, digested.sha256()


def _mapped(file: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Return the tensors of a file, not copied: it may be larger than the free memory; and its metadata."""
    with safe_open(file, framework="pt") as shard:
        return {name: shard.get_tensor(name) for name in shard.keys()}, shard.metadata()  # noqa: SIM118
