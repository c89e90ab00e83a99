"""What is waited for once in a process: the import, and the first product of each method; a compiler would show here.

`python -m benchmarks.speed.startup METHOD` prints it for one method, in JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

# What a product is of: a layer of a small encoder, and a few rows.
N, K, M = 768, 768, 32


def cpu_seconds() -> float:
    """Return the seconds of CPU of this process and of those that it has waited for, such as compilers."""
    others = os.times()
    return time.process_time() + others.children_user + others.children_system


def startup(names: Sequence[str], rounds: int, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Measure imports and first products, each round in a fresh process for each method.

    Args:
        names: Of the methods.
        rounds: How many processes for each.
        failures: Filled with what could not run, and why.

    Returns:
        One row per method: medians of the CPU seconds of `torch_import` (with Transformers), of this package's
        `own_import` after that, of the `first_product`, and of a `later_product`.
    """
    from benchmarks.speed.methods import guarded
    from benchmarks.speed.rounds import significant

    rows = []
    for name in names:
        found = guarded(failures, name, lambda name=name: [_in_fresh_process(name) for _ in range(rounds)])
        if found is not None:
            medians = {key: significant(statistics.median(each[key] for each in found)) for key in found[0]}
            rows.append({"name": name, **medians})
    return rows


def _in_fresh_process(name: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.speed.startup", name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr[-160:])
    return json.loads(ended.stdout.splitlines()[-1])


def main(name: str) -> None:
    """Print what one method takes in this process, which has imported nothing yet."""
    times = [cpu_seconds()]
    import torch
    from transformers import AutoModel, PreTrainedModel  # noqa: F401  (what every model of Transformers imports)

    times.append(cpu_seconds())
    import hf_trainweights  # noqa: F401  (it is the import that is timed)

    times.append(cpu_seconds())
    from benchmarks.speed.methods import methods

    torch.set_num_threads(1)
    method = next(each for each in methods(peers=False) if each.name == name)
    layer = torch.nn.Sequential(torch.nn.Linear(K, N, dtype=method.dtype))
    x = torch.ones(M, K, dtype=method.dtype)
    method.apply(layer)
    products = []
    with torch.inference_mode():
        for _ in range(3):
            start = cpu_seconds()
            layer(x)
            products.append(cpu_seconds() - start)
    imports = {"torch_import": times[1] - times[0], "own_import": times[2] - times[1]}
    print(json.dumps({**imports, "first_product": products[0], "later_product": products[-1]}))


if __name__ == "__main__":
    main(sys.argv[1])
