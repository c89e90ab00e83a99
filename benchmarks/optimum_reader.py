r"""What optimum makes of exported ONNX files: the tokens that it generates beside those of the dequantized model.

optimum-onnx 0.1.0 needs Transformers below 4.58, so it reads in a process with packages of its own, in a folder:

    pip install --no-deps --target SITE "transformers<4.58" "huggingface-hub<1" "tokenizers<0.23" \
        optimum==2.1.0 optimum-onnx==0.1.0

Run `PYTHONPATH=tests python -m benchmarks.optimum_reader SITE`, which takes a few minutes and writes
`benchmarks/results/optimum.json`. The models are tiny and random.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from architectures import ARCHITECTURES
from exports.models import bart, quantized

from benchmarks.machine import versions
from hf_trainweights import dequantize_
from hf_trainweights.exports import export_onnx

RESULTS = Path(__file__).parent / "results" / "optimum.json"
NEW_TOKENS = 12
# The task, the class of optimum, the format and the runtime of each model.
MODELS: dict[str, tuple[Any, str, str, Any]] = {
    "llama": ("text-generation", "ORTModelForCausalLM", "int4 g32", "onnxruntime"),
    "llama_tied": ("text-generation", "ORTModelForCausalLM", "int8", "portable"),
    "gpt2": ("text-generation", "ORTModelForCausalLM", "int8", "onnxruntime"),
    "qwen3_moe": ("text-generation", "ORTModelForCausalLM", "int4 g32", "portable"),
    "t5": ("text2text-generation", "ORTModelForSeq2SeqLM", "int8", "portable"),
    "bart": ("text2text-generation", "ORTModelForSeq2SeqLM", "int4 g32", "onnxruntime"),
    "whisper": ("automatic-speech-recognition", "ORTModelForSpeechSeq2Seq", "int8", "onnxruntime"),
}
READ = """
import importlib.metadata, json, sys, torch
import optimum.onnxruntime
path, cls, given, result = sys.argv[1:]
inputs, options = torch.load(given, weights_only=True)
model = getattr(optimum.onnxruntime, cls).from_pretrained(path)
tokens = model.generate(**inputs, **options).tolist()
versions = {name: importlib.metadata.version(name) for name in ("optimum", "optimum-onnx", "transformers")}
open(result, "w").write(json.dumps({"tokens": tokens, "versions": versions}))
"""


def compare(name: str, site: Path, directory: Path) -> dict[str, Any]:
    """Return whether optimum generates the tokens of the dequantized model, and the versions that it ran with."""
    task, cls, config, runtime = MODELS[name]
    model: Any = quantized(bart() if name == "bart" else name, config)
    export_onnx(model.eval(), directory, task=task, runtime=runtime)
    inputs = ARCHITECTURES["t5" if name == "bart" else name].make_inputs()
    inputs.pop("decoder_input_ids", None)
    dense, options = copy.deepcopy(model), {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    dequantize_(dense)
    wanted = dense.generate(**inputs, **options, do_sample=False).tolist()
    given, result = directory / "inputs", directory / "tokens"
    torch.save((inputs, {**options, "do_sample": False}), given)
    command = [sys.executable, "-W", "ignore", "-c", READ, directory, cls, given, result]
    subprocess.run(command, check=True, cwd=directory, env={**os.environ, "PYTHONPATH": str(site)})
    found = json.loads(result.read_text())
    equal = {"tokens_equal": found["tokens"] == wanted, "versions": found["versions"]}
    return {"class": cls, "format": config, "runtime": runtime, **equal}


def main() -> None:
    """Compare every model, and write the report."""
    site, rows = Path(sys.argv[1]).resolve(), {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            rows[name] = compare(name, site, Path(directory))
        print(name, rows[name], flush=True)
    readers = [row.pop("versions") for row in rows.values()]
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": versions("onnx", "onnxruntime"),
        "reader": readers[0],
        "new_tokens": NEW_TOKENS,
        "models": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
