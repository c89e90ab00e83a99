"""Counts the instructions that CUDA C takes for each weight, in the machine code of GPUs that need not be there.

`python -m benchmarks.gpu.machine_code` writes `benchmarks/results/gpu_instructions.json`. It needs NVRTC and NVIDIA's
disassembler: `pip install nvidia-cuda-nvrtc nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import versions
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.kernels import cuda_driver, few_rows, gpu_tables

# Compute capabilities from the A100 to the RTX 5090.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
FORMS: tuple[Format, ...] = (
    *(Int4(128), Int4(64), Int4(32), Int8(), Int8(128), Int8(32), Float8E4M3()),
    *(Affine(4, 128), Affine(4, 64, offset="bias"), Table4(32, "e8m0"), Table4(16, "e4m3")),
)
# Shared memory that all threads wait for, and memory for what registers do not hold.
SLOW = ("BAR", "STS", "LDS", "LDL", "STL")
PATH = Path(__file__).parents[1] / "results" / "gpu_instructions.json"


@dataclass(frozen=True)
class Loop:
    """The loop of a kernel.

    Args:
        per_weight: Instructions of a lane for each weight of its tile.
        registers: Registers of a thread.
        stack_bytes: Memory of a thread for what registers do not hold.
        slow: How often the loop waits for all threads, or reads and writes shared or local memory.
    """

    per_weight: float
    registers: int
    stack_bytes: int
    slow: int


def default_tile(M: int) -> Mapping[str, int]:
    """Return the tile for M rows that serves where no GPU was measured."""
    return next(rule.tile for rule in gpu_tables.DEFAULT if rule.way == "few_rows" and (rule.rows or 0) >= M)


def count(
    form: Format, architecture: int, tile: Mapping[str, int], grouped: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Loop:
    """Compile the kernel for few rows, and count.

    Args:
        form: The weight's format.
        architecture: A compute capability without its point.
        tile: The constants of the kernel.
        grouped: 1 for experts.
        dtype: Dtype of x.

    Returns:
        The shortest loop that holds all products of tensor cores of a loop.

    Raises:
        FileNotFoundError: The disassembler is not there.
        UnsupportedError: NVRTC is not there.
    """
    macros = few_rows.macros_of(form, 4096, dtype, dtype)
    assert macros is not None
    code = cuda_driver.compiled("few_rows", macros | {**tile, "GROUPED": grouped}, architecture)
    listing, usage = (_disassemble(code, option) for option in ("-sass", "-res-usage"))
    loop = _loop_of(listing)
    # A lane has 16 bytes of codes of two rows in each stage and tile.
    weights = tile["STAGES"] * tile["ROW_TILES"] * 2 * 128 // macros["BITS"]
    slow = Counter(operation.split(".")[0] for operation in loop)
    registers, stack_bytes = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    return Loop(round(len(loop) / weights, 2), registers, stack_bytes, sum(slow[name] for name in SLOW))


def _disassemble(code: bytes, option: str) -> str:
    tools = [_tool(name) for name in ("cuobjdump", "nvdisasm")]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        # cuobjdump calls nvdisasm by its name.
        options = {"capture_output": True, "text": True, "check": True, "env": {"PATH": str(Path(tools[1]).parent)}}
        return subprocess.run([tools[0], option, file.name], **options).stdout


def _tool(name: str) -> str:
    """Return the path of a program of CUDA, as its package installs it."""
    installed = sorted(Path(sysconfig.get_paths()["purelib"]).glob(f"nvidia/*/bin/{name}"))
    path = str(installed[0]) if installed else shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name}: pip install nvidia-cuda-{name}")
    return path


def _loop_of(listing: str) -> list[str]:
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", listing)]
    places = {at: place for place, (at, _) in enumerate(code)}
    loops = []
    for end, (at, text) in enumerate(code):
        target = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            body = [text for _, text in code[places[int(target[1], 16)] : end + 1]]
            loops.append([re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for text in body])
    return max(loops, key=lambda body: (sum("HMMA" in operation for operation in body), -len(body)))


def main() -> None:
    """Count for all formats and GPUs."""
    rows = [
        {
            "form": str(form),
            "rows": M,
            "architecture": architecture,
            **asdict(count(form, architecture, default_tile(M))),
        }
        for form in FORMS
        for M in (8, 16)
        for architecture in ARCHITECTURES
    ]
    head = {"nvrtc": ".".join(map(str, cuda_driver.nvrtc_version())), "versions": versions()}
    PATH.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(PATH)


if __name__ == "__main__":
    main()
