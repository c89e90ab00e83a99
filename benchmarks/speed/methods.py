"""What is compared: the float model, this package's formats, and with `--peers` other quantizers that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from hf_trainweights import TrainWeightsConfig, quantize_


@dataclass(frozen=True)
class Method:
    """One way to hold a model's Linear weights.

    Args:
        name: What tables call it.
        config: Makes the `quantization_config` of `from_pretrained`; None: a float model.
        convert: Quantizes the Linears of a plain module in place; None: as `config` says, by `quantize_`.
        dtype: Dtype of the activations, and of the weights before they are quantized.
        versus: The method whose speed is 1.0.
        bits: Bits per weight, roughly; tells how many copies of a weight it takes to leave the caches.
        whole_model_only: Whether it differs from another method only by weights other than the layers' Linears.
    """

    name: str
    config: Callable[[], Any] | None = None
    convert: Callable[[nn.Module], Any] | None = None
    dtype: torch.dtype = torch.bfloat16
    versus: str = "bf16"
    bits: int = 8
    whole_model_only: bool = False

    def apply(self, module: nn.Module) -> None:
        """Quantize the Linears inside a module, in place."""
        if self.convert is not None:
            self.convert(module)
        elif self.config is not None:
            quantize_(module, self.config())


def _ours(name: str, bits: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Method:
    versus = "bf16" if dtype == torch.bfloat16 else "fp32"
    return Method(name, lambda: TrainWeightsConfig(**options), dtype=dtype, versus=versus, bits=bits)


FLOATS = [Method("bf16", bits=16), Method("fp32", dtype=torch.float32, versus="fp32", bits=32)]
OURS = [
    _ours("int8", 8, format="int8"),
    _ours("int8, 8-bit activations", 8, format="int8", activations="int8"),
    _ours("int4 g128", 4, format="int4", group_size=128),
    replace(
        _ours("int4 g128, lm_head too", 4, format="int4", group_size=128, overrides={"lm_head": "int4"}),
        whole_model_only=True,
    ),
    _ours("int8 g128", 8, format="int8", group_size=128),
    _ours("uint4 g16", 4, format="uint4"),
    _ours("float8_e4m3", 8, format="float8_e4m3"),
    _ours("int8, fp32 activations", 8, torch.float32, format="int8"),
    _ours("int4 g128, fp32 activations", 4, torch.float32, format="int4", group_size=128),
]


def _torchao(name: str) -> Any:
    from torchao import quantization

    if name == "int4":
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig()
    return getattr(quantization, name)()


def _torchao_convert(name: str) -> Callable[[nn.Module], None]:
    def convert(module: nn.Module) -> None:
        from torchao.quantization import quantize_ as torchao_quantize_

        torchao_quantize_(module, _torchao(name))

    return convert


def _quanto_convert(name: str) -> Callable[[nn.Module], None]:
    def convert(module: nn.Module) -> None:
        from optimum import quanto

        quanto.quantize(module, weights=getattr(quanto, name))
        quanto.freeze(module)

    return convert


def _bitsandbytes_convert(bits: int) -> Callable[[nn.Module], None]:
    def convert(module: nn.Module) -> None:
        import bitsandbytes

        for parent in list(module.modules()):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
                    if bits == 8:
                        new = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                    else:
                        new = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.bfloat16, quant_type="nf4")
                    new.load_state_dict(linear.state_dict(), strict=False)
                    setattr(parent, name, new.to("cpu"))

    return convert


def _peer(name: str, bits: int, config: Callable[[], Any], convert: Callable[[nn.Module], None]) -> Method:
    return Method(name, config, convert, bits=bits)


PEERS = [
    _peer(
        "torchao int8",
        8,
        lambda: TorchAoConfig(_torchao("Int8WeightOnlyConfig")),
        _torchao_convert("Int8WeightOnlyConfig"),
    ),
    _peer(
        "torchao int8, 8-bit activations",
        8,
        lambda: TorchAoConfig(_torchao("Int8DynamicActivationInt8WeightConfig")),
        _torchao_convert("Int8DynamicActivationInt8WeightConfig"),
    ),
    _peer("torchao int4 (prototype)", 4, lambda: TorchAoConfig(_torchao("int4")), _torchao_convert("int4")),
    _peer(
        "bitsandbytes int8, 8-bit activations",
        8,
        lambda: BitsAndBytesConfig(load_in_8bit=True),
        _bitsandbytes_convert(8),
    ),
    _peer(
        "bitsandbytes nf4",
        4,
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
        _bitsandbytes_convert(4),
    ),
    _peer("quanto int8", 8, lambda: QuantoConfig(weights="int8"), _quanto_convert("qint8")),
    _peer("quanto int4", 4, lambda: QuantoConfig(weights="int4"), _quanto_convert("qint4")),
]


def methods(peers: bool) -> list[Method]:
    """Return what is compared; the float baselines first."""
    return [*FLOATS, *OURS, *(PEERS if peers else [])]


def guarded(failures: dict[str, str], name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or None and keep its error in one line: a peer that fails is a result too."""
    try:
        return function(*args)
    except Exception as error:
        failures[name] = one_line(error)
        return None


def one_line(error: Exception) -> str:
    """Return an error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
