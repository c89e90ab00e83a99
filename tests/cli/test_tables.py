"""Tables on narrow terminals and none: names stay whole, numbers give way in the order that is documented."""

from __future__ import annotations

import os
import pty
import struct
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
import torch
from command_line import fork_command, run_without_terminal
from forks import exit_code_of
from safetensors.torch import save_file

from hf_trainweights_cli.tables import Table, shorten

NAMES = ("encoder.layer.0.attention.output.LayerNorm.weight", "head.weight", "[red]encoder:smile:.layer[/red]")


def a_table() -> Table:
    table = Table(("tensor", "format"), right=("L2", "A", "B"), drop=("A", "B", "format"))
    for number, name in enumerate(NAMES):
        table.add_row(name, "int4 g128", f"{number}.1e-02", "65.5 kB", "10.2 kB")
    table.add_section()
    table.add_row("total", "", "0", "1 MB", "1 MB")
    return table


@pytest.mark.parametrize("width", [None, 200, 90, 80, 72, 60, 50, 40, 20])
def test_lines_fit_and_names_that_fit_are_whole(width: int | None) -> None:
    lines = a_table().lines(width)
    assert max(map(len, lines)) <= (width or 1000)
    for name in NAMES:
        assert any(line.startswith(shorten(name, width or 1000)) for line in lines)
        if width is None or len(name) <= width:
            assert any(line.startswith(name) for line in lines)


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (None, ["tensor", "format", "L2", "A", "B"]),
        (90, ["tensor", "format", "L2", "A", "B"]),
        (80, ["tensor", "format", "L2", "B"]),
        (71, ["tensor", "format", "L2"]),
        (60, ["tensor", "L2"]),
    ],
)
def test_columns_are_left_out_in_order(width: int | None, heads: list[str]) -> None:
    assert a_table().lines(width)[0].split() == heads


def test_where_even_one_number_does_not_fit_beside_the_names_it_stands_below() -> None:
    assert a_table().lines(50)[:2] == [NAMES[0], "  format int4 g128  L2 0.1e-02  B 10.2 kB"]
    assert a_table().lines(30)[1] == "  format int4 g128  L2 0.1e-02"
    assert a_table().lines(20)[1] == "  L2 0.1e-02"


def test_labels_fold_between_words_before_columns_are_left_out() -> None:
    table = Table(("format",), right=("before", "after"), drop=("before",), labels=("format",))
    table.add_row("float: not the weight of a linear layer", "100.0 kB", "50.0 kB")
    assert table.lines(None)[2].split("  ")[0] == "float: not the weight of a linear layer"
    folded = table.lines(44)
    assert folded[0].split() == ["format", "before", "after"]
    assert len(folded) == 4
    assert "".join(folded[2:]).count("linear") == 1


def test_a_name_longer_than_the_terminal_loses_its_middle() -> None:
    assert shorten("encoder.layer.0.weight", 22) == "encoder.layer.0.weight"
    assert shorten("encoder.layer.0.weight", 21) == "encoder.l....0.weight"
    assert [len(shorten("x" * 50, width)) for width in (49, 20, 5)] == [49, 20, 5]


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("files")
    generator = torch.Generator().manual_seed(0)
    names = [f"encoder.layer.{number}.attention.self.query.weight" for number in range(100)]
    for file in ("a", "b"):
        save_file({name: torch.randn(3, generator=generator) for name in names}, root / f"{file}.safetensors")
    return [str(root / "a.safetensors"), str(root / "b.safetensors")]


@pytest.mark.slow
def test_piped_output_has_one_line_for_each_tensor_with_its_whole_name(
    two_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # COLUMNS, which some shells export, is for terminals.
    monkeypatch.setenv("COLUMNS", "40")
    code, out, errors = run_without_terminal(tmp_path, "diff", *two_files)
    assert (code, errors) == (0, "")
    lines = out.splitlines()
    rows = [line for line in lines if "layer.7.attention.self.query.weight" in line]
    assert [len(row.split()) for row in rows] == [8]
    assert [line for line in lines if line != line.rstrip()] == []


def test_who_stops_reading_hears_no_complaint(two_files: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(os.devnull) as nothing, (tmp_path / "errors").open("wb") as errors:
        streams = {"stdin": nothing.fileno(), "stdout": writer, "stderr": errors.fileno()}
        child = fork_command("inspect", two_files[0], "--tensors", **streams)
        os.close(writer)
        assert exit_code_of(child) == 141
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("width", [120, 80, 50])
def test_on_a_terminal_lines_fit(
    width: int, two_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    with (tmp_path / "stderr").open("wb") as stderr:
        arguments = ("diff", *two_files, "--top", "3")
        child = fork_command(*arguments, stdin=follower, stdout=follower, stderr=stderr.fileno())
        os.close(follower)
        shown = b""
        try:
            while piece := os.read(leader, 4096):
                shown += piece
        except OSError:  # Linux: the other end is closed
            pass
        os.close(leader)
    assert exit_code_of(child) == 0
    lines = shown.decode().splitlines()
    table = lines[: next(index for index, line in enumerate(lines) if "are equal" in line)]
    assert max(map(len, table)) <= width
    assert sum(line.startswith("encoder.layer.") and ".query.weight" in line for line in table) == 3
