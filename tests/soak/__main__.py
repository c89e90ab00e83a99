"""Kills saves for a while and checks what they leave: `python -m tests.soak --seconds 600`; exit code 1 for findings.

Kinds run in turn in `--jobs` processes. To repeat a finding, pass its seed and kind again; kills that come after a time
depend on the machine, kills at calls to the file system do not.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]  # as pytest has it

from forks import exit_code_of, fork  # noqa: E402 (it lies on the path above)
from long_runs import add_time, parser_of, print_table, write_record  # noqa: E402
from soak.harness import SCENARIOS, Row, soak_for  # noqa: E402


def main() -> int:
    """Soak, print a table, and return the exit code."""
    options = _options()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"in {folder}", flush=True)
    workers = [_start_worker(number, folder, options) for number in range(options.jobs)]
    failed = [exit_code_of(worker) != 0 for worker in workers]
    files = [folder / f"rows-{number}.json" for number in range(options.jobs)]
    rows = _merge([json.loads(file.read_bytes()) for file in files if file.exists()])
    print_table([{**asdict(row), "findings": len(row.findings)} for row in rows])
    for row in rows:
        for finding in row.findings:
            print(f"\n{row.kind}: {finding}")
    write_record(options.record, options, [asdict(row) for row in rows])
    is_bad = any(failed) or any(row.findings for row in rows)
    if not is_bad:
        shutil.rmtree(folder)
    return int(is_bad)


def _options() -> argparse.Namespace:
    parser = parser_of("soak", __doc__, "kinds", SCENARIOS)
    add_time(parser)
    return parser.parse_args()


def _start_worker(number: int, folder: Path, options: argparse.Namespace) -> int:
    """Fork a process that soaks on its own; return its process ID."""

    def work() -> None:
        # The others begin elsewhere in the list, so that in a short time each kind has its turn.
        start = number * len(options.kinds) // options.jobs
        kinds = options.kinds[start:] + options.kinds[:start]
        seed = f"{options.seed}/{number}"

        def tell(line: str) -> None:
            print(f"worker {number}: {line}", flush=True)

        rows = soak_for(options.seconds, kinds, folder / f"worker-{number}", seed, tell)
        (folder / f"rows-{number}.json").write_text(json.dumps([asdict(row) for row in rows]))

    return fork(work)


def _merge(workers: list[list[dict]]) -> list[Row]:
    rows = {kind: Row(kind) for kind in SCENARIOS}
    for found in (row for worker in workers for row in worker):
        row = rows[found["kind"]]
        row.runs += found["runs"]
        row.kills += found["kills"]
        row.findings += found["findings"]
    return [row for row in rows.values() if row.runs or row.findings]


if __name__ == "__main__":
    sys.exit(main())
