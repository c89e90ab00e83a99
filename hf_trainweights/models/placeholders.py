"""Tensors that are made one weight at a time, after a file with place for all of them was written.

safetensors writes from memory, all tensors of a shard at once. A weight that a kernel holds in a layout of its own
would have to be there a second time, in the layout of files, and every other one with it. So the writer gets
placeholders: memory that nobody has touched but for a mark at its beginning, and to which the system has given no more
than that page. In the file the marks are found again, whatever the tensors are called there, and each weight is written
over its placeholders.
"""

from __future__ import annotations

import mmap
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_trainweights.errors import SaveError
from hf_trainweights.files.safetensors_file import StoredTensorPlace, tensor_places
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_MARK_BYTES = 16  # of a UUID


class _Group(NamedTuple):
    """Tensors that are made together, and what errors call them."""

    name: str
    make: Callable[[], Mapping[str, Tensor]]


class Placeholders:
    """What stands in for tensors while a file is written, and how the tensors are made.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file, save_file
        >>> file = Path(tempfile.mkdtemp(), "model.safetensors")
        >>> placeholders = Placeholders()
        >>> like = {"codes": torch.empty(4, 8, dtype=torch.int8, device="meta")}
        >>> save_file(placeholders.put("weight", like, lambda: {"codes": torch.ones(4, 8, dtype=torch.int8)}), file)
        >>> placeholders.fill([file])
        >>> load_file(file)["codes"].unique()
        tensor([1], dtype=torch.int8)
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        # Each mark to the number of the group, and the key there.
        self._marks: dict[bytes, tuple[int, str]] = {}

    def put(self, name: str, like: Mapping[str, Tensor], make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return placeholders for tensors that are made together.

        Args:
            name: What errors call them.
            like: Tensors of their shapes and dtypes, on any device; the meta device takes no memory.
            make: Makes the tensors, under the same keys.

        Returns:
            Plain contiguous tensors on the CPU, each with a storage of its own; where one has no room for a mark, the
            tensors themselves.
        """
        if any(tensor.nbytes < _MARK_BYTES for tensor in like.values()):
            return dict(make())
        placeholders = {}
        for key, tensor in like.items():
            mark = uuid.uuid4().bytes
            # Not torch.empty: where malloc has freed memory, that would be taken again.
            memory = mmap.mmap(-1, tensor.nbytes, access=mmap.ACCESS_COPY)
            memory[:_MARK_BYTES] = mark
            self._marks[mark] = len(self._groups), key
            placeholders[key] = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
        self._groups.append(_Group(name, make))
        return placeholders

    def stand_in(self, name: str, weight: QuantizedTensor) -> QuantizedTensor:
        """Return a weight in the layout of files whose tensors are placeholders.

        Args:
            name: What errors call it.
            weight: A weight.

        Returns:
            The weight itself where it is in that layout.
        """
        form = weight.format.canonical
        if form == weight.format:
            return weight
        like = form.empty(weight.stored_shape, weight.scale.dtype, "meta")
        tensors = self.put(name, like, lambda: weight.canonical().tensors)
        return QuantizedTensor(tensors, form, weight.stored_shape, weight.dtype, weight.transposed)

    def fill(self, files: Iterable[Path]) -> None:
        """Make the tensors, one group after the other, and write them where their placeholders lie.

        Args:
            files: Whole safetensors files, which nothing has mapped yet; together they hold all placeholders.

        Raises:
            CorruptFileError: A file is no safetensors file.
            SaveError: A placeholder is not there, or not in its shape.
            OSError: A file cannot be read or written; it is damaged then.
        """
        if self._groups:
            places = self._find(files)
            for number in range(len(self._groups)):
                self._write(number, places)

    def _find(self, files: Iterable[Path]) -> dict[tuple[int, str], StoredTensorPlace]:
        places = {}
        for file in files:
            with file.open("rb") as stream:
                for place in tensor_places(file):
                    stream.seek(place.start)
                    marked = self._marks.get(stream.read(_MARK_BYTES))
                    if marked is not None:
                        places[marked] = place
        return places

    def _write(self, number: int, places: Mapping[tuple[int, str], StoredTensorPlace]) -> None:
        group = self._groups[number]
        for key, tensor in group.make().items():
            place = places.get((number, key))
            if place is None or tuple(tensor.shape) != place.shape or tensor.nbytes != place.end - place.start:
                raise _changed(f"{group.name}, {key}", tensor, place)
            with place.file.open("r+b") as stream:
                stream.seek(place.start)
                stream.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _changed(where: str, tensor: Tensor, place: StoredTensorPlace | None) -> SaveError:
    expected = f"{tensor.dtype} of shape {tuple(tensor.shape)}, as it was handed over"
    found = f"{place.end - place.start} bytes of shape {place.shape}" if place else "nothing in the files"
    return SaveError(
        where, expected, found, "Save without what changes or drops stored tensors on their way to a file."
    )
