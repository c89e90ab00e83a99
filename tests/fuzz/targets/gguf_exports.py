"""GGUF files of odd models: gguf reads the rows of the model's own weights, or the export is refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_trainweights import QuantizedTensor, export_gguf
from hf_trainweights.errors import TrainWeightsError
from tests.fuzz.target import BrokenPromiseError, Outcome, Target
from tests.fuzz.targets.exports import Export, Exports, built
from tests.tiny_tokenizers import byte_level

_ARCHITECTURES = (
    *("Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3", "Phi3", "Gemma", "Gemma2", "Gemma3Text", "GPT2"),
    *("StableLm", "Starcoder2", "Olmo2", "Falcon", "Bert", "Roberta"),
)
_ENCODERS = ("Bert", "Roberta")
# What a file leaves out or unpacks of an encoder.
_NOT_IN_BLOCKS = ("pooler.", "embeddings.token_type_embeddings.")
_EARLIER = b"an earlier model"
_BLOCKS = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)


class GgufExports(Target):
    """A GGUF file holds the rows of the dequantized weights, or the export is refused and leaves what was there."""

    name = "gguf-exports"
    share = 2.0
    limit_seconds = 30.0
    inputs_in_suite = 60

    def mutate(self, rng: random.Random) -> Export:
        given = Exports.mutate(self, rng)  # type: ignore[arg-type]
        sizes = {**given.sizes, "vocab_size": len(tokenizer()), "hidden_size": 32 * rng.choice((1, 2, 4))}
        architecture = rng.choice((given.architecture, *_ARCHITECTURES))
        twist = "no head" if architecture in _ENCODERS else given.twist
        # Positions that a file leaves out would be missed among the rows.
        config = given.config | ({"include_embeddings": False, "overrides": {}} if architecture in _ENCODERS else {})
        return replace(given, architecture=architecture, sizes=sizes, twist=twist, config=config)

    def run(self, given: Export) -> Outcome:
        model = built(given)
        out = self.directory / "model.gguf"
        out.unlink(missing_ok=True)
        if given.over:
            out.write_bytes(_EARLIER)
        try:
            export_gguf(model, out, tokenizer())
        except TrainWeightsError as error:
            if (out.read_bytes() if out.exists() else None) != (_EARLIER if given.over else None):
                raise BrokenPromiseError("a refused export has changed the file") from error
            raise
        if _rows_of_file(out) != _rows_of_model(model):
            raise BrokenPromiseError("a GGUF file holds other rows than the model")
        return Outcome.ACCEPTED


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_level()


def _rows_of_file(path: object) -> Counter[bytes]:
    rows: Counter[bytes] = Counter()
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type in _BLOCKS:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            rows.update(row.tobytes() for row in values.reshape(-1, values.shape[-1]))
    return rows


def _rows_of_model(model: PreTrainedModel) -> Counter[bytes]:
    rows: Counter[bytes] = Counter()
    for name, weight in model.named_parameters():
        if isinstance(weight, QuantizedTensor) and not name.startswith(_NOT_IN_BLOCKS):
            values = weight.format.dequantize(weight.tensors, weight.stored_shape, torch.float32).flatten(0, -2)
            rows.update(row.numpy().tobytes() for row in values)
    return rows
