"""Pushes the directory of a saved quantized model as it lies there: no weight is written anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo

from hf_trainweights.files.digests import CONFIG_NAME
from hf_trainweights.models.loading.saved_models import load_quantized
from hf_trainweights.models.saving.card import CARD_NAME, calibrated_of
from hf_trainweights.models.saving.companions import companions
from hf_trainweights.models.saving.hub import begin_push
from hf_trainweights.models.saving.saving import choose_card, is_replaced


def push_directory(directory: str | os.PathLike[str], repo_id: str, **options: Any) -> CommitInfo:
    """Push a saved quantized model to the Hub with its tokenizer, processor and a model card, in one commit.

    A card that someone wrote or edited is kept, the one on the Hub before the one in the directory. Weight files of an
    earlier push are removed in the same commit. Training state and other files in the directory stay there.
    """
    directory = Path(directory)
    model = load_quantized(directory)
    push = begin_push(repo_id, **options)
    weights = [path.name for path in directory.iterdir() if is_replaced(path.name, variant=None)]
    names = [*weights, CONFIG_NAME, *(path.relative_to(directory).as_posix() for path in companions(directory))]
    local = directory / CARD_NAME
    beside = local.read_text(encoding="utf-8") if local.is_file() else None
    card = choose_card(model, push, beside, calibrated_of(model))
    stale = (name for name in push.present if is_replaced(name, variant=None))
    return push.commit(directory, names, card, remove=stale)
