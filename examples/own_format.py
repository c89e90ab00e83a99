"""Write a quantized dtype of your own, register it, and use it like the built-in ones."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.formats import FORMATS, Format, reciprocal, round_scale, scale_codes


@dataclass(frozen=True)
class Ternary(Format):
    """Codes -1, 0 and 1, four to a byte: the mean magnitude of a row is its scale (arXiv 2402.17764)."""

    name: ClassVar[str] = "ternary"

    def tensor_specs(
        self, shape: Sequence[int], scale_dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Say what is stored: four codes to a byte, one scale a row, in the dtype of the weight."""
        *lead, K = shape
        return {"qdata": ((*lead, K // 4), torch.uint8), "scale": ((*lead, 1), scale_dtype)}

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Say what shape of weight the stored codes are of."""
        return (*qdata.shape[:-1], qdata.shape[-1] * 4)

    @property
    def column_step(self) -> int:
        """Cut columns a byte at a time."""
        return 4

    def fallback(self, shape: Sequence[int]) -> Format:
        """Leave rows that do not fill their last byte to int8."""
        return self if shape[-1] % 4 == 0 else FORMATS["int8"]()

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill scale and codes; the codes are chosen for the scale as it is stored."""
        del amax  # the mean serves instead
        mean = rows.abs().mean(dim=-1, keepdim=True, dtype=torch.float32)
        out["scale"].copy_(round_scale(mean, 1, rows.dtype))
        codes = (rows * reciprocal(out["scale"])).round_().clamp_(-1, 1).add_(1).to(torch.uint8)
        out["qdata"].copy_(sum(codes[:, place::4] << 2 * place for place in range(4)))

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return codes times scale."""
        codes = torch.stack([tensors["qdata"] >> 2 * place & 3 for place in range(4)], dim=-1).flatten(-2)
        return scale_codes(codes.to(torch.int8).sub_(1), tensors["scale"], dtype)


FORMATS[Ternary.name] = Ternary


def main() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1024)
    print(quantize_(layer, TrainWeightsConfig("ternary")))

    with tempfile.TemporaryDirectory() as directory:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **shape)).save_pretrained(f"{directory}/float")
        config = TrainWeightsConfig("ternary", overrides={"re:.*down_proj": "int4"})
        model = AutoModelForCausalLM.from_pretrained(f"{directory}/float", quantization_config=config)
        print(model.hf_quantizer.summary())

        model.save_pretrained(f"{directory}/ternary")
        # Whoever loads it must have run the registration above.
        reloaded = AutoModelForCausalLM.from_pretrained(f"{directory}/ternary")
        prompt = torch.tensor([[1, 2, 3, 4]])
        print("equal logits:", torch.equal(reloaded(prompt).logits, model(prompt).logits))


if __name__ == "__main__":
    main()
