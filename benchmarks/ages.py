"""Tells on which commit each table and picture of the documents was measured, and which are older than their code.

Run `python -m benchmarks.ages && python -m benchmarks.tables`. A result file that names no commit counts as measured on
the one that recorded it. The script warns and ends well: whether a change matters to a figure, people decide.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.tables import DOCUMENTS, RESULTS, ROOT, TABLES

# The code that result files measure, by the beginnings of their names; the whole package for all others.
MEASURED = {
    ("calibration", "curve", "embeddings", "quality"): ("formats", "models/budget", "models/calibration"),
    ("checkpoint", "distributed", "scale", "soak", "run_plot"): ("checkpoint", "files"),
    ("cuda", "limited", "speed"): ("kernels", "tensor/products.py"),
    ("kv_cache",): ("cache",),
    ("large_onnx", "exports", "llama_cpp", "optimum", "compressed_tensors"): ("exports",),
    ("ops",): ("tensor",),
}


DRAWN = {"rooms.svg"}  # by hand, which a test compares with the code


def main() -> None:
    """Record the commit of each table and picture, and name those whose code has changed since."""
    pages = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    ages: dict[str, dict[str, str]] = {}
    for page, text in pages.items():
        names = set(re.findall(r"<!-- ([\w-]+): ", text)) & TABLES.keys() - {"ages"}
        sources = {name: results_of(name) for name in sorted(names)}
        pictures = (page.parent / link for link in re.findall(r"\]\(([\w./]+\.svg)\)", text))
        sources |= {path.name: [path] for path in pictures if path.name not in DRAWN}
        for name, files in sources.items():
            own = [commit for path in files for commit in [commit_of(path)] if commit]
            if own:
                commit = min(own, key=lambda commit: git("log", "-1", "--format=%ct", commit))
                day = git("log", "-1", "--format=%cs", commit)
                ages[name] = {"page": page.relative_to(ROOT).as_posix(), "commit": commit, "date": day}
                warn_if_older(name, commit, files)
    (RESULTS / "ages.json").write_text(json.dumps(ages, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def results_of(name: str) -> list[Path]:
    """Return the result files that a table shows: those without which it would be another one."""
    text, files = made(name)
    return [path for path in files if path.parent == RESULTS and made(name, without=path)[0] != text]


def made(name: str, without: Path | None = None) -> tuple[str, list[Path]]:
    """Return a table, empty if it cannot be made, and the files that it reads; one of them may be withheld."""
    read: list[Path] = []
    plain = Path.read_text

    def read_text(self: Path, *args: Any, **options: Any) -> str:
        read.append(self)
        return "{}" if self == without else plain(self, *args, **options)

    Path.read_text = read_text  # type: ignore[method-assign]
    try:
        return TABLES[name](), list(dict.fromkeys(read))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", read
    finally:
        Path.read_text = plain  # type: ignore[method-assign]


def commit_of(path: Path) -> str:
    """Return the commit that a result file or a picture was measured on; empty if git does not know it."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
    named = found.get("commit") if isinstance(found, dict) else None
    if named and git("cat-file", "-t", named) == "commit":
        return named
    return git("log", "-1", "--format=%H", "--", str(path))


def warn_if_older(name: str, commit: str, files: list[Path]) -> None:
    """Print a line if the code that a table or picture measures has changed since its commit."""
    measured = [rooms for path in files for starts, rooms in MEASURED.items() if path.stem.startswith(starts)]
    paths = sorted({f"hf_trainweights/{room}" for rooms in measured for room in rooms}) or ["hf_trainweights"]
    changes = git("rev-list", "--count", f"{commit}..HEAD", "--", *paths)
    if changes not in ("", "0"):
        print(f"{name}: measured on {commit[:7]}, since when {changes} commits have changed {', '.join(paths)}")


def git(*arguments: str) -> str:
    """Return the output of a git command in the repository, empty if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
