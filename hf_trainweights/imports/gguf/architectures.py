"""The architectures whose GGUF files are read: those that are written too, and a few more."""

from __future__ import annotations

import gguf
import transformers

from hf_trainweights.exports.gguf.architectures import ARCHITECTURES, Architecture

_LATENT = Architecture(gguf.MODEL_ARCH.DEEPSEEK2, described=False)

# llama.cpp computes these as Transformers does. Nobody has compared an export of them with llama.cpp yet.
_READABLE = ARCHITECTURES | {
    "GptOssForCausalLM": Architecture(
        gguf.MODEL_ARCH.GPT_OSS, slides=True, alternating=True, ropes=("default", "linear", "yarn")
    ),
    "Lfm2ForCausalLM": Architecture(gguf.MODEL_ARCH.LFM2),
    "MiniMaxM2ForCausalLM": Architecture(gguf.MODEL_ARCH.MINIMAXM2, partly_rotary=True),
    "T5ForConditionalGeneration": Architecture(gguf.MODEL_ARCH.T5),
    "T5EncoderModel": Architecture(gguf.MODEL_ARCH.T5ENCODER),
    "UMT5ForConditionalGeneration": Architecture(gguf.MODEL_ARCH.T5),
    "UMT5EncoderModel": Architecture(gguf.MODEL_ARCH.T5ENCODER),
    "MT5ForConditionalGeneration": Architecture(gguf.MODEL_ARCH.T5),
    "MT5EncoderModel": Architecture(gguf.MODEL_ARCH.T5ENCODER),
    "Gemma4ForCausalLM": Architecture(gguf.MODEL_ARCH.GEMMA4, slides=True, merged_experts=True),
    "MambaForCausalLM": Architecture(gguf.MODEL_ARCH.MAMBA),
    "BloomForCausalLM": Architecture(gguf.MODEL_ARCH.BLOOM),
    "GraniteForCausalLM": Architecture(gguf.MODEL_ARCH.GRANITE, interleaved=True),
    "GraniteMoeForCausalLM": Architecture(gguf.MODEL_ARCH.GRANITE_MOE, interleaved=True),
    "SmolLM3ForCausalLM": Architecture(gguf.MODEL_ARCH.SMOLLM3, interleaved=True),
    "ArceeForCausalLM": Architecture(gguf.MODEL_ARCH.ARCEE, interleaved=True),
    "OlmoForCausalLM": Architecture(gguf.MODEL_ARCH.OLMO, interleaved=True),
    "Olmo3ForCausalLM": Architecture(gguf.MODEL_ARCH.OLMO2, slides=True, ropes=("default", "yarn")),
    "OlmoeForCausalLM": Architecture(gguf.MODEL_ARCH.OLMOE),
    "SeedOssForCausalLM": Architecture(gguf.MODEL_ARCH.SEED_OSS),
    "Exaone4ForCausalLM": Architecture(gguf.MODEL_ARCH.EXAONE4, slides=True),
    "Ernie4_5ForCausalLM": Architecture(gguf.MODEL_ARCH.ERNIE4_5),
    "Ernie4_5_MoeForCausalLM": Architecture(gguf.MODEL_ARCH.ERNIE4_5_MOE),
    "CohereForCausalLM": Architecture(gguf.MODEL_ARCH.COMMAND_R),
    "Cohere2ForCausalLM": Architecture(gguf.MODEL_ARCH.COHERE2, slides=True),
    "Glm4ForCausalLM": Architecture(gguf.MODEL_ARCH.GLM4, partly_rotary=True),
    "Glm4MoeForCausalLM": Architecture(gguf.MODEL_ARCH.GLM4_MOE, partly_rotary=True),
    "PhiForCausalLM": Architecture(gguf.MODEL_ARCH.PHI2, partly_rotary=True),
    "GPTNeoXForCausalLM": Architecture(gguf.MODEL_ARCH.GPTNEOX, partly_rotary=True),
    "HunYuanDenseV1ForCausalLM": Architecture(gguf.MODEL_ARCH.HUNYUAN_DENSE),
    "Dots1ForCausalLM": Architecture(gguf.MODEL_ARCH.DOTS1),
    "Lfm2MoeForCausalLM": Architecture(gguf.MODEL_ARCH.LFM2MOE),
    "Jais2ForCausalLM": Architecture(gguf.MODEL_ARCH.JAIS2),
    "Qwen3NextForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN3NEXT, partly_rotary=True, norm_offset=1.0),
    "Qwen3_5ForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN35, partly_rotary=True, norm_offset=1.0, tiled=True),
    "Qwen3_5MoeForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN35MOE, partly_rotary=True, norm_offset=1.0, tiled=True),
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT,
    "Llama4ForCausalLM": Architecture(gguf.MODEL_ARCH.LLAMA4, described=False),
    "Ministral3ForCausalLM": Architecture(gguf.MODEL_ARCH.MISTRAL3, interleaved=True, described=False),
    "NemotronForCausalLM": Architecture(gguf.MODEL_ARCH.NEMOTRON, partly_rotary=True, norm_offset=1.0),
}

_IN_TRANSFORMERS = frozenset(dir(transformers))
READABLE = {name: entry for name, entry in _READABLE.items() if name in _IN_TRANSFORMERS}
"""The architectures by the class of the model, but for classes that this version of Transformers lacks."""
