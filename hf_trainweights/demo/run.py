"""What `trainweights demo` does: quantize a model to every format, use it, save it, reload it, and measure.

Each format goes the way a user's model goes: `from_pretrained` with a configuration, `generate`, `save_pretrained` in
both serializations, `from_pretrained` again.
"""

from __future__ import annotations

import filecmp
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_trainweights.demo.training import Corpus, Recipe, Report, read_corpus, train_model
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.config import TrainWeightsConfig

PROMPT = "class Error(Exception):\n    def __init__(self"
NEW_TOKENS = 48
# Directory name of each way to save, and what it takes.
SERIALIZATIONS: dict[str, dict[str, Any]] = {"safetensors": {}, "bin": {"safe_serialization": False}}
# A float model goes past this package, and Transformers itself writes nothing else.
BASELINE_SERIALIZATIONS: dict[str, dict[str, Any]] = {"safetensors": {}}

_WINDOW_TOKENS, _BATCH_SIZE = 128, 8
# For a model of the user's, which may be a thousand times larger.
_MAX_WINDOWS, _MAX_WINDOWS_OF_OTHERS = 128, 16
_GENERATION_SECONDS = 1.0
_NEEDS_HEAD = "Perplexity and generation need a trained language-model head: give a checkpoint saved with one."


@dataclass(frozen=True)
class Row:
    """What one format makes of the model.

    Args:
        format: The format's name; for the baseline, its dtype.
        disk_bytes: Size of the safetensors files.
        bits_per_weight: Bits of a quantized weight, scales included; of any weight for the baseline.
        perplexity: On the held-out text.
        tokens_per_second: Of `generate`, one sequence, greedy, best of a second.
        sample: What the model makes of the prompt.
        summary: Which tensors were quantized and which left alone.
        failures: What a reload or a second save did not give back; empty if all is bit-equal.
    """

    format: str
    disk_bytes: int
    bits_per_weight: float
    perplexity: float
    tokens_per_second: float
    sample: str
    summary: str
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What a demo found.

    Args:
        model: What was quantized.
        held_out: Which text the perplexity is of; files that the training did not see.
        prompt: What the samples continue.
        losses: The training's loss at each step; empty for a model of the user's.
        rows: The baseline and each format.
    """

    model: str
    held_out: str
    prompt: str
    losses: tuple[float, ...]
    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Every failed check, with its format."""
        return tuple(f"{row.format}: {failure}" for row in self.rows for failure in row.failures)


@dataclass(frozen=True)
class Probe:
    """What every variant of a model is asked.

    Args:
        tokenizer: The model's tokenizer.
        windows: Held-out text, int64 [number of windows, tokens].
        device_map: Where to load to.
    """

    tokenizer: PreTrainedTokenizerBase
    windows: Tensor
    device_map: str


def run_demo(
    out: Path,
    formats: Sequence[str],
    recipe: Recipe,
    report: Report,
    model: str | None = None,
    keep: bool = True,
) -> Result:
    """Train a model, or take the user's, and measure it in every format.

    Args:
        out: A new or empty directory for `model/` and `<format>/<serialization>/`.
        formats: Names in `FORMATS`; the float baseline comes first in any case.
        recipe: How to train; not used with `model`.
        report: Told about every step.
        model: Directory or Hub id of a causal language model with a tokenizer; None to train one.
        keep: Whether to leave each format's files there once they are measured.

    Returns:
        The measurements; failed checks are in there, they do not raise.

    Raises:
        ConfigError: `out` is not empty, or `model` is not a float causal language model with a tokenizer.
        UnsupportedError: There is no text on this machine.
        TrainWeightsError: What quantizing or saving raises.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("--out", "a new or empty directory", str(out), "Choose another one: nothing is overwritten.")
    corpus = read_corpus()
    losses: list[float] = []
    if model is None:
        source = str(out / "model")
        losses = train_model(Path(source), corpus, recipe, report)
        # One small model on the CPU: the same numbers on a machine with an accelerator.
        probe = _make_probe(source, corpus, _MAX_WINDOWS, device_map="cpu")
    else:
        source = model
        check_causal_lm(source)
        probe = _make_probe(source, corpus, _MAX_WINDOWS_OF_OTHERS, device_map="auto")
    rows: list[Row] = []
    for name in (None, *formats):
        rows.append(measure(source, name, probe, out, report))
        if not keep:
            shutil.rmtree(out / rows[-1].format)
    return Result(model or "Llama trained here", corpus.name, PROMPT, tuple(losses), tuple(rows))


def check_causal_lm(model: str) -> None:
    """Check, before any weight is loaded, that a model can be measured.

    Args:
        model: Directory or Hub id.

    Raises:
        ConfigError: There is no such model, it has no language-model head, or it is quantized already.
    """
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _cannot_load(model, error) from error
    architectures = getattr(config, "architectures", None) or []
    known = {
        name
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ([names] if isinstance(names, str) else names)
    }
    if architectures and not known & set(architectures):
        raise ConfigError(
            f"--model {model}",
            "a causal language model, whose config.json names an architecture such as LlamaForCausalLM",
            ", ".join(architectures),
            _NEEDS_HEAD,
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"--model {model}", "a float model", "one that is quantized already", "Give the model it was made from."
        )


def measure(source: str, name: str | None, probe: Probe, out: Path, report: Report) -> Row:
    """Load a model in one format, use it, save it both ways, and check that both come back bit by bit.

    Args:
        source: Directory or Hub id of the float model.
        name: The format, None for the float model itself, which is saved as safetensors alone.
        probe: What to ask it.
        out: Directory that gets `<format>/<serialization>/`.
        report: Told about every step, except while the float model is loaded: that shows Transformers' own bars.

    Returns:
        The measurements.

    Raises:
        ConfigError: The float model cannot be loaded, or has no weights for its language-model head.
        TrainWeightsError: What quantizing or saving raises.
    """
    ways = SERIALIZATIONS if name else BASELINE_SERIALIZATIONS
    total = 2 + len(probe.windows) + 2 * len(ways)
    if name is None:
        model = _load_float(source, probe)
    else:
        report(name, "quantize", 0, total)
        model = _load(source, probe, quantization_config=TrainWeightsConfig(name))
    label = name or str(model.dtype).removeprefix("torch.")
    perplexity = _perplexity(model, probe.windows, lambda done: report(label, "perplexity", done, total))
    report(label, "generate", len(probe.windows), total)
    sample, tokens_per_second = _generate(model, probe.tokenizer)
    summary = model.hf_quantizer.summary() if name else None
    bits = _bits_per_weight(model)
    logits = _logits(model, probe)
    for way, arguments in ways.items():
        report(label, f"save {way}", total - 2 * len(ways), total)
        model.save_pretrained(out / label / way, **arguments)
    # Before the reloads, so that a large model is held once.
    del model
    failures: list[str] = []
    for done, way in enumerate(ways):
        report(label, f"reload {way}", total - len(ways) + done, total)
        failures += [f"{way}: {failure}" for failure in check_reload(out / label / way, ways[way], probe, logits)]
        # After the comparison of all files there; with it the directory is a model that anyone can use.
        probe.tokenizer.save_pretrained(out / label / way)
    report(label, "FAILED" if failures else "done", total, total)
    disk_bytes = sum(file.stat().st_size for file in (out / label / "safetensors").glob("*.safetensors"))
    return Row(label, disk_bytes, bits, perplexity, tokens_per_second, sample, str(summary or ""), tuple(failures))


def check_reload(directory: Path, arguments: dict[str, Any], probe: Probe, logits: Tensor) -> list[str]:
    """Load a saved model and compare it, and what it saves, with what was saved.

    Args:
        directory: Where it was saved.
        arguments: How it was saved: arguments of `save_pretrained`.
        probe: What to ask it.
        logits: What the saved model answered.

    Returns:
        What is different; empty if nothing is.
    """
    model = _load(str(directory), probe)
    failures = [] if torch.equal(_logits(model, probe), logits) else ["other logits after a reload"]
    with tempfile.TemporaryDirectory(dir=directory.parent) as second:
        model.save_pretrained(second, **arguments)
        names = sorted({file.name for file in (*directory.iterdir(), *Path(second).iterdir())})
        _, different, missing = filecmp.cmpfiles(directory, second, names, shallow=False)
    return failures + [f"other bytes in {name} after a second save" for name in (*different, *missing)]


def _load(source: str, probe: Probe, **arguments: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map=probe.device_map, **arguments)


def _load_float(source: str, probe: Probe) -> Any:
    try:
        model, loading = _load(source, probe, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise _cannot_load(source, error) from error
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ConfigError(
            f"--model {source}", f"weights for all of {type(model).__name__}", f"none for {missing}", _NEEDS_HEAD
        )
    return model


def _cannot_load(source: str, error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    next_step = "Give a directory that save_pretrained wrote, or the name of a repository on the Hub."
    return ConfigError(f"--model {source}", "a causal language model and its tokenizer", reason, next_step)


def _make_probe(source: str, corpus: Corpus, max_windows: int, device_map: str) -> Probe:
    """Return windows spread evenly over the held-out text, each behind the begin-of-text token if there is one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _cannot_load(source, error) from error
    tokens = torch.tensor(tokenizer("".join(corpus.held_out), add_special_tokens=False)["input_ids"])
    windows = tokens[: len(tokens) // _WINDOW_TOKENS * _WINDOW_TOKENS].view(-1, _WINDOW_TOKENS)
    windows = windows[:: -(-len(windows) // max_windows)]
    if tokenizer.bos_token_id is not None:
        windows = F.pad(windows, (1, 0), value=tokenizer.bos_token_id)
    return Probe(tokenizer, windows, device_map)


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
    """Return the continuation of the prompt and the tokens per second."""
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    arguments = {"do_sample": False, "pad_token_id": pad}
    # Buffers and code paths that only the first call sets up.
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
