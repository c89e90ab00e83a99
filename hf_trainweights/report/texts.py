"""What texts show of a model beside its float one: how far its outputs are off, and what each layer gets."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_trainweights.models.budget.sensitivity import copied
from hf_trainweights.models.calibration.batches import batches_of_texts
from hf_trainweights.models.calibration.blocks import inputs_of, without_padding
from hf_trainweights.models.loading.saved_models import load_saved, load_tokenizer
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Rows of each layer's inputs that the error of its outputs is measured with.
_ROWS_A_BATCH, _MOST_ROWS = 64, 512


@dataclass
class TextMeasures:
    """How a model and its float one read the same texts.

    Args:
        tokens: Tokens that were read.
        divergence: Of the probabilities that the model gives the outputs from those that the float one gives, in
            thousandths of a nat a token; None for a model without logits.
        perplexities: Of the float model and of this one; None for other than causal language models.
        cosine: Mean over the texts of the cosine of both models' mean hidden state; None for a model with logits.
        inputs: What the layer of each weight gets in the float model, by the name of the weight: rows `[n, K]`.
    """

    tokens: int = 0
    divergence: float | None = None
    perplexities: tuple[float, float] | None = None
    cosine: float | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return what was found, a line each."""
        found = []
        if self.divergence is not None:
            found.append(f"divergence on {self.tokens:,} tokens of text: {self.divergence:.3g} millinats a token")
        if self.perplexities is not None:
            before, after = self.perplexities
            found.append(f"perplexity {before:.4g} -> {after:.4g}, {100 * (after / before - 1):+.2f} %")
        if self.cosine is not None:
            found.append(f"cosine of mean hidden states on {self.tokens:,} tokens of text: {self.cosine:.5f}")
        return found


@torch.no_grad()
def measure_with_texts(
    source: str | os.PathLike[str], against: str | os.PathLike[str], texts: Sequence[str]
) -> TextMeasures:
    """Let a saved model and its float one, with its tokenizer, read the first 512 tokens of each text."""
    model, reference = load_saved(source), load_saved(against)
    tokenizer = load_tokenizer(against, "texts", "Save the tokenizer there.")
    layers = {module: f"{name}.weight" for name, module in reference.named_modules() if _is_linear(module)}
    rows: dict[str, list[Tensor]] = defaultdict(list)
    sums: dict[str, float] = defaultdict(float)
    batches = batches_of_texts(reference, tokenizer, texts)
    for batch in logging.tqdm(batches, desc="Reading texts", unit="batch"):

        def see(layer: nn.Module, x: Tensor, batch: Mapping[str, Tensor] = batch) -> None:
            held = rows[layers[layer]]
            if sum(map(len, held)) < _MOST_ROWS:
                inputs = without_padding(x, batch)
                held.append(copied(inputs[:: -(-len(inputs) // _ROWS_A_BATCH)]).float())

        with inputs_of(layers, see):
            expected = reference(**copied(batch))
        _add(sums, batch, model(**batch), expected)
    inputs = {name: torch.cat(parts)[:_MOST_ROWS] for name, parts in rows.items()}
    return _means(sums, _is_causal(reference), inputs)


def _add(sums: dict[str, float], batch: Mapping[str, Tensor], found: Any, expected: Any) -> None:
    """Add to sums by name what both models return for a batch."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    sums["tokens"] += int(mask.sum())
    if getattr(expected, "logits", None) is None:
        a, b = (_mean_state(each.last_hidden_state, mask) for each in (found, expected))
        sums["cosine"] += F.cosine_similarity(a, b).sum().item()
        sums["compared"] += len(mask)
        return
    # A classifier has logits for each text, a language model for each token.
    each_token = expected.logits.shape[: mask.dim()] == mask.shape
    has_next = each_token and expected.logits.shape[-1] > int(batch["input_ids"].max())
    # One text at a time: in float32 the logits of a batch may take gigabytes.
    for ids, kept, *logits in zip(batch["input_ids"], mask, expected.logits, found.logits, strict=True):
        p, q = (F.log_softmax(each.float(), dim=-1) for each in logits)
        divergence = (p.exp() * (p - q)).sum(dim=-1)
        divergence = divergence[kept] if each_token else divergence
        sums["divergence"] += divergence.double().sum().item()
        sums["scored"] += divergence.numel()
        if has_next:
            follows = kept[1:] & kept[:-1]
            for name, chances in (("loss before", p), ("loss after", q)):
                losses = -chances[:-1].gather(-1, ids[1:, None]).squeeze(-1)
                sums[name] += losses[follows].double().sum().item()
            sums["following"] += int(follows.sum())


def _means(sums: Mapping[str, float], is_causal: bool, inputs: Mapping[str, Tensor]) -> TextMeasures:
    """Return what was summed up for each token or text."""
    tokens = int(sums["tokens"])
    if sums["compared"]:
        return TextMeasures(tokens, cosine=sums["cosine"] / sums["compared"], inputs=inputs)
    before, after = (math.exp(sums[name] / max(1, sums["following"])) for name in ("loss before", "loss after"))
    divergence = 1000 * sums["divergence"] / sums["scored"]
    return TextMeasures(tokens, divergence, (before, after) if is_causal else None, inputs=inputs)


def _mean_state(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the states of the tokens of each text, `[texts, hidden]`."""
    if states.shape[:2] != mask.shape:
        return states.float().flatten(1, -2).mean(dim=1)
    return (states.float() * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp_min(1)


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and isinstance(weight, Tensor) and not isinstance(weight, QuantizedTensor)


def _is_causal(model: PreTrainedModel) -> bool:
    return model.can_generate() and not model.config.is_encoder_decoder
