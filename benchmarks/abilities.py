"""What can be done with a model after it is quantized: each quantizer of Transformers tries it, on tiny random models.

Run `python -m benchmarks.abilities`, with the `bench` extra. Every trial is a process of its own, because some end
their process. It writes `benchmarks/results/abilities.json`: for each trial, whether it held, and else why not.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantoConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TorchAoConfig,
)

from benchmarks.machine import cpu_name, versions
from benchmarks.memory import anonymous_bytes
from hf_trainweights import TrainWeightsConfig
from hf_trainweights.models.loading.conversion import return_freed_memory

RESULT = Path(__file__).parent / "results" / "abilities.json"
LIMIT_SECONDS = 300
IDS = torch.arange(12).view(1, 12)
DECODER: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Layers of 30 million weights: what else a load takes is a hundredth of them.
WIDE = {**DECODER, "hidden_size": 1024, "intermediate_size": 4096}


def _torchao(embeddings: bool) -> Any:
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis

    config = Int8WeightOnlyConfig()
    if not embeddings:
        return TorchAoConfig(config)
    # torchao's Int8WeightOnlyConfig takes Linears only; its guide quantizes embeddings with this one.
    rows = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    chosen = FqnToConfig({"_default": config, "model.embed_tokens": rows})
    return TorchAoConfig(chosen, include_input_output_embeddings=True)


# A config for each; with True it is asked to quantize embeddings too, and None says that it has no such option.
CONFIGS: dict[str, Callable[[bool], Any]] = {
    "hf_trainweights int8": lambda embeddings: TrainWeightsConfig("int8", include_embeddings=embeddings),
    "hf_trainweights int4": lambda embeddings: TrainWeightsConfig("int4", include_embeddings=embeddings),
    "torchao int8": _torchao,
    "bitsandbytes int8": lambda embeddings: None if embeddings else BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes nf4": lambda embeddings: (
        None
        if embeddings
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    ),
    "quanto int8": lambda embeddings: None if embeddings else QuantoConfig(weights="int8"),
}


def load(config: Any, source: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model, quantized on the way if a config is given."""
    given = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **given, **options).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def digests(directory: Path) -> list[str]:
    """Return what tells the weight files of a directory apart."""
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.safetensors"))]


def experts(config: Callable[[bool], Any], directory: Path) -> None:
    torch.manual_seed(0)
    sizes = {**DECODER, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(torch.bfloat16).save_pretrained(directory / "moe")
    model = load(config(False), directory / "moe")
    logits(model)
    float_bytes = sum(2 * parameter.numel() for parameter in load(None, directory / "moe").parameters())
    assert model.get_memory_footprint() < 0.7 * float_bytes, "the experts stay in float"


def embeddings(config: Callable[[bool], Any], directory: Path) -> None:
    chosen = config(True)
    assert chosen is not None, "it has no such option"
    model = load(chosen, directory / "float")
    assert type(model.get_input_embeddings().weight) is not torch.nn.Parameter, "the embeddings stay in float"
    logits(model)


def reload(config: Callable[[bool], Any], directory: Path) -> None:
    model = load(config(False), directory / "float")
    expected = logits(model)
    model.save_pretrained(directory / "saved")
    assert torch.equal(logits(load(None, directory / "saved")), expected), "the reloaded model gives other logits"


def save_again(config: Callable[[bool], Any], directory: Path) -> None:
    load(config(False), directory / "float").save_pretrained(directory / "saved")
    load(None, directory / "saved").save_pretrained(directory / "again")
    assert digests(directory / "again") == digests(directory / "saved"), "the second save writes other bytes"


def pickled(config: Callable[[bool], Any], directory: Path) -> None:
    model = load(config(False), directory / "float")
    expected = logits(model)
    model.save_pretrained(directory / "saved", safe_serialization=False)
    assert list((directory / "saved").glob("*.bin")), "it writes safetensors instead"
    assert torch.equal(logits(load(None, directory / "saved")), expected), "the reloaded model gives other logits"


def offload(config: Callable[[bool], Any], directory: Path) -> None:
    saved = directory / "saved"
    LlamaForCausalLM(LlamaConfig(**WIDE)).to(torch.bfloat16).save_pretrained(directory / "wide")
    load(config(False), directory / "wide").save_pretrained(saved)
    expected = logits(load(None, saved))
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "disk", "model.layers.1": "disk"}
    return_freed_memory()  # what this load takes of it would not count
    before_bytes = anonymous_bytes()
    model = load(None, saved, device_map=places, offload_folder=str(directory / "offload"))
    held_bytes, file_bytes = anonymous_bytes() - before_bytes, (saved / "model.safetensors").stat().st_size
    assert torch.equal(logits(model), expected), "the offloaded model gives other logits"
    assert held_bytes < 0.1 * file_bytes, f"{held_bytes} of {file_bytes} bytes are in memory"


def adapters(config: Callable[[bool], Any], directory: Path) -> None:
    from peft import LoraConfig, get_peft_model

    load(config(False), directory / "float").save_pretrained(directory / "saved")
    model = get_peft_model(load(None, directory / "saved"), LoraConfig(target_modules=["q_proj"]))
    model(IDS, labels=IDS).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in gradients), "no gradient arrives"


def dequantized(config: Callable[[bool], Any], directory: Path) -> None:
    load(config(False), directory / "float").save_pretrained(directory / "saved")
    load(None, directory / "saved").dequantize().save_pretrained(directory / "plain")
    model = load(None, directory / "plain")
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters()), "weights stay quantized"
    assert not hasattr(model.config, "quantization_config"), "config.json still calls it quantized"


TRIALS: dict[str, Callable[[Callable[[bool], Any], Path], None]] = {
    "reloads to equal logits": reload,
    "saves again to equal bytes": save_again,
    "saves `.bin`": pickled,
    "keeps offloaded layers out of memory": offload,
    "quantizes experts": experts,
    "quantizes embeddings": embeddings,
    "trains LoRA after a reload": adapters,
    "becomes float again": dequantized,
}


def attempt(method: str, trial: str) -> None:
    """Run one trial in this process; an error is its failure."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**DECODER)).to(torch.bfloat16).save_pretrained(Path(directory, "float"))
        TRIALS[trial](CONFIGS[method], Path(directory))


def outcome(method: str, trial: str) -> dict[str, Any]:
    """Return whether a trial held in a process of its own, and else the last line of its error."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.abilities", method, trial]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"holds": False, "why": f"not done after {LIMIT_SECONDS} s"}
    if ended.returncode == 0:
        return {"holds": True}
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return {"holds": False, "why": lines[-1][:300]}


def main() -> None:
    """Try everything and write the result file."""
    rows = {method: {trial: outcome(method, trial) for trial in TRIALS} for method in CONFIGS}
    report = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "versions": versions("peft"), "methods": rows}
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for method, trials in rows.items():
        print(method, {trial: found.get("why", "yes") for trial, found in trials.items()})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        attempt(*sys.argv[1:])
    else:
        main()
