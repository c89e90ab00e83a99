"""How much a relative error of each weight changes the outputs of a model, measured by gradients and without data.

Rounding changes a weight W of n elements by noise of the relative size t. To second order the outputs then change by
t² |W|² / n times the squared norm of their derivative by W; for logits this norm is the trace of the Fisher information
of W. A forward pass on random tokens and a backward pass in a random direction measure the norm for all weights at
once. `benchmarks.sensitivity` compares it with the real effect of noise in one weight after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.inputs import Batch, copied, tensors_in
from hf_trainweights.models.host.models import holding
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_SEED = 0
# Twice as many tokens would gain MiniLM .02 dB and a small Llama .06 dB at twice the time and memory. Separate
# sequences add no noise to each other, so one random direction is enough: a second one would gain .01 dB.
_SEQUENCES, _TOKENS = 2, 32
# Rows of a float weight that are widened at a time.
_WIDENED_ROWS = 4096
# Rows that the mean square of a weight is taken of. If one row is 30 % off, all these are 2 % off, a fiftieth of a bit.
_SQUARED_ROWS = 256


def random_tokens(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return a batch of random tokens for a model, the same at every call; no batch if it does not take tokens."""
    if not isinstance(model, PreTrainedModel) or model.main_input_name != "input_ids":
        return []
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, nn.Embedding):
        return []
    generator = torch.Generator().manual_seed(_SEED)
    names = ["input_ids", *(["decoder_input_ids"] if model.config.is_encoder_decoder else [])]
    shape = (_SEQUENCES, _TOKENS)
    return [{name: torch.randint(embeddings.num_embeddings, shape, generator=generator) for name in names}]


def sensitivities(model: nn.Module, weights: Sequence[Choice], batches: Iterable[Batch]) -> dict[str, float]:
    """Return how much the outputs of a model change for a relative error of each weight, in any unit, to two digits.

    The result lacks embeddings, and weights on whose modules no output depends. The model is left as it was.
    """
    measured = {choice.name: 0.0 for choice in weights}
    generator = torch.Generator().manual_seed(_SEED)
    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(model.modules(), "training", False))
        # Gradients reach the modules of the model, but no parameter.
        stack.enter_context(holding(model.parameters(), "requires_grad", False))
        for embedding in (module for module in model.modules() if isinstance(module, nn.Embedding)):
            stack.callback(embedding.register_forward_hook(_let_gradients_through).remove)
        stack.enter_context(_Float32Linears())
        for choice in weights:
            if not isinstance(choice.module, nn.Embedding):
                handle = choice.module.register_forward_hook(_Recorder(choice, measured))
                stack.callback(handle.remove)
        device = next(model.parameters()).device
        for batch in batches:
            inputs = {"": batch} if isinstance(batch, Tensor) else dict(batch)
            inputs = {name: _to_differentiate(value, device) for name, value in inputs.items()}
            with torch.enable_grad():
                output = model(inputs[""]) if "" in inputs else model(**inputs)
                _random_derivative(output, generator).backward()
    return {name: float(f"{value:.1e}") for name, value in measured.items() if value}


class _Float32Linear(torch.autograd.Function):
    """`F.linear` that multiplies with a weight of 16 bits in float32, and widens some rows of it at a time.

    If a CPU has no instructions for 16 bits, PyTorch's own way takes 4 to 9 times as long, and 30 to 65 times for a
    gradient: docs/performance.md, "The gradient of x".
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        ctx.weight, ctx.shape = weight, x.shape
        rows = _rows(x)
        output = torch.cat([rows @ weight[chunk].float().t() for chunk in _chunks(weight)], dim=-1)
        output = output if bias is None else output.add_(bias)
        return output.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of x."""
        rows = gradient.reshape(-1, len(ctx.weight))
        total = torch.zeros(len(rows), ctx.weight.shape[1], dtype=torch.float32)
        for chunk in _chunks(ctx.weight):
            total.addmm_(rows[:, chunk].float(), ctx.weight[chunk].float())
        return total.view(ctx.shape).to(gradient.dtype), None, None


def _chunks(weight: Tensor) -> list[slice]:
    return [slice(start, start + _WIDENED_ROWS) for start in range(0, len(weight), _WIDENED_ROWS)]


class _Float32Linears(TorchFunctionMode):
    """A mode in which `F.linear` multiplies with float weights in float32 if that takes less time."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and _multiplies_slowly(args[1]):
            return _Float32Linear.apply(*args, *[None] * (3 - len(args)))
        return func(*args, **kwargs or {})


def _multiplies_slowly(weight: Tensor) -> bool:
    """Return whether a weight has floats of 16 bits, and the CPU has no instructions for them."""
    if isinstance(weight, QuantizedTensor) or weight.device.type != "cpu":
        return False
    return product_dtype(weight.dtype, _SEQUENCES * _TOKENS) != weight.dtype


class _Recorder:
    """A forward hook that makes the backward pass add the sensitivity of a module's weight to `measured`."""

    def __init__(self, choice: Choice, measured: dict[str, float]):
        self.name, self.measured = choice.name, measured
        self.mean_square = _mean_square(choice.weight) if choice.weight.dim() == 2 else None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Ask for the gradient of the output. For experts the squared norms of its rows are kept, not the output."""
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if self.mean_square is None:
            output.register_hook(partial(self._add_of_experts, _rows(output.detach()).square().sum(-1)))
        else:
            output.register_hook(partial(self._add, x.detach(), self.mean_square))

    def _add(self, x: Tensor, mean_square: float, gradient: Tensor) -> None:
        """Add |g' x|² times the mean square of the weight, and make no matrix as large as the weight for it."""
        gradients, inputs = _rows(gradient), _rows(x)
        self.measured[self.name] += (mean_square * ((gradients @ gradients.T) * (inputs @ inputs.T)).sum()).item()

    def _add_of_experts(self, squared_norms: Tensor, gradient: Tensor) -> None:
        """Add an error in proportion to each output row's norm: it is unknown which expert made which row."""
        gradients = _rows(gradient)
        self.measured[self.name] += ((gradients.square().sum(-1) * squared_norms).sum() / gradients.shape[-1]).item()


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).float()


def _random_derivative(output: Any, generator: torch.Generator) -> Tensor:
    """Return a number whose gradient is a random combination of the gradients of all outputs.

    For logits it combines the log-probabilities of tokens drawn from the model itself, else outputs scaled to norm 1.
    """
    logits = getattr(output, "logits", None)
    floats = (tensor for tensor in tensors_in(output) if tensor.is_floating_point())
    first = logits if isinstance(logits, Tensor) else next(floats)
    values = first.float().reshape(-1, first.shape[-1])
    if logits is None:
        values = F.normalize(values, dim=-1)
        noise = torch.randn(values.shape, dtype=torch.float32, generator=generator)
        return (values * noise.to(values.device)).sum()
    chances = values.detach().softmax(-1).cpu()
    drawn = torch.multinomial(chances, 1, generator=generator).to(values.device)
    signs = (torch.randint(2, drawn.shape, generator=generator) * 2 - 1).to(values.device)
    return (values.log_softmax(-1).gather(-1, drawn) * signs).sum()


def _let_gradients_through(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_()


def _to_differentiate(value: Any, device: torch.device) -> Any:
    value = copied(value)
    if not isinstance(value, Tensor):
        return value
    value = value.to(device)
    return value.requires_grad_() if value.is_floating_point() else value


def _mean_square(weight: Tensor) -> float:
    """Return the mean square of a matrix, taken of some of its rows, evenly spaced."""
    values = weight.detach()
    transposed = isinstance(values, QuantizedTensor) and values.transposed
    values = values.t() if transposed else values
    values = values[:: -(-len(values) // _SQUARED_ROWS)]
    values = values.dequantize() if isinstance(values, QuantizedTensor) else values
    return values.float().square().mean().item()
