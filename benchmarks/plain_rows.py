"""One token by the compiled products beside loops that are written for one format and group size alone.

Run `python -m benchmarks.plain_rows` on a CPU with AVX512_VNNI that has a C compiler; it takes minutes and writes
`benchmarks/results/plain_rows.json`: by weight, the best CPU time of each in microseconds, with the weight in the
caches and from memory, and the largest difference of their results, in units of the largest result.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights.formats import get_format
from hf_trainweights.kernels import compiled

RESULTS = Path(__file__).parent / "results" / "plain_rows.json"
SOURCE = Path(__file__).with_suffix(".c")
NATIVE = Path(compiled.__file__).parent / "native"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-tree-pre", "-mavx2", "-mfma", "-mf16c")
AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))

SHAPES = ((896, 4864), (4096, 4096), (2560, 6912))
# The names of the loops: format and group size, 0 for one scale a row.
LOOPS = ("int4_32", "int4_128", "int8_32", "int8_128", "int8_0")
ROUNDS = 25
# More than a third-level cache holds.
MEMORY_BYTES = 1 << 27


def plain_loops() -> ctypes.CDLL:
    """Compile the loops of `plain_rows.c`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plain_rows.so"
        subprocess.run(["cc", *FLAGS, *AVX512, f"-I{NATIVE}", SOURCE, "-o", path], check=True)
        library = ctypes.CDLL(str(path))
    for name in LOOPS:
        getattr(library, name).argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2
    return library


def compiled_call(name: str, x: Tensor, N: int) -> tuple[Callable[[dict[str, Tensor]], None], Tensor]:
    """Return a function that multiplies x with a weight by the library, without what Python does around it."""
    kind, _, group_size = name.partition("_")
    form = get_format({"format": kind, "group_size": int(group_size) or None})
    product, library = compiled.find(form, N, x.shape[1], x.dtype, torch.float16), compiled.loaded_library()
    assert product is not None
    assert library is not None
    scratch, out = torch.empty(1 << 20, dtype=torch.uint8), x.new_empty(1, N)

    def call(weight: dict[str, Tensor]) -> None:
        pointers = (x.data_ptr(), weight["qdata"].data_ptr(), weight["scale"].data_ptr(), None, out.data_ptr())
        library.product(product._address, *pointers, 1, 1, scratch.data_ptr(), *[None] * compiled.OTHERS)

    return call, out


def measure(plain: ctypes.CDLL, name: str, N: int, K: int) -> dict[str, float]:
    """Return the best CPU times in microseconds for one weight, and the difference of the results."""
    kind, _, group_size = name.partition("_")
    form = get_format({"format": kind, "group_size": int(group_size) or None})
    weight, x, out = form.quantize(torch.randn(N, K).half() * 0.02), torch.randn(1, K).bfloat16(), torch.empty(1, N)
    call, rounded = compiled_call(name, x, N)
    loop = getattr(plain, name)

    def plain_call(weight: dict[str, Tensor]) -> None:
        loop(x.data_ptr(), weight["qdata"].data_ptr(), weight["scale"].data_ptr(), out.data_ptr(), N, K)

    result: dict[str, float] = {}
    copies = -(-MEMORY_BYTES // weight["qdata"].nbytes)
    weights = [weight, *({key: tensor.clone() for key, tensor in weight.items()} for _ in range(copies - 1))]
    for place, held in {"caches": weights[:1] * 4, "memory": weights}.items():
        best = {"package": float("inf"), "plain": float("inf")}
        for _ in range(ROUNDS):
            for label, function in {"package": call, "plain": plain_call}.items():
                start = time.thread_time()
                for each in held:
                    function(each)
                best[label] = min(best[label], (time.thread_time() - start) / len(held))
        result |= {f"{label}_us_from_{place}": round(seconds * 1e6, 1) for label, seconds in best.items()}
        result[f"ratio_from_{place}"] = round(best["package"] / best["plain"], 3)
    result["difference"] = float((rounded.float() - out).abs().max() / out.abs().max())
    return result


def main() -> None:
    """Measure, and write the results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = plain_loops()
    rows = {f"{name} {N}x{K}": measure(plain, name, N, K) for N, K in SHAPES for name in LOOPS}
    found = {"cpu": cpu_name(), "library": compiled.instructions(), "commit": commit(), "versions": versions()}
    RESULTS.write_text(json.dumps({**found, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
