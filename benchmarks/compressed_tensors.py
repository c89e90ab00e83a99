"""Which exports to compressed-tensors stock Transformers reads, by architecture, on tiny random models in int8.

Run `PYTHONPATH=tests python -m benchmarks.compressed_tensors`, with the `test` extra; it writes
`benchmarks/results/compressed_tensors.json`: for each architecture and way to read it "same" for the outputs of the
dequantized model, "other outputs", "refused" where the export says no, or the error of the reader.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import ARCHITECTURES
from torch import Tensor
from transformers import CompressedTensorsConfig, PreTrainedModel

from benchmarks.machine import versions
from hf_trainweights import export_compressed_tensors, quantize_
from hf_trainweights.errors import TrainWeightsError

RESULT = Path(__file__).parent / "results" / "compressed_tensors.json"
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURES = {"image_size": 28, "patch_size": 14}
T5 = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
STATES = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "num_hidden_layers": 2}
# Class to the arguments of its configuration, beside the models of the tests.
MORE: dict[str, dict[str, Any]] = {
    "Dinov2Model": SMALL | PICTURES,
    "SiglipVisionModel": SMALL | PICTURES,
    "FalconForCausalLM": {key: value for key, value in SMALL.items() if key != "intermediate_size"},
    "MT5ForConditionalGeneration": T5,
    "ModernBertForMaskedLM": SMALL | SPECIAL,
    "Mamba2ForCausalLM": STATES | {"vocab_size": 64},
}
READERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "`dequantize=True`": {"quantization_config": CompressedTensorsConfig(dequantize=True)},
}


def more(name: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a model of `MORE` and inputs for it."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**MORE[name])).eval()
    ids = torch.arange(6)[None]
    if model.main_input_name == "pixel_values":
        return model, {"pixel_values": torch.randn(1, 3, 28, 28)}
    return model, {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def models() -> dict[str, Callable[[], tuple[PreTrainedModel, dict[str, Tensor]]]]:
    """Return what makes each model and its inputs, by its name."""
    made: dict[str, Callable[[], tuple[Any, Any]]] = {
        name: lambda each=each: (each.build(), each.make_inputs()) for name, each in ARCHITECTURES.items()
    }
    return made | {name: lambda name=name: more(name) for name in MORE}


@torch.no_grad()
def first_output(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    return next(value for value in model.eval()(**inputs).values() if isinstance(value, Tensor) and value.numel())


def outcomes(model: PreTrainedModel, inputs: dict[str, Tensor], directory: str) -> dict[str, str]:
    """Return what each reader makes of a model."""
    quantize_(model, "int8")
    try:
        export_compressed_tensors(model, directory)
    except TrainWeightsError:
        return dict.fromkeys(READERS, "refused")
    wanted = first_output(model.dequantize(), inputs)
    found = {}
    for reader, options in READERS.items():
        try:
            read = first_output(type(model).from_pretrained(directory, dtype="auto", **options), inputs)
            found[reader] = "same" if torch.allclose(read, wanted, rtol=1e-4, atol=1e-5) else "other outputs"
        except Exception as error:
            found[reader] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    return found


def main() -> None:
    """Try every model and write the result file."""
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = {}
    for name, make in models().items():
        with tempfile.TemporaryDirectory() as directory:
            model, inputs = make()
            rows[name] = outcomes(model, inputs, directory)
        print(name, rows[name], flush=True)
    report = {"versions": versions("compressed-tensors"), "rows": rows}
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
