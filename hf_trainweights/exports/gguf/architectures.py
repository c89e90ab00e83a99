"""The architectures that llama.cpp computes as Transformers does, and the settings that llama.cpp has built in.

A new architecture is an entry of `ARCHITECTURES`. `metadata` writes the settings that all architectures have.
Reader: `src/models/` in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import gguf
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import UnsupportedError


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's counterpart of an architecture of Transformers.

    Args:
        number: The architecture in the package gguf.
        interleaved: Whether the rotary embedding turns neighbouring rows of a head. In Transformers it turns rows that
            are half a head apart.
        partly_rotary: Whether the rotary embedding may turn only a part of each head.
        capped: Whether llama.cpp caps attention scores and logits, so that the model must too.
        slides: Whether llama.cpp has sliding windows. If it has none, all tokens attend to each other.
        encoder: Whether tokens also attend to later tokens, and the output is embeddings.
        norm_offset: The number that Transformers adds to the weight of a norm. A file holds the sum.
        ropes: The kinds of rotary embedding that llama.cpp has.
        skips_positions: Whether the first position is one more than the padding token's number.
        transposed: Endings of the names of float weights that a file holds transposed.
        alternating: Whether the rows of gate and up take turns in the experts' merged weight.
        merged_experts: Whether a file has gate and up of the experts in one tensor.
        split_latent: Whether a file has keys and values of latent attention in two tensors, the keys transposed.
        tiled: Whether heads of values that share a head of keys lie apart, see `linear_attention`.
        described: Whether a file tells all settings of a model.
        unused: Beginnings of the names of tensors that llama.cpp does not use.
        scaled_by_width: For a model with this number of layers, llama.cpp divides attention scores by the root of
            hidden size / heads. For any other it divides them by the root of the size of a head.
        fixed: Settings that a file cannot change, each with the values for which llama.cpp computes the same.
    """

    number: gguf.MODEL_ARCH
    interleaved: bool = False
    partly_rotary: bool = False
    capped: bool = False
    slides: bool = False
    encoder: bool = False
    norm_offset: float = 0.0
    ropes: tuple[str, ...] = ("default", "linear")
    skips_positions: bool = False
    transposed: tuple[str, ...] = ()
    alternating: bool = False
    merged_experts: bool = False
    split_latent: bool = False
    tiled: bool = False
    described: bool = True
    unused: tuple[str, ...] = ()
    scaled_by_width: int | None = None
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the architecture in a file."""
        return gguf.MODEL_ARCH_NAMES[self.number]


# llama.cpp has one GELU, by tanh and in float16. Its results differ from the exact ones by up to 2e-3 of their norm.
_GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new")
_SILU = {"hidden_act": ("silu",)}
_QWEN3 = _SILU | {"attention_bias": (False,)}
_ALL_SPARSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_NOT_TIED = {"tie_word_embeddings": (False,)}
_GEMMA = {"attention_bias": (False,), "use_bidirectional_attention": (None, False)}
_TIED_GEMMA = _GEMMA | {"tie_word_embeddings": (True,)}
_BERT = {
    "hidden_act": _GELU,
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
}

_YARN = ("default", "linear", "yarn")
_LLAMA = Architecture(gguf.MODEL_ARCH.LLAMA, interleaved=True, ropes=(*_YARN, "llama3"), fixed=_SILU)
_ROBERTA = Architecture(gguf.MODEL_ARCH.BERT, encoder=True, skips_positions=True, unused=("pooler.",), fixed=_BERT)

# llama.cpp's architectures by the class of the model.
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN2, ropes=_YARN, fixed=_SILU),
    "Qwen2MoeForCausalLM": Architecture(
        gguf.MODEL_ARCH.QWEN2MOE, ropes=_YARN, fixed=_SILU | _ALL_SPARSE | _NOT_TIED | {"norm_topk_prob": (False,)}
    ),
    "Qwen3ForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN3, ropes=_YARN, fixed=_QWEN3),
    "Qwen3MoeForCausalLM": Architecture(
        gguf.MODEL_ARCH.QWEN3MOE, ropes=_YARN, fixed=_QWEN3 | _ALL_SPARSE | {"norm_topk_prob": (True,)}
    ),
    "Phi3ForCausalLM": Architecture(
        gguf.MODEL_ARCH.PHI3, partly_rotary=True, ropes=("default", "longrope"), fixed=_SILU
    ),
    "GemmaForCausalLM": Architecture(gguf.MODEL_ARCH.GEMMA, norm_offset=1.0, fixed=_TIED_GEMMA | {"hidden_act": _GELU}),
    "Gemma2ForCausalLM": Architecture(
        gguf.MODEL_ARCH.GEMMA2,
        capped=True,
        slides=True,
        norm_offset=1.0,
        scaled_by_width=46,
        fixed=_TIED_GEMMA | {"hidden_activation": _GELU},
    ),
    "Gemma3ForCausalLM": Architecture(
        gguf.MODEL_ARCH.GEMMA3,
        slides=True,
        norm_offset=1.0,
        scaled_by_width=62,
        fixed=_GEMMA | {"hidden_activation": _GELU, "attn_logit_softcapping": (None,)},
    ),
    "GPT2LMHeadModel": Architecture(
        gguf.MODEL_ARCH.GPT2,
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        fixed={
            "activation_function": _GELU,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
    "StableLmForCausalLM": Architecture(
        gguf.MODEL_ARCH.STABLELM, partly_rotary=True, fixed=_SILU | _NOT_TIED | {"qk_layernorm": (False,)}
    ),
    "Starcoder2ForCausalLM": Architecture(gguf.MODEL_ARCH.STARCODER2, fixed={"hidden_act": _GELU, "use_bias": (True,)}),
    "Olmo2ForCausalLM": Architecture(gguf.MODEL_ARCH.OLMO2, fixed=_QWEN3 | _NOT_TIED),
    "FalconForCausalLM": Architecture(
        gguf.MODEL_ARCH.FALCON,
        fixed={"activation": _GELU, "alibi": (False,), "bias": (False,), "parallel_attn": (True,)},
    ),
    "BertModel": Architecture(gguf.MODEL_ARCH.BERT, encoder=True, unused=("pooler.",), fixed=_BERT),
    "DistilBertModel": Architecture(gguf.MODEL_ARCH.BERT, encoder=True, fixed={"activation": _GELU}),
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
}


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Return the architecture of a model; UnsupportedError: llama.cpp lacks it, or has other settings built in."""
    name = type(model).__name__
    if name not in ARCHITECTURES or getattr(transformers, name, None) is not type(model):
        raise unsupported("model", f"one of {', '.join(ARCHITECTURES)}", name)
    architecture = ARCHITECTURES[name]
    for setting, values in settings_built_in(architecture, model.config).items():
        value_in_model = getattr(model.config, setting, values[0])
        if value_in_model not in values:
            raise _other_setting(name, setting, " or ".join(repr(value) for value in values), value_in_model)
    for setting in ("attn_logit_softcapping", "final_logit_softcapping"):
        if architecture.capped and getattr(model.config, setting) is None:
            raise _other_setting(name, setting, "a number", None)
    return architecture


def _other_setting(name: str, setting: str, expected: str, found: object) -> UnsupportedError:
    return unsupported(f"{name}'s {setting}", expected, repr(found), "llama.cpp computes with nothing else. ")


def unsupported(where: str, expected: str, found: str, why: str = "") -> UnsupportedError:
    """Return the error for a model or setting that llama.cpp does not support; `why`, a sentence, begins the advice."""
    return UnsupportedError(where, expected, found, f"{why}For other readers there is export_compressed_tensors.")


def settings_built_in(architecture: Architecture, config: PretrainedConfig) -> Mapping[str, tuple[object, ...]]:
    """Return the settings that llama.cpp has built in for a model, each with the values that compute the same."""
    if architecture.scaled_by_width is None:
        return architecture.fixed
    by_width = config.num_hidden_layers == architecture.scaled_by_width
    size = config.hidden_size // config.num_attention_heads if by_width else config.head_dim
    return {**architecture.fixed, "query_pre_attn_scalar": (size,)}
