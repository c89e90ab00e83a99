"""Saves of quantized models over one another, and the quantization of a directory."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from checkpoint.trainers import build
from soak.scenario import Finding, Scenario, require, require_no_leftovers
from transformers import AutoModelForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_directory, verify_model
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.files.staging import clean_up

SAVES = 4
FORMATS = ("int8", "int4")


class SavesOverAnother(Scenario):
    """An int8 and an int4 model take turns in one directory."""

    kind = "save safetensors"
    options: ClassVar[list[dict[str, Any]]] = [{}]

    def prepare(self) -> None:
        """Quantize a model to both formats and note what each computes."""
        source = self.folder / "source"
        build().save_pretrained(source)
        self.tokens = torch.arange(12)[None]
        self.models = {
            name: AutoModelForCausalLM.from_pretrained(
                source, quantization_config=TrainWeightsConfig(name, group_size=32 if name == "int4" else None)
            )
            for name in FORMATS
        }
        self.logits = {name: model(self.tokens).logits.detach() for name, model in self.models.items()}

    def begin(self) -> None:
        """Start from the first of the two models."""
        self.models[FORMATS[0]].save_pretrained(self.run / "model", **self.options[0])

    def work(self, rng: random.Random) -> None:
        """Save a few times; the last is the second model."""
        for number in range(SAVES):
            self.models[FORMATS[number % 2]].save_pretrained(self.run / "model", **rng.choice(self.options))

    def check_kill(self) -> None:
        """The directory loads as one of the models, or not at all."""
        try:
            self._require_one_of_the_models()
        # Transformers calls a directory without config.json a ValueError.
        except (TrainWeightsError, OSError, ValueError) as error:
            print("does not load, which is allowed:", error)

    def check_end(self) -> None:
        """The directory is the model that was saved last, and nothing else is left."""
        name = self._require_one_of_the_models()
        require(name == FORMATS[1], f"{name} instead of {FORMATS[1]}")
        report = verify_model(self.run / "model")
        require(report.ok, f"does not verify: {report}")
        require_no_leftovers(self.run)

    def _require_one_of_the_models(self) -> str:
        model = AutoModelForCausalLM.from_pretrained(self.run / "model")
        name = model.config.quantization_config.format
        if not torch.equal(model(self.tokens).logits, self.logits[name]):
            raise Finding(f"loads as {name}, but computes something else")
        return name


class SavesOfShards(SavesOverAnother):
    """With as many shards as fit, which differ from save to save."""

    kind = "save shards"
    options: ClassVar[list[dict[str, Any]]] = [{"max_shard_size": size} for size in ("40KB", "90KB", "5GB")]


class SavesOfBin(SavesOverAnother):
    """With `.bin` files, sharded or not, and safetensors in between."""

    kind = "save bin"
    options: ClassVar[list[dict[str, Any]]] = [
        {"safe_serialization": False},
        {"safe_serialization": False, "max_shard_size": "60KB"},
        {"safe_serialization": True},
    ]


class QuantizesDirectory(SavesOverAnother):
    """A directory that does not exist before."""

    kind = "quantize directory"

    def begin(self) -> None:
        """Start from nothing."""

    def work(self, rng: random.Random) -> None:
        """Quantize, unless that is done."""
        if not (self.run / "model").exists():
            quantize_directory(self.folder / "source", self.run / "model", TrainWeightsConfig("int4", group_size=32))

    def check_kill(self) -> None:
        """The directory is whole as soon as it is there."""
        if (self.run / "model").exists():
            self._require_one_of_the_models()

    def check_end(self) -> None:
        """The collector removes what killed ones have left."""
        clean_up(self.run)
        super().check_end()
