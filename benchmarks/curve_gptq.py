"""GPTQ as llm-compressor does it, for `benchmarks.curve --gptq PYTHON`, in an environment of its own.

llm-compressor needs other releases of Transformers than this package is measured with, so `curve` runs this file by
the interpreter of an environment that has it, and gives it a model in float32 and texts. It is made by

    python3.11 -m venv PEERS && PEERS/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1

and `PYTHON` is `PEERS/bin/python`. Everything runs on the CPU.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

VERSION = "0.14.0.1"


def main() -> None:
    """Quantize the model of a folder as it is asked for there, and write its weights beside it as floats."""
    import transformers
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from safetensors.torch import save_file
    from torch import tensor
    from torch.utils.data import DataLoader

    if version("llmcompressor") != VERSION:
        raise SystemExit(f"Install llmcompressor=={VERSION}.")
    directory = Path(sys.argv[1])
    asked = json.loads((directory / "asked.json").read_text())
    config: Any = transformers.AutoConfig.from_pretrained(directory / "model")
    model = getattr(transformers, config.architectures[0]).from_pretrained(directory / "model", dtype="float32").eval()
    texts: Any = [{"input_ids": tensor([ids]), "attention_mask": tensor([[1] * len(ids)])} for ids in asked["texts"]]
    scheme = {"num_bits": asked["bits"], "strategy": "group", "group_size": asked["group_size"], "symmetric": True}
    groups = {"all": {"targets": asked["linears"], "weights": {"type": "int", **scheme}}}
    oneshot(
        model=model,
        # Texts are tokens already, and no tokenizer is asked for anything.
        processor=object(),
        dataset=DataLoader(texts, batch_size=None),
        recipe=GPTQModifier(config_groups=groups),
    )
    weights = {name: model.get_submodule(name).weight.detach().contiguous() for name in asked["linears"]}
    save_file(weights, directory / "weights.safetensors")


if __name__ == "__main__":
    main()
