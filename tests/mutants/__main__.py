"""Puts faults into the package, one at a time, and says which test finds each: `python -m tests.mutants`.

The faults are drawn by a seed, equally many for each room. A fault is tried with those tests of its room that run its
line, as a run without a fault has shown, those of its module, and those that run modules in other processes, of which
such a run shows nothing; and where the default run of the tests finds nothing, with the cases that only the exhaustive
run has. What was tried is kept in `build/mutants`, under a digest of the package, so that a run that was interrupted
goes on, and later runs try only what no test has found.

Exit code 1, if a fault is found by no test and its row in the result file has no `equal`: why the program is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS), str(ROOT)]  # as pytest has it

import conftest  # noqa: E402, F401  (settings, before what they set is imported)
import peft  # noqa: E402, F401  (and what tests import, once for all)
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.trainer  # noqa: E402, F401
from long_runs import parser_of, write_record  # noqa: E402
from mutants.faults import Fault, faults  # noqa: E402
from mutants.trial import IMPORT, Chosen, Line, Reach, function_of, run  # noqa: E402

PACKAGE = ROOT / "hf_trainweights"
RESULT = ROOT / "benchmarks" / "results" / "mutants.json"
# Processor time of one test, beside ten times what it takes without a fault; then it is in an endless loop.
SECONDS = 20


@dataclass(frozen=True)
class Room:
    """Modules of the package, as patterns; the tests that are theirs; and those that run them in other processes."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    tests_in_processes: tuple[str, ...] = ()


ROOMS = {
    "formats": Room(("formats/*.py",), ("formats",)),
    "files": Room(("files/*.py",), ("files",)),
    "kernels": Room(("kernels/*.py",), ("kernels",), ("kernels/test_arguments.py", "kernels/test_triton_products.py")),
    "tensor": Room(
        ("tensor/*.py", "tensor/distributed/*.py"),
        ("tensor",),
        ("tensor/distributed/test_agreement.py", "tensor/distributed/test_sharding.py"),
    ),
    "models/saving": Room(
        tuple(f"models/saving/{name}.py" for name in ("saving", "saved_tensors")),
        (
            *(
                f"models/saving/test_{name}.py"
                for name in ("card", "saving", "guards", "interrupted_save", "single_file")
            ),
            *("models/test_quantizer.py", "models/test_tensor_parallel.py", "hub"),
        ),
        ("models/test_tensor_parallel.py",),
    ),
    "checkpoint/codecs": Room(("checkpoint/codecs/*.py",), ("checkpoint/codecs",)),
}


@dataclass(frozen=True)
class Mutant:
    """A fault of one module, whose path begins at the package, and the room that it belongs to."""

    room: str
    module: str
    fault: Fault

    @property
    def path(self) -> Path:
        return PACKAGE / self.module

    @property
    def mirror(self) -> str:
        """The tests of the module itself."""
        folder, _, name = f"tests/{self.module}".rpartition("/")
        return f"{folder}/test_{name}::"

    def dotted(self) -> str:
        """Return the name that the module is imported by."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def row(self) -> dict[str, Any]:
        """Return what the result file says of the fault itself."""
        before, after = self.fault.lines(self.path.read_text(encoding="utf-8"))
        place = {"room": self.room, "module": self.module, "function": self.fault.function, "line": self.fault.line}
        return {**place, "before": before, "after": after}


def main() -> int:
    """Try all faults, write the result file, and return the exit code."""
    options = _options()
    mutants = [each for room in options.rooms for each in draw(room, options.faults, options.seed)]
    folder = ROOT / "build" / "mutants" / _digest()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_try_or_recall(mutant, folder) for mutant in mutants]
    write_record(options.record, options, rows)
    unread = [row for row in rows if row["found_by"] is None and "equal" not in row]
    for row in unread:
        print(json.dumps(row, indent=1))
    return int(bool(unread))


def _options() -> argparse.Namespace:
    parser = parser_of("mutants", __doc__, "rooms", ROOMS)
    parser.add_argument("--faults", type=int, default=26, help="of each room")
    parser.set_defaults(seed=1)
    return parser.parse_args()


def draw(room: str, count: int, seed: int) -> list[Mutant]:
    """Return some faults of a room: for the same seed the same ones, whatever else changes in the package."""
    modules = sorted(path for pattern in ROOMS[room].modules for path in PACKAGE.glob(pattern))
    lots: dict[tuple[str, ...], list[Mutant]] = {}
    for path in modules:
        source = path.read_text(encoding="utf-8")
        for fault in faults(source):
            mutant = Mutant(room, path.relative_to(PACKAGE).as_posix(), fault)
            lots.setdefault((mutant.module, fault.function, *fault.lines(source)), []).append(mutant)
    drawn = sorted(lots, key=lambda lot: hashlib.sha256(f"{seed} {lot}".encode()).digest())[:count]
    return sorted((lots[lot][0] for lot in drawn), key=lambda mutant: (mutant.module, mutant.fault.start))


def _digest() -> str:
    """Return a digest of the package's Python."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _try_or_recall(mutant: Mutant, folder: Path) -> dict[str, Any]:
    """Return the row of a mutant; it is tried unless a test is known to find it, or it is known to be equal."""
    row = mutant.row()
    name = hashlib.sha256(json.dumps(row).encode()).hexdigest()[:16]
    kept = folder / f"{name}.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"found_by": None}
    reason = _known_reasons().get(_key(row))
    if found["found_by"] is None and not (kept.exists() and reason):
        found = _try(mutant, folder)
        kept.write_text(json.dumps(found), encoding="utf-8")
        print(f"{mutant.module}:{row['line']}: {row['before']} -> {row['after']}: {found}", flush=True)
    return row | found | ({"equal": reason} if reason and found["found_by"] is None else {})


def _known_reasons() -> dict[tuple[str, ...], str]:
    """Return why faults make an equal program, as the result file has it."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    return {_key(row): row["equal"] for row in rows if "equal" in row}


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what a fault keeps when lines above it come and go."""
    return tuple(row[name] for name in ("module", "function", "before", "after"))


def _try(mutant: Mutant, folder: Path) -> dict[str, Any]:
    """Return which test finds a mutant, in which run, and how that ended: its exit code, or the signal if negative."""
    faulty = (mutant.dotted(), mutant.fault.apply(mutant.path.read_text(encoding="utf-8")))
    reached = _reached(mutant.room, folder)
    seconds: dict[str, float] = reached["seconds"]
    lines = range(mutant.fault.line, mutant.fault.last_line + 1)
    reaching = {test for line in lines for test in reached["tests"].get(f"{mutant.module}:{line}", ())}
    always = (mutant.mirror, *(f"tests/{path}::" for path in ROOMS[mutant.room].tests_in_processes))
    chosen = {test for test in seconds if IMPORT in reaching or test in reaching or test.startswith(always)}
    order = sorted(chosen - {*reached["failed"]}, key=lambda test: (not test.startswith(mutant.mirror), seconds[test]))
    left_out = {
        "not exhaustive": seconds.keys() - {*order},
        "exhaustive": {*map(function_of, seconds)} - {*map(function_of, order)},
    }
    # Tests that were added since then are tried too if they are in the file of the module.
    named = {test.partition("::")[0] for test in (*order, mutant.mirror)}
    files = sorted(name for name in named if (ROOT / name).exists())
    limit = SECONDS + int(10 * max((seconds[test] for test in order), default=0))
    running = folder / "running"
    for marks in left_out:
        running.write_text(IMPORT, encoding="utf-8")
        plugin = Chosen(order, left_out[marks], running, limit)
        code = run(["-x", "-m", marks, *files], plugin, ROOT, folder / "log", faulty)
        if code not in (0, 5):  # all have passed, or there were none
            return {"found_by": running.read_text(encoding="utf-8"), "run": marks, "code": code}
    return {"found_by": None}


def _paths(room: str) -> list[str]:
    return [f"tests/{path}" for path in ROOMS[room].tests]


def _reached(room: str, folder: Path) -> dict[str, Any]:
    """Return of the tests of a room which fail without a fault, how long each takes, and which run a line."""
    kept = folder / f"reached-{room.replace('/', '-')}.json"
    if not kept.exists():
        modules = [path for pattern in ROOMS[room].modules for path in PACKAGE.glob(pattern)]
        lines = {
            (str(path), line)
            for path in modules
            for fault in faults(path.read_text(encoding="utf-8"))
            for line in range(fault.line, fault.last_line + 1)
        }

        def write(failed: set[str], seconds: dict[str, float], tests: dict[Line, set[str]]) -> None:
            named = {f"{Path(file).relative_to(PACKAGE)}:{line}": sorted(ran) for (file, line), ran in tests.items()}
            kept.write_text(json.dumps({"failed": sorted(failed), "seconds": seconds, "tests": named}))

        code = run(["-m", "not exhaustive", *_paths(room)], Reach(lines, write), ROOT, folder / "log")
        if not kept.exists():
            raise RuntimeError(f"the tests of {room} ended with {code}: see {folder / 'log'}")
    return json.loads(kept.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
