"""DeepSpeed itself, on two ranks without a GPU: it writes what `zero_files` makes, and reads what became small."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.zero.deepspeed_runs import RANKS, config, needs_deepspeed, set_up, whole_weights
from checkpoint.zero.zero_files import GROUPS, write_zero
from covering import exhaustive
from ranks import run_ranks
from torch import Tensor, nn

from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.run.checkpoints import size_bytes
from hf_trainweights.checkpoint.zero.files import TagFiles, load_states

pytestmark = [pytest.mark.slow, needs_deepspeed]

BFLOAT16 = {"bf16": {"enabled": True}}
KINDS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"stage": 1, **BFLOAT16},
    "ZeRO 2": {"stage": 2, **BFLOAT16},
    "ZeRO 3": {"stage": 3, **BFLOAT16},
    "ZeRO 2 in float32": {"stage": 2},
    "ZeRO 2, gradients in turns": {"stage": 2, **BFLOAT16, "zero": {"round_robin_gradients": True}},
    "ZeRO 3 in sub-groups": {"stage": 3, **BFLOAT16, "zero": {"sub_group_size": 20_000}},
    "BF16_Optimizer": {"stage": 1, **BFLOAT16, "data_types": {"grad_accum_dtype": "fp32"}},
}
CHOSEN = ["ZeRO 2", *exhaustive(*(kind for kind in KINDS if kind != "ZeRO 2"))]


class Model(nn.Module):
    """Has the parameters of `GROUPS`, in sizes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 128)
        self.layers = nn.ModuleList([nn.Linear(128, 129)])
        self.norm = nn.LayerNorm(129)
        self.head = nn.Linear(129, 128, bias=False)
        self.register_buffer("positions", torch.arange(5.0))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.layers[0](self.embed(ids)))
        return self.head(nn.functional.silu(hidden)) @ self.embed.weight.T


def engine_of(rank: int, stage: int, **options: Any) -> Any:
    import deepspeed

    set_up(rank)
    torch.manual_seed(0)
    model = Model()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    settings = config(stage, train_micro_batch_size_per_gpu=2, **options)
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=settings)[0]


def step(engine: Any, number: int) -> None:
    ids = torch.randint(0, 301, (2, 16), generator=torch.Generator().manual_seed(RANKS * number + dist.get_rank()))
    logits = engine(ids).float()
    engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten()))
    engine.step()


def save(rank: int, root: Path, kind: str) -> dict[str, Tensor]:
    """Save after each second step; return the weights after eight."""
    options = dict(KINDS[kind])
    engine = engine_of(rank, **options)
    for number in range(8):
        step(engine, number)
        if number % 2 and number < 6:
            engine.save_checkpoint(str(root), tag=f"any name {number}")
    return whole_weights(engine.module, options["stage"])


def go_on(rank: int, root: Path, kind: str) -> dict[str, Tensor]:
    options = dict(KINDS[kind])
    engine = engine_of(rank, **options)
    engine.load_checkpoint(str(root), tag="any name 5")
    for number in range(6, 8):
        step(engine, number)
    return whole_weights(engine.module, options["stage"])


@pytest.mark.parametrize("kind", CHOSEN)
def test_deepspeed_goes_on_exactly_from_what_became_small(tmp_path: Path, kind: str) -> None:
    plain, small = tmp_path / "plain", tmp_path / "small"
    expected = run_ranks(RANKS, save, plain, kind, timeout_seconds=400)[0]
    shutil.copytree(plain, small)
    for number in (1, 3, 5):
        tag = f"any name {number}"
        compress_directory(small / tag)
        assert size_bytes(small / tag) < 0.95 * size_bytes(plain / tag)
    shutil.rmtree(small / "any name 1")
    actual = run_ranks(RANKS, go_on, small, kind, timeout_seconds=400)[0]
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def outline(value: Any) -> Any:
    """Return everything but the numbers in tensors."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, tuple(value.shape), value.requires_grad
    if isinstance(value, dict):
        return {key: outline(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [outline(item) for item in value]
    return type(value).__qualname__


@pytest.mark.parametrize("stage", [2, *exhaustive(3)])
def test_the_files_of_other_tests_are_those_of_deepspeed(tmp_path: Path, stage: int) -> None:
    run_ranks(RANKS, save, tmp_path, f"ZeRO {stage}", timeout_seconds=400)
    theirs, ours = (
        tmp_path / "any name 5",
        write_zero(tmp_path / "ours", stage, groups=groups_of(tmp_path / "any name 5")),
    )
    assert TagFiles(theirs).names == TagFiles(ours).names
    for name in TagFiles(theirs).states:
        one, other = (load_states(tag / name)["optimizer_state_dict"] for tag in (theirs, ours))
        key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        assert {**outline(one), key: outline(one[key]["state"])} == {
            **outline(other),
            key: outline(other[key]["state"]),
        }
    for name in TagFiles(theirs).models:
        one, other = (load_states(tag / name) for tag in (theirs, ours))
        for part in ("module", "param_shapes", "frozen_param_shapes", "shared_params", "dp_world_size", "global_steps"):
            assert outline(dict(one)[part]) == outline(other[part])


def groups_of(tag: Path) -> Any:
    """Return the shapes of a checkpoint as `write_zero` takes them; GROUPS has the same names."""
    loaded = load_states(next(tag.glob("*_model_states.pt")))["param_shapes"]
    assert {name for group in loaded for name in group} == {name for group in GROUPS for name in group}
    return tuple({name: tuple(shape) for name, shape in group.items()} for group in loaded)
