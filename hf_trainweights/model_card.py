"""The README.md of a quantized model on the Hub: what it is, how to load it, what it holds, who wrote it.

A card of ours ends in a line with the digest of the text above it. Whoever edits the card makes it theirs: the digest
no longer fits, and from then on it is kept as it is.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from hf_trainweights.selection import Choice
from hf_trainweights.weight_digests import package_versions

CARD_NAME = "README.md"

_LIBRARY = "transformers"
_TAG = "hf-trainweights"
_MARK = "<!-- hf_trainweights wrote this card and writes it anew until someone edits it: {} -->\n"
_MARK_LENGTH = len(_MARK.format("0" * 64))


def is_generated(text: str) -> bool:
    """Return whether a card is one that `model_card` wrote and nobody has edited since.

    Args:
        text: The whole card. Line ends do not matter, a checkout may have changed them.
    """
    text = text.replace("\r\n", "\n")
    body = text[:-_MARK_LENGTH]
    return text == body + _MARK.format(_digest(body))


def model_card(model: PreTrainedModel, repo_id: str, tags: Iterable[str] = (), earlier: str | None = None) -> str:
    """Return the text of a model's card.

    Args:
        model: The model; one that was dequantized, or saves its adapters alone, gets a card without what is said of
            quantized weights.
        repo_id: Where it is going to lie.
        tags: Tags beside our own.
        earlier: A card of ours for an earlier version of it; where the model was loaded quantized, only that knows the
            base model.

    Returns:
        Metadata and Markdown. Equal models of equal names give equal text.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    title = f"# {repo_id.rpartition('/')[2]}"
    if quantizer is None or getattr(model, "_hf_peft_config_loaded", False):
        return _signed(ModelCardData(library_name=_LIBRARY, tags=list(tags) or None), [title, _use(model, repo_id)])
    choices = quantizer.summary().tensors
    base = base_model(model, earlier)
    formats = [choice.format.name for choice in choices if choice.format is not None]
    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized" if base else None,
        library_name=_LIBRARY,
        tags=list(dict.fromkeys([_TAG, "quantized", *formats, *tags])),
    )
    return _signed(data, [title, _about(choices, base), _use(model, repo_id), _contents(choices)])


def with_tags(text: str, tags: Iterable[str]) -> str:
    """Return a card with tags added to those it has, and otherwise as it was.

    Args:
        text: Any card.
        tags: The tags.
    """
    card = ModelCard(text, ignore_metadata_errors=True)
    present = card.data.get("tags") or []
    missing = [tag for tag in dict.fromkeys(tags) if tag not in present]
    if not missing:
        return text
    card.data["tags"] = [*present, *missing]
    return str(card)


def base_model(model: PreTrainedModel, earlier: str | None = None) -> str | None:
    """Return the Hub id of the float model that a model was quantized from, None where nobody knows.

    Args:
        model: A quantized model.
        earlier: As for `model_card`.
    """
    quantizer: Any = model.hf_quantizer
    source = model.config.name_or_path or ""
    if not quantizer.pre_quantized:
        return source if _is_repository(source) else None
    beside = Path(source) / CARD_NAME
    for text in (earlier, beside.read_text(encoding="utf-8") if beside.is_file() else None):
        base = ModelCard(text, ignore_metadata_errors=True).data.get("base_model") if text else None
        if isinstance(base, str):
            return base
    return None


def _is_repository(source: str) -> bool:
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return source != "" and not os.path.exists(source)


def _signed(data: ModelCardData, parts: Iterable[str]) -> str:
    text = "\n\n".join([f"---\n{data.to_yaml()}\n---", *parts]) + "\n\n"
    return f"{text}{_MARK.format(_digest(text))}"


def _about(choices: Sequence[Choice], base: str | None) -> str:
    before, after = sum(each.bytes_before for each in choices), sum(each.bytes_after for each in choices)
    source = f"[{base}](https://huggingface.co/{base})" if base else "A Transformers model"
    return (
        f"{source} with weights quantized by `hf_trainweights`: "
        f"{_megabytes(before)} of parameters as floats, {_megabytes(after)} as they lie here."
    )


def _use(model: PreTrainedModel, repo_id: str) -> str:
    quantized = hasattr(model, "hf_quantizer")
    # A class of the user's own has no import line that we could know.
    name = type(model).__name__ if hasattr(transformers, type(model).__name__) else "AutoModel"
    package = "hf_trainweights" if quantized else "transformers"
    notice = "import hf_trainweights  # first: without this line the model loads with random weights\n"
    return f"""## Use

```bash
pip install {package}
```

```python
{notice if quantized else ""}from transformers import {name}

model = {name}.from_pretrained("{repo_id}")
```"""


def _contents(choices: Iterable[Choice]) -> str:
    groups: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        groups["not quantized" if choice.format is None else str(choice.format)].append(choice)
    rows = [
        f"| {name} | {len(group)} | {numel:,} | {8 * stored_bytes / max(1, numel):.2f} | {_megabytes(stored_bytes)} |"
        for name, group in sorted(groups.items())
        for numel, stored_bytes in [(sum(each.numel for each in group), sum(each.bytes_after for each in group))]
    ]
    table = "\n".join(rows)
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    return f"""## Weights

| format | tensors | weights | bits per weight | size |
| --- | ---: | ---: | ---: | ---: |
{table}

`trainweights_files.json` holds a SHA-256 of each weight file; `hf_trainweights.verify_model` compares.

Written with {versions}."""


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f} MB"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
