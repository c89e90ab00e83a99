"""The architectures that llama.cpp computes as Transformers does, and what it computes with where a file says nothing.

A new one is an entry of `ARCHITECTURES`; `metadata` writes the settings that they share.
Reader: `src/models/` in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import gguf
import transformers
from transformers import PreTrainedModel

from hf_trainweights.errors import UnsupportedError


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp knows an architecture of Transformers.

    Args:
        number: The architecture in the package gguf.
        interleaved: Whether its rotary embedding turns neighbouring rows of a head, where Transformers turns rows that
            are half a head apart.
        fixed: Settings that a file cannot change, with the values that llama.cpp computes with.
    """

    number: gguf.MODEL_ARCH
    interleaved: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in a file."""
        return gguf.MODEL_ARCH_NAMES[self.number]


_SILU = {"hidden_act": "silu"}
_QWEN3 = _SILU | {"attention_bias": False}
_LLAMA = Architecture(gguf.MODEL_ARCH.LLAMA, interleaved=True, fixed=_SILU)

# By the class of the model.
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN2, fixed=_SILU),
    "Qwen3ForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN3, fixed=_QWEN3),
    "Qwen3MoeForCausalLM": Architecture(
        gguf.MODEL_ARCH.QWEN3MOE,
        fixed=_QWEN3 | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Return the architecture of a model.

    Args:
        model: The model.

    Raises:
        UnsupportedError: llama.cpp does not have it, or has other settings built in.
    """
    name = type(model).__name__
    if name not in ARCHITECTURES or getattr(transformers, name, None) is not type(model):
        next_step = "For other readers there is export_compressed_tensors."
        raise UnsupportedError("model", f"one of {', '.join(ARCHITECTURES)}", name, next_step)
    for setting, value in ARCHITECTURES[name].fixed.items():
        found = getattr(model.config, setting, value)
        if found != value:
            next_step = (
                "llama.cpp computes with that value alone. For other readers there is export_compressed_tensors."
            )
            raise UnsupportedError(f"{name}'s {setting}", repr(value), repr(found), next_step)
    return ARCHITECTURES[name]
