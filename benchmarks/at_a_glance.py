"""Draws `docs/at_a_glance.svg`, the picture of the README, from the result files.

Run `python -m benchmarks.at_a_glance` after a benchmark.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.curves import COLORS
from benchmarks.speed.tables import newest
from hf_trainweights.report.charts import Bar, bar_chart
from hf_trainweights.report.drawing import Drawing, stack

ROOT = Path(__file__).parent.parent
DRAWING = ROOT / "docs" / "at_a_glance.svg"

_NAMES = {"bf16": "bfloat16", "int8": "int8", "int4 g128": "int4"}
_WIDTH = 440
_TOKENS = 8192
# Caches of keys and values, Transformers' own first, with their colors.
_CACHES = {"DynamicCache": 3, "StaticCache": 3, "KVCache int8": 0, "KVCache int4": 0}


def draw(speed: dict[str, Any], cache: dict[str, Any], checkpoints: dict[str, Any], out: Path) -> None:
    """Draw size and speed of a model, the speed at a long context, and the size of checkpoints.

    Args:
        speed: The report that `benchmarks.run` wrote.
        cache: The speeds that `benchmarks.kv_cache` wrote.
        checkpoints: The report that `benchmarks.checkpoints` wrote.
        out: The SVG file to write.
    """
    checkpoint_bars = [_checkpoints(checkpoints[run]) for run in ("lm", "ft")]
    rows = [[_disk(speed), _speed(speed)], [_long_context(cache), _cache_bytes(cache)], checkpoint_bars]
    caption = (
        "Model: a Llama of 415M random weights, embeddings and lm_head in bfloat16, on "
        f"{speed['machine']}, torch {speed['versions']['torch']}, {speed['date']}. Long context: a Llama of .5B int4 "
        f"weights on {cache['machine']['cpu']}, one thread, {cache['date']}. Checkpoints: weights and both "
        "moments of AdamW, the mean of six saves; lossless resumes bit for bit, near-lossless and compact round."
    )
    out.write_text(stack("hf_trainweights at a glance", rows, caption).standalone(), encoding="utf-8")


def _disk(report: dict[str, Any]) -> Drawing:
    sizes = {row["name"]: row.get("disk_bytes") for row in report["loading"]}
    bars = [
        _bar(shown, sizes[name] / 1e6, f"{sizes[name] / 1e6:.0f} MB", _weight_color(name))
        for name, shown in _NAMES.items()
    ]
    return bar_chart("A model on disk", bars, "MB", width=_WIDTH)


def _speed(report: dict[str, Any]) -> Drawing:
    rows = {row["name"]: row for row in report["llama"] if (row["phase"], row["threads"]) == ("decode", 1)}
    bars = [
        _bar(shown, 1 / rows[name]["seconds"], f"{1 / rows[name]['seconds']:.1f}", _weight_color(name))
        for name, shown in _NAMES.items()
    ]
    return bar_chart("Decoding, one thread", bars, "tokens per second", width=_WIDTH)


def _rows_at(cache: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the row of each cache with `_TOKENS` tokens."""
    rows = cache["rows"]
    return {row["cache"]: row for row in rows if (row["model"], row["tokens"]) == ("0.5B", _TOKENS)}


def _long_context(cache: dict[str, Any]) -> Drawing:
    rows = _rows_at(cache)
    bars = [
        _bar(name, 1e3 / rows[name]["milliseconds"], f"{1e3 / rows[name]['milliseconds']:.1f}", color)
        for name, color in _CACHES.items()
    ]
    return bar_chart(f"Decoding after {_TOKENS} tokens", bars, "tokens per second", width=_WIDTH)


def _cache_bytes(cache: dict[str, Any]) -> Drawing:
    rows = _rows_at(cache)
    bars = [
        _bar(name, rows[name]["bytes"] / 1e6, f"{rows[name]['bytes'] / 1e6:.0f} MB", color)
        for name, color in _CACHES.items()
    ]
    return bar_chart(f"Keys and values of {_TOKENS} tokens", bars, "MB", width=_WIDTH)


def _checkpoints(run: dict[str, Any]) -> Drawing:
    saved = run["seeds"]["0"]["checkpoints"]
    plain = _mean_bytes(saved["lossless"], "plain_bytes") / 1e6
    bars = [_bar("Trainer", plain, f"{plain:.0f} MB", 3)]
    for mode in ("lossless", "near-lossless", "compact"):
        stored = _mean_bytes(saved[mode], "stored_bytes") / 1e6
        bars.append(_bar(mode, stored, f"{stored:.1f} MB", COLORS[mode]))
    return bar_chart(f"Checkpoints: {run['title'].rpartition(', ')[0]}", bars, "MB a checkpoint", width=_WIDTH)


def _mean_bytes(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def _weight_color(name: str) -> int:
    return 3 if name == "bf16" else 0


def _bar(label: str, value: float, shown: str, color: int) -> Bar:
    return Bar(label, (*(0.0 for _ in range(color)), value), shown)


if __name__ == "__main__":
    reports = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("kv_cache", "checkpoints")
    }
    draw(newest(), reports["kv_cache"]["speed"], reports["checkpoints"], DRAWING)
