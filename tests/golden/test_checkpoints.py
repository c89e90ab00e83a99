"""A run of two checkpoints in every mode: the first one full, the weights of the second one a delta to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from golden.files import called_by, golden_directory, integers, recorded, texts_in, torch_members
from golden.reader import AFresh, load_checkpoints
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from hf_trainweights.checkpoint.planning.policy import MODES
from hf_trainweights_cli.main import app

ZSTD_VERSION = ".".join(map(str, zstandard.ZSTD_VERSION))
FILES = ("pytorch_model.bin", "optimizer.pt")
STEPS = (1, 2)
# What earlier versions wrote in a mode that stores moments otherwise today.
EARLIER = ("lossless-rank1",)
# So many elements that a lossy mode rounds them, in the dtypes of training.
LARGE = {"linear.weight": torch.float32, "head.weight": torch.bfloat16}


def weights(step: int) -> dict[str, Tensor]:
    """Return a state dict, most of it zeros, so that files are small."""
    found: dict[str, Tensor] = {}
    for seed, (name, dtype) in enumerate(LARGE.items(), 1):
        count = 1024 if dtype == torch.float32 else 16
        first = integers(64, 64, seed=seed, count=count) / (count / 2)
        update = integers(64, 64, seed=seed + 4) / 128 if dtype == torch.float32 else integers(64, 64) / 64
        found[name] = ((first + (step - 1) * update) * sparse()).to(dtype)
    return {**found, "linear.bias": integers(64) / 8 + step, "running_mean": integers(64, 64, seed=2) * sparse() + step}


def optimizer(step: int) -> dict[str, Any]:
    """Return the state dict of an AdamW. Second moments are powers of two, whose logarithms are exact."""
    state = {}
    for index, dtype in enumerate([*LARGE.values(), torch.float32]):
        shape = (64, 64) if index < len(LARGE) else (64,)
        mask = sparse() if index < len(LARGE) else 1
        rare = (integers(*shape, seed=index + step) == 7) * 3
        squares = torch.ldexp(torch.ones(shape), rare - 20 - step + torch.arange(64) % 4)
        moments = integers(*shape, seed=2 * index) / 2**13
        state[index] = {
            "step": torch.tensor(10.0 * step),
            "exp_avg": (moments * mask).to(dtype),
            "exp_avg_sq": (squares * mask).to(dtype),
        }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    names = [*LARGE, "linear.bias"]
    return {"state": state, "param_groups": [{**group, "params": [0, 1, 2], "param_names": names}]}


def sparse() -> Tensor:
    return integers(64, 64, seed=6, count=4) == 0


def write(run: Path, mode: str) -> None:
    for step in STEPS:
        checkpoint = run / f"checkpoint-{step}"
        checkpoint.mkdir()
        save_file(weights(step), checkpoint / "model.safetensors")
        torch.save(optimizer(step), checkpoint / "optimizer.pt")
    done = CliRunner().invoke(app, ["checkpoint", "compress", str(run), "--mode", mode], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def golden(mode: str) -> Path:
    return golden_directory(
        f"checkpoints/{mode}",
        lambda directory: write(directory, mode),
        lambda directory: {"zstd": ZSTD_VERSION, "loaded": load_checkpoints(directory)},
    )


def structure(file: Path) -> dict[str, Any]:
    """Return the JSON object of an encoded file as docs/checkpoint_files.md describes it, without its digest."""
    (text,) = (text for text in texts_in(file) if "storages" in text)
    return json.loads(text[64:].replace("\u00b7", "."))


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


every_run = pytest.mark.parametrize("run", [*MODES, *EARLIER])


@pytest.fixture(scope="module")
def run_of_today(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    write(run, mode)
    return run


@pytest.mark.slow
@every_run
def test_a_fresh_process_loads_what_is_recorded(run: str, afresh: AFresh) -> None:
    loaded = afresh(load_checkpoints, golden(run))
    assert loaded == recorded(golden(run))["loaded"]
    assert loaded["latest"] == "checkpoint-2"


@pytest.mark.slow
def test_a_run_of_today_holds_what_is_recorded(mode: str, run_of_today: Path) -> None:
    assert load_checkpoints(run_of_today) == recorded(golden(mode))["loaded"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FILES)
def test_the_structure_is_written_the_same(mode: str, run_of_today: Path, name: str, step: int) -> None:
    file = Path(f"checkpoint-{step}", name)
    old, new = structure(golden(mode) / file), structure(run_of_today / file)
    # Where the run lay, and figures of compressed bytes, which the next tests look at.
    assert ("anchor" in old) == ("anchor" in new) == (file == Path("checkpoint-2/pytorch_model.bin"))
    bounds: list[list[float]] = [[], []]
    for number, content in enumerate((old, new)):
        content.pop("anchor", None)
        for storage in content["storages"]:
            # Of log-rank1 it is a logarithm, whose last digit is that of the C library.
            bounds[number].append(storage.pop("bound", 0.0))
            del storage["sizes"], storage["crc32"]
    assert new == old
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FILES)
def test_the_payload_is_written_in_the_same_bytes(mode: str, run_of_today: Path, name: str, step: int) -> None:
    directory = golden(mode)
    version = recorded(directory)["zstd"]
    if version != ZSTD_VERSION:
        pytest.skip(f"zstd {version} wrote the file, and zstd {ZSTD_VERSION} may write other bytes that mean the same")
    file = Path(f"checkpoint-{step}", name)
    old, new = torch_members(directory / file), torch_members(run_of_today / file)
    assert [new.keys(), new["data/0"]] == [old.keys(), old["data/0"]]


@every_run
def test_the_pickles_call_one_function_of_the_package_by_a_name_without_a_module(run: str) -> None:
    called = [called_by(golden(run) / f"checkpoint-{step}" / name) for step in STEPS for name in FILES]
    assert called == [{"hf_trainweights decode_file"}] * 4


@every_run
def test_full_and_delta_files_use_the_codecs_of_their_mode(run: str) -> None:
    codecs = {
        "lossless": {"raw", "planes", "planes-delta", "planes-magnitudes"},
        "lossless-rank1": {"raw", "planes", "planes-delta", "planes-rank1"},
        "near-lossless": {"raw", "planes", "planes-delta", "delta-uniform", "update-space", "log-rank1"},
        "compact": {"raw", "planes", "planes-delta", "delta-uniform", "update-space", "log-rank1"},
    }
    files = [golden(run) / f"checkpoint-{step}" / name for step in STEPS for name in FILES]
    assert {storage["codec"] for file in files for storage in structure(file)["storages"]} == codecs[run]
