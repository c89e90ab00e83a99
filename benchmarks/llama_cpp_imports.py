"""What llama.cpp makes of the GGUF files that tests import: its logits beside those of the imported models.

Run `PYTHONPATH=tests python -m benchmarks.llama_cpp_imports` where `llama-cpp-python` is installed; it takes two
minutes and writes `benchmarks/results/llama_cpp_imports.json`. The models are tiny and random. llama.cpp reads each
file with its tensors unpacked to float32, so nothing but the order of sums differs, and its table of GELU in float16.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import llama_cpp
import torch
from imports.gguf.architectures import SPECS, write_architecture
from imports.gguf.files import all_of, write_gguf
from tiny_tokenizers import byte_level

from benchmarks.llama_cpp import relative_error, run, unpack, use_table_of_gelu
from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights import import_directory
from hf_trainweights.imports.gguf.architectures import READABLE

RESULTS = Path(__file__).parent / "results" / "llama_cpp_imports.json"
TOKENS = 100
OTHERS = ("gemma4", "gemma4_shared", "gemma4_experts", "mamba", "bloom", "nemotron", "minimax_m2", "lfm2")


@torch.no_grad()
def compare(name: str, folder: Path) -> dict[str, Any]:
    """Return the difference of the logits of one model, as a part of their norm."""
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True)
    file = source / "model.gguf"
    model = write_architecture(file, name) if name in SPECS else write_gguf(file, name, all_of("Q8_0"))
    byte_level().save_pretrained(source)
    if not READABLE[type(model).__name__].described:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(source)
    import_directory(source, out)
    imported = type(model).from_pretrained(out, dtype=torch.float32).dequantize().eval()
    use_table_of_gelu(imported)
    ids = torch.randint(3, 400, (TOKENS,), generator=torch.Generator().manual_seed(1))
    unpack(file, folder / "unpacked.gguf")
    logits, _ = run(folder / "unpacked.gguf", ids.tolist(), [])
    error = relative_error(logits, imported(ids[None]).logits[0].numpy())
    row = {"architecture": READABLE[type(model).__name__].name, "class": type(model).__name__}
    return {"model": name, **row, "logits_relative_error": error}


def architectures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return all architectures that are read, with their classes and the largest difference of those compared here."""
    listed = []
    for name in dict.fromkeys(entry.name for entry in READABLE.values()):
        classes = [each for each, entry in READABLE.items() if entry.name == name]
        errors = [row["logits_relative_error"] for row in rows if row["architecture"] == name]
        described = READABLE[classes[0]].described
        listed.append({"name": name, "classes": classes, "described": described, "error": max(errors, default=None)})
    return listed


def main() -> None:
    """Compare all models, print and store the results."""
    rows = []
    for name in (*SPECS, *OTHERS):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(name, Path(folder)))
        print(rows[-1], flush=True)
    made = {"commit": commit(), "cpu": cpu_name(), "llama_cpp_python": llama_cpp.__version__, **versions("gguf")}
    RESULTS.write_text(
        json.dumps({**made, "architectures": architectures(rows), "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
