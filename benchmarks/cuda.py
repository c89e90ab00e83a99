"""Speed on a GPU, measured side by side: single products, and a Llama of 4.5B weights that decodes and reads prompts.

Run `python -m benchmarks.cuda` on a machine with an NVIDIA GPU; it writes
`benchmarks/results/cuda-<gpu>-<date>.json`, anew after each phase. torchao, bitsandbytes and gptqmodel (Marlin) are
measured where they are installed. `--only PART...` measures parts again; the others keep what was measured on the same
day with the same versions. `--seconds` ends it, and then what is missing is among the failures. `--warm METHOD`
measures nothing, but leaves compiled programs to a later process. The tiles of kernels are tuned by
`benchmarks.gpu.tune`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    TorchAoConfig,
)

from benchmarks.gpu.gptq_directory import save_as_gptq
from benchmarks.machine import versions
from benchmarks.speed.methods import FLOATS, OURS, PEERS, Method, guarded
from benchmarks.speed.rounds import Run, interleave
from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda, gpu_tables, linear
from hf_trainweights.models.host.models import cache_argument

# Half of the layers of a Llama of 8B weights. Those of small models take less time than the launch of their kernels.
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
ROUNDS = 5
# Without a table for the GPU, weights are dequantized for more rows than these.
MOST_ROWS_OF_TILES = max(rule.rows or 0 for rule in gpu_tables.DEFAULT)
PARTS = ("products", "ours", "peers")
Report = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Sizes:
    """How much is measured: `Sizes()` on a GPU, and something tiny to see that the benchmark runs.

    Args:
        llama: Arguments of `LlamaConfig`.
        shapes: N and K of the single products.
        rows: Their numbers of rows M.
        rotated_bytes: Weights that are multiplied in turn take so much, more than the caches hold.
        prompts: Lengths of the prompts that are read at once; decoding begins after the first of them.
        batches: Numbers of sequences that are decoded at once.
        decoded_tokens: Tokens that are decoded, one after the other, in one run.
        modes: Modes of torch.compile, with CUDA graphs, in which decoding steps are compiled.
        seconds: No phase begins later.
    """

    llama: dict[str, Any] = field(default_factory=lambda: LLAMA)
    shapes: Sequence[tuple[int, int]] = ((2048, 2048), (4096, 4096), (14336, 4096), (4096, 14336))
    rows: Sequence[int] = (1, 16, 64, 256, 1024)
    rotated_bytes: int = 512_000_000
    prompts: Sequence[int] = (256, 64, 1024, 4096)
    batches: Sequence[int] = (1, 16)
    decoded_tokens: int = 32
    modes: Sequence[str] = ("reduce-overhead", "max-autotune")
    seconds: float = math.inf


def _torchao_int4() -> Any:
    from torchao.quantization import Int4WeightOnlyConfig

    return TorchAoConfig(Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))


def compared() -> list[Method]:
    """Return what a whole model is measured with; the float model first."""
    skipped = ("uint4 g16", "torchao int4 (prototype)", "quanto int8", "quanto int4")
    found = [method for method in (*FLOATS, *OURS, *PEERS) if method.versus == "bf16" and method.name not in skipped]
    return [
        *found,
        *(Method(name, partial(TrainWeightsConfig, **options)) for name, options in _ON_GPUS.items()),
        Method("torchao int4 g128", _torchao_int4, bits=4),
        Method(MARLIN, lambda: None, bits=4),
    ]


# Its weights and their configuration are read from files: gptqmodel would take hours to quantize them.
MARLIN = "gptqmodel int4 g128 (Marlin)"
# Methods that are compared on GPUs alone.
_ON_GPUS: dict[str, dict[str, Any]] = {
    "int4 g128, lm_head int8": {"format": "int4", "group_size": 128, "overrides": {"lm_head": "int8"}},
    "float8_e4m3, 8-bit activations": {"format": "float8_e4m3", "activations": "float8"},
}
OUR_NAMES = {method.name for method in OURS} | set(_ON_GPUS)


def measure(
    device: str, sizes: Sizes, methods: Sequence[Method], keep: Callable[[Report], None], known: Report | None = None
) -> Report:
    """Measure everything.

    Args:
        device: "cuda"; "cpu" only shows that the benchmark runs.
        sizes: How much.
        methods: What is compared; the float model first.
        keep: Gets the report each time it has grown.
        known: A report whose rows of other methods stay, and its products where `sizes` has none.

    Returns:
        The report: `products`, `model`, and what could not run in `failures`.
    """
    report = {"products": [], "model": [], "failures": {}, **(known or {})}
    # Each model compiles the same function anew.
    torch._dynamo.config.recompile_limit = 64
    report["products"] = [] if sizes.shapes else report["products"]
    for N, K in sizes.shapes:
        report["products"] += products(device, sizes, N, K, report["failures"])
        keep(report)
    anew = {method.name for method in methods}
    report["model"] = [row for row in report["model"] if row["name"] not in anew]
    for row in model_speed(device, sizes, methods, report["failures"]):
        report["model"].append(row)
        keep(report)
    return report


def products(device: str, sizes: Sizes, N: int, K: int, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Time one weight's products by the kernels, by dequantizing, by integers, and of a bfloat16 weight.

    Args:
        device: Where.
        sizes: How much.
        N: Rows of the weight.
        K: Columns.
        failures: Filled with what could not run, and why.

    Returns:
        One row per M and way.
    """
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    rows = []
    for M in sizes.rows:
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
        runs = {}
        for name, tensors, call in _ways(weight, x):
            run = guarded(failures, f"{name}, {N}x{K}, M={M}", _repeated, device, sizes, tensors, call)
            runs |= {name: run} if run else {}
        rows += [{"N": N, "K": K, "M": M, **row} for row in interleave(runs, ROUNDS, "bf16")]
    return rows


Way = tuple[str, dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor | None]]


def _ways(weight: Tensor, x: Tensor) -> list[Way]:
    M = len(x)
    ways: list[Way] = [("bf16", {"weight": weight}, lambda t: F.linear(x, t["weight"]))]
    for form in (Int8(), Int8(128), Int4(128), Int4(32)):
        way = "kernel" if M <= MOST_ROWS_OF_TILES else "dequantized"
        ways.append((f"{form}, {way}", form.quantize(weight), partial(linear, x, form=form)))
    if M >= cuda._ROUNDED_ROWS:
        form = Int8(activations="int8")
        ways.append(("int8, 8-bit activations", form.quantize(weight), partial(linear, x, form=form)))
    return ways


def _repeated(
    device: str, sizes: Sizes, tensors: dict[str, Tensor], call: Callable[[dict[str, Tensor]], Tensor | None]
) -> Run:
    """Return a run that multiplies copies of a weight in turn, as one CUDA graph, and returns the seconds of one."""
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    copies = [
        tensors,
        *({name: t.clone() for name, t in tensors.items()} for _ in range(sizes.rotated_bytes // size_bytes)),
    ]

    def all_of_them() -> None:
        for copied in copies:
            call(copied)

    all_of_them()
    replay = all_of_them
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        replay = graph.replay
    return lambda: _seconds(device, replay) / len(copies)


def _seconds(device: str, function: Callable[[], Any]) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def model_speed(
    device: str, sizes: Sizes, methods: Sequence[Method], failures: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Time decoding and prompts, each method beside the float model; the phases that matter most come first.

    Args:
        device: Where.
        sizes: How much.
        methods: What is compared; the float model first.
        failures: Filled with what could not run, and why.

    Yields:
        A row per phase and method, with the bytes that the model takes.
    """
    end = time.monotonic() + sizes.seconds
    baseline, *others = methods
    loaded = {method.name: guarded(failures, method.name, _load, sizes, method, device) for method in methods}
    for phase, make in phases(sizes).items():
        floats = guarded(failures, f"{baseline.name}, {phase}", make, loaded[baseline.name], device, sizes)
        for method in others:
            model, name = loaded[method.name], f"{method.name}, {phase}"
            if model is None or floats is None:
                continue
            if time.monotonic() > end:
                failures[name] = "no time was left"
                continue
            run = guarded(failures, name, make, model, device, sizes)
            rows = run and guarded(failures, name, interleave, {"bf16": floats, "other": run}, ROUNDS, "bf16")
            for row in rows or []:
                if row["name"] == "other":
                    yield {"phase": phase, **row, "name": method.name, "model_bytes": model.get_memory_footprint()}


def phases(sizes: Sizes) -> dict[str, Callable[[PreTrainedModel, str, Sizes], Run]]:
    """Return the maker of each phase's run."""
    batches = {batch: "" if batch == 1 else f", batch {batch}" for batch in sizes.batches}
    prompts = {tokens: "" if tokens == sizes.prompts[0] else f" {tokens}" for tokens in sizes.prompts}
    modes = {mode: "compiled" if mode == "reduce-overhead" else mode for mode in sizes.modes}
    makers: dict[str, Any] = {f"decode{suffix}": partial(_decode, batch=batch) for batch, suffix in batches.items()}
    for mode, name in modes.items():
        makers |= {f"decode, {name}{suffix}": partial(_decode, batch=b, mode=mode) for b, suffix in batches.items()}
        if mode == sizes.modes[0]:
            makers |= {f"prefill{suffix}": partial(_prefill, tokens=tokens) for tokens, suffix in prompts.items()}
    return makers if sizes.modes else makers | {f"prefill{s}": partial(_prefill, tokens=t) for t, s in prompts.items()}


def _load(sizes: Sizes, method: Method, device: str) -> PreTrainedModel:
    """Return a model of random weights, quantized where they are; a peer's is saved first, as peers load models."""
    with torch.device(device):  # where random numbers are made in no time
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes.llama)).to(method.dtype).eval()
    if method.config is None:
        return model
    if method.name in OUR_NAMES:
        quantize_(model, method.config())
        return model
    with tempfile.TemporaryDirectory() as directory:
        save = save_as_gptq if method.name == MARLIN else PreTrainedModel.save_pretrained
        save(model, Path(directory))
        del model
        options = {"dtype": method.dtype, "device_map": device, "quantization_config": method.config()}
        return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@torch.inference_mode()
def _decode(model: PreTrainedModel, device: str, sizes: Sizes, batch: int = 1, mode: str | None = None) -> Run:
    """Return a run that decodes greedily with a static cache and returns the seconds of one step."""
    cache = StaticCache(config=model.config, max_cache_len=sizes.prompts[0] + sizes.decoded_tokens)
    prompt = _tokens(model, device, batch, sizes.prompts[0])
    past = {cache_argument(model): cache}

    def step(tokens: Tensor) -> Tensor:
        return model(tokens, **past, use_cache=True).logits[:, -1:].argmax(dim=-1)

    compiled_step = torch.compile(step, mode=mode, fullgraph=True)

    def advance(tokens: Tensor) -> Tensor:
        if mode is None:
            return step(tokens)
        # The memory of a CUDA graph's result is used again by its next run.
        torch.compiler.cudagraph_mark_step_begin()
        return compiled_step(tokens).clone()

    @torch.inference_mode()
    def run() -> float:
        cache.reset()
        tokens = step(prompt)

        def decode(tokens: Tensor = tokens) -> None:
            for _ in range(sizes.decoded_tokens):
                tokens = advance(tokens)

        return _seconds(device, decode) / sizes.decoded_tokens

    # The first runs compile, warm up and capture.
    for _ in range(3):
        run()
    return run


@torch.inference_mode()
def _prefill(model: PreTrainedModel, device: str, sizes: Sizes, tokens: int) -> Run:
    prompt = _tokens(model, device, 1, tokens)
    call = torch.inference_mode()(partial(model, prompt, use_cache=True, logits_to_keep=1))
    call()
    return lambda: _seconds(device, call)


def _tokens(model: PreTrainedModel, device: str, batch: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, tokens), generator=generator).to(device)


def warm(device: str, sizes: Sizes, method: Method) -> None:
    """Compile a method's programs, whose code Inductor keeps for other processes."""
    model = _load(sizes, method, device)
    for mode in sizes.modes:
        _decode(model, device, sizes, mode=mode)


TINY = Sizes(
    llama={
        **LLAMA,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    },
    shapes=[(64, 128)],
    rows=[1, 600],
    rotated_bytes=100_000,
    prompts=(4, 8),
    batches=(1, 2),
    decoded_tokens=2,
    modes=(),
)
"""Something tiny, to see on a CPU that the benchmark runs."""


def main() -> None:
    """Measure on this machine's GPU and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="no phase begins later (default: no limit)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the result is written")
    parser.add_argument("--warm", metavar="METHOD", help="compile the programs of one method, and measure nothing")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with something tiny")
    options = parser.parse_args()
    device, sizes = ("cpu", TINY) if options.dry else ("cuda", Sizes())
    methods = compared()
    if options.warm:
        warm(device, sizes, next(method for method in methods if method.name == options.warm))
        return
    gpu = "no GPU" if options.dry else torch.cuda.get_device_name()
    today = datetime.datetime.now(datetime.UTC).date()
    head = {"machine": gpu, "date": str(today), "cuda": torch.version.cuda, "versions": versions("triton")}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"cuda-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{today}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = found if head.items() <= found.items() else {}

    def keep(report: Report) -> None:
        path.write_text(json.dumps(head | report, indent=1) + "\n", encoding="utf-8")

    baseline, *others = methods
    chosen = [method for method in others if ("ours" if method.name in OUR_NAMES else "peers") in options.only]
    sizes = replace(sizes, seconds=options.seconds)
    sizes = sizes if "products" in options.only else replace(sizes, shapes=())
    measure(device, sizes, [baseline, *chosen], keep, found)
    print(path)


if __name__ == "__main__":
    main()
