"""ONNX files: how exact they are, how large, and how fast ONNX Runtime runs them.

Run `PYTHONPATH=tests python -m benchmarks.exports`, which takes about ten minutes and needs the `test` extra; it writes
`benchmarks/results/exports.json` after each model. Differences are to the model with dequantized weights, relative to
its largest output. Speeds are ratios of one process on one thread, measured by turns, so they hold on a machine that
does other things too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from architectures import ARCHITECTURES
from exports.models import Convolutional, images
from torch import Tensor, nn
from transformers.utils import logging

from benchmarks.float_onnx import export_float
from benchmarks.machine import cpu_flags, cpu_name, versions
from benchmarks.minilm import SENTENCES, minilm, tokens
from benchmarks.speed.rounds import Run, interleave, timed_call
from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.exports import export_onnx, verify_onnx_model

RESULTS = Path(__file__).parent / "results" / "exports.json"
ROUNDS = 31
RUNTIMES = ("portable", "onnxruntime")
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8, groups of 32": {"format": "int8", "group_size": 32},
    "int4, groups of 32": {"format": "int4", "group_size": 32},
    "int4, groups of 128": {"format": "int4", "group_size": 128},
    "float8_e4m3": {"format": "float8_e4m3"},
}
TIMED = ("int8", "int4, groups of 32", "float8_e4m3")
TINY = ("llama", "llama_tied", "vit", "whisper", "qwen3_moe", "gpt2")
# Its rows have 384 columns; those of the tiny models have 64.
ONLY_MINILM = "int4, groups of 128"


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return Convolutional().eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "minilm": (minilm, lambda: tokens(SENTENCES)),
    **{name: (ARCHITECTURES[name].build, ARCHITECTURES[name].make_inputs) for name in TINY},
    "convolutional": (convolutional, lambda: images(2)),
}


def quantized(make: Callable[[], nn.Module], name: str) -> nn.Module:
    model = make()
    quantize_(model, TrainWeightsConfig(**FORMATS[name], include_embeddings=True))
    return model


def payload_bytes(model: nn.Module) -> int:
    """Return the bytes of all stored tensors of a model: codes, scales, float weights and buffers."""
    parts = [w.tensors.values() if isinstance(w, QuantizedTensor) else [w] for w in model.parameters()]
    return sum(tensor.nbytes for tensors in parts for tensor in tensors) + sum(b.nbytes for b in model.buffers())


def parity(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each format and runtime of one model, and keep its files."""
    make, make_inputs = MODELS[name]
    inputs = make_inputs()
    for config in FORMATS:
        if config == ONLY_MINILM and name != "minilm":
            continue
        model = quantized(make, config)
        for runtime in RUNTIMES:
            path = folder / f"{name} {config} {runtime}.onnx"
            row = {"model": name, "format": config, "runtime": runtime, "payload_bytes": payload_bytes(model)}
            try:
                export_onnx(model, path, example_inputs=inputs, runtime=runtime, verify=False)
                outputs = verify_onnx_model(path, model, inputs_of(model, inputs)).outputs
                row["difference"] = max(each.largest_difference / each.largest_value for each in outputs)
                row["bytes"] = path.stat().st_size
            except TrainWeightsError as error:
                row["refused"] = f"{type(error).__name__}: {error}"
            yield row


def inputs_of(model: nn.Module, inputs: Any) -> Any:
    """Return what `export_onnx` calls the model with: a decoder without its cache."""
    return {**inputs, "use_cache": False} if getattr(getattr(model, "config", None), "use_cache", False) else inputs


def session_run(path: Path, inputs: dict[str, Tensor]) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    arrays = {name: value.numpy() for name, value in inputs.items()}
    return timed_call(lambda: session.run(None, arrays))


def speed(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return how fast MiniLM runs, by its files and eagerly, relative to its float file in ONNX Runtime."""
    models = {config: quantized(minilm, config) for config in TIMED}
    found = {}
    for name, sentences in {"one sentence": SENTENCES[:1], "batch of 8": SENTENCES}.items():
        inputs = tokens(sentences)
        runs = {"float32": session_run(folder / "minilm float32.onnx", inputs)}
        for config, model in models.items():
            runs[f"{config}, eager"] = timed_call(lambda model=model, inputs=inputs: model(**inputs))
            for runtime in RUNTIMES:
                runs[f"{config}, {runtime}"] = session_run(folder / f"minilm {config} {runtime}.onnx", inputs)
        found[name] = interleave(runs, ROUNDS, "float32")
    return found


@torch.no_grad()
def main() -> None:
    """Measure everything and write the report."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "machine": f"{cpu_name()}, one thread",
        "flags": cpu_flags(),
        "versions": versions("onnx", "onnxruntime", "onnxscript"),
        "rounds": ROUNDS,
        "float_bytes": {},
        "parity": [],
    }
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name, (make, make_inputs) in MODELS.items():
            report["parity"] += parity(name, folder)
            if name == "minilm":
                export_float(make(), make_inputs(), folder / "minilm float32.onnx")
                report["float_bytes"][name] = (folder / "minilm float32.onnx").stat().st_size
                report["speed"] = speed(folder)
            RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(name, flush=True)
            for path in folder.iterdir():
                path.unlink()


if __name__ == "__main__":
    main()
