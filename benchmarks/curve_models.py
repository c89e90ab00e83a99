"""The two models that `benchmarks.curve` measures, each with what it does when its Linears are changed."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks import quality
from hf_trainweights.models.calibration.blocks import inputs_of, without_padding
from hf_trainweights_cli.demo.corpus import read_corpus
from hf_trainweights_cli.demo.probe import make_probe
from hf_trainweights_cli.demo.training import Recipe, train_model

WINDOWS = 48
# Texts that calibration gets: sentences for MiniLM; for the Llama a window of each of so many files.
SENTENCES, FILES, WINDOW = 256, 64, 128


class Subject:
    """A model whose weights are bfloat16 numbers, as published weights are, and which computes in float32.

    Args:
        model: The model in float32; its weights are rounded.
    """

    def __init__(self, model: PreTrainedModel):
        self.reference = model.bfloat16().float().eval()

    def copied(self) -> PreTrainedModel:
        """Return a copy in bfloat16, to be quantized."""
        return copy.deepcopy(self.reference).bfloat16()

    def linears(self) -> dict[str, nn.Linear]:
        """Return the Linears that are quantized, by name."""
        head = self.reference.get_output_embeddings()
        modules = self.reference.named_modules()
        return {name: each for name, each in modules if isinstance(each, nn.Linear) and each is not head}

    def calibration(self) -> list[dict[str, Tensor]]:
        """Return batches of text that is not measured on."""
        raise NotImplementedError

    @functools.cached_property
    def importance(self) -> dict[str, Tensor]:
        """The mean square of each input of the Linears for the texts of calibration, as llama.cpp measures it."""
        squares: dict[str, Tensor] = {}
        layers = {module: name for name, module in self.linears().items()}

        def see(layer: nn.Module, x: Tensor, batch: dict[str, Tensor]) -> None:
            total = without_padding(x, batch).double().square().sum(dim=0)
            squares[layers[layer]] = squares.get(layers[layer], torch.zeros_like(total)) + total

        for batch in self.calibration():
            with torch.no_grad(), inputs_of(layers, functools.partial(see, batch=batch)):
                self.reference(**batch)
        return squares

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the figures of a changed copy in float32."""
        raise NotImplementedError


class MiniLM(Subject):
    """MiniLM-L6-v2 and the sentences of `benchmarks.quality`."""

    def __init__(self) -> None:
        super().__init__(quality.load())
        self.texts = quality.sentences()
        self.expected = quality.embed(self.reference, self.texts)

    def calibration(self) -> list[dict[str, Tensor]]:
        """Return docstrings of packages of the standard library; those measured on are of its plain modules."""
        texts = list(_other_sentences())
        random.Random(0).shuffle(texts)
        tokenizer = AutoTokenizer.from_pretrained(quality.MODEL)
        options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
        return [dict(tokenizer(texts[start : start + 32], **options)) for start in range(0, SENTENCES, 32)]

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the mean cosine of the embeddings of sentences to those of the reference."""
        cosine = F.cosine_similarity(quality.embed(model, self.texts), self.expected).double().mean().item()
        return {"mean_cosine": cosine}


class DemoLlama(Subject):
    """The demo's Llama, trained here.

    Args:
        seed: Of its training.
        directory: Where trained models are kept.
    """

    def __init__(self, seed: int, directory: Path):
        self.path, self.corpus = directory / f"llama-{seed}", read_corpus()
        if not (self.path / "model.safetensors").is_file():
            with tempfile.TemporaryDirectory() as runs:
                train_model(self.path, Path(runs), self.corpus, Recipe(seed=seed), lambda *_: None)
        super().__init__(AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32))
        self.batches = make_probe(str(self.path), self.corpus, WINDOWS, "cpu").windows.split(16)
        self.expected = [self._log_chances(self.reference, batch) for batch in self.batches]
        self.loss = self._loss(self.expected)

    def calibration(self) -> list[dict[str, Tensor]]:
        """Return a window of each of some files of the training text, from anywhere in it: files begin alike."""
        texts, chance = list(self.corpus.train), random.Random(0)
        chance.shuffle(texts)
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        found = (tokenizer(text)["input_ids"] for text in texts)
        windows = []
        for ids in itertools.islice((ids for ids in found if len(ids) >= WINDOW), FILES):
            start = chance.randrange(len(ids) - WINDOW + 1)
            windows.append(ids[start : start + WINDOW])
        return [{"input_ids": part} for part in torch.tensor(windows).split(16)]

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Return what is lost of the perplexity, and the divergence from the reference, of held-out text."""
        found = [self._log_chances(model, batch) for batch in self.batches]
        pairs = list(zip(self.expected, found, strict=True))
        divergence = sum((p.exp() * (p - q)).sum().item() for p, q in pairs)
        tokens = sum(batch.numel() for batch in self.batches)
        lost = 100 * (math.exp(self._loss(found) - self.loss) - 1)
        return {"perplexity_lost_percent": lost, "divergence_millinats": 1000 * divergence / tokens}

    def _loss(self, found: list[Tensor]) -> float:
        pairs = zip(found, self.batches, strict=True)
        losses = [-chances[:, :-1].gather(-1, batch[:, 1:, None]).flatten() for chances, batch in pairs]
        return torch.cat(losses).double().mean().item()

    @torch.no_grad()
    def _log_chances(self, model: Any, batch: Tensor) -> Tensor:
        return F.log_softmax(model(input_ids=batch).logits.float(), dim=-1)


def _other_sentences() -> Iterator[str]:
    measured = set(quality.sentences())
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py"))[::7]:
        yield from (each for each in quality.docstring_sentences(path) if each not in measured)
