"""Exports of odd models: what is written is read by Transformers and compressed-tensors, to the same weights."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import TrainWeightsConfig, export_compressed_tensors, quantize_
from hf_trainweights.errors import TrainWeightsError
from tests.fuzz.directories import read_tree
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_ARCHITECTURES = ("Llama", "Llama", "Qwen3Moe", "Mixtral", "GPT2", "GPTNeoX", "Qwen2")
_FORMATS: list[dict[str, Any]] = [
    {"format": "int8"},
    {"format": "int8", "group_size": 32},
    {"format": "int8", "group_size": 16},
    {"format": "int4", "group_size": 32},
    {"format": "int4", "group_size": 64},
    {"format": "int4", "group_size": 128},
    {"format": "float8_e4m3"},
]
_SELECTORS = [
    *("re:.*q_proj", "re:.*experts.*", "re:.*down_proj", "lm_head", "re:.*mlp.*", "model.layers.0.self_attn.v_proj"),
    *("re:.*layers\\.1\\..*", "re:.*dense.*", "re:.*c_fc", "re:.*embed.*"),
]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EARLIER = "weights of an earlier model"
_OF_EXPERTS = ("Qwen3Moe", "Mixtral")
_CASTS_FLOAT8_EXPERTS = Version(transformers.__version__) < Version("5.18")  # to bfloat16, while it reads them


@dataclass(frozen=True)
class Export:
    """A model to export.

    Args:
        architecture: As in `<architecture>ForCausalLM`.
        sizes: Of its configuration.
        config: Arguments of `TrainWeightsConfig`.
        dtype: Its dtype.
        twist: What else is odd about it.
        max_shard_size: As for `export_compressed_tensors`.
        over: Whether files of an earlier model are in the directory.
    """

    architecture: str
    sizes: dict[str, Any]
    config: dict[str, Any]
    dtype: str
    twist: str
    max_shard_size: str
    over: bool


class Exports(Target):
    """An export gives the weights of the dequantized model to stock readers, or is refused and leaves nothing."""

    name = "exports"
    share = 4.0
    limit_seconds = 30.0
    inputs_in_suite = 150

    def mutate(self, rng: random.Random) -> Export:
        heads = rng.choice((1, 2, 4))
        sizes = {
            "hidden_size": heads * rng.choice((2, 8, 16, 32)),
            "intermediate_size": rng.choice((1, 7, 32, 36, 64, 100, 128)),
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([each for each in (1, 2, 4) if heads % each == 0]),
            "num_hidden_layers": rng.choice((1, 2)),
            "vocab_size": rng.choice((17, 32, 65)),
            "tie_word_embeddings": rng.random() < 0.3,
            "attention_bias": rng.random() < 0.3,
        }
        config = dict(rng.choice(_FORMATS))
        if rng.random() < 0.5:
            chosen = rng.sample(_SELECTORS, rng.randint(1, 2))
            config["overrides"] = {selector: rng.choice((None, *_FORMATS)) for selector in chosen}
        config["include_embeddings"] = rng.random() < 0.1
        return Export(
            rng.choice(_ARCHITECTURES),
            sizes,
            config,
            rng.choice(sorted(_DTYPES)),
            rng.choice(("", "", "", "cast", "one in float", "extreme values", "no head")),
            rng.choice(("5GB", "5GB", "10KB", "1KB")),
            rng.random() < 0.3,
        )

    def run(self, given: Export) -> Outcome:
        model = built(given)
        out = self.directory / "out"
        shutil.rmtree(out, ignore_errors=True)
        if given.over:
            out.mkdir()
            (out / "model.safetensors").write_text(_EARLIER)
        try:
            export_compressed_tensors(model, out, given.max_shard_size)
        except TrainWeightsError as error:
            left = read_tree(out) if out.exists() else {}
            if left != ({"model.safetensors": _EARLIER.encode()} if given.over else {}):
                raise BrokenPromiseError(f"a refused export left {sorted(left)}") from error
            raise
        model.dequantize()
        try:
            expected = _outputs(model)
        except RuntimeError:  # torch multiplies no experts of these sizes in 16 bits
            return Outcome.ACCEPTED
        if _CASTS_FLOAT8_EXPERTS and given.architecture in _OF_EXPERTS and "float8" in str(given.config):
            return Outcome.ACCEPTED
        actual = _read(out)
        if given.twist == "cast":  # which casts the tables of positions too, that a reader makes anew
            return Outcome.ACCEPTED
        if actual.dtype != expected.dtype or not torch.equal(actual.nan_to_num(), expected.nan_to_num()):
            raise BrokenPromiseError("an export is read as another model")
        return Outcome.ACCEPTED


def built(given: Export) -> PreTrainedModel:
    """Return the quantized model that an input describes."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    names = {"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_head": "num_attention_heads"}
    own = {name: given.sizes[known] for name, known in names.items()} | {"n_layer": 1}
    shared = {"shared_expert_intermediate_size": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    head_size = {"head_dim": given.sizes["hidden_size"] // given.sizes["num_attention_heads"]}
    more = {"Qwen3Moe": experts | head_size, "Qwen2Moe": experts | shared, "Mixtral": experts, "GPT2": own}
    config = getattr(transformers, f"{given.architecture}Config")(
        **given.sizes, **tokens, **more.get(given.architecture, {})
    )
    auto_class = AutoModel if given.twist == "no head" else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=_DTYPES[given.dtype]).eval()
    if given.twist == "extreme values":
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.view(-1)[::7] *= (1e-30, 1e4, 0.0)[number % 3]
    quantize_(model, TrainWeightsConfig(**given.config))
    if given.twist == "cast":
        model.to(torch.float16)
    if given.twist == "one in float":
        name = next(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
        layer = model.get_submodule(name)
        layer.weight = torch.nn.Parameter(torch.ones(layer.weight.shape, dtype=model.dtype), requires_grad=False)
    return model


def _read(directory: Path) -> Tensor:
    """Return what the model computes that Transformers and compressed-tensors read from an export."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        model_class = getattr(transformers, config.architectures[0])
        model, report = model_class.from_pretrained(directory, dtype="auto", output_loading_info=True)
        assert not any(report.values()), f"names in an export are not those of its reader: {report}"
        return _outputs(model)
    except Exception as error:
        raise BrokenPromiseError(f"an export is not read: {type(error).__name__}: {error}") from error


def _outputs(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(12)[None])[0]
