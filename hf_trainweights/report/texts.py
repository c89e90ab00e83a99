"""Compares a model with its float model on texts: the errors of its outputs, and the inputs of each layer."""

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

# Rows of each layer's inputs, from a batch and in all, for measuring the error of its outputs.
_ROWS_A_BATCH, _MOST_ROWS = 64, 512


@dataclass
class TextMeasures:
    """The outputs of a model compared with those of its float model for the same texts.

    Args:
        tokens: Number of tokens in the texts.
        divergence: KL divergence of the model's probabilities from the float model's, in thousandths of a nat per
            token; None for a model without logits.
        perplexities: Perplexities of the float model and of this one; None if they are no causal language models.
        cosine: Cosine of both models' mean hidden states, the mean over all texts; None for a model with logits.
        inputs: Inputs of each weight's layer in the float model, rows `[n, K]` by the name of the weight.
    """

    tokens: int = 0
    divergence: float | None = None
    perplexities: tuple[float, float] | None = None
    cosine: float | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return a line for each measure."""
        lines = []
        if self.divergence is not None:
            lines.append(f"divergence on {self.tokens:,} tokens of text: {self.divergence:.3g} millinats a token")
        if self.perplexities is not None:
            before, after = self.perplexities
            lines.append(f"perplexity {before:.4g} -> {after:.4g}, {100 * (after / before - 1):+.2f} %")
        if self.cosine is not None:
            lines.append(f"cosine of mean hidden states on {self.tokens:,} tokens of text: {self.cosine:.5f}")
        return lines


@torch.no_grad()
def measure_with_texts(
    source: str | os.PathLike[str], against: str | os.PathLike[str], texts: Sequence[str]
) -> TextMeasures:
    """Measure a saved model against its float model, which has the tokenizer, on the first 512 tokens of each text."""
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
            # A copy, because a model may change its inputs in place, and the other model needs them next.
            expected = reference(**copied(batch))
        _add(sums, batch, model(**batch), expected)
    inputs = {name: torch.cat(parts)[:_MOST_ROWS] for name, parts in rows.items()}
    return _means(sums, _is_causal(reference), inputs)


def _add(sums: dict[str, float], batch: Mapping[str, Tensor], outputs: Any, expected: Any) -> None:
    """Add the measures of one batch, from the outputs of the model and of the float model, to `sums`."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    sums["tokens"] += int(mask.sum())
    if getattr(expected, "logits", None) is None:
        a, b = (_mean_state(output.last_hidden_state, mask) for output in (outputs, expected))
        sums["cosine"] += F.cosine_similarity(a, b).sum().item()
        sums["compared"] += len(mask)
        return
    # A classifier has logits for each text, a language model for each token.
    has_token_logits = expected.logits.shape[: mask.dim()] == mask.shape
    # A language model has a logit for each token of the vocabulary, a classifier of tokens one for each class.
    has_next = has_token_logits and expected.logits.shape[-1] > int(batch["input_ids"].max())
    # One text at a time: in float32 the logits of a batch may take gigabytes.
    for ids, is_token, *logits in zip(batch["input_ids"], mask, expected.logits, outputs.logits, strict=True):
        p, q = (F.log_softmax(values.float(), dim=-1) for values in logits)
        divergence = (p.exp() * (p - q)).sum(dim=-1)
        divergence = divergence[is_token] if has_token_logits else divergence
        sums["divergence"] += divergence.double().sum().item()
        sums["scored"] += divergence.numel()
        if has_next:
            follows = is_token[1:] & is_token[:-1]
            for name, chances in (("loss before", p), ("loss after", q)):
                losses = -chances[:-1].gather(-1, ids[1:, None]).squeeze(-1)
                sums[name] += losses[follows].double().sum().item()
            sums["following"] += int(follows.sum())


def _means(sums: Mapping[str, float], is_causal: bool, inputs: Mapping[str, Tensor]) -> TextMeasures:
    """Divide the sums by the number of tokens or texts."""
    tokens = int(sums["tokens"])
    if sums["compared"]:
        return TextMeasures(tokens, cosine=sums["cosine"] / sums["compared"], inputs=inputs)
    before, after = (math.exp(sums[name] / max(1, sums["following"])) for name in ("loss before", "loss after"))
    divergence = 1000 * sums["divergence"] / sums["scored"]
    return TextMeasures(tokens, divergence, (before, after) if is_causal else None, inputs=inputs)


def _mean_state(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean hidden state of each text, `[texts, hidden]`; padding does not count."""
    if states.shape[:2] != mask.shape:
        return states.float().flatten(1, -2).mean(dim=1)
    return (states.float() * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp_min(1)


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and isinstance(weight, Tensor) and not isinstance(weight, QuantizedTensor)


def _is_causal(model: PreTrainedModel) -> bool:
    return model.can_generate() and not model.config.is_encoder_decoder
