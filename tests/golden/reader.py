"""What a file holds, as JSON. Nothing of the package is imported here but `import hf_trainweights`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_trainweights

# Calls a function of this module with the arguments that follow it, in a process that has written nothing.
AFresh = Callable[..., Any]


def describe(value: Any) -> Any:
    """Return JSON that is the same for two values only if they agree in type, order and every bit."""
    if isinstance(value, hf_trainweights.QuantizedTensor):
        weight = value
        return {
            **_kind(value),
            "format": weight.format.get_config(),
            "transposed": weight.transposed,
            "stored": {name: describe(tensor) for name, tensor in weight.tensors.items()},
            "dequantized": _bits(weight.dequantize()),
        }
    if isinstance(value, Tensor):
        return {**_kind(value), "bits": _bits(value)}
    if isinstance(value, dict):
        return {repr(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(describe, value)]
    if type(value).__module__.startswith("deepspeed."):  # a stand-in, or DeepSpeed's own class
        return [type(value).__name__, int(value) if isinstance(value, int) else describe(vars(value))]
    return repr(value)


def _kind(tensor: Tensor) -> dict[str, Any]:
    name = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
    return {"type": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape), "strides": list(tensor.stride())}


def _bits(tensor: Tensor) -> str:
    plain = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=8).hexdigest()


def load(file: Path) -> Any:
    """Return what `torch.load(file, weights_only=True)` gives, described."""
    return describe(torch.load(file, weights_only=True))


def load_checkpoints(run: Path) -> dict[str, Any]:
    """Return what the torch files of a run's checkpoints hold, by their path, and which checkpoint is the latest."""
    newest = hf_trainweights.latest(run)
    files = sorted(file for pattern in ("*.bin", "*.pt") for file in run.rglob(pattern))
    return {"latest": newest and Path(newest).name, **{file.relative_to(run).as_posix(): load(file) for file in files}}


def load_model(directory: Path, model_class: str) -> Any:
    """Return the configuration and the state dict of the model that `from_pretrained` makes of a directory."""
    import transformers  # after the package, as a user may import it

    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, model_class).from_pretrained(directory)
    return {"config": model.config.quantization_config.to_dict(), "state_dict": describe(model.state_dict())}
