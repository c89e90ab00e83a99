"""What llama.cpp makes of exported models: logits and greedy tokens beside Transformers', and token by token its text.

Run `PYTHONPATH=tests python -m benchmarks.llama_cpp` where `llama-cpp-python` is installed, which builds llama.cpp; it
takes half a minute and writes `benchmarks/results/llama_cpp.json`. The models are tiny and random, one for each
architecture and each scaling of rotary embeddings that `export_gguf` supports. Transformers computes in float32 with
the dequantized weights. llama.cpp reads each file twice: as it is, when it also rounds activations to int8, and with
all tensors unpacked to float32, when nothing but the order of sums may differ.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import llama_cpp
import numpy as np
import torch
import transformers
from tiny_tokenizers import PREPEND, TEXTS, byte_level, sentencepiece_like
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from benchmarks.machine import cpu_name, versions
from hf_trainweights import TrainWeightsConfig, export_gguf

RESULTS = Path(__file__).parent / "results" / "llama_cpp.json"

PROMPT_TOKENS = 100
NEW_TOKENS = 20

SIZES: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2}
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of 32": ("Llama", {"head_dim": 32}),
    "llama, rope llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, rope linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, rope yarn": ("Llama", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 32, "moe_intermediate_size": 128, "num_experts": 4, "norm_topk_prob": True},
    ),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8, groups of 32, embeddings too": {"format": "int8", "group_size": 32, "include_embeddings": True},
    "int4, groups of 32": {"format": "int4", "group_size": 32},
    "int4, groups of 128": {"format": "int4", "group_size": 128},
}
_CONTRACTIONS, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
TOKENIZERS = {
    "gpt-2": byte_level(),
    "gpt-2, begin and end": byte_level(adds=["<s>", "</s>"]),
    "smollm": byte_level(steps=[pre_tokenizers.Digits(individual_digits=True)]),
    "llama-bpe": byte_level(_LLAMA3, ignore_merges=True, adds=["<s>"]),
    "smaug-bpe": byte_level(_LLAMA3),
    "qwen2": byte_level(_LLAMA3.replace("{1,3}", "")),
    "tekken": byte_level(_TEKKEN, ignore_merges=True),
    "sentencepiece": sentencepiece_like(normalizer=PREPEND),
}


def build(name: str, directory: Path) -> None:
    """Save a random model in float16."""
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.08) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    model.half().save_pretrained(directory)


def compare_model(directory: Path, config: dict[str, Any]) -> dict[str, float]:
    """Return the errors of logits, as parts of their norm, and how many greedy tokens are equal from the first on."""
    options = {"dtype": torch.float16, "quantization_config": TrainWeightsConfig(**config)}
    AutoModelForCausalLM.from_pretrained(directory, **options).save_pretrained(directory / "quantized")
    export_gguf(directory / "quantized", directory / "model.gguf", byte_level())
    unpack(directory / "model.gguf", directory / "unpacked.gguf")
    # In float32 code times scale is not rounded.
    model = AutoModelForCausalLM.from_pretrained(directory / "quantized", dtype=torch.float32).eval()
    model.dequantize()
    # Random models have no end of text, so its token is one like the others.
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 400, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None]).logits[0].numpy()
        greedy = model.generate(ids[None], max_new_tokens=NEW_TOKENS, do_sample=False)
    own = greedy[0, PROMPT_TOKENS:].tolist()
    results: dict[str, float] = {"greedy_tokens": NEW_TOKENS}
    for name in ("model", "unpacked"):
        logits, equal = run(directory / f"{name}.gguf", ids.tolist(), own)
        error = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
        results |= {f"{name}_logits_relative_error": float(f"{error:.2g}"), f"{name}_greedy_tokens_equal": equal}
    return results


def run(file: Path, prompt: list[int], continuation: list[int]) -> tuple[np.ndarray, int]:
    """Return llama.cpp's logits for a prompt, and how many tokens of a continuation it would choose greedily."""
    llama = llama_cpp.Llama(
        str(file), n_ctx=256, logits_all=True, verbose=False, type_k=0, type_v=0, n_threads=1, n_batch=256
    )
    llama.eval(prompt)
    logits, equal = np.array(llama.scores[: len(prompt)]), 0
    for token in continuation:
        if int(np.argmax(llama.scores[llama.n_tokens - 1])) != token:
            break
        equal += 1
        llama.eval([token])
    llama.close()
    return logits, equal


def unpack(source: Path, target: Path) -> None:
    """Write a file with all tensors in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare_tokenizer(name: str, directory: Path) -> list[str]:
    """Return the texts that llama.cpp splits into other tokens than Transformers."""
    tokenizer = TOKENIZERS[name]
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float16, quantization_config=TrainWeightsConfig("int8")
    )
    export_gguf(model, directory / "model.gguf", tokenizer)
    llama = llama_cpp.Llama(str(directory / "model.gguf"), n_ctx=64, verbose=False, vocab_only=True)
    different = [text for text in TEXTS if llama.tokenize(text.encode(), special=True) != tokenizer(text)["input_ids"]]
    llama.close()
    return different


def main() -> None:
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": cpu_name(),
        "versions": {**versions("gguf", "tokenizers"), "llama_cpp_python": llama_cpp.__version__},
        "models": {},
        "tokenizers": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(MODELS):
            directory = Path(folder) / str(number)
            build(name, directory)
            results["models"][name] = {key: compare_model(directory, config) for key, config in CONFIGS.items()}
            print(name, results["models"][name], flush=True)
        for name in TOKENIZERS:
            different = compare_tokenizer(name, Path(folder) / "0")
            results["tokenizers"][name] = {"texts": len(TEXTS), "different": different}
            print(name, results["tokenizers"][name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
