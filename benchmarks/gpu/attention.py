"""Attention of one token to a long cache on a GPU: by the stored codes, from dequantized floats, and to bfloat16.

`python -m benchmarks.gpu.attention FOLDER` writes `FOLDER/attention.json`, anew after each row. `--seconds` ends it.
`--dry` does the same on a CPU, tiny, by PyTorch's ops alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cuda import _seconds
from benchmarks.speed.rounds import interleave
from hf_trainweights.cache.stores import IntegerStore
from hf_trainweights.kernels import cuda_attention

ROUNDS = 5
# Heads of keys, query heads for each, columns; then tokens, and bits of keys and of values.
HEADS = ((8, 4, 128), (2, 7, 64), (8, 1, 128))
TOKENS = (2048, 8192, 32768, 131072)
BITS = ((8, 8), (8, 4), (4, 4))
# Layers of a model lie one after another in memory: so many bytes are read before any of them is read again.
ROTATED_BYTES = 256_000_000

Pair = tuple[IntegerStore, IntegerStore]


def measure(
    device: str, heads: Sequence[tuple[int, int, int]], tokens: Sequence[int], copied_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each way, for each shape of heads, number of tokens and pair of bits."""
    for key_heads, shared, columns in heads:
        query = torch.randn(1, key_heads * shared, 1, columns).to(device, torch.bfloat16)
        for count in tokens:
            states = torch.randn(2, 1, key_heads, count, columns, device=device).bfloat16()
            copies = 1 + copied_bytes // states.nbytes
            floats = [states.clone() for _ in range(copies)]
            exact = partial(F.scaled_dot_product_attention, query, enable_gqa=key_heads != query.shape[1])
            for bits in BITS:
                pairs = [stores(layer, bits) for layer in floats]
                ways = {
                    "bf16": [partial(exact, *layer) for layer in floats],
                    "dequantized": [partial(by_floats, exact, pair) for pair in pairs],
                    "codes": [partial(by_codes, query, pair) for pair in pairs],
                }
                if ways["codes"][0]() is None:
                    del ways["codes"]
                runs = {name: partial(_each, device, calls) for name, calls in ways.items()}
                for row in interleave(runs, ROUNDS, "bf16"):
                    sizes = {"heads": key_heads, "shared": shared, "columns": columns, "tokens": count, "bits": bits}
                    yield {**sizes, **row}


def stores(states: Tensor, bits: tuple[int, int]) -> Pair:
    """Return keys and values as integers."""
    counted = torch.ones(1, states.shape[3], dtype=torch.bool, device=states.device)
    keys, values = (IntegerStore.of(x, bits[side], side == 0, counted) for side, x in enumerate(states))
    return keys, values


def by_codes(query: Tensor, pair: Pair) -> Tensor | None:
    tokens = slice(0, pair[0].length)
    return cuda_attention.attend(query, pair[0].stored, pair[1].stored, tokens, query.shape[-1] ** -0.5, None)


def by_floats(attend: Callable[[Tensor, Tensor], Tensor], pair: Pair) -> Tensor:
    return attend(*(store.load(0, torch.bfloat16) for store in pair))


def _each(device: str, calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of one of these calls, which read the memory of one layer each."""
    return _seconds(device, lambda: [call() for call in calls]) / len(calls)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the result is written")
    parser.add_argument("--seconds", type=float, default=60, help="no row begins later")
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny")
    options = parser.parse_args()
    start, rows = time.monotonic(), []
    sizes = ("cpu", HEADS[1:2], (100,), 0) if options.dry else ("cuda", HEADS, TOKENS, ROTATED_BYTES)
    head = {"machine": "no GPU" if options.dry else torch.cuda.get_device_name()}
    for row in measure(*sizes):
        rows.append(row)
        text = json.dumps({**head, "rows": rows}, indent=1)
        (options.folder / "attention.json").write_text(text + "\n", encoding="utf-8")
        if time.monotonic() - start > options.seconds:
            break


if __name__ == "__main__":
    main()
