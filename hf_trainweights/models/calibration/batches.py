"""The inputs of calibration: texts as the model's tokenizer gives them, or tokens that the model writes itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.models.host.inputs import Batch
from hf_trainweights.models.host.models import CACHE_ARGUMENTS, cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Many short texts tell more than few long ones.
_MOST_TOKENS, _TEXTS_A_BATCH = 512, 16
# A model writes at least _WINDOWS windows of _WINDOW tokens. It writes more if the widest layer would see fewer than
# _TOKENS_AN_INPUT tokens for each of its inputs.
_WINDOW, _WINDOWS = 128, 64
_TOKENS_AN_INPUT = 8
_SEED = 0


def digest_of(batches: Iterable[Batch]) -> str:
    """Return the SHA-256 of the tensors of batches, in their order; ConfigError: one is neither a dict nor a tensor.

    Examples:
        >>> digest_of([torch.zeros(1)])[:8]
        'df3f6198'
    """
    sha256 = hashlib.sha256()
    for batch in batches:
        if not isinstance(batch, Tensor | Mapping):
            expected, next_step = "batches that are dicts of arguments or tensors", "Pass what model(**batch) takes."
            raise ConfigError("calibration", expected, f"a batch of type {type(batch).__name__}", next_step)
        values = [batch] if isinstance(batch, Tensor) else [batch[name] for name in sorted(batch)]
        for value in values:
            if isinstance(value, Tensor):
                sha256.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def batches_of_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[dict[str, Tensor]]:
    """Return the first 512 tokens of each text in batches, short texts and long ones apart."""
    if model.main_input_name != "input_ids":
        next_step = "Load it and pass batches to quantize_."
        raise ConfigError("calibration", "a model that takes tokens", model.main_input_name, next_step)
    texts = [text for text in texts if not isinstance(text, str) or text.strip()]
    if not texts or not all(isinstance(text, str) for text in texts):
        problem = repr(texts)[:80] if texts else "none"
        raise ConfigError("calibration", "texts", problem, "Give some hundred texts, one a line.")
    if tokenizer.pad_token is None:
        # Any token can serve as padding, because the attention mask leaves it out.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    # A model with other inputs beside texts has its positions in the configuration of the part that reads texts.
    configs = model.config, model.config.get_text_config()
    positions = (getattr(config, "max_position_embeddings", None) for config in configs)
    most = min(_MOST_TOKENS, next(filter(None, positions), _MOST_TOKENS))
    texts = sorted(texts, key=len)
    batches = []
    for start in range(0, len(texts), _TEXTS_A_BATCH):
        chosen = texts[start : start + _TEXTS_A_BATCH]
        batch = dict(tokenizer(chosen, padding=True, truncation=True, max_length=most, return_tensors="pt"))
        if model.config.is_encoder_decoder:
            batch |= {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
        batches.append(batch)
    return batches


@torch.no_grad()
def written_by(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Return batches of tokens that a causal language model draws from its own probabilities, always the same."""
    expected = "a causal language model, which can write"
    next_step = "Give texts, or load it and pass batches to quantize_."
    if not model.can_generate() or model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise ConfigError("calibration", expected, type(model).__name__, next_step)
    embeddings: Any = model.get_input_embeddings()
    most = max(module.in_features for module in model.modules() if isinstance(module, nn.Linear))
    windows = max(_WINDOWS, -(-_TOKENS_AN_INPUT * most // _WINDOW))
    generator = torch.Generator().manual_seed(_SEED)
    starts = torch.randint(embeddings.weight.shape[0], (windows, 1), generator=generator)
    try:
        return [{"input_ids": _write(model, rows, generator)} for rows in starts.split(_TEXTS_A_BATCH)]
    except Warning:
        raise
    except Exception as error:
        # A model that takes no cache, or fewer positions than a window has, may raise any error.
        problem = f"{type(model).__name__}, with {type(error).__name__}: {error}"
        raise ConfigError("calibration", expected, problem[:300], next_step) from error


def _write(model: Any, starts: Tensor, generator: torch.Generator) -> Tensor:
    """Return windows of tokens `[n, _WINDOW]` that begin with the tokens `starts`, `[n, 1]`."""
    argument = cache_argument(model) or CACHE_ARGUMENTS[0]
    windows, cache = starts, None
    for _ in range(_WINDOW - 1):
        output = model(input_ids=windows[:, -1:].to(model.device), use_cache=True, **{argument: cache})
        cache, chances = output[argument], output.logits[:, -1].float().softmax(-1).cpu()
        windows = torch.cat((windows, torch.multinomial(chances, 1, generator=generator)), dim=1)
    return windows
