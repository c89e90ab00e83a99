"""The rules by which a GPU's kernel is chosen, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.kernels import gpu_tables

# Ways that round x, which formats alone ask for.
ROUNDED = ("integers", "float8")
FEW = {"ROW_TILES": 2, "COLUMN_TILES": 1, "WARPS": 4, "STAGES": 2, "BLOCKS": 2}
RULE: dict[str, Any] = {"way": "few_rows", "tile": FEW, "bits": 4, "groups": True, "rows": 8, "N": 2048}


def write(path: Path, table: Any) -> Path:
    path.write_text(json.dumps(table), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_tables, "FOLDER", tmp_path)
    gpu_tables._measured.cache_clear()
    return tmp_path


@pytest.mark.parametrize("rule", gpu_tables.DEFAULT, ids=str)
def test_a_tile_has_what_its_kernel_takes(rule: gpu_tables.Rule) -> None:
    assert set(rule.tile) == gpu_tables.WAYS[rule.way]
    sizes = [size for name, size in rule.tile.items() if name.startswith("BLOCK_")]
    assert all(size.bit_count() == 1 for size in sizes)
    assert rule.way not in ("tiles", "integers") or min(sizes) >= 16


@pytest.mark.parametrize("path", sorted(gpu_tables.FOLDER.glob("*.json")), ids=str)
def test_measured_tables_are_read(path: Path) -> None:
    assert gpu_tables.read(path)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    ("M", "way"), [(1, "few_rows"), (16, "few_rows"), (17, "tiles"), (512, "tiles"), (513, "dequantize")]
)
def test_without_a_file_the_rules_of_every_gpu_hold(M: int, way: str, groups: bool, bits: int, folder: Path) -> None:
    rules = [
        rule for rule in gpu_tables.rules_for((9, 0), bits, groups, M, 4096) if rule.way not in ("integers", "float8")
    ]
    assert rules[0].way == way
    assert rules[-1].way == "dequantize"


def measured_rules(*product: Any) -> list[gpu_tables.Rule]:
    return [rule for rule in gpu_tables.rules_for((9, 0), *product) if rule.way not in ROUNDED]


def test_a_file_does_not_decide_whether_x_is_rounded(folder: Path) -> None:
    write(folder / "90.json", {"rules": [{"way": "dequantize", "tile": {}}]})
    ways = [rule.way for rule in gpu_tables.rules_for((9, 0), 8, False, 17, 64)]
    assert ways[:2] == ["float8", "integers"]


def test_what_was_measured_comes_first_where_it_holds(folder: Path) -> None:
    write(folder / "90.json", {"gpu": "a GPU", "rules": [RULE, {"way": "dequantize", "tile": {}, "rows": 100}]})
    measured = gpu_tables.Rule("few_rows", FEW, 4, True, 8, 2048)
    assert measured_rules(4, True, 8, 2048)[0] == measured
    others = [(4, True, 9, 2048), (4, True, 8, 2049), (4, False, 8, 2048), (8, True, 8, 2048)]
    for other in others:
        assert measured_rules(*other)[0].way == "dequantize"
    assert measured not in list(gpu_tables.rules_for((8, 0), 4, True, 8, 2048))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "expected an object with a list called rules"),
        ({"rules": {}}, "expected an object with a list called rules"),
        ({"rules": [5]}, "rule 0: expected an object with way and tile"),
        ({"rules": [RULE, {"way": "row"}]}, "rule 1: expected an object with way and tile"),
        ({"rules": [RULE | {"shape": 4}]}, "expected an object with way and tile"),
        ({"rules": [RULE | {"way": "fast"}]}, "expected a way and its tile"),
        ({"rules": [RULE | {"way": ["row"]}]}, "expected a way and its tile"),
        ({"rules": [RULE | {"tile": FEW | {"M": 4}}]}, "expected a way and its tile"),
        ({"rules": [RULE | {"tile": FEW | {"WARPS": 0}}]}, "expected sizes of 1 to 4096"),
        ({"rules": [RULE | {"tile": FEW | {"WARPS": True}}]}, "expected sizes of 1 to 4096"),
        ({"rules": [RULE | {"tile": FEW | {"WARPS": 10**9}}]}, "expected sizes of 1 to 4096"),
        (
            {"rules": [{"way": "row", "tile": {"BLOCK_N": 3, "BLOCK_K": 64, "num_warps": 4}}]},
            "expected sizes of 1 to 4096, powers of two for blocks",
        ),
        ({"rules": [RULE | {"bits": 3}]}, "expected bits of 4 or 8"),
        ({"rules": [RULE | {"groups": 1}]}, "expected bits of 4 or 8, and groups true or false"),
        ({"rules": [RULE | {"rows": 0}]}, "expected positive numbers for rows and N"),
        ({"rules": [RULE | {"N": "2048"}]}, "expected positive numbers for rows and N"),
    ],
)
def test_a_malformed_file_is_refused(table: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=message):
        gpu_tables.read(write(tmp_path / "90.json", table))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_what_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "90.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"90\.json: expected JSON"):
        gpu_tables.read(path)
