"""Saved models whose files were changed: loaded whole, and read by each of the functions that check them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor
from transformers import LlamaForCausalLM

from hf_trainweights import TrainWeightsConfig, inspect_weights, verify_model
from hf_trainweights.errors import ConfigError
from hf_trainweights.files.safetensors_file import read_safetensors_header
from hf_trainweights.models.loading.stored_weights import check_weight_files
from hf_trainweights.tensor.stored_names import group_stored, unflatten_weight
from tests.fuzz.directories import Content, write_tree
from tests.fuzz.model_corpus import DIGESTS, change_tree, saved_models, weight_files
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class ChangedModel:
    """A saved model of which some files are others.

    Args:
        base: Name of the saved model.
        changes: What was done to it.
        files: Those that are others.
        reader: Which function is to read it.
    """

    base: str
    changes: tuple[str, ...]
    files: dict[str, Content]
    reader: str

    def tree(self) -> dict[str, Content]:
        """Return all files."""
        return {**saved_models()[self.base], **self.files}


class _ModelTarget(Target):
    readers: tuple[str, ...]

    def prepare(self, directory: Path) -> None:
        saved_models()

    def mutate(self, rng: random.Random) -> ChangedModel:
        base = rng.choice(sorted(saved_models()))
        saved = saved_models()[base]
        tree = dict(saved)
        changes = tuple(change_tree(rng, saved, tree) for _ in range(rng.choice((1, 1, 1, 2))))
        files = {name: content for name, content in tree.items() if content != saved[name]}
        return ChangedModel(base, changes, files, rng.choice(self.readers))

    def verifies(self, given: ChangedModel) -> bool:
        """Return whether the weight files are called those that were saved, and refuse to believe a wrong answer."""
        try:
            report = verify_model(self.directory / "model")
        except ConfigError:  # the digests are missing
            return False
        changed = [name for name in weight_files(given.files) if name in saved_models()[given.base]]
        if report.ok and changed and DIGESTS not in given.files:
            raise BrokenPromiseError(f"{', '.join(changed)} verified, though changed")
        return report.ok


class ModelFiles(_ModelTarget):
    """Each function that reads a model's files refuses what is wrong with them by name."""

    name = "model-files"
    share = 2.0
    inputs_in_suite = 3000
    readers = (
        "verify_model",
        "inspect_weights",
        "check_weight_files",
        "read_safetensors_header",
        "unflatten",
        "config",
    )

    def run(self, given: ChangedModel) -> Outcome:
        tree = given.tree()
        directory = write_tree(self.directory / "model", tree)
        if given.reader == "verify_model":
            return Outcome.ACCEPTED if self.verifies(given) else Outcome.REFUSED
        if given.reader == "inspect_weights":
            inspect_weights(directory)
        elif given.reader == "check_weight_files":
            check_weight_files(sorted(directory.glob("*model*.safetensors")) or sorted(directory.glob("*.bin")))
        elif given.reader == "safetensors":
            for file in sorted(directory.glob("*.safetensors")):
                read_safetensors_header(file)
        elif given.reader == "unflatten":
            _unflatten(tree)
        else:
            _read_config(tree)
        return Outcome.ACCEPTED


def _unflatten(tree: dict[str, Content]) -> None:
    """Put all weights together that lie in the safetensors files."""
    default = TrainWeightsConfig("int4", 32).default_format
    tensors: dict[str, Tensor] = {}
    for name in weight_files(tree):
        content = tree[name]
        if isinstance(content, bytes) and name.endswith(".safetensors"):
            tensors |= load(content)
    for name, stored in group_stored(tensors).items():
        weight = unflatten_weight(name, stored, torch.float32, default)
        if weight.numel() <= _MOST_ELEMENTS:
            weight.dequantize()


def _read_config(tree: dict[str, Content]) -> None:
    content = tree["config.json"]
    config: Any = json.loads(content) if isinstance(content, bytes) else None
    part = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(part, dict):
        TrainWeightsConfig.from_dict(part)


class ModelDirectories(_ModelTarget):
    """from_pretrained gives the saved model or an error, and what gives another model does not verify."""

    name = "model-directories"
    share = 5.0
    limit_seconds = 30.0
    inputs_in_suite = 200
    readers = ("from_pretrained",)

    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        self.outputs: dict[str, Tensor] = {}
        for name, tree in saved_models().items():
            self.outputs[name] = _outputs(write_tree(directory / name, tree))

    def run(self, given: ChangedModel) -> Outcome:
        tree = given.tree()
        directory = write_tree(self.directory / "model", tree)
        same = torch.equal(_outputs(directory), self.outputs[given.base])
        # What config.json says of the model beside its quantization may be edited, so no digest holds it.
        changed = given.files.keys() - {"config.json"}
        if not same and changed and self.verifies(given) and DIGESTS not in given.files:
            raise BrokenPromiseError("from_pretrained gives another model, which verifies")
        return Outcome.ACCEPTED if same else Outcome.REFUSED


def _outputs(directory: Path) -> Tensor:
    model = LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits
