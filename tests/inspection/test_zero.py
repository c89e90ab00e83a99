"""Checkpoints of DeepSpeed are listed and compared, plain and small, though nothing of DeepSpeed is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint.zero.zero_files import GROUPS, in_trainer, parameters, write_zero
from typer.testing import CliRunner

from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.inspection.stored_tensors import find_parts, read_part, unsafe_calls
from hf_trainweights_cli.main import app

RANKS = 2


@pytest.mark.parametrize("is_small", [False, True])
def test_weights_have_their_names_and_partitions_those_of_their_files(tmp_path: Path, is_small: bool) -> None:
    tag = write_zero(tmp_path / "step-2")
    if is_small:
        compress_directory(tag, mode="near-lossless")
    parts = {part: read_part(files, part) for part, files in find_parts(tag).items()}
    weights = {name: stored.values() for name, stored in parts["weights"].items()}
    expected = {name: values["weight"] for name, values in parameters(GROUPS, 2).items()}
    assert weights.keys() == expected.keys() | {"positions"}
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name].float(), weight, atol=1e-2, rtol=1e-2)
    files = {path.name for path in find_parts(tag)["optimizer"]}
    assert {name.split(": ")[1] for name in parts["optimizer"]} == files
    assert len(files) == RANKS
    assert all(unsafe_calls(path) == () for paths in find_parts(tag).values() for path in paths)


@pytest.mark.parametrize("stage", [2, 3])
def test_stored_bytes_are_those_of_all_pieces(tmp_path: Path, stage: int) -> None:
    checkpoint = in_trainer(tmp_path, 2, stage)
    manifest = compress_directory(checkpoint, mode="near-lossless")
    rows = [row for entry in manifest.files.values() for row in entry.report.get("tensors", ())]
    listed = read_part(find_parts(checkpoint)["optimizer"], "optimizer", values=False)
    listed_bytes = sum(stored.stored_bytes or 0 for stored in listed.values())
    assert listed_bytes == sum(row["bytes_out"] for row in rows if "optimizer_state_dict" in row["path"])
    assert all(stored.tensor.is_meta for stored in listed.values())
    assert ("weights" in find_parts(checkpoint)) == (stage == 2)


def test_the_command_line_lists_a_tag_and_compares_it_with_a_plain_one(tmp_path: Path) -> None:
    plain, small = (write_zero(tmp_path / name) for name in ("plain", "small"))
    compress_directory(small)
    for path in (plain, small):
        listed = CliRunner().invoke(app, ["inspect", str(path)], catch_exceptions=False)
        assert listed.exit_code == 0
        assert "single_partition_of_fp32_groups.0" in listed.output
        assert "zip member" not in listed.output
    compared = CliRunner().invoke(app, ["checkpoint", "diff", str(plain), str(small)], catch_exceptions=False)
    assert compared.exit_code == 0
