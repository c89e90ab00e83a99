"""Measures the demo's model in one format.

It treats the model as a user would: `from_pretrained` with a configuration, `generate`, `save_pretrained` in both
serializations, `from_pretrained` again.
"""

from __future__ import annotations

import filecmp
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights_cli.demo.float_model import load_float
from hf_trainweights_cli.demo.probe import PROMPT, Probe
from hf_trainweights_cli.demo.training import Report

NEW_TOKENS = 48
# The arguments of `save_pretrained` for each serialization, by the name of its directory.
SERIALIZATIONS: dict[str, dict[str, Any]] = {"safetensors": {}, "bin": {"safe_serialization": False}}
# Transformers saves the float model, and it writes only safetensors.
BASELINE_SERIALIZATIONS: dict[str, dict[str, Any]] = {"safetensors": {}}

_BATCH_SIZE = 8
_GENERATION_SECONDS = 0.5


@dataclass(frozen=True)
class Row:
    """The measurements of one format.

    Args:
        format: The format's name; for the baseline, its dtype.
        disk_bytes: Size of the safetensors files.
        bits_per_weight: Bits per element of quantized weights in memory, scales included; of all for the baseline.
        perplexity: Perplexity of the held-out text.
        tokens_per_second: Speed of `generate` for one sequence, greedy, the best within half a second.
        sample: The model's continuation of the prompt.
        summary: The summary of quantized and float tensors.
        failures: The differences after a reload or a second save; empty if all bits are equal.
    """

    format: str
    disk_bytes: int
    bits_per_weight: float
    perplexity: float
    tokens_per_second: float
    sample: str
    summary: str
    failures: tuple[str, ...]


def measure(source: str, name: str | None, probe: Probe, out: Path, report: Report) -> Row:
    """Load a model in one format, use it, save it in both serializations, and check that reloads are bit-equal.

    If `name` is None, measure the float model, which is saved only as safetensors.
    """
    ways = SERIALIZATIONS if name else BASELINE_SERIALIZATIONS
    total = 2 + len(probe.windows) + 2 * len(ways)
    if name is None:
        model = load_float(source, probe.device_map)
    else:
        report(name, "quantize", 0, total)
        model = _load(source, probe, quantization_config=TrainWeightsConfig(name))
    label = name or str(model.dtype).removeprefix("torch.")
    perplexity = _perplexity(model, probe.windows, lambda done: report(label, "perplexity", done, total))
    report(label, "generate", len(probe.windows), total)
    sample, tokens_per_second = _generate(model, probe.tokenizer)
    summary = str(model.hf_quantizer.summary()) if name else ""
    bits, logits = _bits_per_weight(model), _logits(model, probe)
    for way, arguments in ways.items():
        report(label, f"save {way}", total - 2 * len(ways), total)
        model.save_pretrained(out / label / way, **arguments)
    # Free the model before the reloads, so that memory holds a large model only once.
    del model
    failures = _check_reloads(out / label, ways, probe, logits, lambda stage, done: report(label, stage, done, total))
    report(label, "FAILED" if failures else "done", total, total)
    disk_bytes = sum(file.stat().st_size for file in (out / label / "safetensors").glob("*.safetensors"))
    return Row(label, disk_bytes, bits, perplexity, tokens_per_second, sample, summary, failures)


def _check_reloads(
    out: Path, ways: Mapping[str, dict[str, Any]], probe: Probe, logits: Tensor, report: Callable[[str, int], None]
) -> tuple[str, ...]:
    failures: list[str] = []
    first_step = 2 + len(probe.windows) + len(ways)
    for number, (way, arguments) in enumerate(ways.items()):
        report(f"reload {way}", first_step + number)
        failures += [f"{way}: {failure}" for failure in check_reload(out / way, arguments, probe, logits)]
        # The tokenizer makes the directory usable; save it only now, after the check has compared all files.
        probe.tokenizer.save_pretrained(out / way)
    return tuple(failures)


def check_reload(directory: Path, arguments: dict[str, Any], probe: Probe, logits: Tensor) -> list[str]:
    """Reload a saved model, save it again with the same `arguments`, and return the differences in logits and files."""
    model = _load(str(directory), probe)
    failures = [] if torch.equal(_logits(model, probe), logits) else ["other logits after a reload"]
    with tempfile.TemporaryDirectory(dir=directory.parent) as second:
        model.save_pretrained(second, **arguments)
        names = sorted({file.name for file in (*directory.iterdir(), *Path(second).iterdir())})
        _, different, missing = filecmp.cmpfiles(directory, second, names, shallow=False)
    return failures + [f"other bytes in {name} after a second save" for name in (*different, *missing)]


def _load(source: str, probe: Probe, **arguments: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map=probe.device_map, **arguments)


@torch.no_grad()
def _perplexity(model: PreTrainedModel, windows: Tensor, report: Callable[[int], None]) -> float:
    nats: list[float] = []
    for batch in windows.split(_BATCH_SIZE):
        report(len(nats))
        logits = model(input_ids=batch.to(model.device)).logits
        # One window at a time: in float32 the logits of a batch can be larger than the model.
        for window, its_logits in zip(batch.to(logits.device), logits, strict=True):
            nats.append(F.cross_entropy(its_logits[:-1].float(), window[1:]).item())
    return math.exp(sum(nats) / len(nats))


@torch.no_grad()
def _logits(model: PreTrainedModel, probe: Probe) -> Tensor:
    return model(input_ids=probe.windows[:1].to(model.device)).logits.cpu()


def _generate(model: Any, tokenizer: Any) -> tuple[str, float]:
    """Generate a continuation of the prompt; return it and the tokens per second."""
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    arguments = {"do_sample": False, "pad_token_id": pad}
    # The first call sets up buffers and code paths.
    model.generate(**inputs, **arguments, max_new_tokens=2)
    arguments |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    sample, seconds = "", []
    while sum(seconds) < _GENERATION_SECONDS:
        start = time.perf_counter()
        output = model.generate(**inputs, **arguments)
        seconds.append(time.perf_counter() - start)
        sample = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sample, NEW_TOKENS / min(seconds)


def _bits_per_weight(model: Any) -> float:
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        weights = [(parameter.numel(), parameter.nbytes) for parameter in model.parameters()]
    else:
        weights = [(choice.numel, choice.bytes_after) for choice in quantizer.summary().quantized]
    return 8 * sum(stored_bytes for _, stored_bytes in weights) / sum(numel for numel, _ in weights)
