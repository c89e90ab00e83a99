"""All that one GPU is asked in eight minutes, in the order in which it would be missed.

`python -m benchmarks.gpu.protocol FOLDER` runs in a checkout on a machine with an NVIDIA GPU. The host's cores compile
first, while the GPU has nothing to wait for. Then kernels are checked, tuned and tested, models measured, and at last
those of other quantizers, if they are installed. Each step has a limit and writes its results as it goes, and a step
that fails does not end the others. `FOLDER/protocol.json` says how each step ended. `--dry` does all of it on a CPU,
tiny, where tests that need a GPU are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# A whole test run on one GPU takes so many processes.
TEST_PROCESSES = "6"
DRY_SECONDS = 300
TESTS = ("tests/kernels/test_on_gpu.py", "tests/models/test_on_gpu.py")
# Methods whose programs are compiled ahead, each in a process of its own; their models fit into a GPU together.
WARMED = ("bf16", "int8", "int4 g128", "int4 g128, lm_head int8", "int8, 8-bit activations")


@dataclass(frozen=True)
class Step:
    """Programs that run at once.

    Args:
        name: What the results call it.
        seconds: After so many seconds the programs are ended.
        programs: The arguments of a Python each.
    """

    name: str
    seconds: int
    programs: Sequence[Sequence[str]]


def steps(folder: Path, dry: bool) -> list[Step]:
    """Return all steps, of 480 seconds together; a dry run has the time of whatever CPU it is on."""
    tune, cuda = ["-m", "benchmarks.gpu.tune"], ["-m", "benchmarks.cuda", "--out", str(folder)]
    test = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", TEST_PROCESSES]
    tiny, warmed = (["--dry"], WARMED[:1]) if dry else ([], WARMED)
    found = [
        Step("compile", 80, [[*tune, "--compile", *tiny], *([*cuda, *tiny, "--warm", name] for name in warmed)]),
        Step("check", 35, [[*test, TESTS[0], "-k", "keep_the_bound or other_programs or experts or attention"]]),
        Step("tune", 95, [[*tune, "--measure", str(folder), "--seconds", "85", *tiny]]),
        Step("attention", 20, [["-m", "benchmarks.gpu.attention", str(folder), "--seconds", "10", *tiny]]),
        Step("tests", 70, [[*test, *TESTS]]),
        Step("ours", 120, [[*cuda, *tiny, "--only", "ours", "--seconds", "110"]]),
        Step("peers", 60, [[*cuda, *tiny, "--only", "peers", "--seconds", "45"]]),
    ]
    return [replace(step, seconds=DRY_SECONDS) for step in found] if dry else found


def run(step: Step, folder: Path) -> dict[str, Any]:
    """Run the programs of a step, whose output goes to files, and return how they ended."""
    # Machine code is compiled here and carried nowhere.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    start, processes = time.monotonic(), []
    for number, program in enumerate(step.programs):
        with (folder / f"{step.name}-{number}.txt").open("wb") as output:
            command = [sys.executable, *program]
            options = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": environment}
            processes.append(subprocess.Popen(command, **options, start_new_session=True))
    codes: list[int | str] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, step.seconds - (time.monotonic() - start))))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append("out of time")
    return {"name": step.name, "ended": codes, "seconds": round(time.monotonic() - start, 1)}


def describe() -> dict[str, str]:
    """Return the GPU's description by its driver, if there is one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {"gpu": "no driver"}
    done = subprocess.run(
        [command, "-q", "-d", "CLOCK,MEMORY"], capture_output=True, text=True, timeout=20, check=False
    )
    return {"gpu": done.stdout[:4000]}


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where all results are written")
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {**describe(), "steps": []}
    for step in steps(folder, options.dry):
        if options.only is None or step.name in options.only:
            report["steps"].append(run(step, folder))
            (folder / "protocol.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(report["steps"][-1]), flush=True)


if __name__ == "__main__":
    main()
