"""Every layout of checkpoints keeps the contract of `hf_trainweights.testing`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded_states import load_stock_trainer, sample_state, save_as_trainer
from checkpoint.whole.test_rewriting import trainer_directory
from checkpoint.zero.zero_files import in_trainer, pretended_packages
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_trainweights.checkpoint.zero.files import TagFiles
from hf_trainweights.testing import LayoutContract
from hf_trainweights.testing.layouts import tensors_in


class TestWholeFiles(LayoutContract):
    def write(self, checkpoint: Path, step: int) -> None:
        weights, _ = trainer_directory(checkpoint, safetensors=None, seed=step)
        torch.save(weights, checkpoint / "pytorch_model.bin")
        (checkpoint / "trainer_state.json").write_text(f'{{"global_step": {step}, "epoch": 0.5}}')

    def load(self, checkpoint: Path) -> Mapping[str, Tensor]:
        names = ("pytorch_model.bin", "optimizer.pt")
        return tensors_in({name: torch.load(checkpoint / name, weights_only=True) for name in names})


@pytest.mark.slow
class TestSharded(LayoutContract):
    def write(self, checkpoint: Path, step: int) -> None:
        generator = torch.Generator().manual_seed(step)

        def move(value: Any) -> Any:
            is_weight = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
            return value + 1e-4 * torch.randn(value.shape, generator=generator) if is_weight else value

        state = sample_state()
        save_as_trainer({**state, "model": tree_map(move, state["model"])}, checkpoint, ranks=2, step=step)

    def load(self, checkpoint: Path) -> Mapping[str, Tensor]:
        return tensors_in(load_stock_trainer(sample_state(), checkpoint))

    def weights(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name for name in super().weights(tensors) if name.startswith(".model")]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
class TestZero(LayoutContract):
    @pytest.fixture(autouse=True)
    def _stage(self, stage: int) -> None:
        self.stage = stage

    @pytest.fixture(autouse=True)
    def _deepspeed(self) -> Iterator[None]:
        with pretended_packages():
            yield

    def write(self, checkpoint: Path, step: int) -> None:
        in_trainer(checkpoint.parent, step, self.stage)

    def load(self, checkpoint: Path) -> Mapping[str, Tensor]:
        tag = next(checkpoint.glob("global_step*"))
        return tensors_in({name: torch.load(tag / name, weights_only=False) for name in TagFiles(tag).names})

    def weights(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name for name in super().weights(tensors) if "fp32" in name]
