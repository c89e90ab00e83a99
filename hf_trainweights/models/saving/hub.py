"""The README.md of a quantized model, and pushes to the Hub.

A generated card ends in a line with the digest of the text above it. Once someone edits the card, the digest no longer
fits. The card is then theirs, and is never generated again.

A push has two steps: the Hub makes the repository, or refuses before a file is written; then one commit is made.

Transformers pushes from inside save_pretrained and knows safetensors only. It leaves the weight files of earlier pushes
in the repository, where a loader might pick them instead of the new ones. Here one commit adds files and removes files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from yaml import YAMLError

from hf_trainweights.errors import SaveError
from hf_trainweights.files.digests import package_versions
from hf_trainweights.models.choosing.summary import Calibrated, Choice
from hf_trainweights.models.host.models import has_adapters, tasks_of

CARD_NAME = "README.md"

_logger = logging.getLogger(__name__)

_LIBRARY = "transformers"
_TAG = "hf-trainweights"
_LICENSE = ("license", "license_name", "license_link")
# The Hub has no such task any more, nor has Transformers 5 a pipeline for it.
_GONE_TASKS = ("text2text-generation",)
_MARK = "<!-- hf_trainweights wrote this card and writes it anew until someone edits it: {} -->\n"
_MARK_LENGTH = len(_MARK.format("0" * 64))


def read_card(file: Path) -> str | None:
    """Return the text of a card, None if there is no file; line ends stay, bytes that are no UTF-8 are replaced."""
    return file.read_bytes().decode(errors="replace") if file.is_file() else None


def is_generated(text: str) -> bool:
    """Return whether `model_card` wrote a card and no one has edited it since; other line ends do not count."""
    text = text.replace("\r\n", "\n")
    body = text[:-_MARK_LENGTH]
    return text == body + _MARK.format(_digest(body))


def model_card(
    model: PreTrainedModel,
    repo_id: str,
    tags: Iterable[str] = (),
    earlier: str | None = None,
    calibrated: Calibrated | None = None,
) -> str:
    """Return the text of a model's card, metadata and Markdown; always the same for the same model and name.

    Licence and task come from the card beside the weights that the model was loaded from, else from the card `earlier`.
    `calibrated` holds the gain of calibration. If the model was dequantized, or saves its adapters alone, the card
    mentions no quantized weights.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    title = f"# {repo_id.rpartition('/')[2]}"
    if quantizer is None or has_adapters(model):
        return _signed(ModelCardData(library_name=_LIBRARY, tags=list(tags) or None), [title, _use(model, repo_id)])
    choices = quantizer.summary().tensors
    source = model.config.name_or_path
    cards = [_metadata(text) for text in (read_card(Path(source, CARD_NAME)) if source else None, earlier) if text]
    base = _base_model(model, cards)
    formats = [choice.format.name for choice in choices if choice.format is not None]
    inherited: dict[str, Any] = {"pipeline_tag": _task(model)} | _inherited(cards)
    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized" if base else None,
        library_name=_LIBRARY,
        **inherited,
        tags=list(dict.fromkeys([_TAG, "quantized", *formats, *tags])),
    )
    return _signed(data, [title, _about(choices, base, calibrated), _use(model, repo_id), _contents(choices)])


def with_tags(text: str, tags: Iterable[str]) -> str:
    """Return a card with further tags; all else in it stays as it was."""
    card = ModelCard(text, ignore_metadata_errors=True)
    present = card.data.get("tags") or []
    added = [tag for tag in dict.fromkeys(tags) if tag not in present]
    if not added:
        return text
    card.data["tags"] = [*present, *added]
    return str(card)


def calibrated_of(model: PreTrainedModel) -> Calibrated | None:
    """Return the gain of calibration for a model: measured just now, or read from the directory it was loaded from."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.calibration_sha256 is None:
        return None
    source = model.config.name_or_path
    return quantizer.calibrated or (Calibrated.beside(Path(source)) if source else None)


def _base_model(model: PreTrainedModel, cards: Iterable[dict[str, Any]]) -> str | None:
    """Return the Hub id of the float model that a model was quantized from, None if it is unknown."""
    quantizer: Any = model.hf_quantizer
    hub_id_in_config = quantizer.quantization_config.base_model
    if hub_id_in_config is not None or not quantizer.pre_quantized:
        return hub_id_in_config
    hub_ids = (card.get("base_model") for card in cards)
    return next((name for name in hub_ids if isinstance(name, str)), None)


def _inherited(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the licence and the task that the cards give: quantizing changes neither."""
    licensed = next((card for card in cards if card.get("license")), {})
    inherited = {key: licensed[key] for key in _LICENSE if key in licensed}
    task = next((card["pipeline_tag"] for card in cards if card.get("pipeline_tag")), None)
    return inherited | ({"pipeline_tag": task} if task else {})


def _task(model: PreTrainedModel) -> str | None:
    """Return the Hub's name for the task of a model's class, None for a class without a head."""
    tasks = tasks_of(type(model).__name__)
    # The last of several tasks is the most specific: Gemma 3 takes images too, BART is no fill-mask model.
    return tasks[-1] if tasks and tasks[-1] not in _GONE_TASKS else None


def _metadata(text: str) -> dict[str, Any]:
    try:
        return ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, YAMLError) as error:
        _logger.warning("The metadata of a %s cannot be read, so nothing is taken from it: %s", CARD_NAME, error)
        return {}


def _signed(data: ModelCardData, parts: Iterable[str]) -> str:
    text = "\n\n".join([f"---\n{data.to_yaml()}\n---", *parts]) + "\n\n"
    return f"{text}{_MARK.format(_digest(text))}"


def _about(choices: Sequence[Choice], base: str | None, calibrated: Calibrated | None) -> str:
    before, after = sum(choice.bytes_before for choice in choices), sum(choice.bytes_after for choice in choices)
    source = f"[{base}](https://huggingface.co/{base})" if base else "A Transformers model"
    about = (
        f"{source} with weights quantized by `hf_trainweights`: "
        f"{_megabytes(before)} of parameters as floats, {_megabytes(after)} as they lie here."
    )
    return f"{about}\n\nThe codes were {calibrated}." if calibrated else about


def _use(model: PreTrainedModel, repo_id: str) -> str:
    quantized = hasattr(model, "hf_quantizer")
    # The card cannot say from where a class of the user's own is imported.
    name = type(model).__name__ if hasattr(transformers, type(model).__name__) else "AutoModel"
    package = "hf_trainweights" if quantized else "transformers"
    notice = "import hf_trainweights  # first: without this line the model does not load\n"
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
        for numel, stored_bytes in [(sum(one.numel for one in group), sum(one.bytes_after for one in group))]
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


@dataclass(frozen=True)
class Push:
    """A push that the Hub has agreed to: repository and branch exist.

    Args:
        present: Names of the files in the repository.
        card: Text of the card in the repository, None if there is none.
        tags: Tags for the card that the push uploads.
        commit_options: Title, branch and so on, as `HfApi.create_commit` takes them.
    """

    repo_id: str
    present: frozenset[str]
    card: str | None
    tags: Sequence[str]
    commit_options: Mapping[str, Any]

    def commit(self, directory: Path, names: Iterable[str], card: str, remove: Iterable[str]) -> CommitInfo:
        """Upload files and a card, and remove other files if the repository has them, in one commit."""
        files = {name: directory / name for name in sorted(names)} | {CARD_NAME: card.encode()}
        operations = [CommitOperationAdd(name, source) for name, source in files.items()]
        operations += [CommitOperationDelete(name) for name in sorted(self.present & set(remove) - files.keys())]
        try:
            return HfApi().create_commit(self.repo_id, operations, **self.commit_options)
        except Warning:
            raise
        except Exception as error:  # The errors of the Hub's client, its HTTP library and hf_xet share no other class.
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            next_step = "A commit is made whole or not at all: push again."
            raise SaveError(self.repo_id, "the Hub to take the upload", problem, next_step) from error


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
    """Make repository and branch unless they exist, and list the files there; the Hub's errors are passed on."""
    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    # A pull request is opened against a branch that exists; refs/pr/1 is one.
    if revision is not None and not create_pr and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    present = frozenset(api.list_repo_files(repo_id, revision=revision, token=token))
    card = None
    if CARD_NAME in present:
        # The download goes past the cache, which would give an old card if the Hub does not answer.
        with tempfile.TemporaryDirectory() as directory:
            file = api.hf_hub_download(repo_id, CARD_NAME, revision=revision, token=token, local_dir=directory)
            card = read_card(Path(file))
    options = {
        "commit_message": commit_message or "Upload model",
        "commit_description": commit_description,
        "token": token,
        "revision": revision,
        "create_pr": create_pr,
    }
    return Push(repo_id, present, card, [tags] if isinstance(tags, str) else tags or (), options)


def choose_card(model: PreTrainedModel, push: Push, beside: str | None, calibrated: Calibrated | None) -> str:
    """Return the card to upload: the user's own if there is one, else one that describes the model."""
    theirs = [card for card in (push.card, beside) if card is not None and not is_generated(card)]
    tags = [*(model.model_tags or ()), *push.tags]
    if theirs:
        return with_tags(theirs[0], tags)
    return model_card(model, push.repo_id, tags, push.card or beside, calibrated)


def hub_id(model: PreTrainedModel) -> str | None:
    """Return the Hub id that a model was loaded from, None if it came from a directory or was made here.

    Call this before the working directory changes: after that a relative path may look like an id.
    """
    source = model.config.name_or_path or ""
    try:
        validate_repo_id(source)
    except HFValidationError:
        return None
    return None if source == "" or os.path.exists(source) else source
