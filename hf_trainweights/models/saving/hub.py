"""Pushes to the Hub in two steps: the Hub may refuse before a file is written, then one commit is made.

Transformers pushes from inside save_pretrained, knows safetensors only, and leaves the weight files of earlier pushes
where they are, which a loader might pick instead of the new ones. Here one commit adds and removes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from hf_trainweights.errors import SaveError
from hf_trainweights.models.saving.card import CARD_NAME, read_card


@dataclass(frozen=True)
class Push:
    """A push that the Hub has agreed to: repository and branch exist.

    Args:
        present: Names of the files in the repository.
        card: Text of the card in the repository, None if there is none.
        tags: Of the card to be written.
        commit_options: Title, branch and so on, as `HfApi.create_commit` takes them.
    """

    repo_id: str
    present: frozenset[str]
    card: str | None
    tags: Sequence[str]
    commit_options: Mapping[str, Any]

    def commit(self, directory: Path, names: Iterable[str], card: str, remove: Iterable[str]) -> CommitInfo:
        """Upload files and a card, and remove others where the repository has them, in one commit."""
        files = {name: directory / name for name in sorted(names)} | {CARD_NAME: card.encode()}
        operations = [CommitOperationAdd(name, source) for name, source in files.items()]
        operations += [CommitOperationDelete(name) for name in sorted(self.present & set(remove) - files.keys())]
        try:
            return HfApi().create_commit(self.repo_id, operations, **self.commit_options)
        except Exception as error:  # The errors of the Hub's client, its HTTP library and hf_xet share no other class.
            found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            next_step = "A commit is made whole or not at all: push again."
            raise SaveError(self.repo_id, "the Hub to take the upload", found, next_step) from error


def begin_push(
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: str | Sequence[str] | None = None,
) -> Push:
    """Make repository and branch, unless they exist, and list the files there; the Hub's errors are passed on."""
    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    # A pull request is opened against a branch that exists; refs/pr/1 is one.
    if revision is not None and not create_pr and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    present = frozenset(api.list_repo_files(repo_id, revision=revision, token=token))
    card = _read_card(api, repo_id, revision, token) if CARD_NAME in present else None
    options = {
        "commit_message": commit_message or "Upload model",
        "commit_description": commit_description,
        "token": token,
        "revision": revision,
        "create_pr": create_pr,
    }
    return Push(repo_id, present, card, [tags] if isinstance(tags, str) else tags or (), options)


def hub_id(model: PreTrainedModel) -> str | None:
    """Return the Hub id that a model was loaded from, None where it was not.

    Ask before the working directory changes, or a relative path may look like an id.
    """
    source = model.config.name_or_path or ""
    try:
        validate_repo_id(source)
    except HFValidationError:
        return None
    return None if source == "" or os.path.exists(source) else source


def _read_card(api: HfApi, repo_id: str, revision: str | None, token: bool | str | None) -> str | None:
    # The download goes past the cache, which would give an old card where the Hub does not answer.
    with tempfile.TemporaryDirectory() as directory:
        file = api.hf_hub_download(repo_id, CARD_NAME, revision=revision, token=token, local_dir=directory)
        return read_card(Path(file))
