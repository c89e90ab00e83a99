"""Models that are no decoders and no encoders of text, trained for a moment: unseen inputs gain too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from architectures import TOKENS
from covering import exhaustive
from torch import Tensor, nn

from hf_trainweights import quantize_

Batch = dict[str, Tensor]


def images(generator: torch.Generator, count: int) -> Batch:
    """Return one of 16 pictures each, in noise."""
    pictures = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    labels = torch.randint(16, (count,), generator=generator)
    return {"pixel_values": pictures[labels] + torch.randn(count, 3, 16, 16, generator=generator), "labels": labels}


def make_vit() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=16)
    )


def copies(generator: torch.Generator, count: int) -> Batch:
    """Return sentences whose translation is their reverse."""
    ids = torch.randint(2, 32, (count, 8), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1)}


def make_t5() -> nn.Module:
    sizes = {"vocab_size": 32, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, **{**TOKENS, "bos_token_id": None}, decoder_start_token_id=0, dropout_rate=0.0)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("make", "data"), exhaustive((make_vit, images), (make_t5, copies)), ids=["vit", "t5"])
def test_outputs_on_unseen_inputs_are_nearer(
    make: Callable[[], nn.Module], data: Callable[[torch.Generator, int], Batch]
) -> None:
    torch.manual_seed(0)
    model, generator = make(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model(**data(generator, 32)).loss.backward()
        optimizer.step()
    model.eval()
    plain, calibrated = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(plain, "uint2")
    quantize_(calibrated, "uint2", calibration=[data(generator, 32) for _ in range(8)])
    unseen = data(generator, 128)
    with torch.no_grad():
        expected = model(**unseen).logits.log_softmax(-1)
        errors = [
            (expected.exp() * (expected - each(**unseen).logits.log_softmax(-1))).sum(-1).mean().item()
            for each in (calibrated, plain)
        ]
    assert errors[0] < 0.7 * errors[1]
