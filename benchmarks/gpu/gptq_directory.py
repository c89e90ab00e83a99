"""A model of random codes as GPTQ packs them, which gptqmodel loads into the kernels of Marlin."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BITS, GROUP_SIZE = 4, 128
CODES_IN_A_WORD = 32 // BITS
CONFIG = {
    "quant_method": "gptq",
    "bits": BITS,
    "group_size": GROUP_SIZE,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}
# A zero point of 8 is stored as 7.
_ZERO_POINTS = 0x77777777


def save_as_gptq(model: PreTrainedModel, directory: Path) -> None:
    """Save a float model with random codes in the place of all weights of Linears but the head's.

    Args:
        model: A model whose Linears have multiples of 128 columns. Its configuration is that of GPTQ afterwards.
        directory: Where the files are written; it exists.
    """
    state, head = model.state_dict(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            state |= {f"{name}.{key}": tensor for key, tensor in _random_codes(state.pop(f"{name}.weight")).items()}
    model.config.quantization_config = CONFIG
    model.save_pretrained(directory, state_dict=state)


def _random_codes(weight: Tensor) -> dict[str, Tensor]:
    """Return tensors of the size and about the magnitudes of a weight `[N, K]`."""
    (N, K), device = weight.shape, weight.device
    groups, words = K // GROUP_SIZE, (K // CODES_IN_A_WORD, N)
    return {
        "qweight": torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=device),
        "qzeros": torch.full((groups, N // CODES_IN_A_WORD), _ZERO_POINTS, dtype=torch.int32, device=device),
        "scales": (weight.std() / 5 * (1 + torch.rand(groups, N, device=device))).half(),
        "g_idx": torch.arange(K, dtype=torch.int32, device=device) // GROUP_SIZE,
    }
