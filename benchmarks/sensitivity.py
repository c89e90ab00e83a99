"""Which weights matter, told by random tokens, by text and by sizes, against what noise in each weight really changes.

Run `python -m benchmarks.sensitivity`; it needs the `test` extra and no network, and takes five minutes. It writes
`benchmarks/results/sensitivity.json`: by how many dB the error of a model falls, in theory, if bits are distributed by
each way to tell instead of evenly. An error of a weight is taken to fall by 6 dB for a bit.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.curve_models import DemoLlama, MiniLM, Subject
from hf_trainweights import TrainWeightsConfig
from hf_trainweights.models.budget.allocation import weights_to_allocate
from hf_trainweights.models.budget.sensitivity import random_tokens, sensitivities
from hf_trainweights.models.choosing.selection import choose

RESULTS = Path(__file__).parent / "results" / "sensitivity.json"
NOISE, DRAWS = 0.02, 2


@torch.no_grad()
def changes_by_noise(subject: Subject) -> dict[str, float]:
    """Return what noise of the same relative size in each weight changes, one weight after another."""
    generator, found = torch.Generator().manual_seed(1), {}
    for name, module in subject.linears().items():
        weight, changes = module.weight.data, []
        for _ in range(DRAWS):
            noise = torch.randn(weight.shape, generator=generator)
            module.weight.data = weight + noise * (math.sqrt(NOISE) * weight.norm() / noise.norm())
            measured = subject.measure(subject.reference)
            changes.append(measured.get("divergence_millinats", 1 - measured.get("mean_cosine", 1)))
        module.weight.data = weight
        found[f"{name}.weight"] = sum(changes) / DRAWS
    # The output of a model does not depend on each of its weights, such as those of MiniLM's pooler.
    return {name: change for name, change in found.items() if change > 1e-6}


def gain_db(told: Mapping[str, float], true: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """Return by how much less a model loses if bits go by one way to tell what matters, at as many bits as evenly."""
    bits = {name: 0.5 * math.log2(told[name] / sizes[name]) for name in true}
    mean_bits = sum(sizes[name] * bits[name] for name in true) / sum(sizes[name] for name in true)
    lost = sum(true[name] * 4 ** (mean_bits - bits[name]) for name in true)
    return 10 * math.log10(sum(true.values()) / lost)


def gains(subject: Subject) -> dict[str, float]:
    """Return the gain of each way to tell what matters."""
    model = subject.reference
    config = TrainWeightsConfig(bits=4.0)
    weights = weights_to_allocate(choose(model, config))
    true = changes_by_noise(subject)
    sizes = {each.name: each.numel for each in weights}
    ways = {
        "noise in each weight": true,
        "text": sensitivities(model, weights, subject.calibration()),
        "random tokens": sensitivities(model, weights, random_tokens(model)),
        "root of the size": {name: math.sqrt(size) for name, size in sizes.items()},
    }
    return {name: round(gain_db(told, true, sizes), 2) for name, told in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("build/curve"), help="where trained models are kept")
    arguments = parser.parse_args()
    subjects: dict[str, Subject] = {"MiniLM-L6-v2": MiniLM()}
    subjects |= {f"the demo's Llama, seed {seed}": DemoLlama(seed, arguments.models) for seed in range(3)}
    found = {name: gains(subject) for name, subject in subjects.items()}
    RESULTS.write_text(json.dumps({"gain_db": found}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
