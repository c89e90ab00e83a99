"""A Trainer under FSDP2 on two ranks: checkpoints become small in the background, and a stock one resumes from them."""

from __future__ import annotations

import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from checkpoint.test_callback_kills import KILLED, DyingDisk
from checkpoint.trainers import STEPS, assert_equal, build, trainer_of
from covering import exhaustive
from ranks import outcomes_of_ranks, run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import TrainerCallback

from hf_trainweights import TrainWeightsCheckpointCallback, latest
from hf_trainweights.checkpoint import verify_checkpoint
from hf_trainweights.checkpoint.run.checkpoints import size_bytes
from hf_trainweights.distributed import latest_on_all_ranks
from hf_trainweights.files import disk

pytestmark = pytest.mark.slow

RANKS = 2


def on_cpu(rank: int) -> None:
    """Set up what `accelerate launch` does, and let accelerate take FSDP on CPUs, where it is refused."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the group is there already
    warnings.simplefilter("ignore")
    original = PartialState.__init__

    def as_if_on_gpus(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = as_if_on_gpus


def fsdp_options(state_dict_type: str) -> dict[str, Any]:
    config = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": state_dict_type,
        "cpu_ram_efficient_loading": False,
        "reshard_after_forward": True,
    }
    return {"fsdp": True, "fsdp_config": config}


def train(
    rank: int, out: Path, kind: str, callbacks: tuple[Any, ...] = (), resume: str | None = None, **options: Any
) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Train on all ranks; return the losses by step, and the weights."""
    if kind == "DDP":
        warnings.simplefilter("ignore")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    else:
        on_cpu(rank)
        options |= fsdp_options(kind)
    trainer, losses = trainer_of(out, *callbacks, model=build(), **options)
    assert trainer.is_fsdp_enabled == (kind != "DDP")
    trainer.train(resume_from_checkpoint=resume)
    options_of_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(trainer.model, options=options_of_state)
    return losses.by_step, {name: tensor.clone() for name, tensor in full.items()}


def train_small(rank: int, out: Path, kind: str, mode: str = "lossless", **options: Any) -> Any:
    """Train with the callback; return also what every rank says is the newest checkpoint."""
    trained = train(rank, out, kind, (TrainWeightsCheckpointCallback(mode=mode),), **options)
    return *trained, latest_on_all_ranks(out), latest(out)


def resume_stock(rank: int, out: Path, kind: str, step: int) -> Any:
    """Resume with a Trainer that has no callback."""
    return train(rank, out, kind, (), str(out / f"checkpoint-{step}"))


DDP = pytest.param(
    "DDP",
    marks=[
        pytest.mark.exhaustive,
        pytest.mark.skipif(
            transformers.__version__ < "5.18",
            reason="this Trainer asks torch.load for cpu:0, which torch does not know",
        ),
    ],
)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", *exhaustive("FULL_STATE_DICT"), DDP])
def test_checkpoints_become_small_and_an_unmodified_trainer_resumes_from_them(tmp_path: Path, kind: str) -> None:
    plain = run_ranks(RANKS, train, tmp_path / "plain", kind)
    small = run_ranks(RANKS, train_small, tmp_path / "small", kind)
    newest = str(tmp_path / "small" / f"checkpoint-{STEPS}")
    assert [(agreed, own) for *_, agreed, own in small] == [(newest, newest)] * RANKS
    assert_equal(small[0][1], plain[0][1])
    for step in range(2, STEPS + 1, 2):
        checkpoint = tmp_path / "small" / f"checkpoint-{step}"
        assert verify_checkpoint(checkpoint).ok
        assert size_bytes(checkpoint) < 0.9 * size_bytes(tmp_path / "plain" / checkpoint.name)
    shutil.rmtree(tmp_path / "small" / "checkpoint-2")
    resumed = run_ranks(RANKS, resume_stock, tmp_path / "small", kind, 4)
    assert_equal(resumed[0][1], plain[0][1])
    assert {step: resumed[0][0][step] for step in range(5, STEPS + 1)} == {
        step: plain[0][0][step] for step in range(5, STEPS + 1)
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT"])
def test_rotation_waits_for_the_ranks_that_write(tmp_path: Path, kind: str) -> None:
    often = partial(train_small, mode="near-lossless", save_steps=1, save_total_limit=2)
    run_ranks(RANKS, often, tmp_path, kind)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        f"checkpoint-{STEPS - 1}",
        f"checkpoint-{STEPS}",
    ]
    assert all(verify_checkpoint(path).ok for path in tmp_path.glob("checkpoint-*"))
    resumed = run_ranks(RANKS, resume_stock, tmp_path, kind, STEPS - 1)
    assert max(resumed[0][0]) == STEPS


class Arm(TrainerCallback):
    """Starts to count the calls of a disk when the Trainer has written the checkpoint of a step."""

    def __init__(self, system: DyingDisk, step: int):
        self.system, self.step = system, step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.system.counts = state.global_step == self.step


def train_and_die(rank: int, out: Path, dying_rank: int, die_at: int) -> Any:
    """Train with the callback until one rank dies while it makes the checkpoint of step 4 small."""
    system = DyingDisk(die_at if rank == dying_rank else None)
    disk.file_system = system
    return train(rank, out, "SHARDED_STATE_DICT", (Arm(system, 4), TrainWeightsCheckpointCallback()))


@pytest.mark.parametrize(("dying_rank", "die_at"), exhaustive((1, 1), (0, 4), (0, 20), (1, 6)))
def test_a_killed_rank_leaves_checkpoints_from_which_all_ranks_resume(
    tmp_path: Path, dying_rank: int, die_at: int
) -> None:
    outcomes = outcomes_of_ranks(RANKS, train_and_die, tmp_path / "killed", dying_rank, die_at)
    assert str(KILLED) in outcomes[dying_rank].text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        newest = latest(tmp_path / "killed")
    assert newest is not None
    assert Path(newest).name in ("checkpoint-4", "checkpoint-6")
    plain = run_ranks(RANKS, train, tmp_path / "plain", "SHARDED_STATE_DICT")
    resumed = run_ranks(RANKS, train, tmp_path / "killed", "SHARDED_STATE_DICT", (), newest)
    assert_equal(resumed[0][1], plain[0][1])
