"""`trainweights checkpoint`: exit codes, what is printed where, and that each command does what it says."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import command_line
import pytest
import torch
from command_line import fork_command, unwrapped
from forks import exit_code_of, fork
from helpers import flip_a_bit
from safetensors.torch import save_file
from transformers import BertConfig, BertModel
from trees import trained

from hf_trainweights import checkpoint
from hf_trainweights.checkpoint.directory import compress_directory, latest
from hf_trainweights.checkpoint.loop.training_state import build_checkpoint, save_checkpoint
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.disk import claim_file

STEPS = (100, 200)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints, as a Trainer leaves them."""
    root = tmp_path_factory.mktemp("plain")
    for number, step in enumerate(STEPS, 1):
        path = root / f"checkpoint-{step}"
        path.mkdir()
        model, optimizer, _ = trained("AdamW", steps=3 * number)
        save_file(
            {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path / "model.safetensors"
        )
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": number / 2}))
    return root


@pytest.fixture
def run_directory(plain_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain_run, tmp_path / "run")


@pytest.fixture
def small_run(run_directory: Path) -> Path:
    for step in STEPS:
        compress_directory(run_directory / f"checkpoint-{step}", mode="near-lossless", metrics={"loss": float("nan")})
    return run_directory


run, run_json = (partial(call, "checkpoint") for call in (command_line.run, command_line.run_json))


def tensors_of(path: Path) -> list[torch.Tensor]:
    state = torch.load(path / "optimizer.pt", weights_only=True)["state"]
    weights = torch.load(path / "pytorch_model.bin", weights_only=True)
    return [*weights.values(), *(tensor for each in state.values() for tensor in each.values())]


def test_the_trainweights_command_has_it() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("ls", "inspect", "verify", "diff", "restore", "compress", "gc"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "diff", "restore", "compress", "gc"])
def test_a_missing_path_is_a_usage_error(command: str, tmp_path: Path) -> None:
    missing = [tmp_path / "missing"] * (2 if command == "diff" else 1)
    result = run(command, *missing)
    assert result.exit_code == 2
    assert "does not exist" in unwrapped(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["ls", "verify", "restore", "compress"])
def test_a_directory_that_is_no_checkpoint_is_an_error_in_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    result = run(command, tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {tmp_path}: expected a checkpoint, or a directory of checkpoint-<step>")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode", "best"), "lossless, near-lossless"),
        (("--rule", "weight"), "SELECTOR=CHOICE"),
        (("--rule", 'weight={"codec"}'), "not JSON"),
        (("--rule", "exp_avg_sq=int8"), "rounds small"),
        (("--rule", "weigth=raw"), "a selector"),
    ],
)
def test_a_wrong_choice_is_a_usage_error_and_changes_nothing(
    arguments: tuple[str, ...], message: str, run_directory: Path
) -> None:
    result = run("compress", run_directory, *arguments)
    assert result.exit_code == 2
    assert message in unwrapped(result.stderr)
    assert not list(run_directory.rglob(MANIFEST_NAME))


@pytest.mark.slow
def test_compress_makes_a_run_small_and_restore_brings_the_same_values_back(run_directory: Path) -> None:
    last = run_directory / "checkpoint-200"
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    rows = run_json("compress", run_directory)
    assert [Path(row["path"]).name for row in rows] == ["checkpoint-100", "checkpoint-200"]
    assert all(row["bytes_after"] < row["bytes_before"] for row in rows)
    assert run_json("ls", run_directory)[1]["anchor"] is not None
    small = tensors_of(last)
    run_json("restore", run_directory)
    assert all(map(torch.equal, small, tensors_of(last)))
    restored = torch.load(last / "optimizer.pt", weights_only=True)
    assert torch.equal(restored["state"][0]["exp_avg"], optimizer["state"][0]["exp_avg"])
    assert {row["mode"] for row in run_json("ls", run_directory)} == {"plain"}


@pytest.mark.slow
def test_no_command_calls_rounded_weights_exact(run_directory: Path) -> None:
    run_json("compress", run_directory, "--mode", "compact")
    rows = run_json("compress", run_directory, "--mode", "lossless")
    assert [row["shown_mode"] for row in rows] == ["compact", "compact"]
    assert {row["mode"] for row in run_json("ls", run_directory)} == {"compact"}
    assert run("inspect", run_directory / "checkpoint-200").stdout.startswith("checkpoint-200: compact, step 200")
    assert {row["shown_mode"][:22] for row in run_json("restore", run_directory)[1:]} == {"plain (weights off by "}
    again = run_json("compress", run_directory / "checkpoint-200")[0]["shown_mode"]
    assert again.startswith("lossless (weights off by up to ")
    (row,) = run_json("ls", run_directory / "checkpoint-200")
    assert (row["mode"], row["shown_mode"]) == ("lossless", again)
    assert again == f"lossless (weights off by up to {row['rounding']['weight']:.1e})"
    assert run("inspect", run_directory / "checkpoint-200").stdout.startswith(f"checkpoint-200: {again}, step 200")
    assert again in run("ls", run_directory / "checkpoint-200").stdout


@pytest.mark.slow
def test_the_ratio_counts_an_anchor_on_neither_side(run_directory: Path) -> None:
    run_json("compress", run_directory / "checkpoint-100")
    last = run_directory / "checkpoint-200"
    (fresh,) = run_json("compress", last)
    assert len(list(last.glob("*.anchor"))) == 1
    assert fresh["bytes_after"] == sum(file.stat().st_size for file in last.iterdir() if file.suffix != ".anchor")
    (again,) = run_json("compress", last)
    assert again["bytes_before"] == again["bytes_after"] == fresh["bytes_after"]


def test_rules_are_read_as_names_and_as_json(run_directory: Path) -> None:
    rules = ("--rule", "re:.*embed.*=raw", "--rule", 'weight={"codec": "delta-uniform", "bound": 1e-3}')
    run_json("compress", run_directory / "checkpoint-200", *rules)
    reports = run_json("inspect", run_directory / "checkpoint-200")["files"]["pytorch_model.bin"]["report"]["tensors"]
    codecs = {report["name"]: (report["codec"], report["bound"]) for report in reports}
    assert codecs["embed.weight"] == ("raw", None)
    assert codecs["head.weight"][0] == "delta-uniform"
    assert 0 < codecs["head.weight"][1] <= 1e-3


@pytest.mark.slow
def test_the_model_in_config_json_tells_weights_from_buffers(tmp_path: Path) -> None:
    """The pooler has no state and the shape of the others: the optimizer alone would leave all of these in doubt."""
    config = BertConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    model = BertModel(config)
    trained_parameters = [each for name, each in model.named_parameters() if "pooler" not in name]
    optimizer = torch.optim.AdamW(trained_parameters)
    for step in STEPS:
        for parameter in trained_parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        path = tmp_path / f"checkpoint-{step}"
        model.save_pretrained(path)
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
    run_json("compress", tmp_path, "--mode", "compact")
    report = run_json("inspect", path)["files"]["pytorch_model.bin"]["report"]["tensors"]
    assert {each["role"] for each in report} == {"weight"}
    codecs = {each["name"]: each["codec"] for each in report}
    assert codecs["encoder.layer.0.attention.self.query.weight"] == "delta-uniform"


def test_warnings_are_lines_on_stderr(run_directory: Path) -> None:
    path = run_directory / "checkpoint-100"
    torch.save({"tensor": torch.zeros(1 << 15), "value": range(3)}, path / "odd.pt")
    result = run("compress", path)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: {path / 'odd.pt'} stays as it is")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_anchor_counts_once_in_the_sizes(small_run: Path) -> None:
    rows = run_json("ls", small_run)
    inodes = {path.stat().st_ino: path.stat().st_size for path in small_run.rglob("*") if path.is_file()}
    assert sum(row["disk_bytes"] for row in rows) == sum(inodes.values())
    assert [(row["mode"], row["step"], row["problem"]) for row in rows] == [("near-lossless", n, None) for n in STEPS]


@pytest.mark.slow
def test_ls_names_a_damaged_manifest_and_lists_the_rest(small_run: Path) -> None:
    flip_a_bit(small_run / "checkpoint-100" / MANIFEST_NAME)
    result = run("ls", small_run)
    assert result.exit_code == 1
    assert "damaged" in result.stdout
    assert "checkpoint-200  near-lossless" in result.stdout
    assert result.stderr.startswith(f"problem: {small_run / 'checkpoint-100'}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin", "trainer_state.json", MANIFEST_NAME])
def test_verify_finds_a_flipped_bit_and_exits_with_1(name: str, small_run: Path) -> None:
    assert run("verify", small_run).exit_code == 0
    flip_a_bit(small_run / "checkpoint-200" / name)
    rows = run_json("verify", small_run, exit_code=1)
    assert [(row["ok"], row["state"]) for row in rows] == [(True, "intact"), (False, "damaged")]
    assert list(rows[1]["problems"]) == [name]
    assert f"checkpoint-200/{name}: " in run("verify", small_run).stderr


def test_verify_tells_plain_and_incomplete_directories_apart(run_directory: Path) -> None:
    (run_directory / "checkpoint-100" / "trainer_state.json").unlink()
    rows = run_json("verify", run_directory, exit_code=1)
    assert [row["state"] for row in rows] == ["damaged", "unverified"]


def test_verify_mentions_foreign_files_and_exits_with_0(small_run: Path) -> None:
    (small_run / "checkpoint-100" / "notes.txt").touch()
    result = run("verify", small_run)
    assert result.exit_code == 0
    assert "not used: notes.txt" in result.stdout


@pytest.mark.slow
def test_inspect_prints_every_tensor_if_asked(small_run: Path) -> None:
    for options in ((), ("--tensors",)):
        result = run("inspect", small_run / "checkpoint-200", *options)
        assert result.exit_code == 0
        assert "delta-uniform" in result.stdout
    assert "norm.running_var" in result.stdout


def test_inspect_of_a_plain_directory_or_of_a_run_is_an_error_that_says_what_to_do(run_directory: Path) -> None:
    plain = run_directory / "checkpoint-100"
    result = run("inspect", plain)
    assert (result.exit_code, result.stdout) == (1, "")
    expected = f"error: {plain}: expected one small checkpoint, found no {MANIFEST_NAME}. See `trainweights inspect"
    assert result.stderr.startswith(expected)
    result = run("inspect", run_directory)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "expected one small checkpoint, found a run of 2. Name one, such as " in result.stderr
    assert f"{run_directory / 'checkpoint-200'}, or list all by `trainweights checkpoint ls {run_directory}`.\n" in (
        result.stderr
    )


def everything(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return name, inode, time of modification and content of all files."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("what", [".", "checkpoint-200"])
@pytest.mark.parametrize("mode", ["lossless", "compact"])
def test_a_dry_run_says_what_compress_would_do_and_changes_nothing(what: str, mode: str, run_directory: Path) -> None:
    if what != ".":
        run_json("compress", run_directory / "checkpoint-100", "--mode", mode)
    before = everything(run_directory)
    tried = run_json("compress", run_directory / what, "--mode", mode, "--dry-run")
    assert everything(run_directory) == before
    assert [path.name for path in run_directory.iterdir() if not path.name.startswith("checkpoint-")] == []
    done = run_json("compress", run_directory / what, "--mode", mode)
    for first, second in zip(tried, done, strict=True):
        assert first["bytes_after"] == pytest.approx(second["bytes_after"], abs=64)  # dates in manifests
        assert {**first, "bytes_after": 0} == {**second, "bytes_after": 0}


@pytest.mark.slow
def test_compress_prints_what_it_rounded(run_directory: Path) -> None:
    result = run("compress", run_directory, "--mode", "compact", "--dry-run")
    rounding = [row["rounding"] for row in run_json("compress", run_directory, "--mode", "compact")]
    assert f"weight {max(each.get('weight', 0) for each in rounding):.1e}" in result.stdout
    assert "exp_avg_sq" in result.stdout
    assert result.stderr.splitlines() == [
        "compressing checkpoint-100 (1 of 2)",
        "compressing checkpoint-200 (2 of 2)",
        "nothing was changed: this was a dry run",
    ]


@pytest.mark.slow
def test_compress_says_what_would_stay_as_it_is(run_directory: Path) -> None:
    run("compress", run_directory / "checkpoint-100")
    lines = run("compress", run_directory, "--dry-run").stdout.splitlines()
    assert "would be" in lines[0]
    assert ["unchanged" in line for line in lines[2:]] == [True, False]
    assert [row["changed"] for row in run_json("compress", run_directory, "--dry-run")] == [False, True]


@pytest.mark.parametrize("mode", ["lossless", "compact"])
def test_rounded_files_are_unchanged_and_called_by_the_mode_that_rounded_them(mode: str, run_directory: Path) -> None:
    run_json("compress", run_directory, "--mode", "near-lossless")
    before = {row["path"]: row["bytes_after"] for row in run_json("compress", run_directory, "--mode", "near-lossless")}
    for dry_run in (["--dry-run"], []):
        last = run_json("compress", run_directory / "checkpoint-200", "--mode", mode, *dry_run)[0]
        assert (last["mode"], last["changed"]) == ("near-lossless", False)
        assert last["bytes_after"] == pytest.approx(before[last["path"]], abs=64)  # the policy in the manifest
    assert run_json("ls", run_directory / "checkpoint-200")[0]["mode"] == "near-lossless"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "answer", "is_changed"),
    [
        (("--mode", "compact"), "n", False),
        (("--mode", "compact"), "y", True),
        (("--mode", "compact", "--yes"), "", True),
        (("--mode", "lossless"), "", True),
    ],
)
def test_whoever_sits_at_a_terminal_is_asked_before_anything_is_rounded(
    arguments: tuple[str, ...], answer: str, is_changed: bool, run_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text(answer)
    with (tmp_path / "answer").open() as stdin, (tmp_path / "stderr").open("w+") as output:
        child = fork_command(
            *("checkpoint", "compress", run_directory, *arguments),
            stdin=stdin.fileno(),
            stdout=output.fileno(),
            stderr=output.fileno(),
            prepare=lambda: setattr(sys.stdin, "isatty", lambda: True),
        )
        code, said = exit_code_of(child), (tmp_path / "stderr").read_text()
    assert bool(list(run_directory.rglob(MANIFEST_NAME))) == is_changed
    assert code == (0 if is_changed else 1), said
    assert ("compact may round 2 checkpoints in place" in said) == bool(answer)


@pytest.mark.slow
def test_diff_measures_what_the_mode_costs(plain_run: Path, small_run: Path) -> None:
    result = run_json("diff", plain_run / "checkpoint-200", small_run / "checkpoint-200")
    rows = {row["name"]: row for row in result["tensors"]}
    weight = rows["head.weight"]
    reports = run_json("inspect", small_run / "checkpoint-200")["files"]["pytorch_model.bin"]["report"]["tensors"]
    report = next(each for each in reports if each["name"] == "head.weight")
    assert 0 < weight["largest"] <= report["bound"]
    assert (weight["bytes_a"], weight["bytes_b"]) == (report["bytes_in"], report["bytes_out"])
    assert rows["norm.running_mean"]["largest"] == 0
    assert rows["optimizer: state.0.exp_avg"]["relative_l2"] > 0
    assert [row["name"] for row in result["totals"]] == ["all of weights", "all of optimizer"]
    printed = run("diff", plain_run / "checkpoint-200", small_run / "checkpoint-200", "--top", 1).stdout
    assert printed.splitlines()[2].split()[0] == result["tensors"][0]["name"].split()[0]


def test_diff_exits_with_1_where_keys_differ(plain_run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(plain_run / "checkpoint-200", tmp_path / "checkpoint-200")
    (other / "optimizer.pt").unlink()
    result = run("diff", plain_run / "checkpoint-200", other)
    assert result.exit_code == 1
    assert f"problem: optimizer: state.0.step is only in {plain_run / 'checkpoint-200'}\n" in result.stderr


@pytest.mark.slow
def test_gc_removes_what_a_dead_process_left(small_run: Path) -> None:
    assert exit_code_of(fork(lambda: claim_file(small_run / "checkpoint-100"))) == 0
    (garbage,) = (small_run / "checkpoint-100").glob("_trainweights-*")
    living, _ = claim_file(small_run / "checkpoint-100")
    assert run_json("gc", small_run, "--dry-run") == {"removed": [str(garbage)], "dry_run": True}
    assert garbage.exists()
    assert run("gc", small_run).stdout == f"removed {garbage}\n"
    assert (garbage.exists(), living.path.exists()) == (False, True)
    living.release()
    living.path.unlink()
    assert run("gc", small_run).stdout == "Nothing to remove.\n"


def test_what_save_checkpoint_wrote_is_a_checkpoint_under_any_name(tmp_path: Path) -> None:
    model, optimizer, _ = trained("SGD")
    save_checkpoint(build_checkpoint(model, optimizer, step=7), tmp_path / "best")
    assert [row["step"] for row in run_json("ls", tmp_path / "best")] == [7]
    assert run("verify", tmp_path / "best").stdout == f"{tmp_path / 'best'}: intact\n"


@pytest.mark.slow
def test_a_moved_run_is_compared_and_restored(small_run: Path, tmp_path: Path) -> None:
    before = tensors_of(small_run / "checkpoint-200")
    moved = small_run.rename(tmp_path / "moved")
    assert run("diff", moved / "checkpoint-200", moved / "checkpoint-200").exit_code == 0
    assert run("restore", moved).exit_code == 0
    assert all(map(torch.equal, before, tensors_of(moved / "checkpoint-200")))
    assert latest(moved) == str(moved / "checkpoint-200")


def test_an_error_of_the_disk_is_one_line_and_debug_shows_the_traceback(
    small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise CorruptFileError(str(path), "a file", "two\nlines", "Look.")

    monkeypatch.setattr(checkpoint, "restore_directory", refuse)
    result = run("restore", small_run)
    assert (result.exit_code, result.stdout) == (1, "")
    error = f"error: {small_run / 'checkpoint-100'}: expected a file, found two lines. Look."
    assert result.stderr.splitlines() == ["restoring checkpoint-100 (1 of 2)", error]
    with pytest.raises(CorruptFileError, match="found two\nlines"):
        run("restore", small_run, "--debug")


@pytest.mark.slow
def test_ls_draws_the_run_into_a_file(small_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    result = run("ls", small_run, "--plot", out)
    assert result.exit_code == 0
    assert "checkpoint-200" in result.stdout
    assert f"picture: {out}" in result.stdout
    assert out.read_text(encoding="utf-8").startswith("<svg ")
    assert len(run_json("ls", small_run, "--plot", tmp_path / "again.svg")) == len(STEPS)
    assert (tmp_path / "again.svg").exists()


@pytest.mark.slow
def test_ls_takes_no_other_picture_and_draws_no_single_checkpoint(small_run: Path, tmp_path: Path) -> None:
    wrong = run("ls", small_run, "--plot", tmp_path / "out.png")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "ends in .svg or .html" in unwrapped(wrong.stderr)
    one = run("ls", small_run / "checkpoint-100", "--plot", tmp_path / "out.svg")
    assert one.exit_code == 1
    assert "expected a run" in one.stderr
    assert not any(tmp_path.glob("out.*"))
