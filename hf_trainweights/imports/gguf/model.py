"""A model in a GGUF file, converted to this package's stored tensors."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from hf_trainweights.errors import ConfigError, TrainWeightsError
from hf_trainweights.exports.gguf.architectures import Architecture
from hf_trainweights.files.digests import CONFIG_NAME
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.imports.conversion import Skeleton, text_alone, write_tensors
from hf_trainweights.imports.gguf.architectures import READABLE
from hf_trainweights.imports.gguf.file import GgufFile
from hf_trainweights.imports.gguf.places import LATENT_KEYS, Slot, places_of
from hf_trainweights.imports.gguf.settings import GIVE_BASE, architecture_name, config_of
from hf_trainweights.imports.gguf.weights import common_format, float_weight, narrowest_dtype, quantized_weight
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.selection import choose
from hf_trainweights.models.host.checkpoints import names_not_saved
from hf_trainweights.models.host.models import tied_names
from hf_trainweights.models.loading.saved_models import check_config
from hf_trainweights.models.loading.stored_weights import saved_class
from hf_trainweights.tensor.stored_names import flatten_weight

# `_slots` only asks which weights can be quantized. Any format would do that holds every shape.
_ANY = TrainWeightsConfig("int8", include_embeddings=True)
_OUTPUT = "output.weight"
_GIVE_TOKENIZER = "Put the tokenizer's files beside the file, or give base_model, whose tokenizer is taken."


class GgufModel:
    """A model of a class of Transformers whose weights lie in a GGUF file.

    Args:
        file: The file, or one of the files of a split model.
        folder: Where to look for config.json. If it is not there, the file's metadata tells the configuration.

    Raises:
        ConfigError: The configuration is for another architecture.
        CorruptFileError: The file is damaged, or its tensors do not fit the configuration.
        UnsupportedError: The architecture, or a setting of it, is not known here.
    """

    def __init__(self, file: Path, folder: Path):
        self._file = GgufFile(file)
        self.config = _saved_config(folder, self._file) or config_of(self._file)
        # A model whose file has an output of its own is not tied, whatever another model's configuration says.
        if not self.config.is_encoder_decoder:  # those tie the embeddings of both halves too
            self.config.tie_word_embeddings = _OUTPUT not in self._file.tensors
        cls, self._architecture = _class_of(self.config, self._file)
        self._skeleton = Skeleton(cls, self.config, self._file.size_bytes)

    def convert(self, target: Path) -> tuple[dict[str, Any], Format]:
        """Write the stored tensors into an empty directory; return the model's settings and the commonest format.

        ConfigError: no weight is quantized.
        """
        spill, slots = Spill(target), _slots(self._skeleton.model, self._file.tensors)
        places = places_of(self._file, slots, self._architecture, self.config)
        formats = {name: common_format(name, slots[name], parts) for name, parts in places.items()}
        sizes = Counter[Format]()
        for name, form in formats.items():
            if form is not None:
                sizes[form] += math.prod(slots[name].shape)
        if not sizes:
            next_step = "Quantize it with quantize_directory, from its float weights in safetensors files."
            raise ConfigError(str(self._file.path), "quantized weights", "float ones alone", next_step)
        floats = {
            name: float_weight(name, slots[name], parts, spill)
            for name, parts in places.items()
            if formats[name] is None
        }
        preferred: Any = self.config.dtype
        dtype = narrowest_dtype(list(floats.values()), preferred)
        tensors: Iterator[dict[str, Tensor]] = (
            {name: floats.pop(name).to(dtype)}
            if form is None
            else flatten_weight(name, quantized_weight(name, slots[name], places[name], form, spill), default=None)
            for name, form in logging.tqdm(formats.items(), desc="Reading weights", unit="weight")
        )
        write_tensors(target, tensors)
        settings = json.loads(self.config.to_json_string(use_diff=False))
        return {**settings, "dtype": str(dtype).removeprefix("torch.")}, sizes.most_common(1)[0][0]

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer of the file into a directory, unless one is there already or the file has none.

        ConfigError: Transformers cannot make a tokenizer of the file.
        """
        if self._file.text("tokenizer.ggml.model") is None or any(directory.glob("tokenizer*")):
            return
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                tokenizer = AutoTokenizer.from_pretrained(self._file.path.parent, gguf_file=self._file.path.name)
        except Warning:  # a filter may raise warnings, and they pass
            raise
        except Exception as error:
            # Transformers reads the metadata without checks, so that damage raises errors of any type.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            raise ConfigError(
                str(self._file.path), "a tokenizer that Transformers reads", reason, _GIVE_TOKENIZER
            ) from error
        tokenizer.save_pretrained(directory)


def _saved_config(folder: Path, file: GgufFile) -> PretrainedConfig | None:
    """Return the configuration in a directory; None if there is none or it names no class.

    ConfigError: it cannot be read.
    """
    if not (folder / CONFIG_NAME).is_file():
        return None
    try:
        with (folder / CONFIG_NAME).open(encoding="utf-8") as opened:
            saved = json.load(opened)
        if not isinstance(saved, dict) or not saved.get("architectures"):
            return None
        check_config(saved, max(len(file.tensors), 1000), file.size_bytes, str(folder / CONFIG_NAME))
        config = AutoConfig.from_pretrained(folder)
    except (TrainWeightsError, Warning):  # a filter may raise warnings, and they pass
        raise
    except Exception as error:
        # Wrong values lead to errors of any type.
        expected, reason = "the configuration of a model", f"{type(error).__name__}: {error}"[:200]
        raise ConfigError(str(folder / CONFIG_NAME), expected, reason, "Download it again, or remove it.") from error
    vars(config).pop("quantization_config", None)
    return _of_text(config)


def _of_text(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text model in a model of several parts, if that is known; a file has only it."""
    text = None if config.get_text_config() is config else text_alone(config)
    return config if text is None or not READABLE.keys() & (text.architectures or ()) else text


def _class_of(config: PretrainedConfig, file: GgufFile) -> tuple[type[PreTrainedModel], Architecture]:
    """Return the class of a model and its architecture; ConfigError: the file is of another architecture."""
    name, cls = saved_class(config)
    architecture = READABLE.get(name) if cls is getattr(transformers, name, None) else None
    found = architecture_name(file)
    if architecture is None or architecture.name != found:
        classes = ", ".join(each for each, entry in READABLE.items() if entry.name == found)
        expected = f"a class for {found}: {classes}" if classes else f"one of {', '.join(READABLE)}"
        raise ConfigError(f"architectures in {CONFIG_NAME}", expected, name, GIVE_BASE)
    return cls, architecture


def _slots(model: PreTrainedModel, in_file: Collection[str]) -> dict[str, Slot]:
    """Return the parameters of a model that a file is to hold, by name, in the model's order."""
    choices = {choice.name: choice for choice in choose(model, _ANY).summary.tensors}
    output = {f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()}
    left_out = (names_not_saved(model) | tied_names(model).keys()) - (output if _OUTPUT in in_file else set())
    has_latent_keys = any(LATENT_KEYS in name for name in in_file)
    slots = {}
    for name, tensor in model.state_dict().items():
        if name not in left_out:
            choice = choices.get(name)
            transposed = choice is not None and choice.transposed and tensor.dim() > 1
            shape = tuple(tensor.mT.shape) if transposed else tuple(tensor.shape)
            takes_codes = choice is not None and choice.format is not None
            # llama.cpp splits `kv_b_proj` into keys and values, and stores the keys transposed. Groups of codes would
            # run along the file's rows, which are columns of this weight. So it is filled with floats, one by one.
            by_numbers = has_latent_keys and name.endswith(".kv_b_proj.weight")
            # `_bias` ends the names of the biases of all experts, which are matrices.
            columns = shape[-1] if len(shape) > 1 and not name.endswith("_bias") and not by_numbers else 1
            slots[name] = Slot(shape, columns, transposed, takes_codes and not by_numbers)
    return slots
