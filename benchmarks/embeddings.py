"""What quantized embeddings and output heads cost, on both models of `benchmarks.curve`.

Run `python -m benchmarks.embeddings [--models DIRECTORY]`; it needs the `test` extra and no network, takes a minute,
and trains the demo's Llama with each of three seeds unless DIRECTORY has it. It writes
`benchmarks/results/embeddings.json`.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.curve_models import DemoLlama, MiniLM, Subject
from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, quantize_

RESULTS = Path(__file__).parent / "results" / "embeddings.json"
SEEDS = (0, 1, 2)
# Each with embeddings in float, then in the format, then in int8.
FORMATS = ("int8", "int4")


def measure(subject: Subject, config: TrainWeightsConfig) -> dict[str, float]:
    """Return the figures of a model by a configuration, and the share of its weights' bytes that are left in float."""
    model = subject.copied()
    quantize_(model, config)
    left = sum(each.nbytes for each in model.parameters() if not isinstance(each, QuantizedTensor))
    share = left / (left + sum(each.stored_bytes for each in model.parameters() if isinstance(each, QuantizedTensor)))
    dequantize_(model)
    changed = copy.deepcopy(subject.reference)
    changed.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    return {**subject.measure(changed), "float_share": share}


def averaged(subjects: Sequence[Subject], config: TrainWeightsConfig) -> dict[str, float]:
    """Return the means of the figures of several models."""
    found = [measure(subject, config) for subject in subjects]
    return {name: mean(each[name] for each in found) for name in found[0]}


def configurations(subject: Subject) -> dict[str, TrainWeightsConfig]:
    """Return what is measured for a model: each format with its embeddings left alone, quantized, and in int8."""
    tables = [subject.reference.get_input_embeddings(), subject.reference.get_output_embeddings()]
    names = [name for name, module in subject.reference.named_modules() if any(module is each for each in tables)]
    found = {}
    for name in FORMATS:
        found[f"{name}, embeddings in float"] = TrainWeightsConfig(name)
        found[f"{name}, embeddings too"] = TrainWeightsConfig(name, include_embeddings=True)
        if name != "int8":
            overrides = dict.fromkeys(names, "int8")
            found[f"{name}, embeddings in int8"] = TrainWeightsConfig(name, overrides=overrides)
    return found


def main() -> None:
    """Measure, print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, help="where the trained Llamas are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        of_seeds = [DemoLlama(seed, options.models or Path(made)) for seed in SEEDS]
        subjects: dict[str, list[Subject]] = {"llama": [*of_seeds], "minilm": [MiniLM()]}
        rows: dict[str, Any] = {
            method: {name: averaged(each, configurations(each[0])[method]) for name, each in subjects.items()}
            for method in configurations(of_seeds[0])
        }
    result = {"commit": commit(), "cpu": cpu_name(), "versions": versions(), "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
