"""How much a relative error of each weight changes what a model returns, told by gradients and without data.

Rounding changes a weight W by noise of the relative size t. To second order the outputs then change by t² |W|² / n
times the squared norm of their derivative by W: the trace of its Fisher information, if they are logits. A forward pass
on random tokens and a few backward passes in random directions measure that norm for all weights at once.
`benchmarks.sensitivity` compares it with what noise in one weight after another really changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Keyword arguments of a model, or a tensor as its only argument.
Batch = Mapping[str, Tensor] | Tensor

_SEED = 0
# Twice as many tokens would gain MiniLM .02 dB and a small Llama .06 dB at twice the time and memory. Sequences apart
# add no noise to each other, so two directions do.
_SEQUENCES, _TOKENS, _DIRECTIONS = 2, 32, 2
# Rows of a float weight that are widened at a time.
_WIDENED_ROWS = 4096


def random_tokens(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return a batch of random tokens for a model, the same at every call; none for one that takes no tokens alone."""
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

    A weight on which no output depends through the call of its module has none, such as an embedding. The model is left
    as it was.
    """
    measured = {choice.name: 0.0 for choice in weights}
    generator = torch.Generator().manual_seed(_SEED)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_frozen(model))
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
                for number in reversed(range(_DIRECTIONS)):
                    _random_derivative(output, generator).backward(retain_graph=number > 0)
    return {name: float(f"{value:.1e}") for name, value in measured.items() if value}


class _GradientInFloat32(torch.autograd.Function):
    """An output of a Linear, whose gradient is multiplied in float32.

    Where a CPU has no instructions for 16 bits, PyTorch's own way takes 30 to 65 times as long: docs/performance.md,
    "The gradient of x".
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, weight: Tensor) -> Tensor:
        """Return the output."""
        ctx.weight, ctx.shape = weight, x.shape
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of x."""
        rows = gradient.reshape(-1, len(ctx.weight))
        total = torch.zeros(len(rows), ctx.weight.shape[1])
        for start in range(0, len(ctx.weight), _WIDENED_ROWS):
            part = slice(start, start + _WIDENED_ROWS)
            total.addmm_(rows[:, part].float(), ctx.weight[part].float())
        return total.view(ctx.shape).to(gradient.dtype), None, None


def _multiplies_slowly(module: nn.Module) -> bool:
    """Return whether a module has a float weight in a dtype of 16 bits for which its CPU has no instructions."""
    weight = module.weight if isinstance(module, nn.Linear) else None
    if not isinstance(weight, Tensor) or isinstance(weight, QuantizedTensor) or weight.device.type != "cpu":
        return False
    return product_dtype(weight.dtype, _SEQUENCES * _TOKENS) != weight.dtype


class _Recorder:
    """A forward hook that adds to `measured` the squared derivatives of what follows by the weight of a module."""

    def __init__(self, choice: Choice, measured: dict[str, float]):
        weight = getattr(choice.module, choice.name.rpartition(".")[2])
        self.name, self.measured = choice.name, measured
        self.mean_square = _mean_square(weight) if weight.dim() == 2 else None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Let the output tell its gradient."""
        x = inputs[0].detach() if inputs and isinstance(inputs[0], Tensor) else None
        if isinstance(output, Tensor) and output.requires_grad and x is not None:
            detached = output.detach()
            output.register_hook(lambda gradient: self._add(x, detached, gradient))

    def _add(self, x: Tensor, output: Tensor, gradient: Tensor) -> None:
        gradients = _rows(gradient)
        if self.mean_square is not None:
            # |g' x|², of which no matrix as large as the weight is made.
            inputs = _rows(x)
            squares = self.mean_square * ((gradients @ gradients.T) * (inputs @ inputs.T)).sum()
        else:
            # Which rows each expert got is not known, but the size of what came out is, to which an error is relative.
            squares = (gradients.square().sum(-1) * _rows(output).square().sum(-1)).sum() / gradients.shape[-1]
        self.measured[self.name] += squares.item()


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).float()


def _random_derivative(output: Any, generator: torch.Generator) -> Tensor:
    """Return a number whose gradient is a random combination of the gradients of all outputs.

    For logits it is one of log-probabilities of tokens drawn from the model itself, else one of outputs of norm 1.
    """
    logits = getattr(output, "logits", None)
    first = (
        logits if isinstance(logits, Tensor) else next(each for each in _tensors(output) if each.is_floating_point())
    )
    values = first.float().reshape(-1, first.shape[-1])
    if logits is None:
        values = F.normalize(values, dim=-1)
        return (values * torch.randn(values.shape, generator=generator).to(values.device)).sum()
    chances = values.detach().softmax(-1).cpu()
    drawn = torch.multinomial(chances, 1, generator=generator).to(values.device)
    signs = (torch.randint(2, drawn.shape, generator=generator) * 2 - 1).to(values.device)
    return (values.log_softmax(-1).gather(-1, drawn) * signs).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    for each in output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ():
        yield from _tensors(each)


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Let gradients reach the modules of a model, but no parameter, and switch dropout off."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]

    def let_through(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()

    def in_float32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return _GradientInFloat32.apply(inputs[0], output.detach(), module.weight)  # type: ignore[return-value]

    handles = [each.register_forward_hook(let_through) for each in model.modules() if isinstance(each, nn.Embedding)]
    handles += [each.register_forward_hook(in_float32) for each in model.modules() if _multiplies_slowly(each)]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        model.eval()
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode


def _to_differentiate(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().to(device)
    return value.clone().requires_grad_() if value.is_floating_point() else value


def _mean_square(weight: Tensor) -> float:
    values = weight.detach()
    values = values.dequantize() if isinstance(values, QuantizedTensor) else values
    return values.float().square().mean().item()
