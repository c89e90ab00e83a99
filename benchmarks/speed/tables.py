"""What the newest result of `benchmarks.run` says, as Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

Report = dict[str, Any]
Row = dict[str, Any]
# Limits on oneDNN that runs had, the newest instructions first; those without AVX512 hold for all libraries.
LIMITS = ("AVX512_CORE_VNNI", "AVX2_VNNI", "AVX2")
WITHOUT_AVX512 = LIMITS[1:]
# The sentences and tokens of each that stand for an encoder where there is room for one figure.
SENTENCES = "8x32"
_RESULTS = Path(__file__).parent.parent / "results"


def newest(part: str = "llama", limit: str | None = None, *, amx: bool = False) -> Report:
    """Return the newest result that has a part, of all instructions or of a limit on them; of one day the first name.

    Args:
        part: One of `benchmarks.run.PARTS`.
        limit: One of `LIMITS`, None for no limit.
        amx: Whether the result is of a CPU with AMX, which has tables of its own.

    Raises:
        ValueError: There is none.
    """
    kind = "limited" if limit else "speed"
    paths = sorted(_RESULTS.glob(f"{kind}-*.json"))
    reports = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    fitting = (
        report for report in reports if part in report and report.get("limit") == limit and uses_amx(report) == amx
    )
    return max(fitting, key=lambda report: report["date"])


def uses_amx(report: Report) -> bool:
    """Return whether the products of a result took AMX: limits on oneDNN exclude it."""
    return report.get("limit") is None and "amx_int8" in report["flags"]


def summary(report: Report) -> str:
    """Return what most readers ask for: speed with one thread, memory, and the time of a reload."""
    speeds = {(row["name"], row["phase"]): row["ratio"] for row in report["llama"] if row["threads"] == 1}
    rows = []
    for row in report["loading"]:
        name = row["name"]
        ratios = (f"{speeds[name, phase]:.2f}" if (name, phase) in speeds else "" for phase in ("decode", "prefill"))
        cells = (_cell(key, row.get(key)) for key in ("disk_bytes", "load_peak_bytes", "reload_seconds"))
        rows.append([name, *ratios, *cells])
    return table(["method", "decode", "prefill", "on disk", "load: peak", "reload: CPU s"], rows)


def model_speed(report: Report, phases: Sequence[str] = ("decode", "prefill")) -> str:
    """Return phases of the Llama, as ratios to the float model."""
    threads = sorted({row["threads"] for row in report["llama"]})
    columns = [(phase, count) for phase in phases for count in threads]
    header = ["method", *(f"{phase}, {count} thread{'s' * (count > 1)}" for phase, count in columns)]
    return table(header, _ratios(report["llama"], ("phase", "threads"), columns))


def limited_speed() -> str:
    """Return decoding and prefill of the Llama on one thread where libraries may not use the newest instructions."""
    reports = [newest("llama", limit) for limit in LIMITS]
    columns = [(limit, phase, 1) for limit in LIMITS for phase in ("decode", "prefill")]
    header = ["method", *(f"{limit}: {phase}" for limit, phase, _ in columns)]
    lines = _ratios(_limited_rows("llama", reports), ("limit", "phase", "threads"), columns)
    return f"{table(header, lines)}\n\n{_limited_caption(reports)}"


def limited_encoder_speed() -> str:
    """Return how fast two encoders are on one thread where all libraries may use no AVX512."""
    reports = [newest("encoders", limit) for limit in WITHOUT_AVX512]
    rows = [row for row in _limited_rows("encoders", reports) if row["threads"] == 1]
    shown = [row for row in rows if row["encoder"].startswith(("MiniLM", "BERT-base"))]
    columns = list(dict.fromkeys((row["limit"], row["encoder"], row["shape"]) for row in shown))
    header = ["method", *(f"{limit}: {encoder.partition(',')[0]}, {shape}" for limit, encoder, shape in columns)]
    lines = _ratios(shown, ("limit", "encoder", "shape"), columns)
    return f"{table(header, lines)}\n\n{_limited_caption(reports)}"


def _limited_rows(part: str, reports: list[Report]) -> list[Row]:
    return [{"limit": report["limit"], **row} for report in reports for row in report[part]]


def _limited_caption(reports: list[Report]) -> str:
    return "; ".join(f"{report['limit']}: {report['machine']}, {report['date']}" for report in reports) + "."


def sentence_speeds(report: Report) -> dict[str, float]:
    """Return how fast MiniLM embeds a few sentences on one thread, by method, beside the float32 model."""
    where = ("MiniLM-L6", 1, SENTENCES)
    rows = (row for row in report["encoders"] if (row["encoder"], row["threads"], row["shape"]) == where)
    return {row["name"]: row["ratio"] for row in rows}


def minilm_speed(report: Report) -> str:
    """Return how fast and how exact MiniLM embeds, beside the float32 model."""
    rows = [row for row in report["encoders"] if row["encoder"].startswith("MiniLM")]
    columns = list(dict.fromkeys((row["threads"], row["shape"]) for row in rows))
    cosines = {row["name"]: f"{row['cosine']:.4f}" for row in rows}
    header = ["method", "cosine", *(f"{shape}, {count} thread{'s' * (count > 1)}" for count, shape in columns)]
    lines = [[name, cosines[name], *cells] for name, *cells in _ratios(rows, ("threads", "shape"), columns)]
    return f"{table(header, lines)}\n\n{_encoder_caption(report, rows)}"


def encoder_speed(report: Report) -> str:
    """Return how fast the shapes of other encoders are on one thread, beside their float32 models."""
    rows = [row for row in report["encoders"] if not row["encoder"].startswith("MiniLM") and row["threads"] == 1]
    columns = list(dict.fromkeys((row["encoder"], row["shape"]) for row in rows))
    header = ["method", *(f"{encoder.partition(',')[0]}, {shape}" for encoder, shape in columns)]
    lines = _ratios(rows, ("encoder", "shape"), columns)
    return f"{table(header, lines)}\n\n{_encoder_caption(report, rows)}"


def _encoder_caption(report: Report, rows: list[Row]) -> str:
    encoders = "; ".join(dict.fromkeys(row["encoder"] for row in rows))
    seconds = {(row["encoder"], row["shape"]): row["float_seconds"] for row in rows if row["threads"] == 1}
    times = ", ".join(f"{value * 1000:.0f}" for value in seconds.values())
    versions = report["versions"]
    return (
        f"{encoders}. The float32 models take {times} ms on one thread of {report['machine']} "
        f"({', '.join(report['flags'])}), {report['date']}; torch {versions['torch']}, ONNX Runtime "
        f"{versions['onnxruntime']}."
    )


def moe_speed(report: Report) -> str:
    """Return decoding and prefill of the mixture of experts."""
    return table(["method", "decode", "prefill"], _ratios(report["moe"], ("phase",), [("decode",), ("prefill",)]))


def linear_speed(report: Report) -> str:
    """Return one Linear alone, by shape and rows of the activation."""
    cells = list(dict.fromkeys((row["N"], row["K"], row["M"]) for row in report["linear"]))
    header = ["method", *(f"{N}x{K}, M={M}" for N, K, M in cells)]
    return table(header, _ratios(report["linear"], ("N", "K", "M"), cells))


def gradient_speed(report: Report) -> str:
    """Return the gradient of x through one Linear, by shape, and where that was measured."""
    return f"{_by_shape(report['gradients'])}\n\n{machine(report)}"


def read_speed(report: Report) -> str:
    """Return which share of the speed of reading memory products of one token reach, and where that was measured."""
    return f"{_by_shape(_shares(report))}\n\n{machine(report)}"


def _shares(report: Report) -> list[Row]:
    return [{**row, "ratio": row["share"]} for row in report["bandwidth"] if row["name"] != "read"]


def _by_shape(rows: list[Row]) -> str:
    shapes = list(dict.fromkeys((row["N"], row["K"]) for row in rows))
    return table(["method", *(f"{N}x{K}" for N, K in shapes)], _ratios(rows, ("N", "K"), shapes))


def amx_model_speed(report: Report) -> str:
    """Return all phases of the Llama on a CPU with AMX."""
    phases = tuple(dict.fromkeys(row["phase"] for row in report["llama"]))
    return f"{model_speed(report, phases)}\n\n{_amx_caption(report, report['llama'])}"


def amx_linear_speed(report: Report) -> str:
    """Return one Linear alone on a CPU with AMX."""
    return f"{linear_speed(report)}\n\n{_amx_caption(report, report['linear'])}"


def amx_encoder_speed(report: Report) -> str:
    """Return how fast all encoders are on one thread of a CPU with AMX, and how exact MiniLM is there."""
    rows = [row for row in report["encoders"] if row["threads"] == 1]
    columns = list(dict.fromkeys((row["encoder"], row["shape"]) for row in rows))
    cosines = {row["name"]: f"{row['cosine']:.4f}" for row in rows if row["encoder"].startswith("MiniLM")}
    header = ["method", "MiniLM-L6, cosine", *(f"{encoder.partition(',')[0]}, {shape}" for encoder, shape in columns)]
    lines = [[name, cosines[name], *cells] for name, *cells in _ratios(rows, ("encoder", "shape"), columns)]
    return f"{table(header, lines)}\n\n{_amx_caption(report, rows)}"


def amx_read_speed(report: Report) -> str:
    """Return which share of the speed of reading memory products of one token reach on a CPU with AMX."""
    return f"{_by_shape(_shares(report))}\n\n{_amx_caption(report, report['bandwidth'])}"


def _amx_caption(report: Report, rows: list[Row]) -> str:
    """Return where figures were taken, and how far the rounds of the middle one lie from it."""
    ranges = [(row["ratio"], *row["ratio_range"]) for row in rows]
    distances = [max(high - ratio, ratio - low) / ratio for ratio, low, high in ranges]
    # A baseline has none.
    percent = 100 * statistics.median(distance for distance in distances if distance)
    return (
        f"{report['machine']} ({', '.join(report['flags'])}), {report['date']}; torch {report['versions']['torch']}. "
        f"In half of the cells the rounds lie within {percent:.0f} % of the figure."
    )


def _ratios(rows: list[Row], key: tuple[str, ...], columns: list[tuple[Any, ...]]) -> list[list[str]]:
    found = {(row["name"], *(row[name] for name in key)): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [found.get((name, *column)) for column in columns]
        lines.append([name, *(f"{cell['ratio']:.2f}" if cell else "" for cell in cells)])
    return lines


def loading(report: Report) -> str:
    """Return what loads and saves take."""
    header = ["method", "load: CPU s", "load: peak", "after it", "save: CPU s", "reload: CPU s", "on disk"]
    rows = []
    for row in report["loading"]:
        keys = ("load_seconds", "load_peak_bytes", "load_resident_bytes", "save_seconds")
        cells = [_cell(key, row.get(key)) for key in (*keys, "reload_seconds", "disk_bytes")]
        rows.append([row["name"], *cells])
    return table(header, rows)


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:.0f} MB" if key.endswith("_bytes") else f"{value:.2f}"


def errors(report: Report) -> str:
    """Return the largest error of each method over all shapes and rows, beside the rounding floor there."""
    rows = []
    for name in dict.fromkeys(row["name"] for row in report["errors"]):
        worst = max(
            (row for row in report["errors"] if row["name"] == name), key=lambda row: row["error"] / row["floor"]
        )
        figures = (f"{worst['error']:.1e}", f"{worst['floor']:.1e}", f"{worst['error'] / worst['floor']:.2f}")
        rows.append([name, *figures])
    return table(["method", "error", "floor", "ratio"], rows)


def casting(report: Report) -> str:
    """Return what casting takes beside a product on a CPU with AMX, and the speed-up that no cast can pass."""
    header = ["N x K", "F.linear, us", "cast alone", "product of what was cast", "bound of int8 to bf16"]
    found = {(row["N"], row["K"], row["name"]): row for row in report["casting"]}
    rows = []
    for N, K in dict.fromkeys((row["N"], row["K"]) for row in report["casting"]):
        cast, *products = (1 / found[N, K, name]["ratio"] for name in ("cast", "right", "left"))
        times = [f"{found[N, K, 'linear']['seconds'] * 1e6:.0f}", f"{cast:.2f}", f"{min(products):.2f}"]
        rows.append([f"{N}x{K}", *times, f"{1 / (cast + min(products)):.2f}"])
    return f"{table(header, rows)}\n\n{_amx_caption(report, report['casting'])}"


def quantization(report: Report) -> str:
    """Return how fast weights are quantized."""
    rows = [[row["name"], f"{row['gigabytes_per_second']:.2f}"] for row in report["quantization"]]
    return table(["method", "GB of bf16 a second"], rows)


def generation(report: Report) -> str:
    """Return whole calls of `generate`, as ratios to the float model in eager mode."""
    settings = list(dict.fromkeys(row["setting"] for row in report["generate"]))
    found = {(row["method"], row["reloaded"], row["setting"]): f"{row['ratio']:.2f}" for row in report["generate"]}
    rows = []
    for method, reloaded in dict.fromkeys((row["method"], row["reloaded"]) for row in report["generate"]):
        cells = [found.get((method, reloaded, setting), "") for setting in settings]
        rows.append([f"{method}{', reloaded' * reloaded}", *cells])
    return table(["method", *settings], rows)


def startup(report: Report) -> str:
    """Return what is waited for once in a process."""
    rows = [
        [row["name"], *(f"{row[key] * 1000:.1f}" for key in ("first_product", "later_product"))]
        for row in report["startup"]
    ]
    torch, own = (statistics.median(row[key] for row in report["startup"]) for key in ("torch_import", "own_import"))
    caption = (
        f"`import hf_trainweights` takes {own:.1f} seconds of CPU after PyTorch and Transformers, which take "
        f"{torch:.1f}. {report['machine']} ({', '.join(report['flags'])}), {report['date']}."
    )
    return f"{table(['method', 'first product, ms', 'third product, ms'], rows)}\n\n{caption}"


def machine(report: Report) -> str:
    """Return where and with what the figures were taken."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{report['machine']} ({report['capability']}), {report['date']}; {versions}."


def failures(report: Report) -> str:
    """Return what could not run."""
    found = [item for part in report["failures"].values() for item in part.items()]
    return table(["what", "error"], [[name, f"`{text}`"] for name, text in found])


# Each table, by the part that a result must have to be the one for it: those of "llama" stand beside each other on one
# page, and come from one run.
TABLES: dict[str, tuple[str, Callable[[Report], str]]] = {
    "speed-summary": ("llama", summary),
    "speed-model": ("llama", model_speed),
    "speed-moe": ("llama", moe_speed),
    "speed-linear": ("llama", linear_speed),
    "speed-loading": ("llama", loading),
    "speed-errors": ("llama", errors),
    "speed-quantization": ("llama", quantization),
    "speed-generation": ("llama", generation),
    "speed-machine": ("llama", machine),
    "speed-failures": ("llama", failures),
    "speed-minilm": ("encoders", minilm_speed),
    "speed-encoders": ("encoders", encoder_speed),
    "speed-startup": ("startup", startup),
    "speed-gradients": ("gradients", gradient_speed),
    "speed-bandwidth": ("bandwidth", read_speed),
}

# The same of results of CPUs with AMX.
AMX_TABLES: dict[str, tuple[str, Callable[[Report], str]]] = {
    "speed-amx-model": ("llama", amx_model_speed),
    "speed-amx-linear": ("linear", amx_linear_speed),
    "speed-amx-encoders": ("encoders", amx_encoder_speed),
    "speed-amx-bandwidth": ("bandwidth", amx_read_speed),
    "speed-casting": ("casting", casting),
}
