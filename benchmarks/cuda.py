"""Speed on a GPU, measured side by side: single products, and a Llama of 4.5B weights that decodes and reads a prompt.

Run `python -m benchmarks.cuda` on a machine with an NVIDIA GPU; it writes
`benchmarks/results/cuda-<gpu>-<date>.json`, anew after each method. torchao and bitsandbytes are measured where they
are installed. `--only PART...` measures parts again; the others keep what was measured on the same day with the same
versions. What the products say about sizes in `hf_trainweights/kernels/cuda.py` is to be entered there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

from benchmarks.machine import versions
from benchmarks.speed.methods import FLOATS, OURS, PEERS, Method, guarded
from benchmarks.speed.rounds import Run, interleave
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda, linear
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
        prompt_tokens: Length of the prompt that is read at once.
        decoded_tokens: Tokens that are decoded, one after the other, in one run.
        compiled: Whether a decoding step is compiled, with CUDA graphs.
    """

    llama: dict[str, Any] = field(default_factory=lambda: LLAMA)
    shapes: Sequence[tuple[int, int]] = ((2048, 2048), (4096, 4096), (14336, 4096), (4096, 14336))
    rows: Sequence[int] = (1, 16, 64, 256, 1024)
    rotated_bytes: int = 512_000_000
    prompt_tokens: int = 256
    decoded_tokens: int = 64
    compiled: bool = True


def _torchao_int4() -> Any:
    from torchao.quantization import Int4WeightOnlyConfig

    return TorchAoConfig(Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))


def compared() -> list[Method]:
    """Return what a whole model is measured with; the float model first."""
    skipped = ("float8_e4m3", "torchao int4 (prototype)", "quanto int8", "quanto int4")
    found = [method for method in (*FLOATS, *OURS, *PEERS) if method.versus == "bf16" and method.name not in skipped]
    return [*found, Method("torchao int4 g128", _torchao_int4, bits=4)]


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
    for rows in model_speed(device, sizes, methods, report["failures"]):
        report["model"] += rows
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
        way = "kernel" if cuda._MOST_ROWS[x.dtype] >= M else "dequantized"
        ways.append((f"{form}, {way}", form.quantize(weight), partial(linear, x, form=form)))
    if M >= cuda._INTEGER_ROWS:
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
) -> Iterator[list[dict[str, Any]]]:
    """Time decoding at batch 1 and a prompt, each method beside the float model.

    Args:
        device: Where.
        sizes: How much.
        methods: What is compared; the float model first.
        failures: Filled with what could not run, and why.

    Yields:
        For each method one row per phase, with the bytes that the model takes.
    """
    with tempfile.TemporaryDirectory() as directory:
        with torch.device(device):  # where random numbers are made in no time
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**sizes.llama)).bfloat16().save_pretrained(directory)
        baseline, *others = methods
        floats = _phases(_load(directory, baseline, device), baseline.name, device, sizes, failures)
        for other in others:
            model = guarded(failures, other.name, _load, directory, other, device)
            if model is None:
                continue
            runs, size_bytes = _phases(model, other.name, device, sizes, failures), model.get_memory_footprint()
            taken = {phase: interleave({"bf16": floats[phase], "other": runs[phase]}, ROUNDS, "bf16") for phase in runs}
            yield [
                {"phase": phase, **row, "name": other.name, "model_bytes": size_bytes}
                for phase, rows in taken.items()
                for row in rows
                if row["name"] == "other"
            ]
            del model, runs


def _phases(model: PreTrainedModel, name: str, device: str, sizes: Sizes, failures: dict[str, str]) -> dict[str, Run]:
    makers = {"decode": _decode, "prefill": _prefill, "decode, compiled": partial(_decode, compiled=True)}
    if not sizes.compiled:
        del makers["decode, compiled"]
    made = {phase: guarded(failures, f"{name}, {phase}", make, model, device, sizes) for phase, make in makers.items()}
    return {phase: run for phase, run in made.items() if run is not None}


def _load(path: str, method: Method, device: str) -> PreTrainedModel:
    options = {} if method.config is None else {"quantization_config": method.config()}
    return AutoModelForCausalLM.from_pretrained(path, dtype=method.dtype, device_map=device, **options).eval()


@torch.inference_mode()
def _decode(model: PreTrainedModel, device: str, sizes: Sizes, compiled: bool = False) -> Run:
    """Return a run that decodes greedily with a static cache and returns the seconds of one token."""
    cache = StaticCache(config=model.config, max_cache_len=sizes.prompt_tokens + sizes.decoded_tokens)
    prompt = _tokens(model, device, sizes)
    past = {cache_argument(model): cache}

    def step(token: Tensor) -> Tensor:
        return model(token, **past, use_cache=True).logits[:, -1:].argmax(dim=-1)

    compiled_step = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    def advance(token: Tensor) -> Tensor:
        if not compiled:
            return step(token)
        # The memory of a CUDA graph's result is used again by its next run.
        torch.compiler.cudagraph_mark_step_begin()
        return compiled_step(token).clone()

    @torch.inference_mode()
    def run() -> float:
        cache.reset()
        token = step(prompt)

        def decode(token: Tensor = token) -> None:
            for _ in range(sizes.decoded_tokens):
                token = advance(token)

        return _seconds(device, decode) / sizes.decoded_tokens

    # The first runs compile, warm up and capture.
    for _ in range(3):
        run()
    return run


@torch.inference_mode()
def _prefill(model: PreTrainedModel, device: str, sizes: Sizes) -> Run:
    call = torch.inference_mode()(partial(model, _tokens(model, device, sizes), use_cache=True, logits_to_keep=1))
    call()
    return lambda: _seconds(device, call)


def _tokens(model: PreTrainedModel, device: str, sizes: Sizes) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, sizes.prompt_tokens), generator=generator).to(device)


def main() -> None:
    """Measure on this machine's GPU and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    only = parser.parse_args().only
    gpu, today = torch.cuda.get_device_name(), datetime.datetime.now(datetime.UTC).date()
    head = {"machine": gpu, "date": str(today), "cuda": torch.version.cuda, "versions": versions("triton")}
    path = RESULTS / f"cuda-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{today}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = found if head.items() <= found.items() else {}

    def keep(report: Report) -> None:
        path.write_text(json.dumps(head | report, indent=1) + "\n", encoding="utf-8")

    baseline, *others = compared()
    chosen = [method for method in others if ("ours" if method in OURS else "peers") in only]
    sizes = Sizes() if "products" in only else Sizes(shapes=())
    measure("cuda", sizes, [baseline, *chosen], keep, found)
    print(path)


if __name__ == "__main__":
    main()
