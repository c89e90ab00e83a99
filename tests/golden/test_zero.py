"""Runs of two checkpoints of ZeRO: the weights of each rank in the second are differences to those in the first.

Beside the tag of ZeRO 2 lies the model's own file, which a Trainer writes. ZeRO 3 has frozen weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.zero.zero_files import Shapes, Values, in_trainer
from golden.files import called_by, golden_directory, integers, recorded, torch_members
from golden.reader import AFresh, load_checkpoints
from golden.test_checkpoints import EARLIER, ZSTD_VERSION, structure
from safetensors.torch import save_file

from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.manifest import Manifest, read_manifest
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.run.file_checks import anchor_problem

# Ranks cut the matrix within a row, and the last slice ends in padding. The whole rows of each rank are enough elements
# for a lossy mode to round.
GROUPS: tuple[Shapes, ...] = ({"linear.weight": (131, 65)},)
RUNS = ((2, "lossless"), (3, "near-lossless"))
ALL_RUNS = (*RUNS, *((2, mode) for mode in EARLIER))
STEPS = (2, 4)


def values(groups: tuple[Shapes, ...], step: int) -> Values:
    """Return weights and moments of which most are zeros, so that files are small; second moments are powers of two."""
    found: Values = {}
    for seed, (name, shape) in enumerate((item for group in groups for item in group.items()), 1):
        mask = integers(*shape, seed=6, count=4) == 0
        update = (step // 2 - 1) * integers(*shape, seed=seed + 4) / 128
        squares = torch.ldexp(torch.ones(shape), torch.arange(shape[-1]) % 4 - 20 - step)
        found[name] = {
            "weight": (integers(*shape, seed=seed, count=1024) / 512 + update) * mask,
            "exp_avg": integers(*shape, seed=2 * seed) / 2**13 * mask,
            "exp_avg_sq": squares * mask,
        }
    return found


def write(run: Path, stage: int, mode: str) -> None:
    sparse = integers(64, 64, seed=6, count=4) == 0
    frozen = {"base.weight": (integers(64, 64, seed=3) * sparse).bfloat16()} if stage == 3 else None
    for step in STEPS:
        path = in_trainer(run, step, stage, groups=GROUPS, values_of=values, frozen=frozen)
        if stage == 2:
            model = torch.load(path / f"global_step{step}" / "mp_rank_00_model_states.pt")["module"]
            save_file({name: tensor.clone() for name, tensor in model.items()}, path / "model.safetensors")
        compress_directory(path, mode=mode)


def load_digests(run: Path) -> dict[str, Any]:
    """Return a digest of what each file holds, and which checkpoint is the latest."""
    loaded = load_checkpoints(run)
    latest = loaded.pop("latest")
    contents = {name: json.dumps(content).encode() for name, content in loaded.items()}
    return {"latest": latest} | {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def golden(stage: int, mode: str) -> Path:
    return golden_directory(
        f"zero/{stage}-{mode}",
        lambda directory: write(directory, stage, mode),
        lambda directory: {"zstd": ZSTD_VERSION, "loaded": load_digests(directory)},
    )


def checkpoints(run: Path) -> list[Path]:
    return [run / f"checkpoint-{step}" for step in STEPS]


def encoded_files(checkpoint: Path) -> dict[str, Path]:
    """Return the encoded files by a name that says nothing of where the run lay, as the digests of anchors do."""
    manifest = read_manifest(checkpoint)
    tag = checkpoint / f"global_step{manifest.step}"
    files = {name: checkpoint / name for name in manifest.files if name.endswith((".pt", ".bin"))}
    anchors = {f"anchor of {name}": tag / f"{record['sha256']}.anchor" for name, record in records(manifest).items()}
    return {**files, **anchors}


def records(manifest: Manifest) -> dict[str, Any]:
    return manifest.sharded["zero_anchors"]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the golden run and one of today."""
    stage, mode = request.param
    run = tmp_path_factory.mktemp("run")
    write(run, stage, mode)
    return golden(stage, mode), run


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mode"), ALL_RUNS)
def test_a_fresh_process_loads_what_is_recorded(stage: int, mode: str, afresh: AFresh) -> None:
    run = golden(stage, mode)
    assert afresh(load_digests, run) == recorded(run)["loaded"]


@pytest.mark.parametrize(("stage", "mode"), ALL_RUNS)
def test_earlier_checkpoints_verify(stage: int, mode: str) -> None:
    for checkpoint in checkpoints(golden(stage, mode)):
        assert verify_checkpoint(checkpoint).ok
        assert all(anchor_problem(file) is None for file in encoded_files(checkpoint).values())


@pytest.mark.slow
def test_a_run_of_today_holds_what_is_recorded(runs: tuple[Path, Path]) -> None:
    old, new = runs
    assert load_digests(new) == recorded(old)["loaded"]


def test_structures_and_payloads_are_written_the_same(runs: tuple[Path, Path]) -> None:
    version = recorded(runs[0])["zstd"]
    for pair in zip(*map(checkpoints, runs), strict=True):
        old, new = map(encoded_files, pair)
        assert new.keys() == old.keys()
        for name in old:
            structures, bounds = [structure(files[name]) for files in (old, new)], [[], []]
            for each, of_file in zip(structures, bounds, strict=True):
                each["anchor"] = "anchor" in each  # a path and digests, which depend on where the run lay
                for storage in each["storages"]:
                    # The bound of log-rank1 is a logarithm, whose last digit is that of the C library.
                    of_file.append(storage.pop("bound", 0.0))
                    del storage["sizes"], storage["crc32"]
            assert structures[0] == structures[1], name
            assert bounds[1] == pytest.approx(bounds[0], rel=1e-6)
            if version == ZSTD_VERSION:  # another one may write other bytes that mean the same
                payloads = [torch_members(files[name])["data/0"] for files in (old, new)]
                assert payloads[0] == payloads[1], name


def test_manifests_are_written_the_same(runs: tuple[Path, Path]) -> None:
    # On where the run lay, on the version of zstd, and on the last digit of sums.
    depends = {"sha256", "first_bits", "last_bits", "delta_rms"}
    for old, new in zip(*([read_manifest(path) for path in checkpoints(run)] for run in runs), strict=True):
        assert (new.mode, new.step, new.metadata["optimizer"]) == (old.mode, old.step, old.metadata["optimizer"])
        names = [sorted(name for name in manifest.files if not name.endswith(".anchor")) for manifest in (old, new)]
        assert names[0] == names[1]
        found = [
            {
                name: {key: value for key, value in record.items() if key not in depends}
                for name, record in all_of.items()
            }
            for all_of in (records(old), records(new))
        ]
        assert found[0] == found[1]


@pytest.mark.parametrize(("stage", "mode"), ALL_RUNS)
def test_files_use_the_codecs_of_their_mode_and_call_one_function(stage: int, mode: str) -> None:
    files = [file for checkpoint in checkpoints(golden(stage, mode)) for file in encoded_files(checkpoint).values()]
    codecs = {storage["codec"] for file in files for storage in structure(file)["storages"]}
    assert ({"delta-uniform", "update-space", "log-rank1"} <= codecs) == (mode in LOSSY_MODES)
    assert {"planes", "planes-delta"} <= codecs
    assert {name for file in files for name in called_by(file)} == {"hf_trainweights decode_file"}
