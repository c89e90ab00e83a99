"""What a result was measured on: the processor, and the versions of what is compared."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("hf_trainweights", "torch", "transformers", "torchao", "bitsandbytes", "optimum-quanto")


def cpu_name() -> str:
    """Return what the processor calls itself, with its family and model where that is no more than a brand."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    name = found.get("model name", platform.processor())
    is_brand = "model" in found and not any(letter.isdigit() for letter in name)
    return f"{name}, family {found['cpu family']} model {found['model']}" if is_brand else name


def cpu_flags() -> list[str]:
    """Return the instruction sets that matter here, as far as the processor has them."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return sorted(
        {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16"} & set(line.split())
    )


def versions(*others: str) -> dict[str, str]:
    """Return the versions of what is compared, and of other packages, as far as they are installed."""
    found = {}
    for name in (*PACKAGES, *others):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit that was measured, in 40 hexadecimal digits; empty outside a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
