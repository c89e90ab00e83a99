"""Reads a checkpoint as anyone would: in a process of its own, in which hf_trainweights is not imported."""

from __future__ import annotations

import io
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import outputs
from torch import Tensor


class StockReader:
    """A process that reads one checkpoint after the other; starting it takes longer than all reading.

    Args:
        pool: The process.
    """

    def __init__(self, pool: ProcessPoolExecutor):
        self.pool = pool

    def outputs(self, directory: Path, inputs: Mapping[str, Tensor], dequantize: bool = False) -> list[Tensor]:
        """Return what the model in a directory computes.

        Args:
            directory: The exported checkpoint.
            inputs: Keyword arguments of `forward`.
            dequantize: Whether compressed-tensors dequantizes while it loads, not at the first forward.
        """
        # As bytes: tensors that cross a process share memory, which would end with it.
        written = self.pool.submit(_read, directory, _dump(dict(inputs)), dequantize).result(timeout=120)
        return torch.load(io.BytesIO(written))

    def refusal(self, directory: Path, loader: str, **options: Any) -> str:
        """Return what a user is told who loads a model: the warnings, and the error with its type; "" if it loads.

        Args:
            directory: The checkpoint.
            loader: A class of Transformers, or the task of a pipeline.
            options: Further arguments of `from_pretrained`.
        """
        return self.pool.submit(_refusal, directory, loader, options).result(timeout=120)


@contextmanager
def stock_reader() -> Iterator[StockReader]:
    """Yield a reader; its process ends with the block."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield StockReader(pool)


def _read(directory: Path, inputs: bytes, dequantize: bool) -> bytes:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, transformers.AutoConfig.from_pretrained(directory).architectures[0])
    config = transformers.CompressedTensorsConfig(dequantize=True) if dequantize else None
    model, report = model_class.from_pretrained(
        directory, dtype="auto", quantization_config=config, output_loading_info=True
    )
    assert {key: found for key, found in report.items() if found} == {}
    found = outputs(model, torch.load(io.BytesIO(inputs)))
    assert "hf_trainweights" not in sys.modules
    return _dump(found)


def _refusal(directory: Path, loader: str, options: dict[str, Any]) -> str:
    messages = io.StringIO()
    handler = logging.StreamHandler(messages)
    logging.getLogger("transformers").addHandler(handler)
    try:
        if hasattr(transformers, loader):
            getattr(transformers, loader).from_pretrained(directory, **options)
        else:
            transformers.pipeline(loader, model=str(directory), **options)
    except Exception as error:
        return f"{messages.getvalue()}\n{type(error).__name__}: {error}"
    finally:
        logging.getLogger("transformers").removeHandler(handler)
        assert "hf_trainweights" not in sys.modules
    return ""


def _dump(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
