"""How much memory loads and saves take at their peak, measured in a process of its own on models of 75 to 120 MB."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from covering import by_default, exhaustive

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with Linux's /proc"),
    pytest.mark.slow,  # a fixture of all of them builds and quantizes these models
]

DENSE = {"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
# One layer whose 24 experts make a merged gate_up_proj of 50 MB and a merged down_proj of 25 MB.
SPARSE = {**DENSE, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
SPARSE |= {"moe_intermediate_size": 512, "num_experts": 24, "num_experts_per_tok": 2}

# 46 million weights in Linears, as bfloat16 in three shards; the embeddings stay mapped.
SHARDED = {**DENSE, "vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 6}

# What is quantized from directory to directory: the model, and how.
DIRECTORIES: dict[str, Any] = {
    "sharded_int8": "int8",
    "sharded_int4": "int4",
    "sharded_coded": {"format": "coded", "bits": 4.0},
    "sharded_compressed": {"format": "int8", "compress": True},
    "sparse_int8": "int8",
}

# The formats of the default run.
FEW = ("int4",)

# The largest tensor in each checkpoint.
DENSE_SOURCE_BYTES = 4096 * 1024 * 4
SPARSE_SOURCE_BYTES = 512 * 512 * 4
SHARDED_SOURCE_BYTES = 4096 * 768 * 2
ALLOWED_BYTES = 8_000_000
# Beside the largest weight: blocks of it, buffers of writers, and pages of placeholders that carry a mark.
ALLOWED_SAVE_BYTES = 6_000_000
# Their largest weights are 3.5 and .5 MB, and quantizing one takes some copies in float32; where embeddings are coded
# one of 6.3 MB is.
ALLOWED_DIRECTORY_BYTES = 16_000_000


def export(model: Any, directory: Path) -> None:
    from hf_trainweights import export_compressed_tensors

    export_compressed_tensors(model, directory)


def export_to_gguf(model: Any, directory: Path) -> None:
    from tiny_tokenizers import byte_level

    from hf_trainweights import export_gguf

    export_gguf(model, directory / "model.gguf", byte_level())


SAVES: dict[str, Callable[[Any, Path], None]] = {
    "safetensors": lambda model, directory: model.save_pretrained(directory),
    "sharded": lambda model, directory: model.save_pretrained(directory, max_shard_size="20MB"),
    "bin": lambda model, directory: model.save_pretrained(directory, safe_serialization=False),
    "compressed_tensors": export,
    "gguf": export_to_gguf,
}


def anonymous_bytes() -> int:
    """Return the memory of this process that is not backed by a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


class Peak(threading.Thread):
    """Samples the memory of this process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.0005)

    def stop(self) -> int:
        self.stopping.set()
        self.join()
        return self.bytes


def measure(directory: Path, **options: Any) -> tuple[dict[str, int], Any]:
    """Load a model and return the bytes of all its weights and of its quantized ones, and how the process grew."""
    from transformers import AutoModelForCausalLM

    from hf_trainweights import QuantizedTensor, get_model_size_in_bytes

    gc.collect()
    # Memory that was freed but not given back would hide what the load takes.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    model = AutoModelForCausalLM.from_pretrained(directory, **options)
    grown, left = peak.stop() - before, anonymous_bytes() - before
    quantized = sum(weight.stored_bytes for weight in model.parameters() if isinstance(weight, QuantizedTensor))
    return {"payload": get_model_size_in_bytes(model), "quantized": quantized, "grown": grown, "left": left}, model


def measure_save(model: Any, save: Callable[[Any, Path], None], directory: Path) -> dict[str, int]:
    """Save a model and return the bytes of its quantized weights, and how the process grew."""
    from hf_trainweights import QuantizedTensor

    weights = [weight for weight in model.parameters() if isinstance(weight, QuantizedTensor)]
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    save(model, directory)
    return {"quantized": sum(weight.stored_bytes for weight in weights), "grown": peak.stop() - before}


def measure_directory(write: Callable[..., Any], source: Path, out: Path, *config: Any) -> dict[str, int]:
    """Write a model from one directory to another and return the bytes of its weights, and how we grew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    write(source, out, *config)
    return {"written": (out / "model.safetensors").stat().st_size, "grown": peak.stop() - before}


def main(root: Path, few: bool) -> None:
    """Print the measurements as JSON, those of the default run if `few`."""
    import torch
    from architectures import ARCHITECTURES
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_trainweights import TrainWeightsConfig, quantize_directory

    torch.set_num_threads(1)
    ARCHITECTURES["qwen3_moe"].build().save_pretrained(root / "tiny")
    LlamaForCausalLM(LlamaConfig(**SHARDED)).bfloat16().save_pretrained(root / "sharded", max_shard_size="50MB")
    measure(root / "tiny", quantization_config=TrainWeightsConfig("int8"))  # imports what is imported late
    name = "directory_sharded_int4"
    results = {name: measure_directory(quantize_directory, root / "sharded", root / name, DIRECTORIES["sharded_int4"])}
    for form in FEW if few else ("int8", *FEW, "float8_e4m3"):
        config = TrainWeightsConfig(form)
        results[f"sharded_{form}"], model = measure(root / "sharded", dtype="auto", quantization_config=config)
        if form == "int4":
            model.save_pretrained(root / "quantized_int4")
            for save in ("safetensors",) if few else SAVES:
                SAVES[save](model, root / "warm" / save)  # imports what is imported late
                results[f"save_{save}"] = measure_save(model, SAVES[save], root / "saved" / save)
        del model
    results["quantized_int4"] = measure(root / "quantized_int4")[0]
    if not few:
        measure_the_others(root, results)
    print(json.dumps(results))


def measure_the_others(root: Path, results: dict[str, dict[str, int]]) -> None:
    """Add what only the exhaustive run measures."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from hf_trainweights import TrainWeightsConfig, dequantize_directory, import_directory, quantize_directory

    LlamaForCausalLM(LlamaConfig(**DENSE)).save_pretrained(root / "dense")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SPARSE)).save_pretrained(root / "sparse")
    int8 = {"quantization_config": TrainWeightsConfig("int8")}
    results["dense"], model = measure(root / "dense", **int8)
    model.save_pretrained(root / "quantized")
    model.save_pretrained(root / "quantized_bin", safe_serialization=False)
    del model
    results["dense_bfloat16"] = measure(root / "dense", dtype=torch.bfloat16, **int8)[0]
    results["sparse"], model = measure(root / "sparse", **int8)
    model.save_pretrained(root / "quantized_sparse")
    export(model, root / "exported_sparse")
    del model
    for name in DIRECTORIES.keys() - {"sharded_int4"}:
        source, written = root / name.partition("_")[0], root / f"directory_{name}"
        results[f"directory_{name}"] = measure_directory(quantize_directory, source, written, DIRECTORIES[name])
    dequantize = partial(measure_directory, dequantize_directory)
    results["dequantized"] = dequantize(root / "quantized", root / "float")
    results["dequantized_sparse"] = dequantize(root / "quantized_sparse", root / "float_sparse")
    results["dequantized_coded"] = dequantize(root / "directory_sharded_coded", root / "float_coded")
    imports = partial(measure_directory, import_directory)
    results["imported"] = imports(root / "saved" / "compressed_tensors", root / "imported")
    results["imported_gguf"] = imports(root / "saved" / "gguf", root / "imported_gguf")
    results["imported_sparse"] = imports(root / "exported_sparse", root / "imported_sparse")
    results["quantized"] = measure(root / "quantized", device_map={"": "disk"})[0]
    results["quantized_bin"] = measure(root / "quantized_bin", device_map={"": "disk"})[0]


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, int]]]:
    directory = tmp_path_factory.mktemp("memory")
    few = "not exhaustive" in request.config.option.markexpr
    command = [sys.executable, __file__, str(directory), *["few"] * few]
    # The tiny models stand beside this folder; a script finds what lies in its own.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    # Otherwise malloc keeps up to 64 MB that was freed, by the order in which threads ran: what is measured is held.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(directory)  # a gigabyte


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "source_bytes"),
    [
        ("dense", DENSE_SOURCE_BYTES),
        ("dense_bfloat16", DENSE_SOURCE_BYTES),
        ("sparse", SPARSE_SOURCE_BYTES),
    ],
)
def test_quantizing_on_load_takes_the_result_and_little_more(
    name: str, source_bytes: int, measured: dict[str, dict[str, int]]
) -> None:
    payload, grown = measured[name]["payload"], measured[name]["grown"]
    assert payload > 20_000_000
    assert grown > 0.9 * measured[name]["quantized"], "the peak was missed"
    assert grown < payload + ALLOWED_BYTES + source_bytes


@pytest.mark.parametrize("name", by_default(FEW, ("int8", "int4", "float8_e4m3")))
def test_after_quantizing_on_load_only_the_result_stays(name: str, measured: dict[str, dict[str, int]]) -> None:
    found = measured[f"sharded_{name}"]
    assert found["quantized"] > 20_000_000
    assert 0.9 * found["quantized"] < found["left"] < 1.1 * found["quantized"]
    assert found["grown"] < found["quantized"] + SHARDED_SOURCE_BYTES + ALLOWED_BYTES


@pytest.mark.parametrize("name", ["quantized_int4", *exhaustive("quantized", "quantized_bin")])
def test_a_quantized_checkpoint_is_mapped_and_not_copied(name: str, measured: dict[str, dict[str, int]]) -> None:
    payload, grown = measured[name]["payload"], measured[name]["grown"]
    assert payload > 20_000_000
    assert grown < 0.05 * payload


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "largest_bytes"),
    [
        ("dequantized", DENSE_SOURCE_BYTES),
        ("dequantized_sparse", SPARSE_SOURCE_BYTES),
        ("dequantized_coded", SHARDED_SOURCE_BYTES),
    ],
)
def test_a_float_model_is_written_weight_by_weight(
    name: str, largest_bytes: int, measured: dict[str, dict[str, int]]
) -> None:
    found = measured[name]
    assert found["written"] > 75_000_000
    # A product of codes and scales is made in blocks, beside the weight that they make.
    assert found["grown"] < largest_bytes + ALLOWED_SAVE_BYTES


@pytest.mark.parametrize("name", by_default(("sharded_int4",), DIRECTORIES))
def test_a_directory_is_quantized_in_the_memory_of_a_weight(name: str, measured: dict[str, dict[str, int]]) -> None:
    found = measured[f"directory_{name}"]
    assert found["written"] > 12_000_000
    assert found["grown"] < ALLOWED_DIRECTORY_BYTES


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["imported", "imported_gguf", "imported_sparse"])
def test_a_directory_is_imported_in_the_memory_of_a_weight(name: str, measured: dict[str, dict[str, int]]) -> None:
    found = measured[name]
    assert found["written"] > 20_000_000
    assert found["grown"] < ALLOWED_DIRECTORY_BYTES


@pytest.mark.parametrize("save", by_default(("safetensors",), SAVES))
def test_a_save_makes_no_copy_of_the_model(save: str, measured: dict[str, dict[str, int]]) -> None:
    found = measured[f"save_{save}"]
    assert found["quantized"] > 20_000_000
    assert found["grown"] < found["quantized"] / 2


if __name__ == "__main__":
    main(Path(sys.argv[1]), few="few" in sys.argv)
