"""One tiny random model for each architecture the quantizer is tested on.

Rows are multiples of 64 elements long, so that groups of 32 and 64 divide them; Mamba's `dt_proj` with its 4
columns stands for the weights that no group size fits. All models together build in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from covering import by_default
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCAB_SIZE = 96
NEW_TOKENS = 5
# Options of `save_pretrained`, by kind of weight files; the models are larger than a shard.
SERIALIZATIONS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "bin": {"safe_serialization": False},
    "sharded": {"max_shard_size": "32KB"},
    "sharded_bin": {"safe_serialization": False, "max_shard_size": "32KB"},
}

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
DECODER = {**TEXT, **TOKENS, "num_key_value_heads": 2, "tie_word_embeddings": False}
MOE = {**DECODER, "num_experts_per_tok": 2}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Architecture:
    """How to make a tiny model, feed it, load it again, and what the defaults quantize in it.

    Args:
        name: Key in `ARCHITECTURES`.
        make: Builds the model with random weights, in float32.
        make_inputs: Builds the keyword arguments of `forward`, floating ones in float32.
        auto_class: Has the `from_pretrained` that gives the same class back.
        float_modules: Linears that stay in full precision under the default configuration: output
            embeddings, tied weights, and what the model asks to keep in float32.
        generates: Whether `generate` applies.
    """

    name: str
    make: Callable[[], PreTrainedModel]
    make_inputs: Callable[[], dict[str, Tensor]]
    auto_class: type
    float_modules: tuple[str, ...] = ()
    generates: bool = False

    def build(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return a new model in eval mode; the same weights at every call, rounded to `dtype`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make()
            randomize(model)
        return model.to(dtype).eval()

    def inputs(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return keyword arguments for `model.forward`, on its device, floating ones in its dtype."""
        return {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in self.make_inputs().items()
        }

    def quantized_names(self, model: PreTrainedModel) -> set[str]:
        """Return the names of the parameters of a float `model` that the defaults quantize."""
        left_float = tuple(f".{module}.weight" for module in self.float_modules)
        return {name for name in weight_names(model) if not f".{name}".endswith(left_float)}


def weight_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of Linear and Conv1D weights and of merged expert weights, tied ones once."""
    for name, parameter in model.named_parameters():
        module_name, _, parameter_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        is_linear = isinstance(module, nn.Linear | Conv1D) and parameter_name == "weight"
        is_expert = module_name.endswith("experts") and parameter.ndim == 3
        if is_linear or is_expert:
            yield name


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Draw weights so large that every layer counts in the output, and biases that are not zero."""
    for name, parameter in model.named_parameters():
        if "bias" in name.rpartition(".")[2]:
            parameter.normal_(std=0.05)
        elif parameter.ndim >= 2 and not name.endswith("A_log"):
            parameter.normal_(std=0.125)


def outputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return every floating tensor that `model(**inputs)` gives, in a fixed order, without caches."""
    with torch.no_grad():
        return list(floating_tensors(model(**inputs)))


def computes_the_same(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two Llamas give the same bits."""
    inputs = ARCHITECTURES["llama"].make_inputs()
    return all(map(torch.equal, outputs(model, inputs), outputs(other, inputs)))


def floating_tensors(value: object) -> Iterator[Tensor]:
    """Yield the floating tensors inside tuples, lists and mappings, depth first."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floating_tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from floating_tensors(item)


def generate(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return token ids after `NEW_TOKENS` greedy steps; an encoder-decoder starts from its start token."""
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    return model.generate(**prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)


def random_ids(length: int = 8) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(1))


def random_floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def text_inputs() -> dict[str, Tensor]:
    ids = random_ids()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def t5_inputs() -> dict[str, Tensor]:
    return {**text_inputs(), "decoder_input_ids": random_ids(4)}


def whisper_inputs() -> dict[str, Tensor]:
    return {"input_features": random_floats(2, 16, 32), "decoder_input_ids": random_ids(4)}


def image_inputs() -> dict[str, Tensor]:
    return {"pixel_values": random_floats(2, 3, 16, 16)}


def clip_inputs() -> dict[str, Tensor]:
    return {**text_inputs(), **image_inputs()}


def make_llama() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def make_llama_tied() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, "tie_word_embeddings": True}))


def make_qwen3_moe() -> PreTrainedModel:
    config = transformers.Qwen3MoeConfig(**MOE, head_dim=16, moe_intermediate_size=64, num_experts=4)
    return transformers.Qwen3MoeForCausalLM(config)


def make_mixtral() -> PreTrainedModel:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**MOE, num_local_experts=4))


def make_gpt_oss() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(**MOE, head_dim=16, num_local_experts=4, rope_parameters=rope)
    return transformers.GptOssForCausalLM(config)


def make_deepseek_v3() -> PreTrainedModel:
    config = transformers.DeepseekV3Config(
        **{**MOE, "num_key_value_heads": 4},
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def make_gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=64, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def make_gpt_neox() -> PreTrainedModel:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TEXT, **TOKENS))


def make_t5() -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_bert() -> PreTrainedModel:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def make_distilbert() -> PreTrainedModel:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=64, hidden_dim=128, n_layers=2, n_heads=4, max_position_embeddings=64
    )
    return transformers.DistilBertForMaskedLM(config)


def make_whisper() -> PreTrainedModel:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def make_vit() -> PreTrainedModel:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=64))


def make_clip() -> PreTrainedModel:
    text = {**TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 64}
    vision = {**VISION, "projection_dim": 64}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    return transformers.CLIPModel(config)


def make_mamba() -> PreTrainedModel:
    config = transformers.MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, state_size=16, num_hidden_layers=2, time_step_rank=4, **TOKENS
    )
    return transformers.MambaForCausalLM(config)


def causal_lm(name: str, make: Callable[[], PreTrainedModel]) -> Architecture:
    return Architecture(name, make, text_inputs, transformers.AutoModelForCausalLM, ("lm_head",), generates=True)


def masked_lm(name: str, make: Callable[[], PreTrainedModel], float_modules: tuple[str, ...]) -> Architecture:
    return Architecture(name, make, text_inputs, transformers.AutoModelForMaskedLM, float_modules)


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        causal_lm("llama", make_llama),
        causal_lm("llama_tied", make_llama_tied),
        causal_lm("qwen3_moe", make_qwen3_moe),
        causal_lm("mixtral", make_mixtral),
        causal_lm("gpt_oss", make_gpt_oss),
        causal_lm("deepseek_v3", make_deepseek_v3),
        causal_lm("gpt2", make_gpt2),
        causal_lm("gpt_neox", make_gpt_neox),
        causal_lm("mamba", make_mamba),
        Architecture(
            "t5",
            make_t5,
            t5_inputs,
            transformers.AutoModelForSeq2SeqLM,
            ("lm_head", "wo"),
            generates=True,
        ),
        Architecture(
            "whisper",
            make_whisper,
            whisper_inputs,
            transformers.AutoModelForSpeechSeq2Seq,
            ("proj_out",),
            generates=True,
        ),
        masked_lm("bert", make_bert, ("cls.predictions.decoder",)),
        masked_lm("distilbert", make_distilbert, ("vocab_projector",)),
        Architecture("vit", make_vit, image_inputs, transformers.AutoModelForImageClassification),
        Architecture("clip", make_clip, clip_inputs, transformers.AutoModel, ("text_projection",)),
    )
}

# What differs between families is how weights are named, merged, transposed, tied and called.
FAMILIES = {
    "decoder": ("llama", "llama_tied", "gpt_neox"),
    "decoder of Conv1D": ("gpt2",),
    "mixture of experts": ("qwen3_moe", "mixtral", "deepseek_v3"),
    "mixture of transposed experts": ("gpt_oss",),
    "state space": ("mamba",),
    "encoder and decoder": ("t5", "whisper"),
    "encoder": ("bert", "distilbert"),
    "vision": ("clip", "vit"),
}


def of_each_family(names: Collection[str] = ARCHITECTURES.keys()) -> list[Any]:
    """Return the names as parameters of a test, of which the default run takes the first of each family."""
    found = [[name for name in family if name in names] for family in FAMILIES.values()]
    return by_default({family[0] for family in found if family}, names)
