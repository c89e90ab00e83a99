"""Sharded checkpoints for tests: what several ranks would write, from one process that does the work of all of them."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._pytree import tree_map
from trees import trained

RANKS = 2


def sample_state() -> dict[str, Any]:
    """Return the state dicts of a small model and its optimizer, by the parameters' names."""
    model, optimizer, _ = trained("AdamW")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": dict(model_state), "optimizer": optimizer_state}


def save_alone(state: Any, path: Path) -> None:
    """Save a state dict as stock PyTorch does in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def save_plain(state: Any, path: Path, ranks: int = RANKS) -> None:
    """Save a state dict as stock PyTorch does, cut into rows for several ranks."""
    save_alone(state, path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    whole = path / "__0_0.distcp"
    content = whole.read_bytes()
    whole.unlink()
    pieces: list[list[tuple[MetadataIndex, bytes]]] = [[] for _ in range(ranks)]
    for index, info in metadata.storage_data.items():
        data = content[info.offset : info.offset + info.length]
        entry = metadata.state_dict_metadata[index.fqn]
        if not hasattr(entry, "chunks"):
            pieces[0].append((index, data))
            continue
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        parts = tensor.chunk(ranks) if tensor.dim() else (tensor,)
        entry.chunks.clear()
        start = 0
        for rank, part in enumerate(parts):
            offsets = torch.Size([start, *[0] * (tensor.dim() - 1)] if tensor.dim() else [])
            entry.chunks.append(ChunkStorageMetadata(offsets, part.shape))
            pieces[rank].append((MetadataIndex(index.fqn, offsets), _saved(part)))
            start += len(part) if tensor.dim() else 0
    _write(path, metadata, pieces)


def save_as_trainer(state: Any, checkpoint: Path, ranks: int = RANKS, step: int = 7) -> None:
    """Save a state as the Trainer does under FSDP2 with SHARDED_STATE_DICT."""
    checkpoint.mkdir(parents=True)
    save_plain({"model": state["model"]}, checkpoint / "pytorch_model_fsdp_0", ranks)
    save_plain({"optimizer": state["optimizer"]}, checkpoint / "optimizer_0", ranks)
    torch.save({"last_epoch": step}, checkpoint / "scheduler.pt")
    (checkpoint / "trainer_state.json").write_text(f'{{"global_step": {step}, "epoch": 0.5}}')


def load_stock(state: Any, path: Path) -> Any:
    """Load with PyTorch's own reader into a state like `state`, whose tensors are zeroed before."""
    empty = tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else None, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        dcp.load(empty, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return empty


def load_stock_trainer(state: Any, checkpoint: Path) -> Any:
    """Load as the Trainer does from what `save_as_trainer` wrote."""
    return {
        **load_stock({"model": state["model"]}, checkpoint / "pytorch_model_fsdp_0"),
        **load_stock({"optimizer": state["optimizer"]}, checkpoint / "optimizer_0"),
    }


def _write(path: Path, metadata: Metadata, pieces: list[list[tuple[MetadataIndex, bytes]]]) -> None:
    metadata.storage_data = {}
    for rank, items in enumerate(pieces):
        name = f"__{rank}_0.distcp"
        with (path / name).open("wb") as file:
            for index, data in items:
                metadata.storage_data[index] = _StorageInfo(name, file.tell(), len(data))
                file.write(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _saved(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor.clone(), file)
    return file.getvalue()
