"""Pushes the directory of a saved quantized model as it lies there: no weight is written anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo

from hf_trainweights.files.model_config import CONFIG_NAME
from hf_trainweights.models.loading.saved_models import load_quantized
from hf_trainweights.models.saving.card import CARD_NAME
from hf_trainweights.models.saving.companions import companions
from hf_trainweights.models.saving.hub import begin_push
from hf_trainweights.models.saving.saving import choose_card, is_replaced


def push_directory(directory: str | os.PathLike[str], repo_id: str, **options: Any) -> CommitInfo:
    """Push a saved quantized model to the Hub with its tokenizer, processor and a model card, in one commit.

    A card that someone wrote or edited is kept, the one on the Hub before the one in the directory. Weight files of an
    earlier push are removed in the same commit. Training state and other files in the directory stay there.

    Args:
        directory: A directory that `save_pretrained` or `quantize_directory` wrote.
        repo_id: Name of the repository; it is made if missing.
        options: As for `push_to_hub` of Transformers: `private`, `token`, `revision` (a branch, made if missing),
            `create_pr`, `tags`, `commit_message`, `commit_description`.

    Returns:
        The commit, a string with its URL.

    Raises:
        ConfigError: It holds no model that this package has quantized, or lacks weights.
        CorruptFileError: A file is damaged.
        SaveError: The upload failed.
        Exception: What the Hub's client refuses, before anything is uploaded: `HFValidationError` for a name that
            cannot be one, `HfHubHTTPError` without a token that may write there.

    Examples:
        >>> push_directory("models/llama-int4", "me/llama-int4", private=True)  # doctest: +SKIP
    """
    directory = Path(directory)
    model = load_quantized(directory)
    push = begin_push(repo_id, **options)
    weights = [path.name for path in directory.iterdir() if is_replaced(path.name, variant=None)]
    names = [*weights, CONFIG_NAME, *(path.relative_to(directory).as_posix() for path in companions(directory))]
    local = directory / CARD_NAME
    card = choose_card(model, push, local.read_text(encoding="utf-8") if local.is_file() else None)
    stale = (name for name in push.present if is_replaced(name, variant=None))
    return push.commit(directory, names, card, remove=stale)
