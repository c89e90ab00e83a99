"""The architectures whose GGUF files are read: those that are written too, and a few more."""

from __future__ import annotations

import gguf

from hf_trainweights.exports.gguf.architectures import ARCHITECTURES, Architecture

# llama.cpp computes these as Transformers does. Nobody has compared an export of them with llama.cpp yet.
READABLE = ARCHITECTURES | {
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
    "NemotronForCausalLM": Architecture(gguf.MODEL_ARCH.NEMOTRON, partly_rotary=True, norm_offset=1.0),
}
"""The architectures by the class of the model."""
