"""What llama.cpp makes of exported models: logits, greedy tokens and embeddings beside Transformers', and its tokens.

Run `PYTHONPATH=tests python -m benchmarks.llama_cpp` where `llama-cpp-python` is installed, which builds llama.cpp; it
takes two minutes and writes `benchmarks/results/llama_cpp.json`. The models are tiny and random, one for each
architecture and each scaling of rotary embeddings that `export_gguf` supports; MiniLM-L6-v2 has its real weights.
Transformers computes in float32 with the dequantized weights. llama.cpp reads each file twice: as it is, when it also
rounds activations to int8, and with all tensors unpacked to float32. Then nothing but the order of sums differs, and
GELU, which llama.cpp takes from a table in float16; so Transformers computes with such a table too.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import llama_cpp
import numpy as np
import torch
import transformers
from tiny_tokenizers import TEXTS, byte_level
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from benchmarks.llama_cpp_models import CONFIGS, ENCODERS, MINILM, MODELS, SENTENCES, SIZES, TOKENIZERS
from benchmarks.machine import cpu_name, versions
from hf_trainweights import TrainWeightsConfig, export_gguf, quantize_

RESULTS = Path(__file__).parent / "results" / "llama_cpp.json"

PROMPT_TOKENS = 100
NEW_TOKENS = 20


class TableOfGelu(torch.nn.Module):
    """GELU as llama.cpp computes it: by tanh, rounded to float16 before and after."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values that llama.cpp computes; beyond 10 it needs no table."""
        rounded = torch.nn.functional.gelu(values.half().float(), approximate="tanh").half().float()
        return torch.where(values <= -10, 0.0, torch.where(values >= 10, values, rounded))


def build(class_name: str, changes: dict[str, Any], directory: Path) -> None:
    """Save a random model in float16."""
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    config_class = model_class.config_class
    # `changes` has the sizes that an architecture calls by names of its own.
    renamed = {name for name, own in config_class.attribute_map.items() if own in changes}
    known = {name: size for name, size in SIZES.items() if hasattr(config_class(), name) and name not in renamed}
    model = model_class(config_class(**known | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.08) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    model.half().save_pretrained(directory)


def export(directory: Path, auto_class: Any, config: dict[str, Any], tokenizer: Any) -> Any:
    """Write `model.gguf` and `unpacked.gguf`, and return the dequantized model in float32."""
    options = {"dtype": torch.float16, "quantization_config": TrainWeightsConfig(**config)}
    auto_class.from_pretrained(directory, **options).save_pretrained(directory / "quantized")
    export_gguf(directory / "quantized", directory / "model.gguf", tokenizer)
    unpack(directory / "model.gguf", directory / "unpacked.gguf")
    # In float32 code times scale is not rounded. Only eager attention limits scores.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = auto_class.from_pretrained(directory / "quantized", **options).eval()
    model.dequantize()
    return model


def use_table_of_gelu(model: torch.nn.Module) -> None:
    """Let a model compute GELU as llama.cpp does."""
    for name, module in list(model.named_modules()):
        if "GELU" in type(module).__name__:
            model.set_submodule(name, TableOfGelu())


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(f"{np.linalg.norm(found - expected) / np.linalg.norm(expected):.2g}")


@torch.no_grad()
def compare_model(directory: Path, config: dict[str, Any]) -> dict[str, float]:
    """Return the errors of logits, as parts of their norm, and how many greedy tokens are equal from the first on."""
    model = export(directory, AutoModelForCausalLM, config, byte_level())
    # Random models have no end of text, so its token is one like the others.
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 400, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1))
    exact = model(ids[None]).logits[0].numpy()
    use_table_of_gelu(model)
    expected = model(ids[None]).logits[0].numpy()
    own = model.generate(ids[None], max_new_tokens=NEW_TOKENS, do_sample=False)[0, PROMPT_TOKENS:].tolist()
    logits, equal = run(directory / "model.gguf", ids.tolist(), own)
    unpacked, unpacked_equal = run(directory / "unpacked.gguf", ids.tolist(), own)
    return {
        "greedy_tokens": NEW_TOKENS,
        "model_logits_relative_error": relative_error(logits, exact),
        "model_greedy_tokens_equal": equal,
        "unpacked_logits_relative_error": relative_error(unpacked, exact),
        "unpacked_logits_relative_error_with_table_of_gelu": relative_error(unpacked, expected),
        "unpacked_greedy_tokens_equal": unpacked_equal,
    }


@torch.no_grad()
def compare_encoder(directory: Path, config: dict[str, Any], tokenizer: Any) -> dict[str, float]:
    """Return the errors of the embeddings of all tokens, as parts of their norm."""
    model = export(directory, AutoModel, config, tokenizer)
    inputs = [tokenizer(text, return_tensors="pt")["input_ids"] for text in [*TEXTS, *SENTENCES]]
    # RoBERTa does not count a padding token, which in a text of these tokenizers is an unknown one.
    inputs = [ids for ids in inputs if model.config.pad_token_id not in ids]

    def own() -> np.ndarray:
        return torch.cat([model(ids).last_hidden_state[0] for ids in inputs]).numpy()

    exact = own()
    use_table_of_gelu(model)
    unpacked = embed(directory / "unpacked.gguf", [ids[0].tolist() for ids in inputs])
    return {
        "model_embeddings_relative_error": relative_error(
            embed(directory / "model.gguf", [ids[0].tolist() for ids in inputs]), exact
        ),
        "unpacked_embeddings_relative_error": relative_error(unpacked, exact),
        "unpacked_embeddings_relative_error_with_table_of_gelu": relative_error(unpacked, own()),
    }


@torch.no_grad()
def compare_sentences(directory: Path, config: dict[str, Any]) -> dict[str, float]:
    """Return the smallest cosine of MiniLM's sentence embeddings in llama.cpp and in Transformers."""
    shutil.copytree(MINILM, directory, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    errors = compare_encoder(directory, config, tokenizer)
    for name in ("modules.json", "1_Pooling"):
        source = MINILM / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, directory / "quantized" / name)
    tokenizer.save_pretrained(directory / "quantized")
    export_gguf(directory / "quantized", directory / "model.gguf")
    model = AutoModel.from_pretrained(directory / "quantized", dtype=torch.float32).eval()
    model.dequantize()
    # Pooled as the file says.
    llama = llama_cpp.Llama(str(directory / "model.gguf"), embedding=True, verbose=False, n_threads=1)
    cosines = []
    for text in SENTENCES:
        own = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        found = torch.tensor(llama.embed(text))
        cosines.append(float(torch.nn.functional.cosine_similarity(own, found, dim=0)))
    llama.close()
    return {**errors, "sentences": len(SENTENCES), "sentence_embeddings_smallest_cosine": round(min(cosines), 6)}


def embed(file: Path, sequences: list[list[int]]) -> np.ndarray:
    """Return llama.cpp's embeddings of all tokens of some texts, one below the other."""
    options = {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_NONE, "n_threads": 1}
    llama = llama_cpp.Llama(str(file), n_ctx=256, verbose=False, **options)
    found = []
    for tokens in sequences:
        llama.tokenize = lambda *_, tokens=tokens: tokens  # embed takes nothing but text
        found.append(np.array(llama.embed("")))
    llama.close()
    return np.concatenate(found)


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
    config = transformers.LlamaConfig(**SIZES | {"vocab_size": max(600, len(tokenizer))})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    quantize_(model, TrainWeightsConfig("int8"))
    export_gguf(model, directory / "tokens.gguf", tokenizer)
    llama = llama_cpp.Llama(str(directory / "tokens.gguf"), n_ctx=64, verbose=False, vocab_only=True)
    texts = [*TEXTS, *SENTENCES]
    different = [text for text in texts if llama.tokenize(text.encode(), special=True) != tokenizer(text)["input_ids"]]
    llama.close()
    return different


def main() -> None:
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": cpu_name(),
        "versions": {**versions("gguf", "tokenizers"), "llama_cpp_python": llama_cpp.__version__},
        "models": {},
        "encoders": {},
        "tokenizers": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (class_name, changes) in MODELS.items():
            directory = Path(folder) / name
            build(class_name, changes, directory)
            results["models"][name] = {key: compare_model(directory, config) for key, config in CONFIGS.items()}
            print(name, results["models"][name], flush=True)
        for name, (class_name, changes, tokenizer) in ENCODERS.items():
            directory = Path(folder) / name
            build(class_name, changes, directory)
            found = {key: compare_encoder(directory, config, tokenizer) for key, config in CONFIGS.items()}
            results["encoders"][name] = found
            print(name, found, flush=True)
        found = {key: compare_sentences(Path(folder) / key, config) for key, config in CONFIGS.items()}
        results["encoders"]["MiniLM-L6-v2"] = found
        print("MiniLM-L6-v2", found, flush=True)
        for name in TOKENIZERS:
            different = compare_tokenizer(name, Path(folder))
            results["tokenizers"][name] = {"texts": len(TEXTS) + len(SENTENCES), "different": different}
            print(name, results["tokenizers"][name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
