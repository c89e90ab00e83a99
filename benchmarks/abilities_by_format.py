"""What each format can do: every capability of the package tried with a model in each, on tiny random models.

Run `PYTHONPATH=tests python -m benchmarks.abilities_by_format`, with the `bench` extra. Each format has a process of
its own, and two ranks try all of them under FSDP2 and tensor parallelism. It writes
`benchmarks/results/abilities_by_format.json`: for each format and capability "yes", "refused" for an error of the
package's own that says what to do instead, or "no", and why.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Outcome, outcomes_of_ranks
from tiny_tokenizers import byte_level
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from weights import random_codes

from benchmarks.abilities import IDS, digests
from benchmarks.machine import cpu_name, versions
from hf_trainweights import (
    QuantizedTensor,
    TrainWeightsConfig,
    dequantize_,
    export_compressed_tensors,
    export_gguf,
    export_program,
    export_torchscript,
    load_file,
    quantize_,
    save_file,
)
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.exports import OnnxModel, export_onnx
from hf_trainweights.formats import get_format

RESULT = Path(__file__).parent / "results" / "abilities_by_format.json"
LIMIT_SECONDS = 1500
# Two ranks can cut rows of GGUF's superblocks of 256 columns.
SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8, groups of 32": {"format": "int8", "group_size": 32},
    "int4": {"format": "int4", "group_size": 32},
    "float8_e4m3": {"format": "float8_e4m3"},
    "codebook4": {"format": "codebook4"},
    **{f"uint{bits}": {"format": f"uint{bits}"} for bits in range(2, 7)},
    "coded": {"format": "coded"},
    "affine": {"format": "affine", "bits": 4},
    "float8_e4m3, groups of 128": {"format": "float8_e4m3", "group_size": 128},
    "int4, column scales": {"format": "int4", "group_size": 32, "column_scale": True},
    "uint4, column scales": {"format": "uint4", "column_scale": True},
    "bits=4.5": {"bits": 4.5},
}
# Formats of weights that other programs quantized. Their stored tensors are random here.
OF_FILES: dict[str, dict[str, Any]] = {
    "affine, scales of GGUF's Q4_K": {"format": "affine", "group_size": 32, "scales": "k4", "offset": "none"},
    "affine, bias (MLX)": {"format": "affine", "group_size": 64, "offset": "bias"},
    "table4, e8m0 (MXFP4)": {"format": "table4", "group_size": 32, "scales": "e8m0"},
    "table4, nested (NF4)": {"format": "table4", "group_size": 64, "scales": "nested"},
    "float8_e4m3, e8m0 (MXFP8)": {"format": "float8_e4m3", "group_size": 32, "scales": "e8m0"},
    "affine, ordered columns (GPTQ)": {"format": "affine", "column_order": True},
}
CONFIGS |= {name: {"format": "int8", "overrides": {"re:.*": form}} for name, form in OF_FILES.items()}


def made(name: str) -> AbstractContextManager[None]:
    """Return a context in which weights get random stored tensors, if the format is one of files alone."""
    return random_codes(get_format(OF_FILES.get(name, {"format": "int8"})))


class Trial:
    """A format and where its models are.

    Args:
        name: The format, one of `CONFIGS`.
        directory: A directory of its own.
    """

    def __init__(self, name: str, directory: Path):
        self.name, self.directory = name, directory

    def load(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return a model that is quantized as it is loaded."""
        config = TrainWeightsConfig(**CONFIGS[self.name])
        source = self.directory.parent / "float"
        with made(self.name):
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, quantization_config=config).eval()

    def saved(self) -> Path:
        """Return the directory of a saved model, written once."""
        path = self.directory / "saved"
        if not path.exists():
            self.load().save_pretrained(path)
        return path


def read(path: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


@torch.no_grad()
def dequantized(model: PreTrainedModel) -> Tensor:
    return logits(copy.deepcopy(model).dequantize())


def same(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    difference = ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
    assert difference <= tolerance, f"the results differ by {difference:.1e}"


def reload(trial: Trial) -> None:
    assert torch.equal(logits(read(trial.saved())), logits(trial.load())), "the reloaded model gives other logits"


def save_again(trial: Trial) -> None:
    read(trial.saved()).save_pretrained(trial.directory / "again")
    assert digests(trial.directory / "again") == digests(trial.saved()), "the second save writes other bytes"


def pickled(trial: Trial) -> None:
    model, path = trial.load(), trial.directory / "bin"
    model.save_pretrained(path, safe_serialization=False)
    assert list(path.glob("*.bin")), "it writes safetensors instead"
    assert torch.equal(logits(read(path)), logits(model)), "the reloaded model gives other logits"


def single_file(trial: Trial) -> None:
    model, path = trial.load(), trial.directory / "single.safetensors"
    save_file(model, path)
    found, wanted = load_file(path), model.state_dict()
    for name, weight in wanted.items():
        if isinstance(weight, QuantizedTensor):
            assert torch.equal(found[name].dequantize(), weight.dequantize()), f"{name} is another"


def offload(trial: Trial) -> None:
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = read(trial.saved(), device_map=places, offload_folder=str(trial.directory / "offload"))
    assert torch.equal(logits(model), logits(read(trial.saved()))), "the offloaded model gives other logits"


def adapters(trial: Trial) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(read(trial.saved()), config)
    model(IDS, labels=IDS).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert gradients, "no parameter is trained"
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients), "no gradient arrives"
    return model.eval()


def merge(trial: Trial) -> None:
    model = adapters(trial)
    before = model.base_model.model.model.layers[0].self_attn.q_proj
    wanted = before.base_layer.weight.dequantize() + before.get_delta_weight("default")
    weight = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, QuantizedTensor), "the merged weight is float"
    # What is merged is quantized again; uint2 keeps a weight to about 6 dB.
    error = ((weight.dequantize() - wanted).norm() / wanted.norm()).item()
    assert error < 0.6, f"the merged weight differs by {error:.2f}"


class Layers(torch.nn.Module):
    """What exporters of graphs are tried with: a model of Transformers takes them ten times as long to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 256)
        self.up, self.down = torch.nn.Linear(256, 256), torch.nn.Linear(256, 64)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of tokens."""
        return self.down(torch.relu(self.up(self.table(ids))))


def layers(trial: Trial) -> tuple[Layers, Tensor]:
    """Return quantized layers, and what they compute with dequantized weights."""
    torch.manual_seed(0)
    model = Layers().eval()
    with made(trial.name):
        quantize_(model, TrainWeightsConfig(**CONFIGS[trial.name], include_embeddings=True))
    plain = copy.deepcopy(model)
    dequantize_(plain)
    with torch.no_grad():
        return model, plain(IDS)


def onnx(runtime: Any, trial: Trial) -> None:
    model, wanted = layers(trial)
    path = trial.directory / f"{runtime}.onnx"
    export_onnx(model, path, example_inputs=IDS, runtime=runtime)
    found = next(iter(OnnxModel(path).predict(IDS).values()))
    same(torch.from_numpy(found), wanted)


def torchscript(trial: Trial) -> None:
    model, wanted = layers(trial)
    export_torchscript(model, trial.directory / "model.pt", IDS)
    same(torch.jit.load(trial.directory / "model.pt")(IDS), wanted)


def program(trial: Trial) -> None:
    model, wanted = layers(trial)
    export_program(model, trial.directory / "model.pt2", IDS)
    same(torch.export.load(trial.directory / "model.pt2").module()(IDS), wanted)


def gguf(trial: Trial) -> None:
    model = trial.load(torch.float16)
    export_gguf(model, trial.directory / "model.gguf", byte_level(size=SIZES["vocab_size"]))
    found = AutoModelForCausalLM.from_pretrained(trial.directory, gguf_file="model.gguf", dtype=torch.float32)
    same(logits(found.eval()), logits(copy.deepcopy(model).dequantize().float()), 1e-3)


def compressed_tensors(trial: Trial) -> None:
    model, path = read(trial.saved()), trial.directory / "compressed"
    export_compressed_tensors(model, path)
    same(logits(read(path)), dequantized(model))


TRIALS: dict[str, Callable[[Trial], Any]] = {
    "reload": reload,
    "second save": save_again,
    "`.bin`": pickled,
    "`save_file`": single_file,
    "offload": offload,
    "LoRA": adapters,
    "merge": merge,
    "ONNX, portable": lambda trial: onnx("portable", trial),
    "ONNX Runtime": lambda trial: onnx("onnxruntime", trial),
    "TorchScript": torchscript,
    "`.pt2`": program,
    "GGUF": gguf,
    "compressed-tensors": compressed_tensors,
}


def sharded(trial: Trial) -> None:
    model = read(trial.saved())
    wanted = logits(model)
    for layer in model.model.layers:
        fully_shard(layer)
    same(logits(fully_shard(model)), wanted)


def tensor_parallel(trial: Trial) -> None:
    options = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())}
    same(logits(read(trial.saved(), **options)), logits(read(trial.saved())))


RANK_TRIALS: dict[str, Callable[[Trial], None]] = {"FSDP2": sharded, "tensor parallelism": tensor_parallel}
COLUMNS = [*itertools.islice(TRIALS, 7), *RANK_TRIALS, *itertools.islice(TRIALS, 7, None)]


def outcome(attempt: Callable[[Trial], Any], trial: Trial) -> dict[str, str]:
    """Return how a trial ended."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt(trial)
    except TrainWeightsError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        return {"outcome": "no", "why": f"{type(error).__name__}: {error}"[:300]}
    return {"outcome": "yes"}


def attempt(name: str, root: Path) -> None:
    """Try a format in this process, and write what came of it."""
    torch.set_num_threads(1)
    directory = root / str(list(CONFIGS).index(name))
    directory.mkdir()
    found = {column: outcome(each, Trial(name, directory)) for column, each in TRIALS.items()}
    (directory / "found.json").write_text(json.dumps(found), encoding="utf-8")


def on_rank(rank: int, root: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return what came of all formats over ranks."""
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(rank), LOCAL_RANK=str(rank))
    trials = {name: Trial(name, root / str(number)) for number, name in enumerate(CONFIGS)}
    return {
        name: {column: outcome(each, trial) for column, each in RANK_TRIALS.items()} for name, trial in trials.items()
    }


def in_process(name: str, root: Path) -> dict[str, dict[str, str]]:
    """Return what came of a format in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.abilities_by_format", name, str(root)]
    file = root / str(list(CONFIGS).index(name)) / "found.json"
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS, check=False)
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    return {column: {"outcome": "no", "why": f"the process ended with {ended.returncode}"} for column in TRIALS}


def _of_rank(ended: Outcome, name: str, column: str) -> dict[str, str]:
    return ended.value[name][column] if ended.value else {"outcome": "no", "why": ended.text[-300:]}


def _worst(outcomes: list[dict[str, str]]) -> dict[str, str]:
    return next((each for each in outcomes if each["outcome"] != "yes"), outcomes[0])


def main() -> None:
    """Try everything and write the result file."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(root / "float")
        rows: dict[str, Mapping[str, Any]] = {name: in_process(name, root) for name in CONFIGS}
        ranks = outcomes_of_ranks(2, on_rank, root, timeout_seconds=LIMIT_SECONDS)
        for name, found in rows.items():
            both = found | {column: _worst([_of_rank(each, name, column) for each in ranks]) for column in RANK_TRIALS}
            rows[name] = {column: both[column] for column in COLUMNS}
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "versions": versions("peft", "onnxruntime", "compressed-tensors", "gguf"),
        "formats": rows,
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, found in rows.items():
        print(name, {column: each.get("why", "yes") for column, each in found.items()})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        attempt(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
